"""Checks the store: connects, inspects the server, and makes the requests of a rendezvous.

All writes go to a temporary run, which is deleted afterwards, even after an error. Last,
`check_run` says whether the run id is free, or which run holds it.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from functools import partial

from rdzv_plugins.cli.check.job import Chosen, Job
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.base import UNREACHED
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.inspection import Condition, Inspection, delete_run, is_torchs, settle
from rdzv_plugins.peers.addresses import address_on
from rdzv_plugins.settings.endpoint import at, redact
from rdzv_plugins.settings.options import Settings

Open = Callable[[str], KeyValueClient]

_ERRORS = (RendezvousConnectionError, RendezvousStateError)

_WRITERS, _LEAST_WRITERS = 16, 2
_CONTESTS = 10

# How many requests of a kind are timed, and for how many seconds at most, for a slow store.
_SAMPLES = 50
_SECONDS_PER_KIND = 5.0

_WAKE_UPS = 10
# Seconds until the waiter is surely parked, so that a wake-up is measured, not a read.
_PARKING_SECONDS = 0.05

# Milliseconds of the server's CPU for heartbeats in a second, which are 1.05 intervals apart.
_BUSY_MS = 0.5 * 1000 * 1.05

# The largest value that is tried; it is the limit of most stores.
_LARGEST_TRIED = 1 << 20

# Seconds without an answer after which an address counts as silent.
_DIAL_SECONDS = 1.0


def check_store(open: Open, job: Job, chosen: Chosen) -> Generator[Finding, None, bool]:
    """Yield the findings; return whether the store can be used.

    ``open`` connects to the namespace of a run id.
    """
    options = chosen.client.of_run(chosen.options, job.run_id)
    local_addr: str | None = job.local_addr or None
    if local_addr is None:
        # The check of the address has already reported a missing address.
        with suppress(ValueError):
            local_addr = address_on(chosen.settings.interface, chosen.settings.network)
    there = yield from chosen.client.inspect_attendance(job.endpoint, options, local_addr)
    if not there:
        return False
    run_id = f"check-{uuid.uuid4().hex[:12]}"
    began = time.perf_counter()
    try:
        client = open(run_id)
    except (*_ERRORS, ValueError) as error:
        why = _tls_mismatch(job, chosen) if UNREACHED in str(error) else ""
        yield Finding(Mark.FAILED, "store", str(error), why)
        return False
    took = (time.perf_counter() - began) * 1000
    where = f" at '{redact(job.endpoint)}'" if job.endpoint else ""
    with closing(client):
        connected = f"connected to {client.name}{where} in {took:,.0f} ms"
        yield Finding(Mark.OK, "store", connected, values={"ms": round(took, 3)})
        usable = True
        try:
            for finding in client.inspect():
                usable = usable and finding.mark is not Mark.FAILED
                yield finding
        except _ERRORS as error:
            yield Finding(Mark.FAILED, "store", str(error))
            return False
        except Exception as error:
            # A run does not need a server's description of itself, so an odd one is no failure.
            odd = f"what it says of itself makes no sense ({type(error).__name__}: {error})"
            yield Finding(Mark.UNKNOWN, "store", plain(odd))
        return usable and (yield from _try(client, partial(open, run_id), job, chosen))


def _try(
    client: KeyValueClient, open: Callable[[], KeyValueClient], job: Job, chosen: Chosen
) -> Generator[Finding, None, bool]:
    """All checks that write, in the client's run; ``open`` makes another client of the run."""
    try:
        requests = check_requests(client)
        yield requests
        if requests.mark is Mark.FAILED:
            return False
        usable, interval = True, chosen.settings.keep_alive_interval
        trials: dict[str, Callable[[], Finding]] = {
            "largest value": lambda: check_size(client),
            "heartbeats": lambda: check_heartbeats(client, interval, job.nnodes),
            "contention": lambda: check_contention(open),
            "latency": lambda: check_latency(client, chosen.settings.request_timeout),
            "wake-up": lambda: check_wake_up(client, open),
        }
        for what, trial in trials.items():
            try:
                finding = trial()
            except _ERRORS as error:
                # Single requests work: many or large requests do not.
                finding = Finding(Mark.WARNING, what, str(error))
            usable = usable and finding.mark is not Mark.FAILED
            yield finding
        return usable
    finally:
        # The store may be away, or may not allow all requests; then nothing can be deleted.
        with suppress(*_ERRORS):
            delete_run(client)


