"""The questions that a policy may answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument
from rdzv_plugins.protocol.rules import Action, Failure, View

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation


class Reason(msgspec.Struct, frozen=True):
    """Why a policy keeps a node out of a round, or makes a round wait.

    Attributes:
        why: for people; empty: no sentence tells of it.
        seconds: until it ends by itself; None: it ends when something else changes.
        limit: what ends then, as in `words.Diagnosis`.
        cause: the field of `documents.Cause` that names the nodes kept out for this reason.
    """

    why: str = ""
    seconds: float | None = None
    limit: str = ""
    cause: str = ""


NOTHING: Mapping[str, Reason] = {}
"""The answer of a policy that keeps no node out."""


class Again(msgspec.Struct, frozen=True):
    """The verdict that a confirmed round must not run, and that another round forms.

    ``document`` has what the policy found. The next round may form ``seconds`` after its write.
    """

    document: RoundDocument
    seconds: float = 0.0


class Stage(Enum):
    """When a leader asks a policy for its verdict."""

    BEFORE_ALL = auto()
    """In any phase: the leader has all records, and has decided nothing yet."""
    TOO_FEW = auto()
    """A round forms, too few nodes are ready, and no node of the last round is awaited."""
    BEFORE_RUNNING = auto()
    """All participants have confirmed their rank: the leader would let the round run now."""


class Policy:
    """A policy overrides the questions that it has an opinion on; the answers here are no opinion.

    The leader asks, with the `situation.Situation` of the run. Every node asks `delays` and
    `leave`, with the document and its own record. All answers must be pure functions, and cheap
    unless the option of the policy is set: a leader of 10,000 nodes asks at each decision.

    A property of the host alone, such as its memory, needs no policy: it is a check in
    `rdzv_plugins.health`.
    """

    def keep_out(
        self, document: RoundDocument, records: Mapping[str, NodeRecord], now: float
    ) -> Mapping[str, Reason]:
        """Nodes that no round may name. A round that names such a node ends without waiting for it.

        This method has no options. A limit on nodes that ask is for `admit`: it has ``at.rules``.
        """
        return NOTHING

    def admit(self, at: Situation, nodes: Collection[str]) -> Mapping[str, Reason]:
        """Which of these asking nodes the next round does not take, and why. They wait."""
        return NOTHING

    def choose(self, at: Situation, nodes: Sequence[str]) -> Sequence[str]:
        """The participants in rank order, out of ``nodes``: the ready nodes, or an earlier choice.

        The last policy leaves `Situation.size` nodes. Asked once, when ranks are given.
        """
        return nodes

    def hold(self, view: View, at: Situation) -> Reason | None:
        """Why waiting nodes do not come in yet, or why a round that has enough nodes waits."""
        return None

    def judge(self, view: View, at: Situation, stage: Stage) -> Action | Again | None:
        """The action to do first; or `Again` if a round that would run must not."""
        return None

    def note(self, view: View, at: Situation, after: RoundDocument) -> RoundDocument:
        """The document to write instead of ``after``, with the fields that the policy keeps."""
        return after

    def delays(self, view: View, document: RoundDocument) -> bool:
        """Whether this node, which came while a round runs, may wait for longer than a last call.

        The node is then a spare, and its join does not time out while that round runs.
        """
        return False

    def leave(self, view: View, document: RoundDocument) -> Failure | None:
        """Why this node, which asks for a round, gives up; None: it does not."""
        return None
