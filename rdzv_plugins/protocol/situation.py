"""The facts that follow from a document and the records: which nodes live, are awaited, ready,
gone.

Each question is answered here only; `decide` decides by a `Situation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from rdzv_plugins.protocol import policies
from rdzv_plugins.protocol.accusations import lost_by_accusation, with_verdicts
from rdzv_plugins.protocol.documents import (
    Accusation,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
    derived,
)
from rdzv_plugins.protocol.policies.policy import Reason
from rdzv_plugins.protocol.rules import Rules, View
from rdzv_plugins.protocol.sizes import Sizes, world_size

_NO_NODES: frozenset[str] = frozenset()


def assess(view: View, document: RoundDocument) -> Situation:
    """The situation as a node sees it that has listed all records."""
    records = {**(view.records or {}), view.me: view.record}
    document = with_verdicts(view, document, records)
    gone = lost_by_accusation(document, records) if document.accused else {}
    # No node while no lease can have run out.
    nodes = _all_nodes(document, records) if view.until_first_lease is None else set[str]()
    others = nodes - {view.me}
    late = (it for it in others if view.confirmed_silence(it) >= view.lease_and_lag(it))
    return Situation(
        document=document,
        records=records,
        rules=view.rules,
        wall=view.wall,
        lost=frozenset(filter(view.is_lost, nodes)).union(gone),
        by_accusation=gone,
        silent=frozenset(late),
        back=frozenset(node for node in document.absent if node == view.me or view.moved(node)),
    )


def assess_from_outside(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool],
    is_lost: Callable[[str], bool],
    wall: float,
) -> Situation:
    """The situation as an observer sees it that has read the whole run and is no node of it.

    Args:
        is_silent: whether a heartbeat of the node is overdue.
        is_lost: whether its lease has run out.
    """
    nodes = _all_nodes(document, records)
    lost = frozenset(filter(is_lost, nodes))
    return Situation(
        document=document,
        records=records,
        rules=Rules.as_stored(document, records.get(document.leader or "")),
        wall=wall,
        lost=lost,
        silent=lost.union(filter(is_silent, nodes)),
    )


def _all_nodes(document: RoundDocument, records: Mapping[str, NodeRecord]) -> set[str]:
    return {*records, *document.ranks, *document.previous_order}


class Situation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The facts by which a leader decides. Each is computed once, when it is first read.

    Attributes:
        rules: the run's settings, as far as they are known.
        wall: seconds since the epoch, on the wall clock of the node or observer.
        lost: nodes that are lost by their heartbeats (`View.is_lost`), or whose processes are gone.
        by_accusation: the lost nodes whose processes are gone, each with its accusation.
        silent: nodes that do not count as live, because their leases have run out even if they have
            one more lease; for an outside observer, because a heartbeat is overdue.
        back: nodes that the document calls absent, and that beat again.
    """

    document: RoundDocument
    records: Mapping[str, NodeRecord]
    rules: Rules
    wall: float
    lost: frozenset[str] = _NO_NODES
    by_accusation: Mapping[str, Accusation] = {}
    silent: frozenset[str] = _NO_NODES
    back: frozenset[str] = _NO_NODES

    def is_gone(self, node: str) -> bool:
        """Whether the node left, is done or lost. A missing record is silence, not a leave."""
        record = self.records.get(node)
        return node in self.lost or (record is not None and record.is_over)

    @derived
    def live(self) -> set[str]:
        """Nodes that have not left, are not silent, and did not end by an accusation. A done node
        is live while it beats.
        """
        return {
            node
            for node, record in self.records.items()
            if record.status is not Status.LEFT
            and node not in self.silent
            and node not in self.by_accusation
        }

    @derived
    def doubted(self) -> list[str]:
        """Nodes that are silent and not lost."""
        return [
            node
            for node in self.records
            if node in self.silent and node not in self.lost and not self.records[node].is_over
        ]

    @derived
    def sizes(self) -> Sizes:
        return Sizes.of(self.rules)

    @derived
    def kept_out(self) -> Mapping[str, Reason]:
        """Nodes that no round may name, and why."""
        return policies.keeps_out(self.document, self.records, self.wall)

    @derived
    def not_admitted(self) -> Mapping[str, Reason]:
        """Nodes that ask for a round, but that a policy keeps out of the next round, and why."""
        runs = self.document.phase is Phase.RUNNING
        return policies.not_admitted(self, self.waiting if runs else self._eligible)

    # While a round forms.

    @derived
    def not_rejoined(self) -> frozenset[str]:
        """Participants of the last round that have not asked for this round. Rule: exclusivity."""
        document, records = self.document, self.records
        return frozenset(
            node
            for node in document.previous
            if not has_rejoined(document, records.get(node), document.round - 1)
        )

    @derived
    def previous_gone(self) -> list[str]:
        """Participants of the last round that have left, are done, or are lost."""
        return [node for node in self.document.previous if self.is_gone(node)]

    @derived
    def awaited(self) -> tuple[str, ...]:
        """Live participants of the last round for which this round waits."""
        if not self.not_rejoined:
            return ()
        gone = {*self.previous_gone}
        return tuple(
            node
            for node in self.document.previous
            if node in self.not_rejoined and node not in gone
        )

    @derived
    def asking(self) -> set[str]:
        """Live nodes that ask for the round, including nodes that are kept out."""
        document, not_rejoined = self.document, self.not_rejoined
        return {
            node
            for node, record in self.records.items()
            if record.asks
            and fits(record, document)
            and node in self.live
            and node not in not_rejoined
        }

    @derived
    def _eligible(self) -> set[str]:
        return self.asking.difference(self.kept_out) if self.kept_out else self.asking

    @derived
    def ready(self) -> set[str]:
        """Nodes that the round may take."""
        return self._eligible.difference(self.not_admitted) if self.not_admitted else self._eligible

    @derived
    def size(self) -> int:
        """How many of the ready nodes the round would take; 0: too few are ready."""
        return world_size(self.ready, self.records, self.sizes)

    @property
    def has_enough(self) -> bool:
        """Whether a round can form from the ready nodes."""
        return self.size > 0

    @property
    def is_full(self) -> bool:
        return self.size > 0 and self.size >= self.sizes.most

    # While a round is confirmed or runs.

    @derived
    def done(self) -> set[str]:
        """Participants whose workers succeeded."""
        document, records = self.document, self.records
        return {node for node in document.ranks if is_done(document, records.get(node))}

    @derived
    def taken_out(self) -> list[str]:
        """Live participants that are to be kept out."""
        if not self.kept_out:
            return []
        return [
            node
            for node in self.document.ranks
            if node in self.kept_out and node not in self.lost and node not in self.done
        ]

    @derived
    def newly_gone(self) -> list[str]:
        """Participants that have left or are lost, and that the document does not call absent."""
        known = {*self.document.absent, *self.taken_out}
        return [
            node
            for node in self.document.ranks
            if self.is_gone(node) and node not in known and node not in self.done
        ]

    @derived
    def rejoined(self) -> list[str]:
        """Participants that ask for the next round."""
        document, records = self.document, self.records
        known = {*self.newly_gone, *self.taken_out}
        return [
            node
            for node in document.ranks
            if node not in known and has_rejoined(document, records.get(node), document.round)
        ]

    @derived
    def absent(self) -> set[str]:
        """Participants that are gone: the running round goes on without them, or has to end.

        A node that fell silent, and was not replaced, never stopped running.
        """
        returned = {
            node
            for node in self.back
            if node in self.live
            and self.records[node].status is Status.RUN
            and self.records[node].world_id == self.document.world_id
        }
        return (
            {*self.newly_gone, *self.document.absent} - {*self.rejoined, *self.taken_out} - returned
        )

    @derived
    def present(self) -> tuple[str, ...]:
        """The participants that are not absent."""
        return without(self.document.ranks, self.absent)

    @derived
    def waiting(self) -> list[str]:
        """Live nodes that ask for a round while this one runs."""
        document = self.document
        return [
            node
            for node, record in self.records.items()
            if node not in document.ranks
            and record.asks
            and node not in self.kept_out
            and node in self.live
            and fits(record, document)
        ]

    @derived
    def newcomers(self) -> list[str]:
        """Waiting nodes for which the round may be ended."""
        if not self.not_admitted:
            return self.waiting
        return [node for node in self.waiting if node not in self.not_admitted]

    @derived
    def growth(self) -> int:
        """By how many nodes the next round would be larger; 0 once a participant is done."""
        if not self.newcomers or self.done:
            return 0
        size = world_size([*self.present, *self.newcomers], self.records, self.sizes)
        return max(0, size - len(self.present))

    @property
    def room(self) -> int:
        """For how many more nodes the running round has room."""
        return self.sizes.most - self.document.size + len(self.absent)

    @derived
    def may_grow(self) -> bool:
        """Whether workers of the round said that now is a good moment to let newcomers in."""
        records = self.records
        return any(records[it].may_grow for it in self.document.ranks if it in records)


