"""The options of a quorum, and where its members are."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property

from rdzv_plugins.peers.addresses import dialled_here, resolved
from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.settings.options import StoreOptions, option
from rdzv_plugins.stores.quorum.wire import greetings

SIZES = (1, 3, 5)
"""Numbers of members; two or four survive no more deaths than one or three."""

# A member listens on one of this many ports.
_CANDIDATES = 3
_GREETING_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Options(StoreOptions):
    """Options of the quorum backend, whose endpoint is ``host[:port]`` of one, three or five
    members, alike on all nodes.
    """

    cluster: str | None = option(None)
    """the name of the members' cluster; default: the run's id, so that each run has its own
    members"""
    ports: str = option("29600-29699")
    """where members listen; the cluster's name selects the ports. A port in the endpoint overrides
    it"""
    linger: float = option(30.0, least=0)
    """seconds that a member outlives its own node, while other nodes of the run are there; 5 after
    a signal"""

    def __post_init__(self) -> None:
        super().__post_init__()
        first, _, last = self.ports.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
            raise ValueError(f"option 'ports': '{self.ports}' is no range such as 29600-29699")

    @property
    def port_range(self) -> range:
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1)

    def secret_bytes(self) -> bytes:
        """The secret of members and clients, or empty; raises `UnreadableFileError`."""
        found = self.secrets()
        return found[0].encode() if found else b""


@dataclass(frozen=True)
class Members:
    """Where the members of a cluster are.

    Attributes:
        hosts: in lower case and alphabetical order, each with the port that the endpoint names.
    """

    cluster: str
    hosts: tuple[tuple[str, int | None], ...]
    options: Options

    @classmethod
    def of(cls, endpoint: str, options: Options) -> Members:
        """Parse the endpoint; raises `ValueError`, also if ``options`` names no cluster."""
        target = parse_endpoint(endpoint, default_port=0)
        target.refuse_all_but()
        if target.user is not None:
            raise ValueError("members have no users: leave out what stands before the '@'")
        count = len(target.hosts)
        if count not in SIZES:
            raise ValueError(
                f"the endpoint names {count} hosts: name one, three or five of the run's. A "
                "majority of the members must live, so that two are no better than one, nor four "
                "than three"
            )
        hosts = sorted((host.lower(), port or None) for host, port in target.hosts)
        if len({*hosts}) < count:
            raise ValueError("the endpoint names a host twice: each member needs a host of its own")
        if options.cluster is None:
            raise ValueError(
                "each run has members of its own: name the run with -i, or, where a command takes "
                "no run, with --rdzv-conf=cluster=<its id>"
            )
        # All nodes must sort the hosts alike, because a member is known by its index.
        return cls(options.cluster, tuple(hosts), options)

    @classmethod
    def clusters(cls, endpoint: str, options: Options) -> tuple[set[str], bool]:
        """The clusters that have members on these hosts, and whether each host has answered."""
        wanted = range(len(options.port_range)) if options.cluster is None else range(_CANDIDATES)
        members = cls.of(endpoint, replace(options, cluster=options.cluster or ""))
        places = [
            (address, port)
            for host, names in enumerate(members._dialled_here[name] for name, _ in members.hosts)
            for name in names
            for address in resolved(name)
            for port in members.ports(host, wanted)
        ]
        greeting = members.greeting if options.cluster is not None else None
        found, is_sure = greetings(dict.fromkeys(places), _GREETING_SECONDS, greeting)
        named = (it.rpartition(" of ") for it in found)
        size = members.greeting.rpartition(" of ")[2]
        return {cluster for cluster, _, hosts in named if hosts == size}, is_sure

    def name(self, index: int) -> str:
        """The host of a member; a stranger may claim any index."""
        return self.hosts[index][0] if index in range(len(self.hosts)) else f"host {index}"

    @property
    def greeting(self) -> str:
        """The cluster's name in greetings; members that count other hosts must not connect."""
        return f"{self.cluster} of {len(self.hosts)} hosts"

    def ports(self, host: int, wanted: range = range(_CANDIDATES)) -> list[int]:
        """The ports that this member may have, in its order of preference."""
        own = self.hosts[host][1]
        if own is not None:
            return [own]
        ports = self.options.port_range
        first = zlib.crc32(self.cluster.encode())
        return list(dict.fromkeys(ports[(first + i) % len(ports)] for i in wanted))

    @property
    def dialled(self) -> list[list[tuple[str, int]]]:
        """The `places` of each member."""
        return [self.places(host) for host in range(len(self.hosts))]

    def places(self, host: int) -> list[tuple[str, int]]:
        """The addresses and ports to dial for this member, the likeliest first."""
        addresses = self._dialled_here[self.hosts[host][0]]
        return [(address, port) for port in self.ports(host) for address in addresses]

    @cached_property
    def _dialled_here(self) -> dict[str, list[str]]:
        return dialled_here(name for name, _ in self.hosts)

    def __str__(self) -> str:
        return ",".join(host for host, _ in self.hosts)
