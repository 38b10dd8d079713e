"""The workers' view of their round; see `rdzv_plugins.current`.

The agent's process hands it down in one environment variable: torch starts workers with a copy of
the agent's environment.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

__all__ = [
    "VARIABLE",
    "CurrentRound",
    "FencedError",
    "Moments",
    "current",
    "end_with_agent",
    "fence",
    "hand_down",
    "refuse_in_a_worker",
    "resize_now",
    "take_back",
]

log = logging.getLogger(__name__)

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
        agent: the process id of the agent that started the worker.
    """

    run_id: str
    round: int
    world_id: str
    cause: str
    spares: int = 0
    domain: str | None = None
    fencing_token: int = 0
    resize_file: str | None = None
    agent: int = 0


# Whether it was said that `resize_now` could not do it.
_told = False
# Of Linux's prctl: the signal that a process gets when the thread that started it has ended.
_PR_SET_PDEATHSIG = 1

_ROUNDS = msgspec.json.Decoder(CurrentRound)


def current() -> CurrentRound | None:
    """As `rdzv_plugins.current`."""
    try:
        found = _ROUNDS.decode(os.environ.get(VARIABLE, ""))
    except msgspec.DecodeError:
        return None
    # An agent of another backend, that a worker of this one has started, hands the variable on.
    return found if os.environ.get("TORCHELASTIC_RUN_ID", found.run_id) == found.run_id else None


def refuse_in_a_worker(run_id: str) -> None:
    """Raise `ValueError` where a worker of this run would start another node of the same run.

    The nodes would restart for it, and end it with the worker, again and again. Only torch's agent
    sets TORCHELASTIC_RUN_ID, in the environment of its workers.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") == run_id:
        raise ValueError(
            "a worker of this run has started this launcher, which would join the run as one more "
            "node: use --standalone for one host, or an --rdzv-id of its own"
        )


def end_with_agent() -> bool:
    """As `rdzv_plugins.end_with_agent`."""
    now = current()
    if now is None or sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None).prctl
    if os.getppid() == now.agent and prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() == now.agent:
        return True
    # torch gives each worker a session of its own: then no other process stands in between, and the
    # agent is gone. In a container of the worker's own nobody is its parent.
    if os.getsid(0) == os.getpid() and os.getppid() != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return False


def resize_now() -> bool:
    """As `rdzv_plugins.resize_now`."""
    now = current()
    if now is None or now.resize_file is None:
        return False
    file = Path(now.resize_file)
    try:
        # The agent has made its folder; but cleaners take away what is old there.
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch()
    except OSError as error:
        # One line, once: a training that goes on is worth more than newcomers.
        global _told
        if not _told:
            log.warning(
                "resize_now() could not tell the agent that newcomers may come (%s): the training "
                "goes on without them",
                error,
            )
        _told = True
        return False
    return True


class Moments:
    """Where the workers of an agent say that newcomers may come: a file a round, in a folder.

    Args:
        warn: tells a person that no worker can say it.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._warned = False
        # A name that nobody guesses: whoever makes the folder must be of this user.
        self._name = f"rdzv-{secrets.token_hex(8)}"
        self._folder = self._file = ""

    def begin(self, world_id: str) -> str:
        """The file of this round. Its folder is made anew, since a cleaner may have taken it."""
        try:
            self._folder = os.path.join(tempfile.gettempdir(), self._name)
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError as error:
            # A worker tries it once more when it has something to say.
            self._folder = self._folder or os.path.join("/tmp", self._name)
            self._tell(error)
        self._file = os.path.join(self._folder, world_id)
        return self._file

    def named(self) -> bool:
        """Whether a worker has said it since this was asked last; never raises."""
        try:
            os.unlink(self._file)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._tell(error)
            return False
        return True

    def _tell(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"no worker can say that newcomers may come, for the folder of temporary files "
                f"cannot be used ({error}); set TMPDIR to another one"
            )

    def close(self) -> None:
        """Take the folder away, as far as that is possible."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


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
# The run's id is cut to this length, so that all fits; it is for people.
_ID_LENGTH = 64

# The fences that a thread holds or waits for, by process and path: their descriptors. It would wait
# for its own for ever, as where a signal comes while it saves, and its handler saves.
_held = threading.local()


@contextmanager
def fence(path: str | os.PathLike[str]) -> Iterator[None]:
    """As `rdzv_plugins.fence`."""
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
            error.filename = os.fspath(path)  # Only `open` says it.
            raise
        yield
    finally:
        if outer is None:
            if os.getpid() == process:
                # A process forked meanwhile has the descriptor too, and would keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            del held[this]
            os.close(descriptor)


def _take(descriptor: int, path: str | os.PathLike[str], now: CurrentRound) -> None:
    """Write this worker's round into the fence that it has locked; raises as `fence` does."""
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
    """Have the workers that this process starts next know of their round; returns the variable."""
    text = msgspec.json.encode(found).decode()
    os.environ[VARIABLE] = text
    return text


def take_back(text: str | None) -> None:
    """Forget what `hand_down` returned, unless another handler of this process has changed it."""
    if text is not None and os.environ.get(VARIABLE) == text:
        os.environ.pop(VARIABLE, None)
