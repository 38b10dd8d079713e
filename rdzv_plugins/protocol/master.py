"""How rank 0 opens its TCPStore: the node asks its driver for it, and learns the address."""

from __future__ import annotations

from collections.abc import Callable

from rdzv_plugins.kv import Attempts, RendezvousStateError
from rdzv_plugins.protocol.documents import RoundDocument
from rdzv_plugins.protocol.effects import Effects, OpenMaster, Tell

# A TCPStore opens within a few milliseconds, unless name resolution hangs.
_AT_ONCE_SECONDS = 0.05


class Master:
    """Opens a TCPStore; after ``patience`` seconds the node looks for another rank 0."""

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        # The world_id for which a TCPStore is being opened, and since when.
        self._opening: tuple[str, float] | None = None
        # The world_id for which opening has ended, and the address or the error.
        self._opened: tuple[str, str | Exception] | None = None
        self._attempts = Attempts(clock)
        # Whether the last attempt failed, and the next attempt waits for a pause.
        self._reopens = False

    @property
    def is_reported(self) -> bool:
        """Whether `open` has not taken up a result yet."""
        return self._opening is not None and self._opened is not None

    def report(self, world_id: str, result: str | Exception) -> None:
        """Note how an attempt ended; called in any thread."""
        opening = self._opening  # The node's thread may change `_opening`.
        if opening is not None and opening[0] == world_id:
            self._opened = world_id, result

    def give_up(self) -> None:
        """Stop opening a TCPStore."""
        self._opening = None

    def opening_for(self, document: RoundDocument | None) -> float | None:
        """See `View.opening_for`."""
        opening = self._opening
        if opening is None or self._opened is not None or document is None:
            return None
        return self._clock() - opening[1] if opening[0] == document.world_id else None

    def begin(self, world_id: str) -> Effects[None]:
        """Have a TCPStore opened for this round, unless it already is; nothing waits for it."""
        if self._opening is not None and self._opening[0] == world_id:
            return  # The node tries to write the round again.
        self._opening, self._opened, self._reopens = (world_id, self._clock()), None, False
        yield from OpenMaster(world_id, 0.0)

    def open(self, world_id: str) -> Effects[str | float]:
        """The address of this round's TCPStore, or the seconds after which to ask again.

        Raises `RendezvousStateError` if a retry does not help.
        """
        now = self._clock()
        yield from self.begin(world_id)
        assert self._opening is not None
        since = self._opening[1]
        is_slow = now - since >= _AT_ONCE_SECONDS
        is_due = self._reopens and not self._attempts.seconds_left
        if is_due or not (self._opened is not None or self._reopens or is_slow):
            self._reopens = False
            yield from OpenMaster(world_id, _AT_ONCE_SECONDS)
        if self._opened is not None and self._opened[0] == world_id:
            _, opened = self._opened
            if not isinstance(opened, Exception):
                self._attempts.succeed()
                return opened
            self._opened, self._reopens = None, True
            if isinstance(opened, RendezvousStateError):
                raise opened
            if self._attempts.fail():
                yield from Tell("master", f"{opened}; rank 0 tries again")
        if self._opened is not None:
            return 0.0
        left = since + self._patience - now
        return max(0.0, min(left, self._attempts.seconds_left) if self._reopens else left)
