"""What a node's agent asks for, and the rounds that it was given."""

from __future__ import annotations

from collections.abc import Callable

from rdzv_plugins.protocol import words
from rdzv_plugins.protocol.documents import RoundDocument


class Orders:
    """Orders and reports of the agent's threads that the node has not taken up yet.

    ``join``, ``withdraw``, ``done`` and ``growth`` tell which methods of `Node` were called;
    ``unfit`` is the reason of `Node.report_unfit`, None: not called.
    """

    def __init__(self) -> None:
        self.join = self.withdraw = self.done = self.growth = False
        self.unfit: str | None = None
        self.failed, self.waited = False, 0.0

    @property
    def any(self) -> bool:
        agent = self.join or self.withdraw or self.done or self.growth
        return agent or self.unfit is not None


class Join:
    """The agent's join, and the rounds that it was given.

    Attributes:
        waits: an agent waits for a round.
        asked_at, deadline: when it asked, and when its join times out.
        rounds: by incarnation, the number of the last round that it was given.
        suspect: as `NodeRecord.suspect`.
        news: a line for the log, once the record that asks for a round has been written.
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout, self._clock = timeout, clock
        self.waits = False
        self.asked_at = self.deadline = 0.0
        self.given: RoundDocument | None = None
        self.rounds: dict[str, int] = {}
        self.suspect = False
        self.news = ""
        self.pace = words.Pace(clock())

    def begin(self, waited: float, news: str) -> None:
        """Ask for a round; ``waited``: seconds of the time-out that are over already."""
        self.waits, self.asked_at = True, self._clock()
        self.deadline = self.asked_at + max(0.0, self._timeout - waited)
        self.news, self.pace = news, words.Pace(self.asked_at)

    def start_over(self) -> None:
        """Restart the time-out: a spare waits for as long as a round lasts."""
        self.deadline = self._clock() + self._timeout

    def succeed(self, document: RoundDocument) -> None:
        """Note the round that the agent is given."""
        self.given, self.suspect = document, False
        self.rounds[document.incarnation] = document.round

    @property
    def seconds_left(self) -> float:
        """Seconds until the join times out."""
        return max(0.0, self.deadline - self._clock())
