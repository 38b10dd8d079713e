"""Checks this node: its address as others will dial it, other nodes, and its own health."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rdzv_plugins.cli.check.job import Job
from rdzv_plugins.health import gate_of
from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.peers.addresses import (
    candidates,
    dial_self,
    is_at_loopback,
    is_ip,
    is_out_of_reach,
    node_address,
    resolved,
    route_to,
)
from rdzv_plugins.peers.reach import gloo_fault
from rdzv_plugins.settings.endpoint import Place, at, is_loopback
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.stores import client_class

# Seconds without an answer after which an address counts as silent.
_PATIENCE = 3.0


def check_address(job: Job, settings: Settings) -> Iterator[Finding]:
    """Open a port, as rank 0 does for its TCPStore, and dial it at this node's address."""
    store: type[KeyValueClient] | None = None
    with suppress(ValueError):  # `check_options` reports the error.
        store = client_class(job.backend)
    place = store.locate(job.endpoint) if store is not None else Place()
    hosts = place.dialled
    alone = job.nnodes is not None and job.nnodes[1] == 1
    interface, network = settings.interface, settings.network
    try:
        own = node_address(
            job.local_addr or None, hosts, interface=interface, network=network, alone=alone
        )
    except ValueError as error:
        yield Finding(Mark.FAILED, "address", str(error), "see: ip address")
        return
    address, found = own.address, [str(it) for it in candidates()]
    values: dict[str, object] = {"address": address, "why": own.why, "candidates": found}
    advice = "name an address of this host with --local-addr, interface= or network="
    try:
        port = dial_self(address, _PATIENCE, settings.ports)
    except (OSError, UnicodeError) as error:
        text = f"this host cannot be reached at '{address}' ({error})"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            text = f"no port of master_port={settings.master_port} is free at '{address}'"
            advice = "name more, or end what listens there"
        yield Finding(Mark.FAILED, "address", text, advice, values)
        return
    among = f"; this host has {', '.join(found)}" if len(found) > 1 else ""
    text = (
        f"other nodes dial '{address}' ({own.why}{among}); port {port} was opened and dialled there"
    )
    others = [[host] for host in hosts] + [[(host, port or 1)] for host, port in job.peers]
    elsewhere = any(is_out_of_reach("localhost", other) for other in others)
    mark = Mark.OK
    if not is_ip(address):
        text += "; each of them must resolve that name"
    if _is_loopback(address) and (alone or not (elsewhere or job.local_addr)):
        text += "; it is loopback: only nodes on this host reach it"
    elif _is_loopback(address):
        why = ", but the store or a peer is on another host" if elsewhere else ""
        text = f"'{address}' is loopback{why}: nodes on other hosts cannot reach this one"
        mark = Mark.WARNING
    yield Finding(mark, "address", text, advice if mark is Mark.WARNING else "", values)
    if not alone and (elsewhere or job.nnodes is not None):
        if store is not None and is_at_loopback(place):
            yield _of_own_store(store)
        if fault := gloo_fault(address):
            yield Finding(Mark.WARNING, "gloo", fault)


def _of_own_store(store: type[KeyValueClient]) -> Finding:
    """The finding about a store at loopback, of which each host has its own."""
    if store.run_by == "agents":
        text = f"it is at loopback, as agents of {store.name} are: each host needs one of the same "
        text += "servers"
        return Finding(Mark.OK, "store's host", text)
    text = "it is at loopback: nodes on other hosts have another store there, and wait in vain"
    advice = "name an address of it that all hosts reach, unless all nodes are on this host"
    if store.run_by != "nodes":
        advice += ", or a proxy of a store that all share listens there"
    return Finding(Mark.WARNING, "store's host", text, advice)


def check_peers(job: Job) -> Iterator[Finding]:
    """Dial all peers at once; of a peer without a port, look up name and route only."""
    with ThreadPoolExecutor(len(job.peers) or 1, "rdzv-check-peer") as pool:
        yield from pool.map(lambda peer: _dial(*peer), job.peers)


def _dial(host: str, port: int | None) -> Finding:
    where = at(host, port) if port else host
    values = {"host": host, "port": port}
    try:
        if port is None:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            route = route_to([(host, 1)])
            if route is None:
                raise OSError("there is no route to it")
            text = f"'{host}' is {found[0][4][0]}, with a route from {route}; nothing was dialled"
            advice = "name a port that it listens on to dial it"
            return Finding(Mark.OK, "peer", text, advice, values)
        began = time.perf_counter()
        socket.create_connection((host, port), _PATIENCE).close()
    except (OSError, UnicodeError) as error:
        text, advice = _meaning(error)
        return Finding(Mark.FAILED, "peer", f"{where} {text} ({error})", advice, values)
    took = (time.perf_counter() - began) * 1000
    text = f"{where} was dialled in {took:.1f} ms"
    return Finding(Mark.OK, "peer", text, values={**values, "ms": round(took, 3)})


def _meaning(error: Exception) -> tuple[str, str]:
    """What happened, and advice."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return "cannot be resolved", "check its spelling, and this host's DNS or /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection", "the host answers, but nothing listens on that port"
    if isinstance(error, TimeoutError):
        return "is unreachable: it does not answer", "is it up, and is there a firewall in between?"
    return "is unreachable", "check the network between the hosts"


def _is_loopback(address: str) -> bool:
    """Whether an address or name means loopback; on Debian a host's own name is 127.0.1.1."""
    found = resolved(address)
    return bool(found) and all(map(is_loopback, found))


def check_health(settings: Settings) -> Iterator[Finding]:
    """Run the checks that the options ask for, as this node's agent does before it joins.

    A node that has been in no round dials no other node.
    """
    warnings: list[str] = []
    gate = gate_of(settings, lambda: None, warnings.append)
    if gate is None:
        return
    reason = gate.check()
    for line in warnings:
        yield Finding(Mark.WARNING, "health", line)
    if reason is not None:
        found, advice = f"this node is unfit: {reason}", "it would not join: rdzv docs node-checks"
        yield Finding(Mark.FAILED, "health", found, advice)
    elif not warnings:
        yield Finding(Mark.OK, "health", f"this node is fit: {', '.join(gate.names)}")
