"""Checkpoint: all ranks save at one step before a planned change of the round."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import NodeRecord, Phase, Saving
from rdzv_plugins.protocol.policies.growth import why_not_grow
from rdzv_plugins.protocol.policies.policy import Policy, Stage
from rdzv_plugins.protocol.rules import Action, View, Write

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

# The named step is this many seconds ahead of the fastest rank, or this many steps if the time of a
# step is unknown or too short; twice as many after each rejection.
_AHEAD_SECONDS, _AHEAD_STEPS = 0.5, 4
# After this many rejections the round ends without a checkpoint.
MOST_REJECTIONS = 16


class Checkpoint(Policy):
    """Rule: checkpoint. The leader names a step, agrees on it, and notes that it was saved."""

    def judge(self, view: View, at: Situation, stage: Stage) -> Action | None:
        if stage is not Stage.BEFORE_ALL or at.document.phase is not Phase.RUNNING:
            return None
        after = _following(view, at)
        return Write(replace(at.document, saving=after)) if after != at.document.saving else None


def seconds_left(view: View, at: Situation) -> float | None:
    """Seconds that a planned end of the round still awaits a checkpoint; None: it awaits none."""
    saving = at.document.saving
    if saving is None or saving.saved or saving.step in saving.rejected or not is_wanted(view, at):
        return None
    left = view.rules.save_timeout - view.saving_for
    return left if left > 0 else None


def is_wanted(view: View, at: Situation) -> bool:
    """Whether a planned change of the round awaits a checkpoint."""
    if not view.rules.save_timeout:
        return False
    leaves = any(node in at.records and at.records[node].leaves for node in at.present)
    if at.document.restart or at.taken_out or leaves:
        return True
    if not at.growth or not (at.document.resize or view.rules.grow == "checkpoint"):
        return False
    return why_not_grow(view, at, permitted=True) is None


def _is_possible(at: Situation) -> bool:
    """Whether every participant is there, and the workers of each tell their steps."""
    return not (at.absent or at.done) and all(
        (record := at.records.get(node)) is not None
        and record.world_id == at.document.world_id
        and record.step is not None
        for node in at.document.ranks
    )


def _following(view: View, at: Situation) -> Saving | None:
    """The next state of the checkpoint, by the votes of all participants."""
    saving = at.document.saving
    records = {
        node: record
        for node in at.document.ranks
        if (record := at.records.get(node)) and record.world_id == at.document.world_id
    }
    if (lost := _lost(saving, records.values())) is not None:
        return lost
    if saving is None:
        if not is_wanted(view, at) or not _is_possible(at):
            return None
        return Saving(max(_ahead(view, node, at.records[node]) for node in at.document.ranks))
    if saving.saved:
        return saving if is_wanted(view, at) else None
    if saving.agreed:
        # `saved` of a node that does not know of the agreement is about an earlier one.
        saved = all(it.agreed == saving.step < it.saved for it in records.values())
        return replace(saving, saved=saved and _is_possible(at))
    if saving.step in saving.rejected:
        return saving
    if not records.keys() >= {*at.present}:
        return saving  # The store has lost records. They return with the next heartbeats.
    return _after_the_votes(at, saving, records.values())


def _lost(saving: Saving | None, records: Collection[NodeRecord]) -> Saving | None:
    """What the document has lost of a checkpoint, by the participants' records; None: nothing.

    A store that forgets may lose the document, and a node then restores an older one.
    """
    named = sorted({it.vote[0] for it in records if it.vote is not None})
    if not named or all(it.saved > named[-1] for it in records):
        return None
    last, rejected = named[-1], {*named}
    agreed = any(it.agreed == last for it in records)
    if saving is not None:
        if (saving.step, saving.agreed) >= (last, agreed) or last in saving.rejected:
            return None
        rejected |= {*saving.rejected, saving.step}
    return Saving(last, agreed, rejected=tuple(sorted(rejected - {last}))[-MOST_REJECTIONS:])


def _after_the_votes(at: Situation, saving: Saving, records: Collection[NodeRecord]) -> Saving:
    votes = [record.accepts(saving.step) for record in records]
    rejected = (*saving.rejected, saving.step)
    if not _is_possible(at) or (False in votes and len(rejected) > MOST_REJECTIONS):
        return replace(saving, rejected=rejected)
    if False in votes:
        fastest = max(it.vote[1] + _steps(it, len(rejected)) for it in records if it.vote)
        return Saving(max(fastest, saving.step) + 1, rejected=rejected)
    return saving if None in votes else replace(saving, agreed=True)


def _ahead(view: View, node: str, record: NodeRecord) -> int:
    """A step that this node's workers have not reached yet, as far as its last heartbeat tells."""
    assert record.step is not None
    # possible_silence() is negative during the grace after an outage.
    silence = max(0.0, view.possible_silence(node)) if node != view.me else 0.0
    return record.step[0] + _steps(record, 0, silence) + 2


def _steps(record: NodeRecord, rejections: int, silence: float = 0.0) -> int:
    """The steps that the node's workers may do in the time until they hear of a named step."""
    milliseconds = record.step[1] if record.step else 0
    if milliseconds == 0:
        return _AHEAD_STEPS << rejections
    return int(1000 * (silence + _AHEAD_SECONDS * 2.0**rejections) / milliseconds)
