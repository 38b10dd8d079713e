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
    """seconds within which a node must be in a complete round; torch's name ``timeout`` works too,
    except the 900 that torchrun adds by itself"""
    last_call_timeout: float = option(30.0, least=0)
    """seconds to wait for more nodes once the minimum has joined"""
    close_timeout: float = option(30.0, least=0.001)
    """seconds within which closing the run must succeed"""
    heartbeat_timeout: float | None = option(None, least=0.01)
    """seconds for one request to the store, with its retries; default: a third of the lease, from 2
    to 5"""
    keep_alive_interval: float = option(5.0, least=0.05)
    """seconds between two heartbeats of a node"""
    # At least two: a lease of one interval would expire between two punctual heartbeats.
    keep_alive_max_attempt: int = option(3, least=2)
    """the lease, in intervals: a node without a heartbeat for so long is lost"""
    restart_on_loss: bool = option(True, of_run=True)
    """when a node is lost, restart the others at once"""
    replacement_timeout: float | None = option(None, least=0, of_run=True)
    """seconds that a restart after a loss waits for more nodes than the minimum, unless all nodes
    of the last round are back; default: last_call_timeout; at most 0.8 x join_timeout"""
    grow: str = option("now", choices=("now", "checkpoint", "never"), of_run=True)
    """when new nodes may end a running round that has room: now, checkpoint (after
    ``rdzv_plugins.saved()``) or never; see policies.md"""
    save_timeout: float = option(60.0, least=0, of_run=True)
    """seconds that a planned restart waits for the checkpoint of a script that calls
    ``rdzv_plugins.step()``; 0: it does not wait; see training-script.md"""
    step_timeout: float = option(0.0, least=0, of_run=True)
    """seconds without ``rdzv_plugins.step()`` after which the round ends; see training-script.md;
    0: never"""
    leave_notice: float = option(25.0, least=0)
    """seconds that ``rdzv run`` waits for the checkpoint after SIGTERM or another of
    ``--signals-to-handle``, before it leaves; at most save_timeout"""
    min_uptime: float = option(0.0, least=0, of_run=True)
    """seconds that a round runs before it ends for new nodes"""
    resize_interval: float = option(0.0, least=0, of_run=True)
    """seconds between two rounds that begin for new nodes"""
    no_progress_rounds: int = option(0, least=0, of_run=True)
    """the run is closed after so many rounds in a row that ran for less than no_progress_uptime,
    not counting those that ended for new nodes; agents exit with 93; 0: never"""
    no_progress_uptime: float = option(60.0, least=0, of_run=True)
    """seconds; see no_progress_rounds"""
    quarantine_after: int | None = option(None, least=0, of_run=True)
    """a host that has ended so many rounds within quarantine_window is kept out for a time;
    default: 3, and only losses count; 0: never; see taking-nodes-out.md"""
    quarantine_window: float = option(3600.0, least=1, of_run=True)
    """seconds; also the longest quarantine"""
    rank_order: str = option(
        "natural", choices=("natural", "stable", "hint", "topology"), of_run=True
    )
    """natural (by address, node2 before node10), stable (as in the last round, then new nodes),
    hint (by the option ``rank``) or topology (by ``domain``)"""
    rank: int | None = option(None, least=0)
    """this node's position for rank_order=hint, such as $SLURM_NODEID"""
    domain: str | None = option(None)
    """this node's place in the network, for rank_order=topology and segment: ``rack7``, or levels
    such as ``spine1/leaf3/rack7``; default: as Slurm or NVML says; see policies.md"""
    node_unit: int = option(1, least=1, of_run=True)
    """a round has a multiple of so many nodes; the rest wait as spares"""
    segment: int = option(1, least=1, of_run=True)
    """a round has whole segments of so many nodes of one domain; the rest wait as spares"""
    network_check: bool = option(False, of_run=True)
    """before a round runs, its nodes exchange data and dial rank 0; see node-checks.md"""
    links: bool = option(True)
    """neighbours in rank order keep connections to each other, to notice a killed process after
    about a second, not after its lease; off with on_outage=stop"""
    rejoin_timeout: float = option(600.0, least=0.001)
    """seconds that a round waits for a live node of the last round to come back; a tenth of this if
    other nodes fill the round; at most 0.8 x join_timeout"""
    loss_shutdown_timeout: float = option(5.0, least=0)
    """seconds from SIGTERM to SIGKILL for workers after a loss or a stall, under ``rdzv run``; at
    most ``--shutdown-timeout``"""
    on_outage: str = option("continue", choices=("continue", "stop"))
    """while the store does not answer, workers continue, or stop after outage_limit, so that no
    second copy of the job trains; see split-brain.md"""
    outage_limit: float | None = option(None, least=0)
    """with on_outage=stop: seconds without an accepted heartbeat after which a node stops its
    workers; default: the lease"""
    closed_ttl: float = option(60.0, least=0)
    """seconds for which the id of a closed run stays taken after its last workers have ended; at
    least the lease"""
    abandoned_ttl: float = option(3600.0, least=1)
    """seconds until the keys of a run without a leader expire; at least four leases"""
    history_ttl: float = option(604800.0, least=0)
    """seconds that a run's last rounds, its end and its entry in the list of runs are kept; 0: they
    are not written"""
    check_command: str | None = option(None)
    """a program with arguments, run before this node joins: status 0 lets it join; see
    node-checks.md"""
    checks: str | None = option(None)
    """more checks, with a comma or + between: gpu (extra ``gpu``), disk, network, and your own"""
    check_timeout: float = option(60.0, least=0.001)
    """seconds for each check"""
    check_at: str = option("join", choices=("join", "restart"))
    """join (before a node joins the run) or restart (before each round too)"""
    on_unhealthy: str = option("wait", choices=("wait", "exit"))
    """if checks fail, or the host lets no worker start: wait (and try again, until join_timeout) or
    exit"""
    check_fails_open: bool = option(False)
    """a check that cannot run counts as passed, with a warning"""
    check_disk: str | None = option(None)
    """the directory of the check ``disk``; default: $TMPDIR"""
    check_disk_free: float = option(1.0, least=0)
    """GiB that must be free there"""
    interface: str | None = option(None)
    """the network interface whose address other nodes dial, such as ib0; default: the one to the
    store, or, if that is loopback, to the default route"""
    network: str | None = option(None)
    """the network of the address that other nodes dial, such as 10.1.0.0/16. ``--local-addr``
    overrides this and interface"""
    master_port: str | None = option(None)
    """a range of three or more ports, such as 30000-30999, for rank 0's MASTER_PORT, ``links`` and
    ``network_check``, but not for gloo and NCCL; default: any free port; see split-brain.md"""
    log_level: str = option("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    """the least level of this package's lines on stderr, unless the application has set up logging:
    DEBUG, INFO, WARNING or ERROR"""
    metrics_port: int | None = option(None, least=0)
    """serve /metrics, /healthz and /why of this node on this port; 0: any free one (extra
    ``metrics``); see metrics.md"""
    metrics_host: str | None = option(None)
    """the address of these pages; default: 127.0.0.1. Any other needs page_token"""
    page_token: str | None = option(None, secret=True)
    """the token for these pages, ``rdzv dashboard`` and ``rdzv exporter``; set it in
    $RDZV_PLUGINS_PAGE_TOKEN"""
    page_token_file: str | None = option(None)
    """file whose first line is that token"""
    otel: bool = option(False)
    """report the metrics through OpenTelemetry (extra ``otel``); see metrics.md"""
    handler: str = option("rdzv", choices=("rdzv", "torch"))
    """rdzv (this package's handler) or torch (torch's own on this backend: without master_port,
    metrics and otel, the options from restart_on_loss to outage_limit, and those from abandoned_ttl
    to check_disk_free)"""

    def __post_init__(self) -> None:
        if self.metrics_port is not None and self.metrics_port > _LARGEST_PORT:
            raise ValueError(
                f"option 'metrics_port': '{self.metrics_port}' must be at most {_LARGEST_PORT}"
            )
        _refuse_both(self)
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
    def run_options(self) -> str:
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
    """keeps strangers out; the same for all nodes and commands; set it in $RDZV_PLUGINS_SECRET; see
    operating.md"""
    secret_file: str | None = option(None)
    """file whose first line is the secret; a second secret may follow while you replace it"""

    def __post_init__(self) -> None:
        _refuse_both(self)
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
    """longest interval between polls, in seconds: the longest time until a waiter notices a
    change"""

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
    """set it in $RDZV_PLUGINS_PASSWORD or in the endpoint; refused in --rdzv-conf, which others can
    read"""
    password_file: str | None = option(None)
    """file whose first line is the password"""
    tls: bool = option(False)
    """encrypt the connection, as rediss:// and https:// do"""
    ca_file: str | None = option(None)
    """PEM file of the trusted authorities, for redis beside the system's; default: the system's"""
    cert_file: str | None = option(None)
    """PEM file of the client's certificate"""
    key_file: str | None = option(None)
    """PEM file of the client's private key"""

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


def _refuse_both(options: Settings | StoreOptions) -> None:
    """Raise `ValueError` if a secret is given twice: as it is, and by the option of its file."""
    for it in fields(options):
        file = f"{it.name}_file"
        if getattr(options, it.name) is not None and getattr(options, file, None) is not None:
            variable = f"$RDZV_PLUGINS_{it.name.upper()}"
            raise ValueError(f"{file} and {variable} are both set: leave one of them out")


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
