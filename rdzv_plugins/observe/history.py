"""Records that outlive a run: ends of runs, last rounds, excluded hosts, the list of all runs.

They have run ids that no job can have: ``!archive/<run id>`` has the tombstones and the rounds of
one run id, ``!runs`` an entry for each run id, ``!excluded`` the hosts that each run id excludes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from shlex import join
from typing import TypeAlias, TypeVar

import msgspec

from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.gate import (
    SMALL_BYTES,
    Count,
    Id,
    InvalidValueError,
    Key,
    Nodes,
    Text,
    decode,
    is_time,
    plain,
)
from rdzv_plugins.kv.retry import pause_after
from rdzv_plugins.kv.sealed import NO_SECRET_HERE, is_sealed, why_unreadable
from rdzv_plugins.protocol.documents import NOBODY, Exclusion, Names, Outcome, Phase, RoundDocument
from rdzv_plugins.protocol.round_record import RoundRecord
from rdzv_plugins.settings.run_ids import is_possible

T = TypeVar("T")
Open: TypeAlias = Callable[[str], KeyValueClient]

_ENDED = "ended/"
_ROUNDS = "rounds/"
LIST = "!runs"
"""The run id whose namespace is the list of runs."""
EXCLUDED = "!excluded"
"""The run id whose namespace has the exclusions: a key for each run id, and one for all."""
_ALL_RUNS = "!all"
# The store forgets exclusions without an end this many seconds after the last `rdzv exclude` under
# a prefix.
_LONGEST_EXCLUSION = 365 * 24 * 3600.0
# The store deletes the exclusions this many seconds after the last exclusion was removed.
_AFTER_THE_LAST = 60.0

# A node that was away for less than this finds the tombstone of its run.
_TOMBSTONE_SECONDS = 7 * 24 * 3600.0
_MOST_REFUSALS = 60
# The most tombstones and rounds of one run id, however often the id is used again.
_MOST_TOMBSTONES = 64
_MOST_ROUNDS = 50


class Row(RoundRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A round that began to run, or the end of a run.

    Attributes:
        at: the time of the event, on the leader's wall clock, ISO 8601 in UTC.
    """

    at: Id

    @property
    def trains_since(self) -> datetime | None:
        """When every rank had finished a step; None: not told."""
        took = self.seconds
        if took is None or took.started is None or took.first_step is None:
            return None
        return datetime.fromisoformat(self.at) + timedelta(seconds=took.started + took.first_step)

    @property
    def took(self) -> str:
        """How long the round took to form and to train, and how many steps were lost."""
        if self.seconds is None:
            return self.outcome.value if self.outcome is not None else self.phase.value
        if self.lost_steps is None:
            return str(self.seconds)
        plural = "s" if self.lost_steps != 1 else ""
        return f"{self.seconds}; {self.lost_steps} step{plural} lost"


