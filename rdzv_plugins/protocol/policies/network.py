"""Network: which pairs of nodes exchange data, which links failed, which node is at fault.

While a round confirms, each node dials one other node, and all nodes dial rank 0. A node's record
tells what failed together with its confirmation; the leader decides by the records of all nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import (
    NO_FAULTS,
    Dials,
    Faults,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
    labels,
)
from rdzv_plugins.protocol.policies.policy import NOTHING, Again, Policy, Reason, Stage
from rdzv_plugins.protocol.rules import Failure, Rules, View
from rdzv_plugins.protocol.sizes import world_size

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

# Links that fail for the first time keep at most this many rounds in a row from running.
_MOST_ROUNDS = 4
# A node that has failed with this many others is at fault.
_SEVERAL = 2

# A document lists at most this many failed links, and this many nodes that are kept out.
_LINKS_KEPT, _OUT_KEPT = 64, 32

# A node that takes more than _SLOW times the median, and more than _LEAST_SECONDS, is slow.
_SLOW, _LEAST_SECONDS = 2.0, 0.05

_SHOWN = 3
_MOST_DOUBLINGS = 10

Link = tuple[str, str]


class Network(Policy):
    """Rule: network check."""

    def admit(self, at: Situation, nodes: Collection[str]) -> Mapping[str, Reason]:
        document = at.document
        if document.phase is Phase.FORMING:
            if not document.faults.rounds:
                return NOTHING
            # Until a round has run, keep nodes that were at fault out, if the others are enough.
            well = {node for node in nodes if not at.records[node].was_at_fault}
            if not world_size(well, at.records, at.sizes):
                return NOTHING
        elif document.resize or not at.present:
            return NOTHING
        # A node that was at fault ends no running round: it joins when a round forms anyway.
        return {node: Reason() for node in nodes if at.records[node].was_at_fault}

    def judge(self, view: View, at: Situation, stage: Stage) -> Again | None:
        if stage is not Stage.BEFORE_RUNNING:
            return None
        verdict = verdict_on(at.document, at.records)
        if verdict.runs:
            return None
        cause = at.document.cause.plus(apart=_pairs(verdict.failed, at.records))
        after = replace(at.document, cause=cause, faults=verdict.faults)
        return Again(after, pause(verdict.faults, view.rules))

    def note(self, view: View, at: Situation, after: RoundDocument) -> RoundDocument:
        was, faults = at.document.phase, after.faults
        if was is Phase.CONFIRMING and after.phase is Phase.RUNNING:
            faults = verdict_on(at.document, at.records).faults
        elif was is Phase.RUNNING and after.phase is Phase.FORMING:
            faults = still_not_to_host(faults)
        elif was is Phase.FORMING and after.phase is Phase.CONFIRMING and faults.out:
            faults = replace(faults, out=())
        return after if faults is after.faults else replace(after, faults=faults)

    def delays(self, view: View, document: RoundDocument) -> bool:
        return view.record.was_at_fault

    def leave(self, view: View, document: RoundDocument) -> Failure | None:
        """A node that the check found at fault is unfit."""
        record = view.record
        if document.phase is not Phase.FORMING or record.status is not Status.RUN:
            return None
        was_in_it = (record.incarnation, record.round) == (document.incarnation, document.round - 1)
        return Failure.AT_FAULT if was_in_it and document.faults.why_out(view.me) else None


def partner_in(ranks: Mapping[str, int], me: str, round_: int) -> str | None:
    """The node that ``me`` dials. One node dials each node; the pairs change with each round."""
    ring = sorted(ranks, key=ranks.__getitem__)
    if me not in ranks or len(ring) < 2:
        return None
    step = 1 + round_ % (len(ring) - 1)
    return ring[(ring.index(me) + step) % len(ring)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a round that all its participants have confirmed.

    Attributes:
        runs: the round may run; False: another round forms.
        faults: for the document of the running or the next round.
        failed: the links that failed in the round.
    """

    runs: bool
    faults: Faults
    failed: tuple[Link, ...] = ()


