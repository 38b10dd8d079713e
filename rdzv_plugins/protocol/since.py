"""When each part of the round document last changed."""

from __future__ import annotations

from rdzv_plugins.protocol.documents import Phase, RoundDocument


class Since:
    """When a node first saw the present parts of the document, on its monotonic clock.

    Attributes:
        document: when it first saw the document.
        round: when it first saw the document's round.
        running: when it first saw the round run; None: no round runs.
        forming: when it first saw the last document before `running`; None: it saw no document.
        saving: when it first saw that the round awaits a checkpoint; None: it awaits none.
        grown: when it first saw the last round that let newcomers in.
        enough: when this leader first counted enough ready nodes; None: there are too few.
    """

    def __init__(self, now: float) -> None:
        self.document = self.round = self.grown = now
        self.running: float | None = None
        self.saving: float | None = None
        self.forming: float | None = None
        self.enough: float | None = None
        self._runs: str | None = None  # The world_id of the round of `running`.
        self._grew: tuple[str, int] | None = None  # Incarnation and round of `grown`.

    def note(self, was: RoundDocument | None, document: RoundDocument | None, now: float) -> None:
        """Take another document in place of ``was``."""
        before, self.document = self.document, now
        if document is None:
            return
        if was is None or was.place != document.place:
            self.enough = None
        if document.saving is None:
            self.saving = None
        elif self.saving is None:
            self.saving = now
        same_round = was is not None and was.is_of(document) and was.round == document.round
        if not same_round:
            self.round = now
        if document.phase is not Phase.RUNNING:
            self.running, self._runs = None, None
        elif document.world_id != self._runs:
            self.running, self._runs = now, document.world_id
            self.forming = before if same_round else None
        first_forms = (document.round, document.phase) == (0, Phase.FORMING)
        grew = document.incarnation, -1 if first_forms else document.grew
        if grew != self._grew:
            self.grown, self._grew = now, grew

    def note_enough(self, enough: bool, now: float) -> bool:
        """Note whether enough nodes are ready; returns whether the last call begins now."""
        begins = enough and self.enough is None
        if begins or not enough:
            self.enough = now if enough else None
        return begins
