"""A node's wish for a round, and the rounds that its agent was given."""

from __future__ import annotations

from collections.abc import Callable

from rdzv_plugins.protocol import words
from rdzv_plugins.protocol.documents import RoundDocument


class Orders:
    """Orders and reports of the agent's threads that the node has not taken up yet.

    Attributes:
        join, withdraw, done, growth: as `Node.order_join`, `Node.order_withdrawal`,
            `Node.report_done` and `Node.allow_growth` were called.
        unfit: the reason of `Node.report_unfit`; None: it was not called.
        failed, waited: as of the last `Node.order_join`.
    """

    def __init__(self) -> None:
        self.join = self.withdraw = self.done = self.growth = False
        self.unfit: str | None = None
        self.failed, self.waited = False, 0.0

    @property
    def any(self) -> bool:
        """Whether there is one."""
        agent = self.join or self.withdraw or self.done or self.growth
        return agent or self.unfit is not None


class Join:
    """What the agent asks for, and what it was given.

    Attributes:
        waits: an agent waits for a round.
        asked_at: when it asked.
        deadline: when its time is over.
        given: the round that it was given last; None: it was given none.
        rounds: the number of the round that it was given last, by incarnation.
        suspect: the network check found this node cut off, and no round was given to it since.
        news: a line for the log, once the record that asks for a round has been written.
        pace: when the sentence of a join that waits is told.
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
        """Ask for a round; ``waited``: seconds of its time that are over already."""
        self.waits, self.asked_at = True, self._clock()
        self.deadline = self.asked_at + max(0.0, self._timeout - waited)
        self.news, self.pace = news, words.Pace(self.asked_at)

    def start_over(self) -> None:
        """Give the agent its whole time again: a spare waits for as long as a round lasts."""
        self.deadline = self._clock() + self._timeout

    def succeed(self, document: RoundDocument) -> None:
        """Note the round that the agent is given now."""
        self.given, self.suspect = document, False
        self.rounds[document.incarnation] = document.round

    @property
    def seconds_left(self) -> float:
        """Until its time is over."""
        return max(0.0, self.deadline - self._clock())
