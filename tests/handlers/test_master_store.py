"""Where rank 0's TCPStore listens, with torch's own."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.peers.addresses import is_own_ip, loopback
from rdzv_plugins.torch.master_store import TAKES_SOCKETS, open_store
from tests.handlers.site import site
from tests.servers.process import free_ports

pytestmark = pytest.mark.rule("a fresh MASTER")

NAME = "rdzv-test-door"


def answers(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as line:
        line.settimeout(5)
        return line.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7", "::1"])
def test_the_tcpstore_listens_at_the_announced_address_alone(address: str) -> None:
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
def test_the_tcpstore_listens_everywhere_behind_a_router_and_for_a_name(address: str) -> None:
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


def free_range(count: int) -> str:
    """A range of ``count`` free ports that follow each other, as ``master_port`` has them."""
    for first in free_ports(40):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return f"{first}-{first + count - 1}"
    raise AssertionError(f"nowhere {count} free ports follow each other")


def port_of(master: str) -> int:
    return int(master.rpartition(":")[2])


def test_workers_of_an_earlier_round_dial_nobody_though_rank_0_is_a_new_process() -> None:
    conf, ports = free_range(3), []
    with site() as run:
        for _ in range(4):
            handler = run.handler(1, 1, master_port=conf, keep_alive_interval=0.1)
            (info,) = run.join(handler)
            assert info.bootstrap_store_info is not None
            ports.append(info.bootstrap_store_info.master_port)
            assert not any(answers("127.0.0.1", it) for it in ports[-2:-1]), ports
            run.kill(handler)


def test_workers_of_a_run_whose_rank_0_is_gone_dial_nobody_where_another_run_is() -> None:
    met = []
    with site() as run, site() as other_run:
        conf = free_range(20)
        one, other = (it.handler(1, 1, master_port=conf) for it in (run, other_run))
        for world in range(3):
            old = port_of(one._open_master(f"{world}-of-one"))
            one._masters.keep(None)
            other._open_master(f"{world}-of-another")
            met.append(answers("127.0.0.1", old))
            other._masters.keep(None)
    # Each begins its search anywhere in the range, not at its first port.
    assert not all(met)


def test_a_range_that_others_have_is_told_as_such() -> None:
    conf = free_range(3)
    with site() as run, ExitStack() as others:
        for port in range(*map(int, conf.split("-"))):
            others.enter_context(socket.create_server(("127.0.0.1", port)))
        handler = run.handler(1, 1, master_port=conf)
        run.join(handler)
        # The one that is free was the last round's.
        handler._masters.keep(None)
        with pytest.raises(RendezvousConnectionError, match=f"no port of master_port={conf} is fr"):
            handler._open_master("1-another")
        last = int(conf.split("-")[1])
        with (
            socket.create_server(("127.0.0.1", last)),
            pytest.raises(RendezvousStateError, match=r"at '127\.0\.0\.1' for the network check"),
        ):
            run.handler(1, 2, master_port=conf, network_check=True)
