"""How many nodes a round may have: ``--nnodes``, in whole units and segments.

A *unit* is ``node_unit`` nodes, wherever they are; a *segment* is ``segment`` nodes of one domain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument
from rdzv_plugins.protocol.rules import Rules


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many nodes a round may have: ``--nnodes``, and the options of the run."""

    min_nodes: int
    max_nodes: int
    node_unit: int = 1
    segment: int = 1

    @classmethod
    def of(cls, rules: Rules) -> Sizes:
        # Use this node's own rules: records of other nodes are not trusted.
        unit, segment = max(1, rules.node_unit), max(1, rules.segment)
        return cls(rules.min_nodes, rules.max_nodes, unit, segment)

    @classmethod
    def as_stored(cls, document: RoundDocument, leader: NodeRecord | None) -> Sizes:
        """The sizes, read from the document and the leader's record."""
        return cls.of(Rules.as_stored(document, leader))

    @property
    def step(self) -> int:
        """The number of which each size is a multiple."""
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
    def constraints(self) -> str:
        """The options that may keep nodes waiting, for people; "": none."""
        options = {"node_unit": self.node_unit, "segment": self.segment}
        return " and ".join(f"{name}={value}" for name, value in options.items() if value > 1)

    @property
    def demand(self) -> str:
        """Such as "node_unit=4 demands"."""
        return f"{self.constraints} demand{'' if ' and ' in self.constraints else 's'}"

    def refuse_if_impossible(self) -> None:
        """Raises `ValueError` if no round can ever form."""
        if self.least > self.most:
            raise ValueError(
                f"--nnodes={self.min_nodes}:{self.max_nodes} allows no multiple of {self.step} "
                f"nodes, as {self.demand}: change one of them"
            )


def world_size(nodes: Collection[str], records: Mapping[str, NodeRecord], sizes: Sizes) -> int:
    """How many of these nodes a round would take; 0: too few for one."""
    count = len(nodes)
    if sizes.segment > 1:
        count = sum(here - here % sizes.segment for here in in_domains(nodes, records).values())
    count = min(count, sizes.max_nodes)
    count -= count % sizes.step
    return count if count >= sizes.min_nodes else 0


def needed(nodes: Collection[str], records: Mapping[str, NodeRecord], sizes: Sizes) -> int:
    """How many more nodes a round needs at least."""
    if sizes.segment == 1:
        return max(0, sizes.least - len(nodes))
    segment, counts = sizes.segment, in_domains(nodes, records).values()
    lacking = max(0, sizes.least // segment - sum(here // segment for here in counts))
    gaps = sorted(segment - here % segment for here in counts if here % segment)
    return sum([*gaps, *[segment] * lacking][:lacking])


def in_domains(nodes: Iterable[str], records: Mapping[str, NodeRecord]) -> Mapping[str, int]:
    """How many of the nodes each domain has; a node without a domain or record has no segment."""
    found = (record.domain for node in nodes if (record := records.get(node)) is not None)
    return Counter(domain for domain in found if domain is not None)
