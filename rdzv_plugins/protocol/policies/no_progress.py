"""No progress: close a run if round after round ends after a short time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import Cause, Outcome, Phase, RoundDocument
from rdzv_plugins.protocol.policies.policy import Policy, Stage
from rdzv_plugins.protocol.rules import Action, Close, View

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation


class NoProgress(Policy):
    """Rule: no progress. `RoundDocument.short_rounds` counts consecutive short rounds."""

    def judge(self, view: View, at: Situation, stage: Stage) -> Action | None:
        rules, document = view.rules, at.document
        if stage is not Stage.BEFORE_ALL or document.phase is not Phase.FORMING:
            return None
        if not 0 < rules.no_progress_rounds <= document.short_rounds:
            return None
        count = document.short_rounds
        rounds, last = (
            (f"{count} rounds in a row", "the last one") if count > 1 else ("a round", "it")
        )
        why = (
            f"no progress: {rounds} ran for less than {rules.no_progress_uptime:g} s, "
            f"{last} ended so: {document.reason}"
        )
        return Close(document, Outcome.NO_PROGRESS, why)

    def note(self, view: View, at: Situation, after: RoundDocument) -> RoundDocument:
        ends = at.document.phase is Phase.RUNNING and after.phase is Phase.FORMING
        if not (ends and view.rules.no_progress_rounds):
            return after
        cause = after.cause
        if cause.drained or cause.excluded or at.document.restart:
            return after  # A round that a person's order ended leaves the count as it is.
        short = view.longest_uptime < view.rules.no_progress_uptime
        only_grows = cause == Cause(joined=cause.joined)
        count = after.short_rounds + (not only_grows) if short else 0
        return replace(after, short_rounds=count)
