"""What the workers of a node tell of their steps."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

# Copies of `kv.gate`'s types: importing kv.gate would delay a worker's first step.
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Difference = Annotated[int, Meta(ge=-(2**53), le=2**53)]


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """How the workers of a node came to train in a round; all times are in milliseconds.

    Attributes:
        started: from the moment that their agent had the round until they imported this package.
        first_step: from then until each of them had finished a step.
        lost_steps: how many steps they repeat; less than 0: they skip steps. None: not known,
            because no worker of their agent has trained before.
        trained: the time from the first step of the round in which they trained before to the last
            step that they do not repeat; less than 0: they also repeat steps of earlier rounds.
    """

    started: _Count
    first_step: _Count
    lost_steps: _Difference | None = None
    trained: _Difference = 0


class Trained(msgspec.Struct, frozen=True):
    """Steps ``first`` to ``last`` of a round; ``began``, ``ended``: when these two steps ended."""

    first: int
    last: int
    began: int
    ended: int

    def kept(self, lost: int) -> int:
        """How long the steps took without the last ``lost`` steps."""
        steps = self.last - self.first
        return (self.ended - self.began) * min(steps, steps - lost) // steps if steps > 0 else 0


class Doing(IntEnum):
    """What a worker does while its step stands still. A lower value is blamed first."""

    NO_ANSWER = 0
    """It does not answer a signal: it is stopped, or hangs in the kernel."""
    OWN_CODE = 1
    """Its script runs or waits; also if this is not known."""
    COLLECTIVE = 2
    """It waits in torch for other ranks."""


class Progress(msgspec.Struct, frozen=True):
    """The steps of one node's workers.

    Attributes:
        step, fastest: the last step of the slowest and of the fastest local rank.
        rank: the global rank of the slowest worker.
        milliseconds: how long its last steps took on average; 0: unknown, or less than one.
        saved: the last step that every local rank has saved, plus 1; 0: none.
        stood: milliseconds since the last step of the slowest worker; 0 if it has ended.
        resumed: how this round's training began.
    """

    step: int
    fastest: int
    rank: int = 0
    milliseconds: int = 0
    saved: int = 0
    stood: int = 0
    doing: Doing = Doing.OWN_CODE
    resumed: Resumed | None = None


class Workers(Protocol):
    """Access to the steps of a node's workers. No method raises."""

    def progress(self) -> Progress | None:
        """Their progress; None: a worker has not called ``step()`` in this round."""

    def propose(self, step: int) -> None:
        """Have each worker wait when it reaches ``step``.

        Returns once each worker has read the proposal at its next step: `progress` then tells
        which workers are past ``step``.
        """

    def settle(self, step: int, saves: bool) -> None:
        """End the wait at the step; ``saves``: all ranks of the run save there."""

    def probe(self) -> None:
        """Find out what each worker does, for `Progress.doing`."""

    def release(self) -> None:
        """End the wait of workers that have saved: they train on."""


class NoSteps:
    """Workers whose script does not call ``step()``."""

    def progress(self) -> Progress | None:
        return None

    def propose(self, step: int) -> None: ...

    def settle(self, step: int, saves: bool) -> None: ...

    def probe(self) -> None: ...

    def release(self) -> None: ...