class Listed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of a run id in the list of runs: its last run, and the last recorded round.

    Attributes:
        began: when the run was founded, on the wall clock of that node; ISO 8601 in UTC.
        at, until: when the entry was written, and when it may be deleted.
        outcome: how the run ended; None: its end was not noted.
    """

    run: Id
    incarnation: Key
    began: Id
    at: Id
    until: Id
    phase: Phase
    round: Count
    nodes: Nodes
    reason: Text = ""
    outcome: Outcome | None = None


class _Tombstone(msgspec.Struct):
    """The fields of a tombstone that are read: how a run ended, and when."""

    outcome: Id = ""
    at: Id = ""


_ENDS = msgspec.json.Decoder(_Tombstone)
_ROWS = msgspec.json.Decoder(Row)
_LISTED = msgspec.json.Decoder(Listed)
# Room for thousands of hosts.
_EXCLUSIONS_BYTES = 4 * SMALL_BYTES
_EXCLUSIONS = msgspec.json.Decoder(tuple[Exclusion, ...])


def goodput(rows: Sequence[Row], now: datetime) -> float | None:
    """The share of the last run's time in which steps were trained that no later round repeated.

    The time counts from the start of the first round in ``rows``, oldest first. In each round the
    time from the first step to the last step that no later round repeated was good. The newest
    round is good to its end, because what a later round will repeat is unknown. None: no round has
    told its first step, for example because the script does not call ``rdzv_plugins.step()``.
    """
    mine = [it for it in rows if it.incarnation == rows[-1].incarnation]
    newest = max((i for i, it in enumerate(mine) if it.trains_since is not None), default=None)
    if newest is None:
        return None
    ends = datetime.fromisoformat(mine[-1].at) if mine[-1].phase is Phase.CLOSED else now
    until, later = ends, mine[newest + 1 :]
    if later and later[0].seconds is not None:
        until = datetime.fromisoformat(later[0].at) - timedelta(
            seconds=sum(later[0].seconds.phases.values())
        )
    since = mine[newest].trains_since or until
    # Leave out the first row: the steps that it repeats were trained before the counted time.
    good = sum(it.trained for it in mine[1:]) + max(0.0, (until - since).total_seconds())
    whole = (ends - datetime.fromisoformat(mine[0].at)).total_seconds()
    return min(1.0, max(0.0, good / whole)) if whole > 0 else None


class Archive:
    """The archive of one run id. Each call opens its own connection, because calls are rare.

    All methods raise `RendezvousConnectionError` if the store is away or refuses the user.

    Args:
        open: connects to the namespace of a run id.
        history_ttl: seconds that rounds and the entry in the list are kept; 0: neither is written.
        briefly: connects for `note` and `exclusions`, which a run can do without; None: ``open``.
        where: the arguments with which a command reaches the store.
    """

    def __init__(
        self,
        open: Open,
        run_id: str,
        history_ttl: float,
        briefly: Open | None = None,
        where: Sequence[str] = (),
    ) -> None:
        self._open, self._briefly, self._where = open, briefly or open, where
        self._run_id = run_id
        self._history_ttl = history_ttl
        self._kept = max(_TOMBSTONE_SECONDS, history_ttl)

    def command(self, name: str, *arguments: str) -> str:
        """A command that a person can paste; it is about all runs if there is no run id."""
        run = ["-i", self._run_id] if self._run_id else []
        return join(["rdzv", name, *run, *self._where, *arguments])

    def _own(self) -> closing[KeyValueClient]:
        return closing(self._open(archive_run_id(self._run_id)))

    def put_tombstone(self, ended: RoundDocument) -> None:
        """Record that this incarnation ended; all records expire a week after the last one."""
        outcome = ended.outcome or Outcome.CLOSED
        story = {"outcome": outcome.value, "round": ended.round, "reason": plain(ended.reason)}
        story["at"] = _iso(datetime.now(UTC))
        told = msgspec.json.encode(story)
        self._keep(self._open, _ENDED, ended.incarnation, told, _MOST_TOMBSTONES)

    def _keep(self, open: Open, prefix: str, key: str, value: bytes, most: int) -> None:
        """Put a value, and delete the oldest values of its kind beyond ``most``."""
        with closing(open(archive_run_id(self._run_id))) as client:
            client.put(prefix + key, value)
            client.expire(self._kept)
            entries = client.list(prefix)
            # Delete unreadable values first.
            ages = {key: it.at if (it := _decode(_ENDS, entries[key])) else "" for key in entries}
            if len(entries) > most:
                client.delete_many(sorted(ages, key=ages.__getitem__)[: len(entries) - most])

    def tombstone(self, incarnation: str) -> Outcome | None:
        """How this incarnation ended; None: no end is recorded."""
        with self._own() as client:
            entry = client.get(_ENDED + incarnation)
        if entry is None:
            return None
        try:
            return Outcome(decode(_ENDS, entry.value, SMALL_BYTES).outcome)
        except ValueError:
            return Outcome.CLOSED

    def note(self, record: RoundRecord, at: datetime | None = None) -> None:
        """Record a round or the end of the run, and update the run's entry in the list of runs.

        ``at``: the time of the event, on this host's wall clock; None: now.
        """
        if not self._history_ttl:
            return
        at = at or datetime.now(UTC)
        if record.phase is not Phase.FORMING:
            row = msgspec.json.encode(Row(**msgspec.structs.asdict(record), at=_iso(at)))
            place = "end" if record.phase is Phase.CLOSED else f"{record.round:08d}"
            key = f"{record.incarnation}/{place}"
            self._keep(self._briefly, _ROUNDS, key, row, _MOST_ROUNDS)
        with closing(self._briefly(LIST)) as client:
            self._enlist(client, record, at)

    def rows(self) -> list[Row]:
        """The stored rounds and ends of the id's runs, oldest first."""
        with self._own() as client:
            entries = client.list(_ROUNDS)
        rows = (row for entry in entries.values() if (row := _decode(_ROWS, entry)) is not None)
        found = [row for row in rows if is_time(row.at)]
        return sorted(found, key=lambda row: (row.at, row.phase.order, row.round))

    def why_unreadable(self) -> str:
        """Why this client can read no stored round, for people; "": it can, or there is none."""
        with self._own() as client:
            return why_unreadable(client, "the history of the run")

    def last(self) -> Row | Listed | None:
        """The last record of the id's runs; None: there is none, or the store forgot it.

        A run that has had no round has no row, only its entry in the list.
        """
        rows = self.rows()
        with closing(self._open(LIST)) as client:
            listed = _listed({self._run_id: client.get(self._run_id)}).get(self._run_id)
        if listed is None or not rows:
            return listed or (rows[-1] if rows else None)
        row = rows[-1]
        # A round or an end is recorded in both places with the same time.
        both = (row.incarnation, row.at) == (listed.incarnation, listed.at)
        return row if both or row.at > listed.at else listed

    def free_in(
        self, ended: RoundDocument, now: datetime, at_work: Names = NOBODY
    ) -> tuple[float | None, str]:
        """Seconds until the id of a closed run is free (None: not known), and advice in words.

        Compares two wall clocks, for people. This node's ``closed_ttl`` may differ from that of the
        node that closed the run. ``at_work``: the nodes that train on.
        """
        if at_work:
            train = "trains" if at_work.count == 1 else "train"
            return None, f"its id is taken while {at_work} {train} in its last round"
        # A node that closes a run writes `expires` last.
        rows = self.rows() if ended.expires else []
        for row in reversed(rows):
            if row.incarnation == ended.incarnation and row.kept is not None:
                since = now - datetime.fromisoformat(row.at)
                # Any other number comes from differing clocks, or a store that deletes late.
                if 0 < (left := row.kept - since.total_seconds()) <= row.kept:
                    return left, f"its id is free in {left:.0f} s; now: {self.command('clean')}"
                break
        return None, self.free_now

    @property
    def free_now(self) -> str:
        """Advice if it is unknown when the id of a closed run is free."""
        return f"to free its id now: {self.command('clean')}"

    def end_by_hand(self, reason: str) -> bool:
        """Record the end of the id's last run if no node did; returns whether it was missing.

        Otherwise the run would be listed as dead for ``history_ttl``.
        """
        last = self.last()
        if last is None or last.outcome is not None:
            return False
        end = RoundRecord(
            incarnation=last.incarnation, round=last.round, phase=Phase.CLOSED, nodes=last.nodes,
            reason=reason, outcome=Outcome.CLOSED,
        )  # fmt: skip
        self.note(end)
        return True

    def exclusions(self, now: float, all_runs: bool | None = None) -> tuple[Exclusion, ...]:
        """The exclusions in force for the runs of this id, at most one for each host.

        ``all_runs``: True: only exclusions for all runs; False: only for this id; None: both.
        """
        keys = {None: (_ALL_RUNS, self._run_id), True: (_ALL_RUNS,), False: (self._run_id,)}
        with closing(self._briefly(EXCLUDED)) as client:
            entries = client.get_many(keys[all_runs])
        return _hold((it for key in keys[all_runs] for it in _excluded(entries.get(key))), now)

    def exclude(self, exclusion: Exclusion, now: float, *, all_runs: bool = False) -> None:
        """Store an exclusion for this id's runs or all runs; it replaces its host's last one."""
        self._change_exclusions(lambda held: (*held, exclusion), now, all_runs)

    def include(self, hosts: Collection[str], now: float, *, all_runs: bool = False) -> bool:
        """Remove the exclusions of a host with these names; returns whether there was one."""
        found = []

        def without(held: tuple[Exclusion, ...]) -> tuple[Exclusion, ...]:
            found.append(any(it.host in hosts for it in held))
            return tuple(it for it in held if it.host not in hosts)

        self._change_exclusions(without, now, all_runs)
        return found[-1]

    def _change_exclusions(
        self,
        change: Callable[[tuple[Exclusion, ...]], tuple[Exclusion, ...]],
        now: float,
        all_runs: bool,
    ) -> None:
        key = _ALL_RUNS if all_runs else self._run_id
        with closing(self._open(EXCLUDED)) as client:
            entry, written = client.get(key), False
            for refused in range(_MOST_REFUSALS):
                if entry is not None and is_sealed(entry.value):
                    raise RendezvousStateError(f"the list of excluded hosts {NO_SECRET_HERE}")
                held = _hold(change(_hold(_excluded(entry), now)), now)
                value, expected = msgspec.json.encode(held), entry.version if entry else None
                entry, written = client.compare_and_set(key, value, expected)
                if written:
                    break
                time.sleep(pause_after(refused))
            else:
                raise RendezvousConnectionError(
                    "others change the list of excluded hosts again and again, so that nothing was "
                    "changed: try once more"
                )
            seen, entries = None, client.list("")
            for _ in range(_MOST_REFUSALS):
                # Repeat if another command changed them: it may have set a later deadline before.
                if seen == (seen := {it: entry.version for it, entry in entries.items()}):
                    return
                kept = (it for entry in entries.values() for it in _hold(_excluded(entry), now))
                ends = [_LONGEST_EXCLUSION if it.until is None else it.until - now for it in kept]
                # Never expire at once: another command may write an exclusion at this moment.
                client.expire(min(max(ends, default=_AFTER_THE_LAST), _LONGEST_EXCLUSION))
                entries = client.list("")

    def _enlist(self, client: KeyValueClient, record: RoundRecord, at: datetime) -> None:
        # Read the whole list only when a run begins or ends.
        only = {self._run_id: client.get(self._run_id)} if record.phase is Phase.RUNNING else None
        runs = _listed(client.list("") if only is None else only)
        before = runs.get(self._run_id)
        if before is not None and before.incarnation != record.incarnation:
            before = None
        if before is not None and before.at > _iso(at):
            return  # Another node has recorded a later round, or the end.
        listed = Listed(
            run=self._run_id,
            incarnation=record.incarnation,
            began=before.began if before is not None else _iso(at),
            at=_iso(at),
            # The value differs each time, so that readers see that the round was recorded again.
            until=_iso(datetime.now(UTC) + timedelta(seconds=self._history_ttl)),
            phase=record.phase,
            round=record.round,
            nodes=record.nodes,
            reason=plain(record.reason),
            outcome=record.outcome,
        )
        client.put(self._run_id, msgspec.json.encode(listed))
        client.expire(self._history_ttl)
        old = (run for run, it in runs.items() if it.until < _iso(at) and run != self._run_id)
        client.delete_many([*old])