def nodes_waiting(view: View) -> int:
    """The answer of ``num_nodes_waiting()``: above 0 tells the agent to join again."""
    document, member, latest = view.document, view.member, view.latest
    if view.joining or member is None or latest is None:
        return 0
    if latest.is_of(member) and latest.closed:
        # An agent gave up: this node's workers would wait for that agent's workers forever.
        return int(latest.outcome is not None and latest.outcome.ends_workers)
    if latest.closed:
        # `latest` is another run of the id, which replaced this node's run and is closed.
        return int(member.incarnation in view.without_tombstone)
    if document is None or document.closed:
        return 0
    if not document.is_of(member):
        return int(member.incarnation in view.without_tombstone)
    if document.place < latest.place:
        return 0  # The store forgot the newer document, and nodes write it back.
    ended = document.round > member.round or document.world_id != member.world_id
    return to_join_again(document) if ended else 0


def to_join_again(document: RoundDocument) -> int:
    """The answer of ``num_nodes_waiting()`` to the agents whose round this document ended."""
    return max(1, document.waiters)


def waits_for_a_living_round(view: View) -> bool:
    """Whether this node is a spare of a running round with live nodes and a live leader."""
    document = view.document
    if not view.joining or document is None or document.phase is not Phase.RUNNING:
        return False
    if document.all_absent:
        return False
    if view.record.status is not Status.SPARE or view.me in document.ranks:
        return False
    leader = document.leader
    return leader is not None and (
        leader == view.me or view.confirmed_silence(leader) < view.lease_and_lag(leader)
    )


