"""A node's part in the network check, while it confirms a rank: what it dials and finds.

`policies.network` has the leader's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from rdzv_plugins.kv import Attempts, Entry, ExhaustedError, Version
from rdzv_plugins.protocol.documents import NODES_PREFIX, Dials, NodeRecord, RoundDocument
from rdzv_plugins.protocol.effects import DialPeer, Effects, Read, Tell
from rdzv_plugins.protocol.policies.network import partner_in
from rdzv_plugins.protocol.roster import ranks_in, shard_key

# An exchange usually takes less; during a longer exchange the node goes on with its turns.
_AT_ONCE_SECONDS = 0.05

_LONGEST_WHY = 120

_Report = tuple[str, float | Exception]


class NetworkCheck:
    """One check for each round whose rank this node confirms; a dial fails after ``limit`` seconds.

    ``awaits``: the key and version of rank 0's record, while the record does not have the address
    of rank 0's TCPStore.
    """

    def __init__(
        self,
        me: str,
        limit: float,
        clock: Callable[[], float],
        read_record: Callable[[str], Effects[tuple[Entry | None, NodeRecord | None]]],
    ) -> None:
        self._me = me
        self._limit = limit
        self._clock = clock
        self._read_record = read_record
        self.awaits: tuple[str, Version | None] | None = None
        # The world_id of the checked round; the node to exchange data with; rank 0.
        self._world_id: str | None = None
        self._partner: tuple[str, NodeRecord] | None = None
        self._first: str | None = None
        self._dials = Dials()
        # The dial that is under way and when it began; its report, until `run` takes it up.
        self._attempts = 0
        self._dialling: tuple[str, float] | None = None
        # This host had no thread or descriptor for the dial, so the link is not at fault.
        self._beginnings = Attempts(clock)
        self._begins_again = False
        self._report: _Report | None = None
        self._answer: _Report | None = None

    @property
    def reported(self) -> bool:
        """Whether a report was not taken up yet."""
        return self._report is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until the dial has failed, or begins again."""
        left = self._left
        return min(left, self._beginnings.seconds_left) if self._begins_again else left

    @property
    def _left(self) -> float:
        since = self._dialling[1] if self._dialling is not None else self._clock()
        return max(0.0, since + self._limit - self._clock())

    def is_of(self, document: RoundDocument) -> bool:
        """Whether the check of this round goes on."""
        return self._world_id is not None and self._world_id == document.world_id

    def report(self, attempt: str, result: float | Exception) -> None:
        """Note the result of a `DialPeer`: its seconds, or why it failed; from any thread."""
        dialling = self._dialling
        if dialling is not None and dialling[0] == attempt:
            self._report = attempt, result

    def take_up(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            self._answer = report

    def run(self, document: RoundDocument) -> Effects[Dials | None]:
        """This node's dials; None: not known yet, call again."""
        self.awaits = None
        if self._world_id != document.world_id:
            yield from self._begin(document)
        if self._partner is not None:
            partner, record = self._partner
            answer = yield from self._dial(partner, f"{record.address}:{record.port}", True)
            if answer is None:
                return None
            seconds, why = answer
            self._partner = None
            why = f"{record.label} at {why}" if why else ""
            self._dials = replace(self._dials, partner=partner, seconds=seconds, why=why)
        if self._first is not None:
            entry, first = yield from self._read_record(self._first)
            if first is None or first.master is None or first.world_id != document.world_id:
                version = entry.version if entry is not None else None
                self.awaits = NODES_PREFIX + self._first, version
                return None
            answer = yield from self._dial(self._first, first.master, False)
            if answer is None:
                return None
            why = f"rank 0, {first.label}, at {answer[1]}" if answer[1] else ""
            self._dials = replace(self._dials, first=self._first, unreached=why)
        self._world_id = None  # The node may confirm the same round again.
        return self._dials

    def _begin(self, document: RoundDocument) -> Effects[None]:
        ranks: Mapping[str, int] = document.ranks
        if document.roster is not None:
            # In a large round a node dials only nodes of its own shard.
            key = shard_key(document.incarnation, document.roster, self._me)
            ranks = ranks_in((yield from Read(key))) or {}
        partner, self._partner = partner_in(ranks, self._me, document.round), None
        if partner is not None:
            _, record = yield from self._read_record(partner)
            # A node without the option network_check answers no exchange.
            if record is not None and record.port:
                self._partner = partner, record
        others = (node for node, rank in ranks.items() if rank == 0 and node != self._me)
        self._first = next(others, None)
        self._dials, self._dialling, self._answer = Dials(), None, None
        self._begins_again = False
        self._world_id = document.world_id

    def _dial(self, node: str, endpoint: str, exchanges: bool) -> Effects[tuple[float, str] | None]:
        """The seconds that the dial took, and why it failed, if it did; None: not known yet."""
        if self._dialling is None or (self._begins_again and not self._beginnings.seconds_left):
            self._attempts += 1
            attempt = f"{self._world_id} {self._attempts}"
            since = self._clock() if self._dialling is None else self._dialling[1]
            self._dialling, self._answer, self._begins_again = (attempt, since), None, False
            limit = self._left
            yield from DialPeer(attempt, _AT_ONCE_SECONDS, node, endpoint, exchanges, limit)
            self.take_up()
        if self._answer is None and self._left > 0:
            return None
        _, result = self._answer or ("", TimeoutError("no answer in time"))
        if isinstance(result, ExhaustedError) and self._left > 0:
            self._answer, self._begins_again = None, True
            if self._beginnings.fail():
                yield Tell(
                    "network", f"{endpoint} cannot be dialled: {result}; this is tried again"
                )
            return None
        self._dialling, self._answer, self._begins_again = None, None, False
        self._beginnings.succeed()
        if not isinstance(result, Exception):
            return round(result, 4), ""
        why = " ".join(str(result).split())[:_LONGEST_WHY]
        return 0.0, f"{endpoint} ({why or type(result).__name__})"