def check_requests(client: KeyValueClient) -> Finding:
    """Make each kind of request once, so that a missing permission shows here."""
    try:
        entry, _ = client.compare_and_set("state", b"1", None)
        client.put("nodes/a", b"1")
        client.put_many({"nodes/a": b"2", "bell": b"1"})
        read = client.get("nodes/a"), client.list("nodes/").get("nodes/a")
        _, replaced = client.compare_and_set("state", b"2", entry.version if entry else None)
        client.add("counter", 1)
        client.wait("nodes/none", None, _PARKING_SECONDS)
        client.expire(600)
        client.expire(0)
        client.delete_many(["nodes/a", "bell"])
    except _ERRORS as error:
        return Finding(Mark.FAILED, "rights", str(error))
    if not replaced or any(it is None or it.value != b"2" for it in read):
        found = "the store did not return what was just written to it"
        return Finding(Mark.FAILED, "rights", found, "is it one server, or several that differ?")
    found = "read, list, write, compare-and-set, add, wait, expire and delete are allowed and work"
    return Finding(Mark.OK, "rights", found)


def check_size(client: KeyValueClient) -> Finding:
    """Write a large value, and read it back."""
    largest = client.capabilities.max_value_bytes
    tried = min(largest, _LARGEST_TRIED)
    value = os.urandom(tried)
    try:
        client.put("large", value)
        entry = client.get("large")
        client.delete("large")
    except _ERRORS as error:
        found = f"{tried:,} bytes were not written: {error}"
        advice = "c10d stores of the job may need such values; rounds of any size do with less"
        return Finding(Mark.WARNING, "largest value", found, advice)
    found = f"{largest:,} bytes; {tried:,} were written and read back"
    mark, values = Mark.OK, {"max_value_bytes": largest, "tried_bytes": tried}
    if entry is None or entry.value != value:
        mark, found = Mark.FAILED, f"a value of {tried:,} bytes was not read back as it was written"
    return Finding(mark, "largest value", found, values=values)


def check_heartbeats(
    client: KeyValueClient, interval: float, nnodes: tuple[int, int] | None = None
) -> Finding:
    """How many nodes the interval allows, if heartbeats may take half a core of the server."""
    if client.heartbeat_ms is None:
        found = (
            f"the server CPU per heartbeat of {client.name} is not known, and so not how many "
            "nodes half a core serves"
        )
        return Finding(Mark.UNKNOWN, "heartbeats", found)
    nodes = nodes_within(client.heartbeat_ms, interval)
    found = (
        f"half a core of the server serves about {nodes:,} nodes with "
        f"keep_alive_interval={interval:g}"
    )
    values = {"keep_alive_interval": interval, "nodes": nodes}
    if nnodes is None or nnodes[1] <= nodes:
        return Finding(Mark.OK, "heartbeats", found, values=values)
    fits = f"keep_alive_interval={math.ceil(nnodes[1] * client.heartbeat_ms / _BUSY_MS)}"
    advice = f"for {nnodes[1]:,} set {fits}; a lost node is noticed later then"
    return Finding(Mark.WARNING, "heartbeats", found, advice, values)


def nodes_within(heartbeat_ms: float, interval: float) -> int:
    """How many nodes take half a core of the server, rounded down to two digits."""
    nodes = int(_BUSY_MS * interval / heartbeat_ms)
    unit: int = 10 ** max(0, len(str(nodes)) - 2)
    return nodes // unit * unit


