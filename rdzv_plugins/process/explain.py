"""The texts for people when a join ends without a round, or when this node fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.protocol.documents import (
    NOBODY,
    NODES_PREFIX,
    Names,
    Outcome,
    RoundDocument,
    Status,
    at_work,
)
from rdzv_plugins.protocol.effects import JoinOutcome
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.rules import Failure
from rdzv_plugins.protocol.states import is_due

# Other nodes see at most this many characters of an OSError's text.
_LONGEST_REASON = 200

# An agent's exit status after no progress; NVIDIA's resiliency extension has the same.
_NO_PROGRESS = 93


@dataclass(frozen=True)
class Refusal:
    """Makes the exceptions of joins that end without a round.

    Attributes:
        join_timeout: seconds.
        store_is_here: whether the store's address is loopback; may look up a name.
    """

    run_id: str
    node: Node
    client: KeyValueClient
    archive: Archive
    join_timeout: float
    store_is_here: Callable[[], bool]

    def of(self, outcome: JoinOutcome, was_in_the_run: bool) -> BaseException:
        """The exception; ``SystemExit`` if the agent should end without an error."""
        run, latest = f"run '{self.run_id}'", self.node.latest
        ended = latest.outcome if latest is not None else None
        match outcome.failure:
            case Failure.CLOSED | Failure.SPARE_CLOSED if ended is Outcome.NO_PROGRESS:
                return SystemExit(_NO_PROGRESS)
            case Failure.SPARE_CLOSED if ended is not Outcome.FAILED:
                return SystemExit(0)
            case Failure.DRAINED:
                return SystemExit(0)
            case Failure.CLOSED | Failure.SPARE_CLOSED:
                why = f" ({plain(latest.reason)})" if latest is not None and latest.reason else ""
                free = self._when_free(was_in_the_run)
                return RendezvousClosedError(f"{run} is closed{why}; {free}")
            case Failure.MISMATCH:
                document = self.node.document
                theirs = f"{document.min_nodes}:{document.max_nodes}" if document else "others"
                return RendezvousStateError(
                    f"{run} was started with --nnodes={theirs}, this node with "
                    f"--nnodes={self.node.rules.min_nodes}:{self.node.rules.max_nodes}; "
                    "use the same on every node, or another --rdzv-id"
                )
            case Failure.TIMEOUT:
                return self._of_timeout(outcome)
        return outcome.error or RendezvousStateError(
            f"{run}: the rendezvous of this node ended without an outcome; please report it"
        )

    def _of_timeout(self, outcome: JoinOutcome) -> BaseException:
        rules, patience, more = self.node.rules, self.join_timeout, ""
        if rules.min_nodes < rules.max_nodes and patience <= rules.last_call_timeout:
            more = f"; last_call_timeout alone is {rules.last_call_timeout:g} s"
        with suppress(OSError):  # An exhausted host cannot look up the name.
            if rules.max_nodes > 1 and self.store_is_here():
                more += (
                    "; the store is at loopback, so that other hosts have another one there: "
                    "for nodes on several hosts, name an address of it that all reach, unless "
                    "an agent or a proxy of a store that all share listens there"
                )
        nodes = f"{rules.min_nodes} to {rules.max_nodes}"
        if rules.min_nodes == rules.max_nodes:
            nodes = str(rules.max_nodes)
        came, sentence = self._who_came(outcome)
        return RendezvousTimeoutError(
            f"run '{self.run_id}': {came} of {nodes} nodes came within {patience:g} s, and no "
            f"round formed: {sentence}{more}"
        )

    def _when_free(self, was_in_the_run: bool) -> str:
        ended = self.node.latest
        # Thousands of nodes of the run may come here at once; only newcomers ask the store.
        if ended is not None and not was_in_the_run:
            with suppress(RendezvousConnectionError, RendezvousStateError):
                records = RecordCache().decode(self.client.list(NODES_PREFIX))
                # The ages compare two hosts' clocks, which may differ by a second.
                ages = {node: time.time() - it.at - 1.0 for node, it in records.items()}
                working = at_work(ended, records, lambda it: is_due(ages[it], records[it]))
                return self.archive.free_in(ended, datetime.now(UTC), working)[1]
        return self.archive.free_now

    def _who_came(self, outcome: JoinOutcome) -> tuple[str, str]:
        """How many nodes came for a round that did not form, and a sentence about the end."""
        said = outcome.diagnosis
        came, left, gave_up = "an unknown number", set[str](), set[str]()
        with suppress(RendezvousConnectionError):
            records = RecordCache().decode(self.client.list(NODES_PREFIX))
            others = [it for node, it in records.items() if node != self.node.id]
            lost = said.lost.first if said is not None else ()
            asking = [it for it in others if it.asks and it.label not in lost]
            gone = [it for it in others if it.status is Status.LEFT]
            # A node that left before its first round waited too, mostly for as long as this node.
            waited = [it for it in gone if not it.world_id and not it.is_unfit]
            left, gave_up = {it.label for it in gone}, {it.label for it in waited}
            came = str(1 + len(asking) + len(waited))
        if said is None:
            return came, "nothing is known of it"
        return came, str(said.at_the_end(left, gave_up))

    def who(self, document: RoundDocument) -> Names:
        """The nodes of this round; empty if the store does not answer."""
        with suppress(RendezvousConnectionError):
            records = RecordCache().decode(self.client.list(NODES_PREFIX))
            here = [it for it in records.values() if it.world_id == document.world_id]
            return Names().plus(it.label for it in sorted(here, key=lambda it: it.rank or 0))
        return NOBODY


def what_failed(error: BaseException) -> str:
    """Why this node closes the run as failed, for people at the other nodes."""
    if not isinstance(error, ChildFailedError):
        # Leave out the texts of other errors, which may hold anything.
        text = f": {' '.join(str(error).split())}" if isinstance(error, OSError) else ""
        return f"its agent failed ({type(error).__name__}{text[:_LONGEST_REASON]})"
    rank, first = error.get_first_failure()
    ended = f"exited with {first.exitcode}" if first.exitcode else "hangs in the kernel"
    if first.exitcode < 0:
        ended = f"was ended by {first.signal_name()}"
    others = len(error.failures) - 1
    more = f" and {others} more failed" if others else ""
    return f"its workers failed (rank {rank} {ended}{more})"
