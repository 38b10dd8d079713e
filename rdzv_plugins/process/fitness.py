"""A node that is unfit waits before it joins, and tells the others why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

from rdzv_plugins.health import Gate
from rdzv_plugins.kv import missing_for_workers
from rdzv_plugins.observe.logs import RunLog
from rdzv_plugins.process.driver import Driver
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.settings.options import Settings

# The pauses between two runs of the checks, each twice as long as the one before.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@dataclass
class Fitness:
    """Waits until workers can start here, the checks pass, and other nodes reach this node.

    Attributes:
        gate: runs the checks; None: there are none.
        is_over: whether the handler was shut down.
        refuse: raises unless the outcome is a round.
        fail: logs an error and raises it.
        at_fault_for: seconds of pauses so far, while other nodes do not reach this node.
    """

    run_id: str
    settings: Settings
    node: Node
    driver: Driver
    log: RunLog
    gate: Gate | None
    is_over: Callable[[], bool]
    refuse: Callable[[effects.JoinOutcome], None]
    fail: Callable[[BaseException], NoReturn]
    at_fault_for: float = 0.0
    next_pause: float = _FIRST_PAUSE

    def await_fitness(self, has_had_workers: bool) -> float:
        """Wait until workers can start here and the checks pass; return the seconds of pauses.

        The other nodes learn the reason, and do not wait. The time of the checks does not count
        against ``join_timeout``, because they have their own limits.
        """
        checks = not self.node.in_round or self.settings.check_at == "restart"
        waited, pause, logged = 0.0, _FIRST_PAUSE, ""
        while (reason := self._why_unfit(checks, has_had_workers)) and not self.is_over():
            if reason != logged and self._tries_again(waited + pause):
                left = self.settings.join_timeout - waited
                self.log.warning(
                    f"this node is unfit and does not join: {reason}; it tries again in "
                    f"{pause:g} s, and so on for {left:g} s"
                )
                logged = reason
            self._wait_unfit(reason, waited, pause)
            waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE)
        if waited and not self.is_over():
            self.log.info("this node is fit again, and joins")
        return waited

    def wait_at_fault(self, reason: str) -> None:
        """Wait before the next join, because the network check of this node has failed."""
        waited, pause = self.at_fault_for, self.next_pause
        if self._tries_again(waited + pause):
            left = self.settings.join_timeout - waited
            self.log.warning(
                f"this node is unfit, since others do not reach it, or it does not reach them: "
                f"{reason}; it asks again in {pause:g} s, and so on for {left:g} s"
            )
        self._wait_unfit(reason, waited, pause)
        self.at_fault_for, self.next_pause = waited + pause, min(2 * pause, _LONGEST_PAUSE)

    def begin(self) -> None:
        """Note that this node is in a round."""
        self.at_fault_for, self.next_pause = 0.0, _FIRST_PAUSE

    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()

    def _why_unfit(self, checks: bool, has_had_workers: bool) -> str | None:
        # Not before the first workers: until then the node's own threads show what the host lacks.
        if has_had_workers and (missing := missing_for_workers()) is not None:
            return f"no worker can start: {missing}"
        return self.gate.check() if checks and self.gate is not None else None

    def _tries_again(self, seconds: float) -> bool:
        """Whether this node tries again after being unfit for ``seconds``."""
        settings = self.settings
        return settings.on_unhealthy != "exit" and seconds <= settings.join_timeout

    def _wait_unfit(self, reason: str, waited: float, pause: float) -> None:
        """Stay out for ``pause`` seconds; raises if this node does not try again."""
        tries_again = self._tries_again(waited + pause)
        outcome = self.driver.stay_out(reason, pause if tries_again else 0.0)
        if outcome is not None:
            self.refuse(outcome)
        if tries_again:
            return
        run, patience = f"run '{self.run_id}'", self.settings.join_timeout
        if self.settings.on_unhealthy == "exit":
            self.fail(RendezvousError(f"{run}: this node is unfit, and exits: {reason}"))
        self.fail(
            RendezvousTimeoutError(
                f"{run}: this node was unfit for join_timeout ({patience:g} s): {reason}"
            )
        )
