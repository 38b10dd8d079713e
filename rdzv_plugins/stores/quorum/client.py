"""No server: the agents of one, three or five hosts run the members of the store themselves.

The endpoint names the hosts of the members. [Start without a server](start/quorum.md) tells which
hosts to name, where a member listens, and what is lost with it. A majority of the members is enough
for each request, and no member leads. Each run has its own members: the run's id selects their
ports.

Values up to 1 MiB, 32 MiB in a member. Nothing is encrypted; with a secret, members and clients
prove to each other that they know it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from rdzv_plugins.kv.base import STAMP_BYTES, Limit, Problem, Stored, segments
from rdzv_plugins.kv.contract import Attendance, Capabilities, MembersUp, RendezvousConnectionError
from rdzv_plugins.kv.epochs import MARK, Epoch, EpochClient
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.register.messages import Held
from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.settings.run_ids import RESERVED
from rdzv_plugins.stores.quorum.members import Members, Options
from rdzv_plugins.stores.quorum.registers import FullError, Registers
from rdzv_plugins.stores.quorum.wire import OtherClusterError, SecretError

# How long `members_up` waits for silent members.
_PATIENCE = 0.3

# `_replace_at` puts an entry for each recent writer before the value: the id of the client's thread
# and the stamp of the value. A client whose request had no answer finds its own entry there.
_WRITER, _STAMP, _ENTRIES = 8, STAMP_BYTES - 1, 127
# A value begins with the number of entries, or with `_PUT` if `_put_at` wrote it.
_PUT = b"\x80"


class Client(EpochClient):
    """One run in the store that its nodes run."""

    name = "quorum"
    default_port = None
    run_by = "nodes"
    options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, linearizable=True, batch=False, ttl=False, max_value_bytes=1 << 20
    )
    heartbeat_ms = 1.1

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"quorum at {redact(endpoint)}", request_timeout)
        self._members = members = Members.of(endpoint, options)
        self._seed = secrets.randbits(8 * _WRITER)
        self._namespace = "/".join(segments(namespace, options.prefix))
        self._registers = Registers(members.dialled, members.greeting, options.secret_bytes())
        self._connect(self._present)

    @classmethod
    def of_run(cls, options: Any, run_id: str) -> Options:
        """The options, with the run's id as the default name of the cluster."""
        assert isinstance(options, Options)
        if options.cluster is None and run_id and not run_id.startswith(RESERVED):
            return replace(options, cluster=run_id)
        return options

    @classmethod
    def clusters(cls, endpoint: str, options: Any) -> tuple[set[str], bool]:
        assert isinstance(options, Options)
        return Members.clusters(endpoint, options)

    @classmethod
    def attend(
        cls, endpoint: str, options: Any, local_addr: str | None, run_id: str
    ) -> Attendance | None:
        # Only nodes need the member's code.
        from rdzv_plugins.stores.quorum.attending import Attending

        assert isinstance(options, Options)
        return Attending(Members.of(endpoint, options), local_addr, run_id)

    @classmethod
    def inspect_attendance(
        cls, endpoint: str, options: Any, local_addr: str | None
    ) -> Generator[Finding, None, bool]:
        from rdzv_plugins.stores.quorum import check

        assert isinstance(options, Options)
        return (yield from check.check(endpoint, options, local_addr))

    def take_part(self) -> None:
        """Keep the members alive until this client is closed."""
        self._registers.is_node = True
        self._registers.renew()
        self._call(partial(self._present, fresh=True))

    def inspect(self) -> Iterable[Finding]:
        found = self.members_up()
        mark, advice = Mark.OK, ""
        if found.up < found.size:
            mark, advice = Mark.WARNING, "start the agents of the other hosts"
        values = {"members": found.size, "up": found.up}
        yield Finding(mark, "members", str(found), advice, values)
        plain = "plain, not encrypted: members and clients have no TLS"
        yield Finding(Mark.OK, "TLS", plain, values={"encrypted": False})

    def members_up(self) -> MembersUp:
        # `_present` learns the generation in which most members take part.
        self._call(partial(self._present, fresh=True))
        up = self._call(lambda limit: self._registers.up(limit.within(_PATIENCE)))
        return MembersUp(up, len(self._members.hosts))

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        return self._stored(self._registers.read([*map(self._key, paths)], limit))

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return self._stored(self._registers.read(self._key(prefix), limit))

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        before, tries = seen.guard if seen is not None else None, 0
        writer = (self._seed ^ threading.get_ident()).to_bytes(_WRITER, "big")
        ours = writer + data[:_STAMP]

        def change(value: bytes | None) -> bytes | None:
            nonlocal tries
            tries += value == before
            return _after(value, ours, data) if value == before else value

        held = self._registers.change(self._key(path), change, limit)
        # Another client may have settled this value, and replaced it, before this client's answer.
        entries, _ = _split(held or b"")
        if ours in entries:
            return True
        last = _split(before or b"")[0][:1]
        is_known = len(entries) < _ENTRIES or any(
            it in last or it[:_WRITER] == writer for it in entries
        )
        if tries and not is_known:
            raise RendezvousConnectionError(
                f"{self.where}: over {_ENTRIES} others replaced '{path}' at once, so whether this "
                "client did is unknown"
            )
        return False

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        for path, data in values.items():
            put = partial(_put, _PUT + data)
            self._registers.change(self._key(path), put, limit, lambda it: it.startswith(_PUT))

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        for path in paths:
            self._registers.change(self._key(path), partial(_put, None), limit)

    def _age(self, epoch: Epoch, mark: Stored, limit: Limit) -> float:
        # Members share no clock, so the answering member's clock gives the age.
        return self._registers.read([self._key(MARK)], limit).get(self._key(MARK), Held()).age

    def _park_at(self, path: str, seen: Stored | None, limit: Limit) -> Stored | None:
        held = self._registers.read([self._key(path)], limit).get(self._key(path), Held())
        if held.value == (seen.guard if seen is not None else None):
            self._registers.watch(self._key(path), held, limit)
        return None

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, SecretError):
            return Problem(
                "refused this client: give all nodes and commands the same secret, in "
                "$RDZV_PLUGINS_SECRET or secret_file",
                denied=True,
            )
        if isinstance(error, FullError):
            return Problem(
                "is full: its members hold up to 32 MiB each; delete runs that are over, with "
                "rdzv clean",
                retryable=True,
            )
        if isinstance(error, OtherClusterError):
            cluster = self._members.cluster
            return Problem(f"has no member of '{cluster}' on its ports: {error}", retryable=True)
        if isinstance(error, OSError):
            return self._unreachable(error)
        return None

    def _unreachable(self, error: Exception, *, undone: bool = False, hint: str = "") -> Problem:
        few = "a majority of its members" if len(self._members.hosts) > 1 else "its member"
        return Problem(
            f"could not be reached within {self.timeout:g} s "
            f"({str(error) or type(error).__name__}): {few} must run, which the agents of "
            f"'{self._members.cluster}' on these hosts start",
            retryable=True,
            undone=undone,
        )

    def _disconnect(self) -> None:
        self._registers.close()

    def _key(self, path: str) -> str:
        return f"{self._namespace}!{path}"

    def _stored(self, found: Mapping[str, Held]) -> dict[str, Stored]:
        start = len(self._key(""))
        values = {key[start:]: held.value or b"" for key, held in found.items()}
        return {path: Stored.parse(_split(value)[1], value) for path, value in values.items()}


def _after(value: bytes | None, ours: bytes, data: bytes) -> bytes:
    """The new value of a register: the entries of its writers, then the data."""
    others = [it for it in _split(value or b"")[0] if it[:_WRITER] != ours[:_WRITER]]
    entries = [ours, *others][:_ENTRIES]
    return bytes([len(entries)]) + b"".join(entries) + data


def _split(value: bytes) -> tuple[list[bytes], bytes]:
    size = _WRITER + _STAMP
    end = 1 + (value[0] % _PUT[0] if value else 0) * size
    return [value[i : i + size] for i in range(1, end, size)], value[end:]


def _put(data: bytes | None, _: bytes | None) -> bytes | None:
    return data
