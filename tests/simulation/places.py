"""How many of some hosts a round may have, and which ranks: not as the code has it.

Written from docs/policies.md, so that a fault in the code under test shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rdzv_plugins.protocol.rules import Rules

__all__ = ["are_contiguous", "largest", "most"]


def largest(domains: Iterable[str | None], rules: Rules) -> int:
    """The largest round of nodes in these domains; 0: none."""
    hosts = Counter(domains)
    for size in range(min(rules.max_nodes, hosts.total()), rules.min_nodes - 1, -1):
        if size % rules.node_unit or size % rules.segment:
            continue
        segments = sum(
            count // rules.segment
            for domain, count in hosts.items()
            if rules.segment == 1 or domain is not None
        )
        if segments * rules.segment >= size:
            return size
    return 0


def most(rules: Rules) -> int:
    """The largest round of all."""
    return largest(["anywhere"] * rules.max_nodes, rules)


def are_contiguous(domains: Sequence[str]) -> bool:
    """Whether each domain is one piece of these, at each level."""
    for depth in range(1, 1 + max((domain.count("/") + 1 for domain in domains), default=0)):
        seen: list[str] = []
        for domain in domains:
            part = "/".join(domain.split("/")[:depth])
            if part in seen[:-1]:
                return False
            if part not in seen:
                seen.append(part)
    return True
