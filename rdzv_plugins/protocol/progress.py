"""What the workers of a node tell of their steps."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """Where the workers of one node are.

    Attributes:
        step, fastest: the last step of the slowest and of the fastest local rank.
        rank: the slowest local rank.
        milliseconds: how long its last steps took on average; 0: unknown, or less than one.
        saved: the last step that every local rank has saved, plus 1; 0: none.
    """

    step: int
    fastest: int
    rank: int = 0
    milliseconds: int = 0
    saved: int = 0


class Workers(Protocol):
    """The workers of a node, as far as they tell their steps. No method raises."""

    def progress(self) -> Progress | None:
        """Where they are; None: a worker has not called ``step()`` in this round."""

    def propose(self, step: int) -> None:
        """Have each of them wait when it reaches the step.

        Returns once each of them has seen it at its next step: `progress` then tells who is past
        it.
        """

    def settle(self, step: int, saves: bool) -> None:
        """End the wait at the step; ``saves``: all ranks of the run save there."""

    def release(self) -> None:
        """Let workers train on that have saved, and wait for the end of the round."""


class NoSteps:
    """Workers whose script does not call ``step()``."""

    def progress(self) -> Progress | None:
        return None

    def propose(self, step: int) -> None: ...

    def settle(self, step: int, saves: bool) -> None: ...

    def release(self) -> None: ...
