"""Selection: which ready nodes make the next round, in whole units and segments.

Nodes that are left over wait as spares. `sizes` says how many nodes a round takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument
from rdzv_plugins.protocol.policies.policy import Policy
from rdzv_plugins.protocol.policies.ranks import by_domain, domain_key, old_places, order_ranks
from rdzv_plugins.protocol.rules import Rules, View
from rdzv_plugins.protocol.sizes import Sizes, in_domains, world_size

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation


class Selection(Policy):
    """Rule: units and segments."""

    def delays(self, view: View, document: RoundDocument) -> bool:
        return view.rules.node_unit > 1 or view.rules.segment > 1

    def choose(self, at: Situation, nodes: Sequence[str]) -> Sequence[str]:
        document, records = at.document, at.records
        ready = {*nodes}
        survivors = [node for node in document.previous if node in ready]
        fresh = ready.difference(survivors)
        newcomers = order_ranks(fresh, records, (), at.rules.rank_order)
        return choose(document, survivors, newcomers, records, at.rules)


def choose(
    document: RoundDocument,
    survivors: Sequence[str],
    newcomers: Sequence[str],
    records: Mapping[str, NodeRecord],
    rules: Rules,
) -> list[str]:
    """The participants of the next round, in no particular order.

    Survivors come before newcomers. If domains matter, whole segments are taken: first those with
    the most survivors, then those with replacements of nodes that their domain has lost, then whole
    domains, the largest first. ``survivors`` are in their old rank order, ``newcomers`` in natural
    order.
    """
    ready = [*survivors, *newcomers]
    size = world_size(ready, records, Sizes.of(rules))
    if not rules.minds_domains or size == len(ready):
        return ready[:size]
    lost = old_places(document, records).keys() - {*survivors}
    vacant = in_domains(lost, records)
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
    # Whole domains first; domains that are in the round already come before all.
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