def list_runs(open: Callable[[str], KeyValueClient]) -> dict[str, Listed]:
    """All runs of the last ``history_ttl`` seconds under the prefix, by run id."""
    with closing(open(LIST)) as client:
        return read_list(client)


def read_list(client: KeyValueClient) -> dict[str, Listed]:
    """`list_runs` for repeated reads; ``client`` is in the namespace `LIST`.

    Raises `RendezvousStateError` if this client lacks a secret of an entry.
    """
    entries = client.list("")
    runs = _listed(entries)
    if not runs:
        sealed = any(is_sealed(entry.value) for entry in entries.values())
        if said := f"the list of runs {NO_SECRET_HERE}" if sealed else client.why_absent(""):
            raise RendezvousStateError(said)
    # Leave out what earlier versions listed wrongly: `rdzv clean --dead` would delete it.
    return {run: it for run, it in runs.items() if is_possible(run)}


def archive_run_id(run_id: str) -> str:
    """The run id whose namespace is the archive of ``run_id``."""
    return f"!archive/{run_id}"


def _decode(
    decoder: msgspec.json.Decoder[T], entry: Entry | None, most: int = SMALL_BYTES
) -> T | None:
    """The decoded value; None also if it is damaged or of another version."""
    try:
        return decode(decoder, entry.value, most) if entry is not None else None
    except InvalidValueError:
        return None


def _listed(entries: Mapping[str, Entry | None]) -> dict[str, Listed]:
    runs = {run: _decode(_LISTED, entry) for run, entry in entries.items()}
    return {
        run: it
        for run, it in runs.items()
        if it is not None and it.run == run and all(map(is_time, (it.began, it.at, it.until)))
    }


def _excluded(entry: Entry | None) -> tuple[Exclusion, ...]:
    return _decode(_EXCLUSIONS, entry, _EXCLUSIONS_BYTES) or ()


def _hold(exclusions: Iterable[Exclusion], now: float) -> tuple[Exclusion, ...]:
    """The exclusions in force; the last exclusion of each host."""
    return tuple({it.host: it for it in exclusions if it.is_in_force(now)}.values())


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")
