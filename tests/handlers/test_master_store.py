"""Where rank 0's TCPStore listens, with torch's own."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rdzv_plugins.addresses import is_own_ip, loopback
from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.servers.process import free_ports
from rdzv_plugins.torch_compat.master_store import TAKES_SOCKETS, open_store
from tests.handlers.site import site

NAME = "rdzv-test-door"


def answers(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as line:
        line.settimeout(5)
        return line.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7", "::1"])
def test_it_listens_at_the_announced_address_alone(address: str) -> None:
    if not is_own_ip(address):
        pytest.skip("this host has no IPv6")
    server = open_store(address, 10, name=NAME)
    client = TCPStore(address, server.port, is_master=False)
    client.set("key", "x")
    assert client.get("key") == b"x"
    others = {"127.0.0.1", "127.0.0.7", "127.0.0.8", "::1"} - {address}
    if TAKES_SOCKETS:
        assert [it for it in others if is_own_ip(it) and answers(it, server.port)] == []
    assert NAME not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("address", ["localhost", "192.0.2.77"])
def test_it_listens_everywhere_where_a_router_translates_and_for_a_name(address: str) -> None:
    server = open_store(address, 10)
    assert answers("127.0.0.7", server.port)
    assert answers("127.0.0.8", server.port)


@pytest.mark.skipif(not TAKES_SOCKETS, reason="that of torch 2.7 listens at loopback too")
def test_somebody_else_may_have_the_port_at_loopback() -> None:
    address = "127.0.0.7"
    (port,) = free_ports(1)
    family = socket.AF_INET6 if ":" in loopback() else socket.AF_INET
    with socket.create_server((loopback(), port), family=family):
        server = open_store(address, 10, [port])
        assert server.port == port
        TCPStore(address, port, is_master=False).set("key", "x")


def two_neighbours() -> int:
    """The first of two free ports that follow each other."""
    for first in free_ports(20):
        with suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first
    raise AssertionError("no free port has a free neighbour")


def test_the_next_port_is_taken_in_turn_and_its_own_old_ones_last() -> None:
    first = two_neighbours()
    with site() as run:
        handler = run.handler(1, 1, master_port=f"{first}-{first + 1}")
        opened = [int(handler._open_master(f"world-{n}").rpartition(":")[2]) for n in range(4)]
        # The third has to end the first two: a port alone is no reason to be in no round.
        assert opened == [first, first + 1, first, first + 1]
        assert [*handler._servers] == ["world-2", "world-3"]


def test_a_range_that_others_have_is_told_as_such() -> None:
    (port,) = free_ports(1)
    with site() as run, socket.create_server(("127.0.0.1", port)):
        handler = run.handler(1, 1, master_port=str(port))
        with pytest.raises(RendezvousConnectionError, match=f"no port of master_port={port} is fr"):
            handler._open_master("world")
        with pytest.raises(RendezvousStateError, match=r"at '127\.0\.0\.1' for the network check"):
            run.handler(1, 2, master_port=str(port), network_check=True)