def verdict_on(document: RoundDocument, records: Mapping[str, NodeRecord]) -> Verdict:
    """Whether the round may run, by what its participants have found.

    It may not run if a participant could not dial rank 0, or failed with several others; nor if a
    link fails for the first time, because another pairing tells more about its two ends. A link
    that fails again, between nodes that are well otherwise, does not delay the round.
    """
    was, first = document.faults, document.participants[0]
    # Check the records, not this node's options: the leader may be the only node without them.
    dials = {node: it for node in document.participants if (it := records[node].dials)}
    failed = [(node, it.partner) for node, it in dials.items() if it.why]
    cut = [(node, first) for node, it in dials.items() if it.unreached]
    if not (failed or cut):
        return Verdict(True, still_not_to_host(was))
    # Links have a direction, because a link may fail only if one of its ends dials.
    passed = {(node, it.partner) for node, it in dials.items() if it.partner and not it.why}
    here = {*document.participants}
    known = [link for link in was.links if link not in passed and here.issuperset(link)]
    fresh = [link for link in failed if link not in known]
    links = [*known, *fresh]
    blind = [pair for pair in was.blind if pair not in cut and here.issuperset(pair)]
    blind += cut
    now = {it for pair in (*failed, *cut) for it in pair}
    out = _at_fault(links, blind, now, was.rounds > 0)
    if not (cut or out) and (not fresh or was.rounds >= _MOST_ROUNDS):
        kept = Faults(links=tuple(failed[-_LINKS_KEPT:]), not_to_host=was.not_to_host)
        return Verdict(True, kept, tuple(failed))
    faults = Faults(
        links=_without(out, links)[-_LINKS_KEPT:],
        rounds=was.rounds + 1,
        out=tuple((node, _reason(of, records)) for node, of in out.items())[:_OUT_KEPT],
        not_to_host=_not_to_host(document, dials, out),
        blind=_without(out, blind)[-_LINKS_KEPT:],
    )
    return Verdict(False, faults, tuple(dict.fromkeys((*failed, *cut))))


def _not_to_host(
    document: RoundDocument, dials: Mapping[str, Dials], out: Mapping[str, object]
) -> tuple[str, ...]:
    """The nodes that must not be rank 0 of the next round, because others could not dial them."""
    not_to_host, first = document.faults.not_to_host, document.participants[0]
    dialled = {node: it.unreached for node, it in dials.items() if it.first and node not in out}
    blind = [node for node, why in dialled.items() if why]
    nobody = len(blind) == len(dialled)
    if not blind or first in out or (out and not nobody):
        return not_to_host
    # A node that cannot dial this rank 0 can usually not be dialled by it either.
    not_to_host = tuple(dict.fromkeys((*not_to_host, first, *(() if nobody else blind))))
    if {*document.participants} <= {*not_to_host}:
        not_to_host = (first,)  # Each node has been rank 0.
    return not_to_host[-_LINKS_KEPT:]


def still_not_to_host(faults: Faults) -> Faults:
    """The faults of a running round that count for the next round."""
    return Faults(not_to_host=faults.not_to_host) if faults.not_to_host else NO_FAULTS


def _without(out: Mapping[str, object], pairs: Sequence[Link]) -> tuple[Link, ...]:
    return tuple(pair for pair in pairs if not {*pair} & out.keys())


def _at_fault(
    links: Sequence[Link], blind: Sequence[Link], now: Collection[str], sure: bool
) -> dict[str, list[str]]:
    """The nodes that failed with several others, and with which: the fewest nodes that explain all.

    A rank 0 that cannot be dialled may be well otherwise, so that counts only against the node that
    dialled. If both ends of a link failed with equally many others, either may be well: the next
    pairing tells, and after that pairing a node is named anyway.

    Args:
        links: pairs of nodes that could not exchange data.
        blind: pairs (a node, the rank 0 that it could not dial).
        now: nodes for which something failed in this round.
        sure: another pairing has been tried.
    """
    out: dict[str, list[str]] = {}
    while True:
        others: dict[str, set[str]] = {}
        left = _without(out, links), _without(out, blind)
        for one, other in left[0]:
            others.setdefault(one, set()).add(other)
            others.setdefault(other, set()).add(one)
        for one, other in left[1]:
            others.setdefault(one, set()).add(other)
        counts = {node: len(of) for node, of in others.items() if node in now}
        most = max(counts.values(), default=0)
        if most < _SEVERAL:
            return out
        top = {node for node, times in counts.items() if times == most}
        if not sure and any(top.issuperset(pair) for pair in (*left[0], *left[1])):
            return out
        node = max(top)
        out[node] = sorted(others[node])