def has_no_room(document: RoundDocument, sizes: Sizes) -> bool:
    """Whether the running round has no room."""
    return document.size - len(document.absent) >= sizes.most


def unconfirmed(document: RoundDocument, records: Mapping[str, NodeRecord]) -> list[str]:
    """The participants that have not confirmed their rank."""
    world_id = document.world_id
    return [
        node
        for node in document.ranks
        if (record := records.get(node)) is None
        or record.status is not Status.RUN
        or record.world_id != world_id
    ]


def is_done(document: RoundDocument, record: NodeRecord | None) -> bool:
    """Whether the node's workers succeeded in this round; the node may have ended since."""
    if record is None or record.status is not Status.DONE:
        return False
    return record.world_id == document.world_id


def has_rejoined(document: RoundDocument, record: NodeRecord | None, ended_round: int) -> bool:
    """Whether the node asked to join after ``ended_round``; an earlier request does not count."""
    if record is None or not record.asks:
        return False
    return round_in(document, record) >= ended_round


def round_in(document: RoundDocument, record: NodeRecord) -> int:
    """The last round of this run in which the node was named; -1: none."""
    return record.round if record.incarnation == document.incarnation else -1


def fits(record: NodeRecord, document: RoundDocument) -> bool:
    """Whether the node was started with the run's ``--nnodes``."""
    return (record.min_nodes, record.max_nodes) == (document.min_nodes, document.max_nodes)


def without(nodes: Iterable[str], gone: Iterable[str | None]) -> tuple[str, ...]:
    """The nodes that are not in ``gone``, in the same order."""
    left_out = set(gone)
    return tuple(node for node in nodes if node not in left_out)
