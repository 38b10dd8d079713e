"""Policies: who is in a round, and when a run changes its size. Each policy is one file.

A policy answers some of the questions of `policy.Policy`. `situation` and `decide` know no policy:
they ask all of `POLICIES`, in that order, by the functions of this module. See docs/policies.md and
docs/writing-a-policy.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument
from rdzv_plugins.protocol.policies.checkpoint import Checkpoint
from rdzv_plugins.protocol.policies.growth import Growth
from rdzv_plugins.protocol.policies.kept_out import KeptOut
from rdzv_plugins.protocol.policies.network import Network
from rdzv_plugins.protocol.policies.no_progress import NoProgress
from rdzv_plugins.protocol.policies.policy import NOTHING, Again, Policy, Reason, Stage
from rdzv_plugins.protocol.policies.quarantine import Quarantine
from rdzv_plugins.protocol.policies.ranks import Ranks
from rdzv_plugins.protocol.policies.selection import Selection
from rdzv_plugins.protocol.rules import Action, Failure, View

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

__all__ = [
    "POLICIES",
    "chosen",
    "delays",
    "holds",
    "judged",
    "keeps_out",
    "leaves",
    "not_admitted",
    "noted",
]

POLICIES: tuple[Policy, ...] = (
    KeptOut(),
    NoProgress(),
    Quarantine(),
    Network(),
    Checkpoint(),
    Growth(),
    Selection(),
    Ranks(),
)
"""All are asked, in this order: the first answer to `hold`, `judge` or `leave` counts; `keep_out`
and `admit` add up; `choose` and `note` change what the policy before them returned.
"""


def keeps_out(
    document: RoundDocument, records: Mapping[str, NodeRecord], now: float
) -> Mapping[str, Reason]:
    """The nodes that no round may name."""
    found = NOTHING
    for policy in POLICIES:
        if more := policy.keep_out(document, records, now):
            found = {**more, **found}
    return found


def not_admitted(at: Situation, nodes: Collection[str]) -> Mapping[str, Reason]:
    """Which of these nodes the next round does not take, and why."""
    found = NOTHING
    for policy in POLICIES:
        if nodes and (more := policy.admit(at, nodes)):
            found = {**found, **more}
            nodes = [node for node in nodes if node not in more]
    return found


def chosen(at: Situation) -> Sequence[str]:
    """The participants of the round that forms, in rank order."""
    nodes: Sequence[str] = [*at.ready]
    for policy in POLICIES:
        nodes = policy.choose(at, nodes)
    return nodes


def holds(view: View, at: Situation) -> Reason | None:
    """Why the round waits for nodes, or nodes for a round; None: they wait for nothing."""
    answers = (policy.hold(view, at) for policy in POLICIES)
    return next((it for it in answers if it is not None), None)


def judged(view: View, at: Situation, stage: Stage) -> Action | Again | None:
    """The action that a policy demands first; None: there is none."""
    answers = (policy.judge(view, at, stage) for policy in POLICIES)
    return next((it for it in answers if it is not None), None)


def noted(view: View, at: Situation, after: RoundDocument) -> RoundDocument:
    """The document to write, after each policy has added its fields."""
    for policy in POLICIES:
        after = policy.note(view, at, after)
    return after


def delays(view: View, document: RoundDocument) -> bool:
    """Whether this node, which came while a round runs, may have to wait for long."""
    return any(policy.delays(view, document) for policy in POLICIES)


def leaves(view: View, document: RoundDocument) -> Failure | None:
    """Why this node, which asks for a round, gives up; None: it does not."""
    answers = (policy.leave(view, document) for policy in POLICIES)
    return next((it for it in answers if it is not None), None)
