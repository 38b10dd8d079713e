"""A checkpoint at one step on all ranks, before nodes leave or join by plan. Rule: checkpoint.

The leader names a step ahead of the fastest rank (`policies.checkpoint`). Each node has its workers
wait at that step, and then votes with the step that its fastest worker has reached. If that is the
named step or a later one, the node rejects it, and the leader names another step. Once every node
has accepted, the leader writes that the run agrees; only then does a waiting worker go on. A node
that has accepted must wait for the leader, because another node's workers may save already. If the
store loses the agreement, the leader finds it in the records.
"""

from __future__ import annotations

from rdzv_plugins.protocol.documents import Phase, RoundDocument, Status
from rdzv_plugins.protocol.heartbeat import Heartbeat
from rdzv_plugins.protocol.progress import Progress, Workers


class OwnCheckpoint:
    """One node's part in checkpoints."""

    def __init__(self, workers: Workers, heartbeat: Heartbeat) -> None:
        self._workers = workers
        self._heartbeat = heartbeat
        # In round `_world`: the accepted step that is still open, and the steps that this node has
        # rejected or given up.
        self._world = ""
        self._open: int | None = None
        self._rejected: set[int] = set()

    def take_up(self, document: RoundDocument | None) -> None:
        """Vote on the step that the run has named, or tell the workers the run's decision."""
        record = self._heartbeat.record
        if document is None or document.phase is not Phase.RUNNING:
            return
        if record.status is not Status.RUN or record.world_id != document.world_id:
            return
        if self._world != document.world_id:
            self._world, self._open, self._rejected = document.world_id, None, set()
        saving = document.saving
        if saving is None:
            if record.agreed is not None:
                self._workers.release()
            return
        if self._open is not None and self._open in saving.rejected:
            self._give_up(self._open)
        if saving.agreed and self._open == saving.step:
            self._workers.settle(saving.step, True)
            self._open = None
            self._heartbeat.amend(agreed=saving.step, saved=0)
        elif self._open is None and record.accepts(saving.step) is None:
            self._vote(saving.step)
        if saving.agreed and not saving.saved:
            self._say_what_is_saved(saving.step)

    def _vote(self, step: int) -> None:
        progress: Progress | None = None
        if step not in self._rejected:
            self._workers.propose(step)
            progress = self._workers.progress()
        fastest = progress.fastest if progress is not None else step
        if fastest < step:
            self._open = step
        else:
            self._give_up(step)
        self._heartbeat.change(rings=True, vote=(step, max(fastest, 0)))

    def _give_up(self, step: int) -> None:
        self._workers.settle(step, False)
        self._rejected.add(step)
        self._open = None

    def _say_what_is_saved(self, step: int) -> None:
        progress = self._workers.progress()
        if progress is not None and self._heartbeat.record.saved <= step < progress.saved:
            self._heartbeat.change(rings=True, saved=progress.saved)
