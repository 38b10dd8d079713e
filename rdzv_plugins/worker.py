"""What the workers of a node can know of their round; see `rdzv_plugins.current`.

The agent's process hands it down in one environment variable: torch starts workers with a copy of
the agent's environment.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

__all__ = ["VARIABLE", "CurrentRound", "current", "hand_down", "resize_now", "take_back"]

VARIABLE = "RDZV_CURRENT_ROUND"
"""JSON; not RDZV_PLUGINS_*, which are options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRound:
    """The round that a worker was started in.

    Attributes:
        run_id: as in ``--rdzv-id``.
        round: grows with every change of membership.
        world_id: of no other round of this run, also if the store forgot one and gave its number
            again.
        cause: why this round, in words: who was lost, left, failed or joined.
        spares: how many nodes waited without a place when its ranks were given.
        domain: this node's, where it is given or the run minds it; None: not known.
        resize_file: to be made by whoever says that newcomers may come; None: nobody asks.
    """

    run_id: str
    round: int
    world_id: str
    cause: str
    spares: int = 0
    domain: str | None = None
    resize_file: str | None = None


_ROUNDS = msgspec.json.Decoder(CurrentRound)


def current() -> CurrentRound | None:
    """As `rdzv_plugins.current`."""
    try:
        found = _ROUNDS.decode(os.environ.get(VARIABLE, ""))
    except msgspec.DecodeError:
        return None
    # An agent of another backend, that a worker of this one has started, hands the variable on.
    return found if os.environ.get("TORCHELASTIC_RUN_ID", found.run_id) == found.run_id else None


def resize_now() -> bool:
    """As `rdzv_plugins.resize_now`."""
    now = current()
    if now is None or now.resize_file is None:
        return False
    # The agent of an earlier round, or of a run that ended, has taken the folder away.
    with suppress(FileNotFoundError):
        Path(now.resize_file).touch()
    return True


def hand_down(found: CurrentRound) -> str:
    """Have the workers that this process starts next know of their round; returns the variable."""
    text = msgspec.json.encode(found).decode()
    os.environ[VARIABLE] = text
    return text


def take_back(text: str | None) -> None:
    """Forget what `hand_down` returned, unless another handler of this process has changed it."""
    if text is not None and os.environ.get(VARIABLE) == text:
        os.environ.pop(VARIABLE, None)
