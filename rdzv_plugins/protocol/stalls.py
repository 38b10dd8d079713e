"""Steps that do not come: when a run says so, when it ends the round, and which rank it names.

All ranks of a training stand still together, because each waits for the slowest. The rank that is
named has done the fewest steps. Among equals it is one that answers no signal, then one that is not
in a collective of torch, then the one that has stood still for longest. Rule: stalls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from rdzv_plugins.protocol.documents import NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.progress import Doing, Progress
from rdzv_plugins.protocol.rules import Rules, View

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

# A stall is a step that takes over _LEAST_SECONDS, and over _TIMES the usual time.
_LEAST_SECONDS, _TIMES = 60.0, 20
# While steps come, a record is older than another by this many heartbeats at most.
_HEARTBEATS_APART = 2

_SHOWN = {
    Doing.NO_ANSWER: "; it answers no signal: it is stopped, or hangs in the kernel",
    Doing.OWN_CODE: "",
    Doing.COLLECTIVE: "; it waits in torch for other ranks",
}


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a run's workers.

    Attributes:
        step: the last step of the slowest rank.
        seconds: how long a step takes; 0: not known, or less than a millisecond.
        stalled: seconds for which no step has come, if that is long; else 0.
        host, rank: of the rank that is behind the others, or stands still; None: no rank is.
    """

    step: int
    seconds: float
    stalled: float = 0.0
    host: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.stalled:
            usually = f" (usually {_rounded(self.seconds)} s)" if self.seconds else ""
            where = f"rank {self.rank} on {self.host} stands at step {self.step}"
            return f"no step for {self.stalled:.0f} s{usually}: {where}"
        text = f"step {self.step}"
        if self.seconds:
            text += f", {_rounded(self.seconds)} s each"
        if self.rank is not None:
            text += f"; rank {self.rank} on {self.host} is behind"
        return text


def stall_of(progress: Progress | None, rules: Rules) -> tuple[int, Doing] | None:
    """See `NodeRecord.stall`."""
    if progress is None:
        return None
    limit = max(_LEAST_SECONDS, _TIMES * progress.milliseconds / 1000)
    limit = min(limit, rules.step_timeout or limit)
    return (progress.stood, progress.doing) if progress.stood >= 1000 * limit else None


def steps_of_node(record: NodeRecord) -> StepReport | None:
    """The step of one node's slowest worker; None: its workers tell no steps."""
    if record.step is None or record.status is not Status.RUN:
        return None
    step, milliseconds, rank = record.step
    stalled = record.stall[0] / 1000 if record.stall else 0.0
    seconds = milliseconds / 1000
    return StepReport(step=step, seconds=seconds, stalled=stalled, host=record.host, rank=rank)


def steps_of_run(document: RoundDocument, records: Mapping[str, NodeRecord]) -> StepReport | None:
    """The steps of the run's workers; None: they tell no steps."""
    told = [*_told(document, records).values()]
    if not told:
        return None
    last = min(told, key=_blame)
    found = steps_of_node(last)
    assert found is not None
    if found.stalled or _is_behind(last, max(it.step[0] for it in told if it.step)):
        return found
    return msgspec.structs.replace(found, host=None, rank=None)


def stuck(view: View, at: Situation) -> tuple[NodeRecord, str] | None:
    """The node whose stall ends the round, and why; None: steps come, or step_timeout is off."""
    limit, document = 1000 * view.rules.step_timeout, at.document
    if not limit or at.done:
        return None
    told = {node: it for node, it in _told(document, at.records).items() if node not in at.absent}
    stood = {node: it.stall[0] for node, it in told.items() if it.stall and it.stall[0] >= limit}
    if not stood:
        return None
    # A node whose heartbeat is older than the stall may have told an earlier step.
    if len(stood) < len(told) and max(stood.values()) < limit + 1000 * view.rules.interval:
        return None
    silence = view.possible_silence
    first = min(stood, key=lambda it: (*_blame(told[it]), -stood[it] - 1000 * silence(it)))
    alike = {_blame(it)[1] for it in told.values()} == {Doing.COLLECTIVE}
    shown = _SHOWN[_blame(told[first])[1]] + (", as all others do" if alike else "")
    return told[first], f"{steps_of_node(told[first])}{shown}"


def _told(document: RoundDocument, records: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """The records of the participants whose workers tell steps."""
    if document.phase is not Phase.RUNNING:
        return {}
    found = {node: records[node] for node in document.ranks if node in records}
    return {
        node: it
        for node, it in found.items()
        if it.step is not None and it.status is Status.RUN and it.world_id == document.world_id
    }


def _blame(record: NodeRecord) -> tuple[int, Doing]:
    assert record.step is not None
    return record.step[0], record.stall[1] if record.stall is not None else Doing.OWN_CODE


def _is_behind(record: NodeRecord, fastest: int) -> bool:
    """Whether the node's last heartbeat tells fewer steps than the heartbeat's age explains."""
    assert record.step is not None
    step, milliseconds, _ = record.step
    if not milliseconds:
        return False
    return step + 1 + _HEARTBEATS_APART * 1000 * record.interval / milliseconds < fastest


def _rounded(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 100 else f"{seconds:.0f}"
