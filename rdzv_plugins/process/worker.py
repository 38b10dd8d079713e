"""The workers' view of their round; see `rdzv_plugins.current`.

The agent sets an environment variable, which torch copies to the workers.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

VARIABLE = "RDZV_CURRENT_ROUND"
"""JSON. The names RDZV_PLUGINS_* are options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRound:
    """The round that a worker was started in.

    Attributes:
        run_id: as in ``--rdzv-id``.
        round: grows with every change of membership.
        world_id: unique among the rounds of this run, even if the store forgets a round and its
            number repeats.
        cause: why this round formed, in words: which nodes were lost, left, failed or joined.
        spares: how many nodes waited without a place when the ranks were given.
        domain: this node's domain; None: unknown, or the run does not need it.
        fencing_token: larger than in each earlier round of the run id; see `rdzv_plugins.fence`.
        steps_file: shared memory of the node's workers and their agent; None: there is none.
        agent: the process id of the agent that started the worker.
    """

    run_id: str
    round: int
    world_id: str
    cause: str
    spares: int = 0
    domain: str | None = None
    fencing_token: int = 0
    steps_file: str | None = None
    agent: int = 0


# For Linux's prctl: a process gets a signal when the thread that started it has ended.
_PR_SET_PDEATHSIG = 1

_ROUNDS = msgspec.json.Decoder(CurrentRound)


def current() -> CurrentRound | None:
    """See `rdzv_plugins.current`."""
    try:
        found = _ROUNDS.decode(os.environ.get(VARIABLE, ""))
    except msgspec.DecodeError:
        return None
    # A worker may start an agent of another backend, whose workers inherit the variable.
    return found if os.environ.get("TORCHELASTIC_RUN_ID", found.run_id) == found.run_id else None


def refuse_in_a_worker(run_id: str) -> None:
    """Raise `ValueError` if this process is a worker of the run, and would join it as a node.

    Each join would restart the workers, which would join again. Only torch's agent sets
    TORCHELASTIC_RUN_ID, for its workers.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") == run_id:
        raise ValueError(
            "a worker of this run has started this launcher, which would join the run as one more "
            "node: use --standalone for one host, or an --rdzv-id of its own"
        )


def end_with_agent() -> bool:
    """See `rdzv_plugins.end_with_agent`."""
    now = current()
    if now is None or sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None).prctl
    if os.getppid() == now.agent and prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() == now.agent:
        return True
    # A session's leader was started by the agent itself, so another parent means that the agent has
    # ended. Parent 0: the worker is in a pid namespace of its own.
    if os.getsid(0) == os.getpid() and os.getppid() != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return False


class FencedError(RuntimeError):
    """A later round has held the fence: this worker is of a world that was replaced."""


class _Holder(msgspec.Struct, frozen=True):
    """The round that held a fence last."""

    token: int
    world_id: str
    run_id: str


_HOLDERS = msgspec.json.Decoder(_Holder)
# Every holder has this length, so one write replaces the old holder as a whole. A crash therefore
# leaves the old or the new one.
_HOLDER_BYTES = 512
# The run's id, which is for people, is cut so that the holder fits.
_ID_LENGTH = 64

# Descriptors of the fences that a thread has locked or waits for, by process and path. A signal
# handler may save while its thread saves, and must not wait for the lock of its own thread.
_held = threading.local()


@contextmanager
def fence(path: str | os.PathLike[str]) -> Iterator[None]:
    """See `rdzv_plugins.fence`."""
    now, process = current(), os.getpid()
    if now is None:
        yield
        return
    held: dict[tuple[int, str], int] = _held.__dict__.setdefault("fences", {})
    this = process, os.path.realpath(path)
    outer = held.get(this)
    if outer is None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held[this] = descriptor
    else:
        descriptor = outer
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _take(descriptor, path, now)
        except OSError as error:
            error.filename = os.fspath(path)  # Only errors of `open` have a filename.
            raise
        yield
    finally:
        if outer is None:
            if os.getpid() == process:
                # Closing alone would leave the lock to a process forked in the meantime.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            del held[this]
            os.close(descriptor)


def _take(descriptor: int, path: str | os.PathLike[str], now: CurrentRound) -> None:
    """Write this worker's round into a locked fence; raises as `fence` does."""
    data, size = os.pread(descriptor, _HOLDER_BYTES, 0), os.fstat(descriptor).st_size
    held: _Holder | None = None
    if data.strip(b"\0"):
        try:
            held = _HOLDERS.decode(data) if size == _HOLDER_BYTES else None
        except msgspec.DecodeError:
            held = None
        if held is None:
            raise ValueError(
                f"'{os.fspath(path)}' is no fence, for it holds other data: a fence is a file of "
                "its own, beside the checkpoint"
            )
    if held is None or held.token < now.fencing_token:
        mine = _Holder(now.fencing_token, now.world_id, now.run_id[:_ID_LENGTH])
        os.pwrite(descriptor, msgspec.json.encode(mine).ljust(_HOLDER_BYTES), 0)
        os.fsync(descriptor)
    elif held.world_id != now.world_id:
        raise FencedError(
            f"'{os.fspath(path)}' is held by a later round of run '{held.run_id}' (fencing token "
            f"{held.token}, this worker's is {now.fencing_token}): this world was replaced, and "
            "must write no more"
        )


def hand_down(found: CurrentRound) -> str:
    """Tell the next workers of this process their round; return the variable's value."""
    text = msgspec.json.encode(found).decode()
    os.environ[VARIABLE] = text
    return text


def take_back(text: str | None) -> None:
    """Delete the variable, unless another handler of this process has changed it."""
    if text is not None and os.environ.get(VARIABLE) == text:
        os.environ.pop(VARIABLE, None)
