"""Checks this node's address as others will dial it, and the addresses of other nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

from rdzv_plugins.addresses import dial_self, is_out_of_reach, node_address, route_to, store_hosts
from rdzv_plugins.cli.check.job import Job
from rdzv_plugins.kv.findings import Finding, Mark

__all__ = ["check", "check_peers"]

# Seconds until an address counts as one that does not answer; all peers are dialled at once.
_PATIENCE = 3.0
# A resolver that hangs takes longer than a connection.
_LONGEST_LOOKUP = 10.0


def check(job: Job) -> Iterator[Finding]:
    """Open a port, as rank 0 does for its TCPStore, and dial it at this node's address."""
    hosts = store_hosts(job.endpoint)
    address = node_address(job.local_addr or None, hosts)
    values = {"address": address}
    advice = "name an address of this host with --local-addr"
    try:
        port = dial_self(address, _PATIENCE)
    except (OSError, UnicodeError) as error:
        found = f"this host cannot be reached at '{address}' ({error})"
        yield Finding(Mark.FAILED, "address", found, advice, values)
        return
    found = f"other nodes dial '{address}'; port {port} was opened and dialled there"
    if not _is_loopback(address):
        yield Finding(Mark.OK, "address", found, values=values)
        return
    others = [[host] for host in hosts] + [[(host, port or 1)] for host, port in job.peers]
    elsewhere = any(is_out_of_reach("localhost", other) for other in others)
    alone = job.nnodes is not None and job.nnodes[1] == 1
    if alone or not (elsewhere or job.local_addr):
        found += "; it is loopback: only nodes on this host reach it"
        yield Finding(Mark.OK, "address", found, values=values)
        return
    why = ", but the store or a peer is on another host" if elsewhere else ""
    found = f"'{address}' is loopback{why}: nodes on other hosts cannot reach this one"
    yield Finding(Mark.WARNING, "address", found, advice, values)


def check_peers(job: Job) -> Iterator[Finding]:
    """Dial each peer; of a peer without a port, look up name and route only."""
    outcomes: dict[int, Finding] = {}

    def dial(number: int, host: str, port: int | None) -> None:
        outcomes[number] = _dial(host, port)

    threads = [
        threading.Thread(target=dial, args=(n, *peer), name="rdzv-check-peer", daemon=True)
        for n, peer in enumerate(job.peers)
    ]
    deadline = time.monotonic() + _LONGEST_LOOKUP + _PATIENCE
    for thread in threads:
        thread.start()
    for number, (thread, (host, _)) in enumerate(zip(threads, job.peers, strict=True)):
        thread.join(max(0.0, deadline - time.monotonic()))
        slow = Finding(
            Mark.FAILED, "peer", f"'{host}': its name was not resolved in time", "check the DNS"
        )
        yield outcomes.get(number, slow)


def _dial(host: str, port: int | None) -> Finding:
    where = f"[{host}]" if ":" in host else host
    where = f"{where}:{port}" if port else where
    values = {"host": host, "port": port}
    try:
        if port is None:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            route = route_to([(host, 1)])
            if route is None:
                raise OSError("there is no route to it")
            text = f"'{host}' is {found[0][4][0]}, with a route from {route}; nothing was dialled"
            return Finding(
                Mark.OK, "peer", text, "name a port that it listens on to dial it", values
            )
        began = time.perf_counter()
        socket.create_connection((host, port), _PATIENCE).close()
    except (OSError, UnicodeError) as error:
        text, advice = _meaning(error)
        return Finding(Mark.FAILED, "peer", f"{where} {text} ({error})", advice, values)
    took = (time.perf_counter() - began) * 1000
    text = f"{where} was dialled in {took:.1f} ms"
    return Finding(Mark.OK, "peer", text, values={**values, "ms": round(took, 3)})


def _meaning(error: Exception) -> tuple[str, str]:
    """What happened, and what to do."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return "cannot be resolved", "check its spelling, and this host's DNS or /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection", "the host answers, but nothing listens on that port"
    if isinstance(error, TimeoutError):
        return "is unreachable: it does not answer", "is it up, and is there a firewall in between?"
    return "is unreachable", "check the network between the hosts"


def _is_loopback(address: str) -> bool:
    """Also of a name: on Debian a host's own name is 127.0.1.1."""
    with suppress(OSError, UnicodeError):
        return all(
            ip_address(str(target[0]).partition("%")[0]).is_loopback
            for *_, target in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        )
    return False
