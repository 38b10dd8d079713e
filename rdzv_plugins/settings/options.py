"""The options as dataclasses: what each means, its default and its bounds.

Each option is a field of a dataclass here or in a backend's module. The string below a field says
what the option means; ``docs/options.md`` is generated from it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from rdzv_plugins.settings import topology

_LARGEST_PORT = 65535

# Rank 0's TCPStore needs a port while the TCPStore of the round before may still have its own.
_PORTS_OF_MASTER = 2

# Seconds that a request may take by default.
_SHORTEST_REQUEST, _LONGEST_REQUEST = 2.0, 5.0

# A secret, and the secret that replaces it.
_MOST_SECRETS = 2


def option(
    default: Any,
    *,
    least: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    of_run: bool = False,
) -> Any:
    """A dataclass field with the bounds that `parse_options` enforces.

    Args:
        of_run: all nodes of a run must have the same value; the leader uses its own value.
    """
    return field(
        default=default,
        repr=not secret,
        metadata={"least": least, "choices": choices, "secret": secret, "of_run": of_run},
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The handler's own options."""

    join_timeout: float = option(600.0, least=0.001)
    """seconds within which a node must be in a complete round; torch's name ``timeout`` is
    accepted, except the 900 that torchrun adds by itself"""
    last_call_timeout: float = option(30.0, least=0)
    """seconds to wait for more nodes once the minimum has joined"""
    close_timeout: float = option(30.0, least=0.001)
    """seconds within which closing the run must succeed"""
    heartbeat_timeout: float | None = option(None, least=0.01)
    """seconds that one request to the store may take, with its retries; none: a third of the lease,
    from 2 to 5"""
    keep_alive_interval: float = option(5.0, least=0.05)
    """seconds between two heartbeats of a node"""
    # At least two: a lease of one interval would expire between two punctual heartbeats.
    keep_alive_max_attempt: int = option(3, least=2)
    """intervals without a heartbeat until a node is lost (the lease)"""
    restart_on_loss: bool = option(True, of_run=True)
    """when a node is lost, restart the others at once"""
    replacement_timeout: float | None = option(None, least=0, of_run=True)
    """seconds that a restart after a loss waits for more nodes than the minimum; none:
    last_call_timeout. If all nodes of the last round are back, it does not wait"""
    grow: str = option("now", choices=("now", "checkpoint", "never"), of_run=True)
    """when newcomers may end a running round that has room: now (after last_call_timeout, or once
    they fill the round), checkpoint (when a worker calls ``rdzv_plugins.saved()``, or at ``rdzv
    resize``) or never. Any other restart lets them in"""
    save_timeout: float = option(60.0, least=0, of_run=True)
    """seconds that a planned end of a round (``rdzv drain``, ``restart`` and ``resize``,
    grow=checkpoint, a signal to ``rdzv run``) waits for the checkpoint of a script that calls
    ``rdzv_plugins.step()``; 0: it does not wait"""
    step_timeout: float = option(0.0, least=0, of_run=True)
    """seconds without a step after which the round ends, and the rank is named that stood still
    first; see policies.md. For a script that calls ``rdzv_plugins.step()``; 0: never"""
    leave_notice: float = option(25.0, least=0)
    """seconds after SIGTERM, or another of ``--signals-to-handle``, within which ``rdzv run``
    leaves; until the run has saved, its workers train on; at most save_timeout"""
    min_uptime: float = option(0.0, least=0, of_run=True)
    """seconds that a round runs before it is ended for newcomers"""
    resize_interval: float = option(0.0, least=0, of_run=True)
    """seconds between two rounds that begin for newcomers"""
    no_progress_rounds: int = option(0, least=0, of_run=True)
    """the run is closed, and torchrun exits with 93, after so many rounds in a row that ran for
    less than no_progress_uptime and did not end for newcomers; 0: never"""
    no_progress_uptime: float = option(60.0, least=0, of_run=True)
    """seconds; see no_progress_rounds"""
    quarantine_after: int | None = option(None, least=0, of_run=True)
    """a host is kept out for a time after it has ended so many rounds within quarantine_window by
    its loss or its workers' failure, if enough other nodes are there; none: 3, and only losses
    count; 0: never"""
    quarantine_window: float = option(3600.0, least=1, of_run=True)
    """seconds; also the longest quarantine: the first takes a tenth of it, each further one of the
    host twice as long"""
    rank_order: str = option(
        "natural", choices=("natural", "stable", "hint", "topology"), of_run=True
    )
    """natural (by address, node2 before node10), stable (nodes of the last round keep their order,
    new nodes follow), hint (by the option ``rank``) or topology (by the option ``domain``)"""
    rank: int | None = option(None, least=0)
    """this node's position for rank_order=hint, e.g. $SLURM_NODEID"""
    domain: str | None = option(None)
    """where this node is, for rank_order=topology and segment: ``rack7``, or levels, the widest
    first, as in ``spine1/leaf3/rack7``; none: as Slurm (SLURM_TOPOLOGY_ADDR) or NVML (the NVLink
    domain) says"""
    node_unit: int = option(1, least=1, of_run=True)
    """a round has a multiple of so many nodes; the rest wait as spares"""
    segment: int = option(1, least=1, of_run=True)
    """a round has whole segments of so many nodes of one domain; the rest wait as spares"""
    network_check: bool = option(False, of_run=True)
    """before a round runs, pairs of nodes exchange 4 MiB each way, and all dial rank 0's
    MASTER_PORT; a node that fails with several others is left out; see node-checks.md"""
    links: bool = option(True)
    """neighbours in rank order keep connections to each other, at a port of master_port: a killed
    process is noticed after about a second, and not after its lease. on_outage=stop turns links
    off"""
    rejoin_timeout: float = option(600.0, least=0.001)
    """seconds that a round waits for a live node of the last round before it starts without that
    node; a tenth of this if other nodes fill the round; at most 0.8 x join_timeout"""
    loss_shutdown_timeout: float = option(5.0, least=0)
    """seconds from SIGTERM to SIGKILL for the workers of a round that has lost a node or
    hung, at most ``--shutdown-timeout``; for ``rdzv run``, torchrun takes 30 s"""
    on_outage: str = option("continue", choices=("continue", "stop"))
    """while the store does not answer: workers continue, or stop after outage_limit, so that no
    second copy of the job trains; stop turns links off. A node that the store refuses while it
    accepts others stops its workers after its lease in any case; see split-brain.md"""
    outage_limit: float | None = option(None, least=0)
    """with on_outage=stop: seconds without an accepted heartbeat after which a node stops its
    workers; none: the lease"""
    closed_ttl: float = option(60.0, least=0)
    """seconds for which the id of a closed run stays taken once no node trains in it; at least the
    lease"""
    abandoned_ttl: float = option(3600.0, least=1)
    """seconds until the keys of a run without a leader expire; at least four leases"""
    history_ttl: float = option(604800.0, least=0)
    """seconds that the last rounds of a run, its end and its entry in the list of runs are kept; 0:
    they are not written"""
    check_command: str | None = option(None)
    """a program with arguments, run before this node joins: status 0 lets it join, else the last
    line of the output is the reason why not; see node-checks.md"""
    checks: str | None = option(None)
    """more such checks, with a comma or + between: gpu (extra ``gpu``), disk, network, and entry
    points of the group rdzv_plugins.health"""
    check_timeout: float = option(60.0, least=0.001)
    """seconds that each check may take"""
    check_at: str = option("join", choices=("join", "restart"))
    """join (before a node that is in no round joins) or restart (each time that its agent asks for
    a round)"""
    on_unhealthy: str = option("wait", choices=("wait", "exit"))
    """what a node does whose checks fail, or whose host lets no worker start: wait (the others go
    on; it tries again after 1, 2, 4 ... up to 60 s, until join_timeout) or exit"""
    check_fails_open: bool = option(False)
    """a check that cannot run (no such program, no answer in time, an exception) counts as passed,
    with a warning"""
    check_disk: str | None = option(None)
    """the directory for the check ``disk``; none: $TMPDIR"""
    check_disk_free: float = option(1.0, least=0)
    """GiB that must be free there"""
    interface: str | None = option(None)
    """the network interface whose address the others dial, e.g. ib0; none: that by which this node
    reaches the store, or, if that is loopback, the default route"""
    network: str | None = option(None)
    """the network in which the address is that the others dial, e.g. 10.1.0.0/16. ``--local-addr``
    overrides both"""
    master_port: str | None = option(None)
    """the range of at least three ports, such as 30000-30999, for rank 0's MASTER_PORT, ``links``
    and ``network_check``; none: any free port. Each round has another port than the one before. If
    hosts of two runs may get each other's addresses, give each run its own range, or a wide one;
    see split-brain.md. gloo and NCCL open other ports"""
    log_level: str = option("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    """the least level of this package's lines on stderr: DEBUG, INFO, WARNING or ERROR; without
    effect where the application has set up logging"""
    metrics_port: int | None = option(None, least=0)
    """serve /metrics, /healthz and /why of this node on this port; 0: any free one, which the log
    names (extra ``metrics``)"""
    metrics_host: str | None = option(None)
    """address on which they are served; if other hosts can reach it, page_token is needed; none:
    127.0.0.1"""
    page_token: str | None = option(None, secret=True)
    """the token for /metrics and /why, and for ``rdzv dashboard`` and ``rdzv exporter``: clients
    send it as the header `Authorization: Bearer`. Set it in $RDZV_PLUGINS_PAGE_TOKEN"""
    page_token_file: str | None = option(None)
    """file whose first line is that token; read at each request"""
    otel: bool = option(False)
    """report the same metrics through OpenTelemetry, if the application has set it up (extra
    ``otel``)"""
    handler: str = option("rdzv", choices=("rdzv", "torch"))
    """rdzv (this package's handler) or torch (torch's own handler on this backend; it has no
    master_port, no metrics and otel, and none of the options from restart_on_loss to outage_limit
    and from abandoned_ttl to check_disk_free)"""

    def __post_init__(self) -> None:
        if self.metrics_port is not None and self.metrics_port > _LARGEST_PORT:
            raise ValueError(
                f"option 'metrics_port': '{self.metrics_port}' must be at most {_LARGEST_PORT}"
            )
        _refuse_both(self.page_token, "page_token_file", self.page_token_file)
        if self.domain is not None:
            topology.levels(self.domain)
        if self.outage_limit is not None:
            if self.on_outage != "stop":
                raise ValueError("option 'outage_limit' has a meaning with on_outage=stop only")
            if self.outage_limit < 2 * self.keep_alive_interval:
                raise ValueError(
                    f"option 'outage_limit': '{self.outage_limit:g}' must be at least twice "
                    f"keep_alive_interval ({self.keep_alive_interval:g} s): between two heartbeats "
                    "workers are not to stop"
                )
        if self.network is not None:
            try:
                ip_network(self.network, strict=False)
            except ValueError:
                raise ValueError(
                    f"option 'network': '{self.network}' is no network such as 10.1.0.0/16"
                ) from None
        if self.master_port is not None:
            ports = self.ports
            if not 0 < ports.start < ports.stop <= _LARGEST_PORT + 1:
                raise ValueError(
                    f"option 'master_port': '{self.master_port}' is no range such as 30000-30999, "
                    f"up to {_LARGEST_PORT}"
                )
            if len(ports) <= _PORTS_OF_MASTER:
                raise ValueError(
                    f"option 'master_port': '{self.master_port}' has less than "
                    f"{_PORTS_OF_MASTER + 1} ports: MASTER_PORT, that of the round before, and one "
                    "for links: name more, such as 30000-30999"
                )

    @property
    def check_names(self) -> list[str]:
        """The names in ``checks``; in ``--rdzv-conf`` a comma begins the next option."""
        return (self.checks or "").replace(",", " ").replace("+", " ").split()

    @property
    def ports(self) -> range:
        """The ports of ``master_port``; port 0 stands for any free port."""
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", self.master_port or "0", re.ASCII)
        return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)

    @property
    def answer_ports(self) -> range:
        """The part of `ports` at which this node answers others, the last port first.

        Two ports are left for rank 0's TCPStore, however many nodes the host has.
        """
        return self.ports[: _PORTS_OF_MASTER - 1 : -1] or self.ports

    @property
    def policy(self) -> str:
        """The options of the run that are not at their defaults, as in ``--rdzv-conf``."""
        return ",".join(
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if item.metadata["of_run"] and getattr(self, item.name) != item.default
        )

    @property
    def lease(self) -> float:
        """Seconds without a heartbeat, on the observer's clock, after which a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def request_timeout(self) -> float:
        """Seconds that one request to the store may take, retries included.

        A heartbeat whose connection is lost is sent again over another connection in the lease.
        """
        if self.heartbeat_timeout is not None:
            return self.heartbeat_timeout
        return min(max(self.lease / 3, _SHORTEST_REQUEST), _LONGEST_REQUEST)

    @property
    def patience_in_an_outage(self) -> float:
        """Seconds without an accepted heartbeat after which the workers stop; infinite: never."""
        if self.on_outage == "continue":
            return math.inf
        return self.lease if self.outage_limit is None else self.outage_limit

    def current_page_token(self) -> str | None:
        """The token, or the present first line of ``page_token_file``; None: neither is set.

        Raises `UnreadableFileError`.
        """
        return given_or_in_file(self.page_token, "page_token_file", self.page_token_file)

    @property
    def sweep_after(self) -> float:
        """Seconds until a closed run's keys expire; at least a lease, so that all nodes see it."""
        return max(self.closed_ttl, self.lease)


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of every store."""

    prefix: str = option("rdzv")
    """first part of every key: ``<prefix>/<run id>/``"""
    secret: str | None = option(None, secret=True)
    """keeps strangers out: every value is sealed with it, and what has no such seal counts as
    absent; the same for all nodes and commands. Set it in $RDZV_PLUGINS_SECRET"""
    secret_file: str | None = option(None)
    """file whose first line is the secret; a second one is accepted too, while one is replaced"""

    def __post_init__(self) -> None:
        _refuse_both(self.secret, "secret_file", self.secret_file)
        # ZooKeeper refuses an empty path segment; refuse it for every store alike.
        if not all(self.prefix.split("/")):
            raise ValueError(
                f"option 'prefix': '{self.prefix}' must not be empty, start or end with '/', or "
                "contain '//'"
            )

    def secrets(self) -> tuple[str, ...]:
        """The present secrets: the first secret seals, and all are accepted; empty: none is set.

        Raises `UnreadableFileError`.
        """
        if self.secret_file is None:
            return () if self.secret is None else (self.secret,)
        lines = _lines("secret_file", self.secret_file)
        return (lines[0], *filter(None, lines[1:_MOST_SECRETS]))


@dataclass(frozen=True, kw_only=True)
class PollingOptions(StoreOptions):
    """Options of the stores that cannot push."""

    poll_interval_min: float = option(0.1, least=0.001)
    """seconds between the first polls of a waiter"""
    poll_interval_max: float = option(2.0, least=0.001)
    """longest interval between polls, in seconds: a waiter notices a change within that time"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.poll_interval_max < self.poll_interval_min:
            raise ValueError("option 'poll_interval_max' is less than 'poll_interval_min'")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(StoreOptions):
    """Options of the stores that have a host and a port."""

    user: str | None = option(None)
    """user name; a user in the endpoint takes precedence"""
    password: str | None = option(None, secret=True)
    """set it in $RDZV_PLUGINS_PASSWORD or in the endpoint; refused in --rdzv-conf, which every user
    of the host can read"""
    password_file: str | None = option(None)
    """file whose first line is the password"""
    tls: bool = option(False)
    """encrypt the connection; an endpoint with rediss:// or https:// implies it"""
    ca_file: str | None = option(None)
    """PEM file of the trusted authorities; none: the system's"""
    cert_file: str | None = option(None)
    """PEM file of the client's certificate"""
    key_file: str | None = option(None)
    """PEM file of the client's private key"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_both(self.password, "password_file", self.password_file)

    def current_password(self) -> str | None:
        """The password, or the present first line of ``password_file``; None: neither is set.

        Raises `UnreadableFileError`.
        """
        return given_or_in_file(self.password, "password_file", self.password_file)


class OptionError(ValueError):
    """A store's first requests have shown that only other options, or another store, help."""


class UnreadableFileError(ValueError):
    """A file of a secret or certificate is missing, empty or broken: a bad option at the start.

    Later the file is most likely being replaced, and the next attempt reads it again.
    """


def first_line(name: str, path: str) -> str:
    """The first line of the file of option ``name``; raises `UnreadableFileError`."""
    return _lines(name, path)[0]


def given_or_in_file(given: str | None, name: str, path: str | None) -> str | None:
    """The given secret, or else the present first line of its file; None: neither is given.

    Raises `UnreadableFileError`.
    """
    return given if given is not None or path is None else first_line(name, path)


def _refuse_both(given: str | None, name: str, path: str | None) -> None:
    if given is not None and path is not None:
        variable = f"$RDZV_PLUGINS_{name.removesuffix('_file').upper()}"
        raise ValueError(f"{name} and {variable} are both set: leave one of them out")


def _lines(name: str, path: str) -> list[str]:
    """All lines; raises as `first_line`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # No error shows the content of a file.
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UnreadableFileError(f"{name} '{path}' cannot be read ({why})") from error
    if not lines or not lines[0]:
        raise UnreadableFileError(f"{name} '{path}' has no first line: write the secret there")
    return lines
