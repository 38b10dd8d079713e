"""How a node parts from a run: it leaves a run that goes on without it, and closes any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.effects import Effects, List, Rest
from rdzv_plugins.protocol.policies import keeps_out
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.protocol.situation import fits
from rdzv_plugins.protocol.sizes import Sizes, world_size

if TYPE_CHECKING:
    from rdzv_plugins.protocol.node import Node

# How often a new node under torchrun tries again after its workers failed; not with the last
# restart.
_TRIES = 1

# Seconds between two looks at whether the other nodes live.
_LOOK_SECONDS = 0.5


class Parting(StrEnum):
    """How a node parted: it left, it closed the run, or the run no longer counted on it."""

    LEFT = "left"
    CLOSED = "closed"
    REPLACED = "replaced"


class Service:
    """A node's time in the rounds of a run, and how the node parts from it.

    Attributes:
        last: the last round that its agent was given.
        newcomers: the nodes that joined the run with this node or later; None: no round had run
            before this node joined.
    """

    def __init__(
        self,
        node: Node,
        clock: Callable[[], float],
        wall: Callable[[], float],
        max_restarts: int = 0,
    ) -> None:
        self._node, self._rules, self._clock, self._wall = node, node.rules, clock, wall
        self._max_restarts = max_restarts
        self.last: RoundDocument | None = None
        self.newcomers: Names | None = None
        # Seconds in earlier rounds of this run, and when the last round began.
        self._served, self._began = 0.0, 0.0
        self._failures = 0

    def begin(self, document: RoundDocument) -> None:
        """The node's agent is given a round."""
        now = self._clock()
        if self.last is None or not document.is_of(self.last):
            self.newcomers = newcomers_with(self._node.record.label, document)
            self._served, self._failures = 0.0, 0
        else:
            self._served += now - self._began
            if self.newcomers is not None:
                joined = document.cause.joined
                self.newcomers = self.newcomers.plus(joined.first).and_more(joined.more)
        self.last, self._began = document, now

    @property
    def seconds(self) -> float:
        return self._served + self._clock() - self._began

    @property
    def is_new(self) -> bool:
        """Whether the node joined a run that went on already, and is still in its probation.

        Its workers' failure is then more likely its own than the script's or the run's.
        """
        probation = self._rules.min_uptime or self._rules.probation
        return self.newcomers is not None and self.seconds < probation

    @property
    def rank_0(self) -> tuple[str, int] | None:
        """Where rank 0 of this node's last round listens, if the run still has that node.

        None also if this node is rank 0, or if the round is too large for it to know rank 0.
        """
        last, latest, me = self.last, self._node.latest, self._node.id
        if last is None or last.master is None or latest is None or not latest.is_of(last):
            return None
        first = last.participants[0] if last.participants else me
        if first == me or first in latest.absent or not latest.names(first):
            return None
        address, _, port = last.master.rpartition(":")
        return address, int(port)

    def fails_again(self) -> bool:
        """Note that its workers failed; returns whether this new node costs others too much."""
        if not self.is_new:
            return False
        self._failures += 1
        return self._failures > min(_TRIES, self._max_restarts // 2)

    def only_leaves(self, all_done: bool) -> bool:
        """Whether a node that ends leaves the run open, as others work or it is in no round."""
        return (self._node.done and not all_done) or not self._node.in_round

    def may_give_up(self, of_workers: bool) -> bool:
        """Whether this node leaves if others go on, after its workers (False: its agent) failed."""
        return self.is_new if of_workers else not self._node.done

    def costs_the_others(
        self, is_over: Callable[[], bool] = lambda: False, grace: float = 0.0
    ) -> Effects[bool]:
        """Whether this new node, whose workers failed again, should leave so that the others go on.

        Args:
            is_over: whether the answer is not needed any more.
            grace: seconds for which no loss shows, because the store was away.
        """
        newcomers, last = self.newcomers or Names(), self.last
        if last is None or not (yield from self._others_go_on(newcomers)):
            return False
        deadline = self._clock() + max(0.0, grace) + loss_shows_within(self._rules)
        return not (
            yield from self._follows_from_a_loss(
                last, lambda: is_over() or self._clock() > deadline
            )
        )

    def give_up(self, why: str, *, of_workers: bool, looked: bool = False) -> Effects[Parting]:
        """Leave a run that goes on without this node, or close it as failed; after `Node.run`.

        It may be driven again if a request failed.

        Args:
            of_workers: the workers of this new node failed; False: its agent failed.
            looked: the others are known to be enough.
        """
        newcomers = (self.newcomers if of_workers else None) or Names()
        if looked or (yield from self._others_go_on(newcomers)):
            yield from self._node.farewell(why)
            if (yield from self._others_go_on(newcomers, left=True)):
                return Parting.LEFT
        if (yield from self.close(Outcome.FAILED, why)):
            return Parting.CLOSED
        yield from self._node.farewell(why)
        return Parting.REPLACED

    def close(self, outcome: Outcome, why: str) -> Effects[bool]:
        """Close the run if it counts on this node, or did until this node gave up.

        Returns whether the run is closed.
        """
        node, last, latest = self._node, self.last, self._node.latest
        if last is not None and latest is not None and not latest.is_of(last):
            latest = last  # The store lost this run, and `latest` is of a newer run.

        def may_close(now: RoundDocument) -> bool:
            follows = last is not None and now.is_of(last) and now.round == last.round + 1
            return now.names(node.id) or (follows and now.phase is Phase.FORMING)

        closed = yield from close_run(
            node.id,
            latest,
            outcome,
            f"{why}; closed by {node.record.label}",
            self._rules.sweep_after,
            may_close=may_close,
            told=node.told_of_the_end,
        )
        return closed

    def _others_go_on(self, newcomers: Names, *, left: bool = False) -> Effects[bool]:
        """Whether the others are enough for a round; ``left``: this node has said that it leaves.

        Where several nodes leave at once, each leaves before it looks at the others, so that the
        last one finds too few. In a large run only the leader looks, or a node that finds no
        leader.
        """
        me, latest, records = self._node.id, self._node.latest, None
        if latest is None:
            return False
        if latest.is_whole or (left and latest.leader in (None, me)):
            records = RecordCache().decode((yield from List(NODES_PREFIX)))
        elif left:
            return True
        return goes_on_without(me, latest, records, self._rules, self._wall(), newcomers)

    def _follows_from_a_loss(
        self, last: RoundDocument, is_over: Callable[[], bool]
    ) -> Effects[bool]:
        """Whether the workers failed because a node of the round ``last`` was lost.

        Waits until all other nodes have shown that they live, or ``is_over``: a loss would show by
        then.
        """
        before = RecordCache().decode((yield from List(NODES_PREFIX)))
        while True:
            if (latest := self._node.latest) is not None and lost_one(last, latest):
                return True
            if is_over():
                return False
            now = RecordCache().decode((yield from List(NODES_PREFIX)))
            if all_live(self._node.id, last, before, now):
                return False
            yield from Rest(min(_LOOK_SECONDS, self._rules.interval))


def newcomers_with(label: str, document: RoundDocument) -> Names | None:
    """The nodes that joined a run together with this node, in its first round of that run.

    None: no round had run before, or the node was in it.
    """
    joined = document.cause.joined
    is_new = document.round > 0 and (label in joined or joined.more > 0)
    return joined if is_new and joined.count < document.size else None


def goes_on_without(
    me: str,
    document: RoundDocument,
    records: Mapping[str, NodeRecord] | None,
    rules: Rules,
    wall: float,
    newcomers: Names,
) -> bool:
    """Whether the other nodes of a run are enough for a round, without ``newcomers``.

    ``records`` None: there are too many to read. Participants are counted instead, and each gone
    node may break a segment.
    """
    sizes = Sizes.of(rules)
    if document.closed:
        return False
    if records is None:
        shards = document.roster or document.previous_roster
        size = shards.size if shards is not None else document.size
        forms = document.phase is Phase.FORMING
        gone = document.cause.lost.count if forms else len(document.absent)
        return size - sizes.segment * (gone + max(1, newcomers.count)) >= sizes.least
    out = {me, *document.absent, *keeps_out(document, records, wall)}
    others = [
        node
        for node, record in records.items()
        if node not in out
        and record.label not in newcomers
        # The record of a lost node may still say that it runs; one that the document names is back.
        and (document.names(node) or record.label not in document.cause.lost)
        and fits(record, document)
        and (record.asks or _runs(document, node, record))
    ]
    # Leave out one node for each newcomer whose name is unknown.
    others = others[newcomers.more :]
    return world_size(others, records, sizes) > 0


def lost_one(last: RoundDocument, latest: RoundDocument) -> bool:
    """Whether a node of the round ``last`` was lost since."""
    if not latest.is_of(last):
        return False
    return bool(latest.absent or (latest.round > last.round and latest.cause.lost))


def all_live(
    me: str,
    last: RoundDocument,
    before: Mapping[str, NodeRecord],
    records: Mapping[str, NodeRecord],
) -> bool:
    """Whether all other nodes of the round ``last`` wrote, rejoined or left since ``before``.

    For a large round the answer is False, because reading each node's record costs too much.
    """
    return bool(last.participants) and all(
        (now := records.get(node)) is not None
        and (now.asks or now.is_over or ((old := before.get(node)) is None or old.beat < now.beat))
        for node in last.participants
        if node != me
    )


def _runs(document: RoundDocument, node: str, record: NodeRecord) -> bool:
    """Whether the node works in the round, or in the round before while the next one forms."""
    if record.status is not Status.RUN or record.incarnation != document.incarnation:
        return False
    forms = document.phase is not Phase.RUNNING
    # Count a participant even if its record shows an older round. A store that forgot the node's
    # last write shows that round until the node's next heartbeat.
    return document.names(node) or record.round >= document.round - forms


def loss_shows_within(rules: Rules) -> float:
    """Seconds within which the loss of a participant shows in `Node.num_nodes_waiting`."""
    # The leader may see a node's last heartbeat 1.1 intervals late, and then waits for the lease.
    # If the leader itself was lost, its successor needs up to 2 s to take over.
    return rules.lease + 1.1 * rules.interval + 2.0