def check_contention(open: Callable[[], KeyValueClient]) -> Finding:
    """Let 16 clients replace one key at once, repeatedly: each time one client must win.

    Uses fewer clients if no more can connect, because a pooler may have few connections.
    """
    with ExitStack() as stack, ThreadPoolExecutor(_WRITERS, "rdzv-check") as pool:
        clients: list[KeyValueClient] = []
        crowded = ""
        try:
            # Connect one by one: concurrent clients could take each other's connections.
            while len(clients) < _WRITERS:
                clients.append(stack.enter_context(closing(open())))
        except RendezvousConnectionError:
            if len(clients) < _LEAST_WRITERS:
                raise
            crowded = f", as no more could connect of {_WRITERS}"
        start = threading.Barrier(len(clients))
        version = None
        times = []
        for _ in range(_CONTESTS):

            def write(client: KeyValueClient, expected: object = version) -> tuple[object, bool]:
                start.wait(60)
                entry, won = client.compare_and_set("contested", os.urandom(8), expected)
                return (entry.version if entry else None), won

            began = time.perf_counter()
            outcomes = [*pool.map(write, clients)]
            times.append(time.perf_counter() - began)
            winners = [written for written, won in outcomes if won]
            if len(winners) != 1:
                found = f"{len(winners)} of {len(clients)} writers won a compare-and-set, not one"
                advice = "the store is not linearizable: is it one server, or several that differ?"
                return Finding(Mark.FAILED, "contention", found, advice)
            version = winners[0]
    middle = statistics.median(times) * 1000
    found = f"{len(clients)} writers at once{crowded}, {_CONTESTS} times: one winner each, in "
    found += f"{middle:.1f} ms"
    return Finding(Mark.OK, "contention", found, values={"median_ms": round(middle, 3)})


def check_latency(client: KeyValueClient, patience: float) -> Finding:
    """Time each kind of request; ``patience``: seconds that a request may take."""
    entry, _ = client.compare_and_set("swapped", b"0", None)
    last = [entry.version if entry else None]

    def swap() -> None:
        entry, _ = client.compare_and_set("swapped", os.urandom(16), last[0])
        last[0] = entry.version if entry else None

    kinds: dict[str, Callable[[], object]] = {
        "get": lambda: client.get("swapped"),
        "put": lambda: client.put("nodes/x", os.urandom(16)),
        "compare-and-set": swap,
        "list": lambda: client.list("nodes/"),
        "add": lambda: client.add("counter", 1),
    }
    measured = {kind: _quantiles(request) for kind, request in kinds.items()}
    shown = ", ".join(f"{kind} {p50:.2f}/{p99:.2f}" for kind, (p50, p99) in measured.items())
    found = f"{shown} ms (p50/p99)"
    values = {kind: {"p50_ms": p50, "p99_ms": p99} for kind, (p50, p99) in measured.items()}
    if max(p99 for _, p99 in measured.values()) > patience * 500:
        advice = f"raise heartbeat_timeout ({patience:g} s), which is less than twice the slowest"
        return Finding(Mark.WARNING, "latency", found, advice, values)
    return Finding(Mark.OK, "latency", found, values=values)


def _quantiles(request: Callable[[], object]) -> tuple[float, float]:
    """The 50th and 99th percentile of a request's time, in ms."""
    times: list[float] = []
    until = time.perf_counter() + _SECONDS_PER_KIND
    while len(times) < 2 or (len(times) < _SAMPLES and time.perf_counter() < until):
        began = time.perf_counter()
        request()
        times.append((time.perf_counter() - began) * 1000)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return round(cuts[49], 3), round(cuts[98], 3)


def check_wake_up(writer: KeyValueClient, open: Callable[[], KeyValueClient]) -> Finding:
    """Time from a write until a waiter on another connection has the value."""
    times = []
    with closing(open()) as waiter, ThreadPoolExecutor(1, "rdzv-check") as pool:

        def woken_at(key: str) -> float | None:
            entry = waiter.wait(key, None, timeout=10.0)
            return None if entry is None else time.perf_counter()

        for key in (f"wake/{sample}" for sample in range(_WAKE_UPS)):
            woken = pool.submit(woken_at, key)
            time.sleep(_PARKING_SECONDS)
            began = time.perf_counter()
            writer.put(key, b"x")
            if (ended := woken.result()) is None:
                found = "a waiter was not woken within 10 s of a write"
                advice = "is there a proxy or a pooler in between?"
                return Finding(Mark.FAILED, "wake-up", found, advice)
            times.append((ended - began) * 1000)
    how = "pushed" if writer.capabilities.push else "polled: the store cannot push"
    p50, most = statistics.median(times), max(times)
    found = f"a waiter has a new value after {p50:.2f} ms, {most:.2f} ms at most ({how})"
    values = {"p50_ms": round(p50, 3), "max_ms": round(most, 3)}
    return Finding(Mark.OK, "wake-up", found, values=values)