def _reason(others: Sequence[str], records: Mapping[str, NodeRecord]) -> str:
    return f"network: no data passed between this node and {_listed(labels(records, others))}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def pause(faults: Faults, rules: Rules) -> float:
    """Seconds until the next round after a failed check, because it may fail at once too."""
    if faults.rounds < 2:
        return 0.0
    return min(rules.interval * 2.0 ** min(faults.rounds - 2, _MOST_DOUBLINGS), rules.lease)


def able_to_host(
    document: RoundDocument, records: Mapping[str, NodeRecord], chosen: Collection[str]
) -> Mapping[str, NodeRecord]:
    """The records for giving ranks: an unreached node becomes rank 0 only if no other node can."""
    if not document.faults.not_to_host:
        return records
    others = [node for node in chosen if node not in document.faults.not_to_host]
    able = [node for node in others if records[node].can_host] or others
    return {**records, **{node: replace(records[node], can_host=node in able) for node in chosen}}


def _pairs(links: Sequence[Link], records: Mapping[str, NodeRecord]) -> list[str]:
    pairs = dict.fromkeys(tuple(sorted(link)) for link in links)
    return [" and ".join(labels(records, pair)) for pair in pairs]


def sentence(document: RoundDocument, records: Mapping[str, NodeRecord]) -> str:
    """The part about the network in a run's sentence; empty: there is none."""
    faults = document.faults
    parts = [
        f"no data passes between {_listed(_pairs(faults.links, records))}" if faults.links else "",
        f"{_listed([' cannot dial '.join(labels(records, it)) for it in faults.blind])} as rank 0"
        if faults.blind
        else "",
    ]
    return "; ".join(filter(None, parts))


def remark(document: RoundDocument, records: Mapping[str, NodeRecord], runs: bool) -> str:
    """Which links failed in a round, each with its endpoint, and what to do."""
    dials = [(records[node].label, it) for node, it in _dials(document, records)]
    said = [text for label, it in dials for text in _failures(label, it)]
    what = "runs all the same" if runs else "does not run"
    return (
        f"round {document.round} {what}: {'; '.join(said[:_SHOWN])}"
        f"{f' and {len(said) - _SHOWN} more' if len(said) > _SHOWN else ''}. Check the network and "
        "the firewalls between these hosts, and their --local-addr"
    )


def own_findings(record: NodeRecord) -> str:
    """The peers that a node could not reach when it last confirmed a rank, for its log."""
    dials = record.dials
    return "; ".join(_failures("this node", dials)) if dials is not None else ""


def _failures(label: str, dials: Dials) -> list[str]:
    said = [f"{label} could not exchange data with {dials.why}"] if dials.why else []
    return said + ([f"{label} could not dial {dials.unreached}"] if dials.unreached else [])


def slow(document: RoundDocument, records: Mapping[str, NodeRecord]) -> str:
    """The nodes with slow exchanges of data (over twice the median), for people; empty: none."""
    dials = [(node, it) for node, it in _dials(document, records) if it.partner and not it.why]
    if len(dials) < 3:
        return ""
    usual = sorted(it.seconds for _, it in dials)[len(dials) // 2]
    late = [(node, it) for node, it in dials if it.seconds > max(_SLOW * usual, _LEAST_SECONDS)]
    if not late:
        return ""
    late.sort(key=lambda pair: -pair[1].seconds)
    said = [
        f"{' and '.join(labels(records, (node, it.partner)))} in {it.seconds:.2f} s"
        for node, it in late
    ]
    return f"data passed slowly between {_listed(said)}; the median of all is {usual:.2f} s"


def _dials(document: RoundDocument, records: Mapping[str, NodeRecord]) -> list[tuple[str, Dials]]:
    """The findings of this round's participants, as far as their records are known."""
    return [
        (node, record.dials)
        for node in document.participants
        if (record := records.get(node)) is not None
        and record.dials is not None
        and record.world_id == document.world_id
    ]
