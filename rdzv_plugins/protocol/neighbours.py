"""A node's neighbours in rank order: links to them, and what the links tell.

A link ends with the process at its other end. The node then accuses the gone node in its record,
and the leader asks the gone node to answer (`accusations`); the accuser itself asks an accused
leader. Over links each node also sends its `Standing`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable

from rdzv_plugins.protocol.contact import Contact, Standing
from rdzv_plugins.protocol.documents import Accusation, Phase, RoundDocument
from rdzv_plugins.protocol.effects import Effects, KeepLinks
from rdzv_plugins.protocol.heartbeat import Heartbeat
from rdzv_plugins.protocol.join import Inbox, Join
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.roster import MISSING, shard_firsts
from rdzv_plugins.protocol.rules import Own

# A node makes its links once the others have their round too, which takes longer the more nodes
# there are. A process that dies earlier costs the others its lease.
_AFTER_START_SECONDS = 0.1
_PER_NODE_SECONDS = 0.001

# A node makes no more accusations than a document names.
_MOST_ACCUSED = 64


class Neighbours:
    """The links of a node, and its accusations."""

    def __init__(
        self,
        own: Own,
        seen: Observer,
        heartbeat: Heartbeat,
        join: Join,
        contact: Contact,
        inbox: Inbox,
    ) -> None:
        self._id, self._rules, self._clock = own.id, own.rules, own.clock
        self._seen, self._heartbeat, self._join = seen, heartbeat, join
        self._contact, self._inbox = contact, inbox
        # Reports of links that `take_up_evidence` has not read: a node, and whether it is gone.
        self._evidence: deque[tuple[str, bool]] = deque()
        # When links are due next. By linked node: the endpoint of its listener (None: no listener).
        self._due_at = math.inf
        self._endpoints: dict[str, str | None] = {}
        # The round for which the links are made, and the linked nodes that are no neighbours.
        self._linked_for: tuple[str, tuple[str, ...]] = "", ()
        # The last round in which this leader knew the first nodes of the shards, and these nodes.
        self._firsts: tuple[str, tuple[str, ...]] = "", ()
        # Whether this node is the first node of a shard, and there are several shards.
        self._leads_shard = False
        # This node's last Standing, the others' Standings, and whether the others' are new.
        self._said = Standing.ACCEPTED
        self._others: frozenset[Standing] = frozenset()
        self._others_reported = False
        # The accusation that this node has answered, and its incarnation.
        self._answers: tuple[str, Accusation] | None = None

    # Methods for any thread.

    def report_dead(self, node: str) -> None:
        """Report that a node's process has ended, as far as a link tells."""
        self._evidence.append((node, True))
        self._inbox.wake()

    def report_alive(self, node: str) -> None:
        """Report that a node answers after `report_dead`."""
        self._evidence.append((node, False))
        self._inbox.wake()

    def report_others(self, others: frozenset[Standing]) -> None:
        """Report the `Standing` of all other ends of links; `ACCEPTED` for a missing link."""
        self._others, self._others_reported = others, True
        self._hear_others()  # Now, because a request may outlast this node's lease.
        self._inbox.wake()

    @property
    def is_reported(self) -> bool:
        """Whether the node has not taken up a report yet."""
        return bool(self._evidence) or self._others_reported

    # Methods for the thread that drives the node.

    def news(self) -> KeepLinks | None:
        """The new standing for the links; None: no change. Sent even during a request."""
        if not self._heartbeat.record.link or (standing := self._standing) is self._said:
            return None
        self._said = standing
        return self._links

    @property
    def _standing(self) -> Standing:
        document, contact = self._seen.document, self._contact
        if not contact.fails:
            return Standing.ACCEPTED
        is_over = document is not None and document.world_id != self.linked_to
        others = contact.others_may_go_on or contact.others_are_lost
        return Standing.LOST if is_over or contact.why_cut_off or others else Standing.FAILING

    @property
    def linked_to(self) -> str:
        """The world_id of the round for which the links are made; "": there are none."""
        return self._linked_for[0]

    def take_up_others(self) -> None:
        """Beat at once if others' requests fail: the store may refuse this node too."""
        if self._others_reported:
            self._others_reported = False
            if Standing.FAILING in self._others and not self._contact.fails:
                self._heartbeat.require()

    def take_up_evidence(self) -> Effects[None]:
        """Accusations: write into this node's record which nodes are gone or back."""
        while self._evidence:
            node, is_gone = self._evidence[0]
            accuses = dict(self._heartbeat.record.accuses)
            accuses.pop(node, None)
            if is_gone:
                # Read the node's record first: it may have left, or have a version without links.
                _, record = yield from self._seen.read_record(node)
                if record is not None and record.link and not record.is_over:
                    accuses[node] = record.beat
            self._evidence.popleft()
            accused = tuple(accuses.items())[:_MOST_ACCUSED]
            if accused == self._heartbeat.record.accuses:
                continue
            self._heartbeat.change(rings=True, accuses=accused)
            self.owe_links()
            document = self._seen.document
            if document is not None and document.leader == node:
                self._seen.read_again(document=True, leader=True)

    def answer(self) -> None:
        """Beat at once if the document asks this node whether it lives."""
        accusation = self._accusation()
        if accusation is not None and accusation != self._answers:
            self._answers = accusation
            self._heartbeat.answer()

    @property
    def is_asked(self) -> bool:
        """Whether an accusation waits for this node's answer."""
        return self._accusation() not in (None, self._answers)

    def _accusation(self) -> tuple[str, Accusation] | None:
        """The accusation against this node in the document, with the incarnation."""
        document = self._seen.document
        if document is None or not document.accused:
            return None
        against = (it for it in document.accused if it.node == self._id and not it.lost)
        accusation = next(against, None)
        return (document.incarnation, accusation) if accusation is not None else None

    def begin(self, document: RoundDocument) -> None:
        """Drop accusations of nodes outside the round that the agent is given."""
        accuses = self._heartbeat.record.accuses
        named = tuple(it for it in accuses if it[0] in document.ranks)
        self._heartbeat.amend(accuses=named)
        self.owe_links(_AFTER_START_SECONDS, document.size)
        self._hear_others()

    def owe_links(self, seconds: float = 0.0, nodes: int = 0) -> None:
        """Make the links after these seconds at most, and _PER_NODE_SECONDS for each node."""
        if self._rules.answer_timeout is not None:
            due_at = self._clock() + seconds + _PER_NODE_SECONDS * nodes
            self._due_at = min(self._due_at, due_at)

    @property
    def seconds_left(self) -> float:
        """Seconds until links are due; infinite: none are."""
        if self._due_at == math.inf and self._links_for() not in (None, self._linked_for):
            return 0.0
        return max(0.0, self._due_at - self._clock())

    def _links_for(self) -> tuple[str, tuple[str, ...]] | None:
        """The round for which links are due, and the nodes beside the neighbours; None: unknown.

        The leader connects nodes that are not neighbours: a node outside of the round learns from
        the leader that others can go on, and the first nodes of shards learn of each other. Both
        ends hold the link of a shard, so that both notice its loss. `MISSING` stands for the first
        nodes until the leader knows them.
        """
        document, confirmed = self._seen.document, self._seen.confirmed
        if self._rules.answer_timeout is None:
            return None
        if document is None or document.phase is not Phase.RUNNING:
            return None
        leads = document.leader == self._id
        leader = () if document.leader is None or leads else (document.leader,)
        if self._join.joining and self._id not in document.ranks:
            silence = self._seen.liveness.confirmed_silence(leader[0]) if leader else 0.0
            return document.world_id, leader if silence >= self._rules.lease / 2 else ()
        if confirmed is None or confirmed.world_id != document.world_id:
            return None
        if not leads or document.size <= self._rules.inline:
            return document.world_id, leader if self._leads_shard else ()
        if self._firsts[0] != document.world_id:
            if document.roster is not None:
                return document.world_id, (MISSING,)
            self._firsts = document.world_id, shard_firsts(document, self._rules.inline)
        return self._firsts

    def keep_links(self) -> Effects[None]:
        """Keep links to both neighbours in the round, and to the nodes of `_links_for`.

        Past gone neighbours, keep links to the next nodes.
        """
        confirmed, accused = self._seen.confirmed, dict(self._heartbeat.record.accuses)
        links_for, before = self._links_for(), self._links
        ring: tuple[str, ...] = ()
        if confirmed is not None:
            if links_for is None or links_for[0] == confirmed.world_id:
                ring = self._seen.own_rank.peers(confirmed)
            self._leads_shard = ring[:1] == (self._id,) and len(ring) < confirmed.size
            links_for = self._links_for() or (confirmed.world_id, ())
        here = ring.index(self._id) if self._id in ring else len(ring)
        others = (*ring[here + 1 :], *ring[:here])
        linked = [*_as_far_as(others, accused), *_as_far_as(others[::-1], accused)]
        if links_for is not None:
            linked += (it for it in links_for[1] if it != self._id)
        endpoints = dict[str, str | None]()
        for node in dict.fromkeys(linked):
            endpoints[node] = yield from self._endpoint(node)
        self._endpoints = endpoints
        self._due_at, self._linked_for = math.inf, links_for or self._linked_for
        self._hear_others()
        if self._links != before:
            yield from self._links

    def _endpoint(self, node: str) -> Effects[str | None]:
        """The endpoint of the node's listener; None: it has none."""
        if node == MISSING:
            return None
        if node in self._endpoints:
            return self._endpoints[node]
        record = (self._seen.records or {}).get(node)
        if record is None:
            _, record = yield from self._seen.read_record(node)
        return f"{record.address}:{record.link}" if record is not None and record.link else None

    def _hear_others(self) -> None:
        """If a link of the agent's round is missing, assume that others may go on."""
        given = self._join.given
        linked = given is not None and given.world_id == self.linked_to
        stand = linked and self._due_at == math.inf and None not in self._endpoints.values()
        self._contact.hear(self._others if stand else (*self._others, Standing.ACCEPTED))

    @property
    def _links(self) -> KeepLinks:
        known = tuple((node, it) for node, it in self._endpoints.items() if it is not None)
        return KeepLinks(known, self._said)


def _as_far_as(nodes: Iterable[str], accused: Container[str]) -> list[str]:
    """These nodes up to and including the first that is not accused."""
    found = []
    for node in nodes:
        found.append(node)
        if node not in accused:
            break
    return found
