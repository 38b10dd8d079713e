"""Where the members of a quorum are: its options, and what the endpoint says of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

from rdzv_plugins.peers.addresses import dialled_here
from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.settings.options import StoreOptions, option

SIZES = (1, 3, 5)
"""How many members there may be: of two or four, half are no majority."""

# On so many ports, one after the other, a member is looked for.
_CANDIDATES = 3


@dataclass(frozen=True, kw_only=True)
class Options(StoreOptions):
    """Options of the quorum backend, whose endpoint is ``host[:port]`` of one, three or five
    members, alike on all nodes.
    """

    cluster: str | None = option(None)
    """the members' name for their cluster; none: the run's id, so that each run has members of its
    own"""
    ports: str = option("29600-29699")
    """where members listen; the cluster's name decides on which of them. A port in the endpoint
    overrides it"""
    linger: float = option(30.0, least=0)
    """seconds that a member outlives its own node at most, while other nodes of the run are there;
    5 after a signal"""

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
        """What members and clients of this cluster prove to know; empty: nobody needs it.

        Raises:
            UnreadableFileError: the file of the secret has none.
        """
        found = self.secrets()
        return found[0].encode() if found else b""


@dataclass(frozen=True)
class Members:
    """Where the members of a cluster are, as the endpoint and the options say.

    Attributes:
        cluster: its name.
        hosts: in lower case and alphabetical order, each with its own port; None: the rule decides.
    """

    cluster: str
    hosts: tuple[tuple[str, int | None], ...]
    options: Options

    @classmethod
    def of(cls, endpoint: str, options: Options) -> Members:
        """Parse the endpoint.

        Raises:
            ValueError: no number of hosts that can have a majority, one that is there twice, or
                nobody has said of which run the members are.
        """
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
        # A member is known by its index: all nodes must count alike.
        return cls(options.cluster, tuple(hosts), options)

    def name(self, index: int) -> str:
        """The host of the member that claims this index; without a secret anybody may claim one."""
        return self.hosts[index][0] if index in range(len(self.hosts)) else f"host {index}"

    @property
    def greeting(self) -> str:
        """The cluster's name as members say it: other hosts would have a majority of their own."""
        return f"{self.cluster} of {len(self.hosts)} hosts"

    def ports(self, host: int) -> list[int]:
        """The ports that this member may have, in the order in which it takes one."""
        own = self.hosts[host][1]
        if own is not None:
            return [own]
        ports = self.options.port_range
        first = zlib.crc32(self.cluster.encode())
        return list(dict.fromkeys(ports[(first + i) % len(ports)] for i in range(_CANDIDATES)))

    @property
    def dialled(self) -> list[list[tuple[str, int]]]:
        """For each member the places where it may be."""
        return [self.places(host) for host in range(len(self.hosts))]

    def places(self, host: int) -> list[tuple[str, int]]:
        """Where this member may be, as dialled from this host, the likeliest first."""
        addresses = self._dialled_here[self.hosts[host][0]]
        return [(address, port) for port in self.ports(host) for address in addresses]

    @cached_property
    def _dialled_here(self) -> dict[str, list[str]]:
        return dialled_here(name for name, _ in self.hosts)

    def __str__(self) -> str:
        return ",".join(host for host, _ in self.hosts)
