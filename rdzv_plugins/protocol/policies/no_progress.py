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
        why = (
            f"no progress: {document.short_rounds} rounds in a row ran for less than "
            f"{rules.no_progress_uptime:g} s, the last one ended so: {document.reason}"
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