def _tls_mismatch(job: Job, chosen: Chosen) -> str:
    """Advice if only one side speaks TLS; "": this is not known."""
    client, schemes = chosen.client, [f"{it}://" for it in chosen.client.tls_schemes]
    tls = job.endpoint.lower().startswith(tuple(schemes)) or getattr(chosen.options, "tls", False)
    others = " or ".join(["tls=true", *schemes])
    for host, port in client.locate(job.endpoint).hosts if client.begins_with_tls else ():
        speaks_tls = _speaks_tls(host, port) if port else None
        if tls and speaks_tls is False:
            return f"what listens at {at(host, port)} does not speak TLS: leave out {others}"
        if not tls and speaks_tls:
            return f"what listens at {at(host, port)} speaks TLS: set {others}"
    return ""


def _speaks_tls(host: str, port: int) -> bool | None:
    """Whether the address speaks TLS, by a handshake; None: it does not answer."""
    context = ssl.create_default_context()
    # No verification, because nothing secret is sent.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        raw = socket.create_connection((host, port), _DIAL_SECONDS)
    except (OSError, UnicodeError):
        return None
    with raw:
        try:
            context.wrap_socket(raw, server_hostname=host).close()
        except OSError as error:
            # An alert comes from a server that speaks TLS.
            return isinstance(error, ssl.SSLError) and "ALERT" in str(error)
    return True


def check_run(open: Open, job: Job, settings: Settings) -> Iterator[Finding]:
    """Check the run id: one finding. Nodes with slow heartbeats need up to 12 s of watching."""
    try:
        with closing(open(job.run_id)) as client:
            archive = Archive(open, job.run_id, settings.history_ttl, where=job.where)
            mark, found, advice = _holder(Inspection(client, archive, job.run_id), job, settings)
    except _ERRORS as error:
        mark, found, advice = Mark.FAILED, f"'{job.run_id}': {error}", ""
    yield Finding(mark, "run", found, advice)


def _holder(seen: Inspection, job: Job, settings: Settings) -> tuple[Mark, str, str]:
    """The mark, what holds the run id, and advice."""
    name, another = f"'{job.run_id}'", "use another --rdzv-id"
    seen.look()
    document = seen.document
    holder = "torch" if is_torchs(seen.client) else "rdzv"
    if document is None and holder == "rdzv":
        return Mark.OK, f"{name} is free", ""
    if holder != settings.handler:
        found = f"{name} is held by a run of handler={holder}, whose nodes never meet this job's"
        return Mark.WARNING, found, f"{another}, or handler={holder}"
    if document is None:
        return Mark.UNKNOWN, f"{name} is in use; the state of handler=torch is not read", ""
    if document.closed:
        found = f"{name} is held by a run that has ended ({document.reason})"
        settle([seen])
        _, wait = seen.archive.free_in(document, datetime.now(UTC), seen.at_work)
        return Mark.WARNING, found, f"{wait}; else {another}"
    theirs = document.min_nodes, document.max_nodes
    if job.nnodes is not None and job.nnodes != theirs:
        found = (
            f"{name} was started with --nnodes={theirs[0]}:{theirs[1]}, this job with "
            f"--nnodes={job.nnodes[0]}:{job.nnodes[1]}"
        )
        return Mark.FAILED, found, f"use the same on every node, or {another}"
    settle([seen])
    if seen.condition is Condition.DEAD:
        found = f"{name} is held by a run whose nodes are gone ({seen.sentence})"
        wait = f"this job continues it once its lease ({settings.lease:g} s) has run out"
        return Mark.WARNING, found, f"{wait}; now: {seen.archive.command('clean')}"
    gone = ("silent", "lost", "unknown", "left")
    living = sorted(it.name for it in seen.nodes() if it.state not in gone)
    found = f"{name} is held by a run ({seen.sentence}) of {', '.join(living[:4])}"
    if latest := seen.last_beat:
        found += f", whose last heartbeat came at {latest}"
    return Mark.WARNING, found, f"a node that starts now joins it; for another job {another}"
