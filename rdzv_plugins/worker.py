"""What the workers of a node can know of their round; see `rdzv_plugins.current`.

The agent's process hands it down in one environment variable: torch starts workers with a copy of
the agent's environment.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

__all__ = [
    "VARIABLE",
    "CurrentRound",
    "FencedError",
    "current",
    "fence",
    "hand_down",
    "resize_now",
    "take_back",
]

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
        fencing_token: larger than that of each earlier round of the id; see `rdzv_plugins.fence`.
        resize_file: to be made by whoever says that newcomers may come; None: nobody asks.
    """

    run_id: str
    round: int
    world_id: str
    cause: str
    spares: int = 0
    domain: str | None = None
    fencing_token: int = 0
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


class FencedError(RuntimeError):
    """A later round has held the fence: this worker is of a world that was replaced."""


class _Holder(msgspec.Struct, frozen=True):
    """The round that held a fence last."""

    token: int
    world_id: str
    run_id: str


_HOLDERS = msgspec.json.Decoder(_Holder)
# One write of so many bytes replaces all that stood there: a crash leaves the old or the new.
_HOLDER_BYTES = 512


@contextmanager
def fence(path: str | os.PathLike[str]) -> Iterator[None]:
    """As `rdzv_plugins.fence`."""
    now = current()
    if now is None:
        yield
        return
    mine = _Holder(now.fencing_token, now.world_id, now.run_id)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        held = _holder_in(os.pread(descriptor, _HOLDER_BYTES, 0))
        if held is not None and held != mine and held.token >= mine.token:
            raise FencedError(
                f"'{os.fspath(path)}' is held by a later round of run '{held.run_id}' (fencing "
                f"token {held.token}, this worker's is {mine.token}): this world was replaced, and "
                "must write no more"
            )
        if held != mine:
            os.pwrite(descriptor, msgspec.json.encode(mine).ljust(_HOLDER_BYTES), 0)
            os.fsync(descriptor)
        yield
    finally:
        os.close(descriptor)


def _holder_in(data: bytes) -> _Holder | None:
    try:
        return _HOLDERS.decode(data)
    except msgspec.DecodeError:
        return None  # A new file.


def hand_down(found: CurrentRound) -> str:
    """Have the workers that this process starts next know of their round; returns the variable."""
    text = msgspec.json.encode(found).decode()
    os.environ[VARIABLE] = text
    return text


def take_back(text: str | None) -> None:
    """Forget what `hand_down` returned, unless another handler of this process has changed it."""
    if text is not None and os.environ.get(VARIABLE) == text:
        os.environ.pop(VARIABLE, None)
