"""Which of the nodes that are ready make the next round: whole units, segments and domains.

A *unit* is ``node_unit`` nodes, wherever they are; a *segment* is ``segment`` nodes of one domain.
A round has whole units and whole segments only. Who is left over waits as a spare.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument
from rdzv_plugins.protocol.ranks import by_domain, domain_key, old_places
from rdzv_plugins.protocol.rules import Rules

__all__ = ["Sizes", "choose", "needed", "world_size"]

_IN_POLICY = re.compile(r"(?:^|,)(node_unit|segment)=(\d{1,9})(?=,|$)")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many nodes a round may have.

    Attributes:
        min_nodes, max_nodes: ``--nnodes``.
        node_unit, segment: the options of the run.
    """

    min_nodes: int
    max_nodes: int
    node_unit: int = 1
    segment: int = 1

    @classmethod
    def of(cls, rules: Rules) -> Sizes:
        return cls(rules.min_nodes, rules.max_nodes, rules.node_unit, rules.segment)

    @classmethod
    def told(cls, document: RoundDocument, leader: NodeRecord | None) -> Sizes:
        """As somebody knows them who has the document and the leader's record only."""
        policy = leader.policy if leader is not None else ""
        options = {name: max(1, int(value)) for name, value in _IN_POLICY.findall(policy)}
        return cls(document.min_nodes, document.max_nodes, **options)

    @property
    def step(self) -> int:
        """Each size is a multiple of this."""
        return math.lcm(self.node_unit, self.segment)

    @property
    def least(self) -> int:
        """The smallest size; above ``most`` if there is none."""
        return -(-self.min_nodes // self.step) * self.step

    @property
    def most(self) -> int:
        """The largest size; below ``least`` if there is none."""
        return self.max_nodes - self.max_nodes % self.step

    @property
    def policy(self) -> str:
        """The options that hold nodes back, for people; "": none."""
        options = {"node_unit": self.node_unit, "segment": self.segment}
        return " and ".join(f"{name}={value}" for name, value in options.items() if value > 1)

    def refuse_if_impossible(self) -> None:
        """Raises `ValueError` if no round can ever form."""
        if self.least > self.most:
            raise ValueError(
                f"--nnodes={self.min_nodes}:{self.max_nodes} allows no multiple of {self.step} "
                f"nodes, as {self.policy} demands: change one of them"
            )


def world_size(nodes: Collection[str], records: Mapping[str, NodeRecord], sizes: Sizes) -> int:
    """How many of these nodes a round would take; 0: they are too few for one."""
    count = len(nodes)
    if sizes.segment > 1:
        count = sum(here - here % sizes.segment for here in _counts(nodes, records).values())
    count = min(count, sizes.max_nodes)
    count -= count % sizes.step
    return count if count >= sizes.min_nodes else 0


def needed(nodes: Collection[str], records: Mapping[str, NodeRecord], sizes: Sizes) -> int:
    """How many more nodes a round needs at least, besides these."""
    if sizes.segment == 1:
        return max(0, sizes.least - len(nodes))
    segment, counts = sizes.segment, _counts(nodes, records).values()
    lacking = max(0, sizes.least // segment - sum(here // segment for here in counts))
    gaps = sorted(segment - here % segment for here in counts if here % segment)
    return sum([*gaps, *[segment] * lacking][:lacking])


def _counts(nodes: Iterable[str], records: Mapping[str, NodeRecord]) -> Mapping[str, int]:
    """How many of the nodes each domain has; who has none, or no record, is in no segment."""
    found = (record.domain for node in nodes if (record := records.get(node)) is not None)
    return Counter(domain for domain in found if domain is not None)


def choose(
    document: RoundDocument,
    survivors: Sequence[str],
    newcomers: Sequence[str],
    records: Mapping[str, NodeRecord],
    rules: Rules,
) -> list[str]:
    """The participants of the next round, in no particular order.

    Survivors come before newcomers. Where domains count, what is taken is whole segments: those
    with the most survivors first, then those with replacements of nodes that their domain has
    lost, then whole domains, the largest first.

    Args:
        document: the forming round.
        survivors: nodes of the last round that are ready, in their old rank order.
        newcomers: the others that are ready, in their natural order.
        records: of all nodes; those that are gone may be among them.
    """
    ready = [*survivors, *newcomers]
    size = world_size(ready, records, Sizes.of(rules))
    if not rules.minds_domains or size == len(ready):
        return ready[:size]
    lost = old_places(document, records).keys() - {*survivors}
    vacant = _counts(lost, records)
    segment, room = rules.segment, size // rules.segment
    wanted: list[tuple[int, int, Any, int, list[str]]] = []
    fresh: dict[str | None, list[list[str]]] = {}
    stay = Counter(records[node].domain for node in survivors)
    for domain, nodes in by_domain(ready, records).items():
        if domain is None and segment > 1:
            continue
        kept = stay[domain]
        filled = kept + (vacant.get(domain, 0) if domain is not None else 0)
        for first in range(0, len(nodes) - len(nodes) % segment, segment):
            old = min(max(kept - first, 0), segment)
            back = min(max(filled - first, 0), segment) - old
            part = nodes[first : first + segment]
            if old or back:
                wanted.append((-old, -back, domain_key(domain), first, part))
            else:
                fresh.setdefault(domain, []).append(part)
    wanted.sort()
    taken = [part for *_, part in wanted[:room]]
    begun = {records[part[0]].domain for part in taken}
    # Whole domains first, those that are in the round already before all.
    rest = sorted(
        fresh.items(), key=lambda it: (it[0] not in begun, -len(it[1]), domain_key(it[0]))
    )
    left = []
    for _, parts in rest:
        if len(taken) + len(parts) <= room:
            taken += parts
        else:
            left += parts
    taken += left[: room - len(taken)]
    return [node for part in taken for node in part]
