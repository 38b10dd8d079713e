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
    """Why a policy keeps a node out of a round, or has a round wait.

    Attributes:
        why: for people; empty: no sentence tells of it.
        seconds: until it ends by itself; None: when something else changes.
        limit: what ends then, as in `words.Diagnosis`.
        cause: the field of `documents.Cause` that names the nodes which it took out of a round.
    """

    why: str = ""
    seconds: float | None = None
    limit: str = ""
    cause: str = ""


NOTHING: Mapping[str, Reason] = {}
"""The answer of a policy that keeps nobody out."""


class Again(msgspec.Struct, frozen=True):
    """The verdict that a confirmed round must not run, and that another one is to form.

    Attributes:
        document: the round, with what the policy has found.
        seconds: the age of the document at which the other one may form.
    """

    document: RoundDocument
    seconds: float = 0.0


class Moment(Enum):
    """When a leader asks a policy for its verdict."""

    BEFORE_ALL = auto()
    """It has all records, and has decided nothing yet; in any phase."""
    TOO_FEW = auto()
    """A round forms, the nodes that are ready are too few, and nobody of the last is awaited."""
    NAMES = auto()
    """It would give ranks now."""
    RUNS = auto()
    """All participants have confirmed their rank: it would let the round run now."""


class Policy:
    """A policy answers what it has an opinion on; each answer here is to have none.

    The leader asks, by the `situation.Situation` of the run; only `delays` and `leave` are asked by
    every node, which knows the document and its own record. All must be pure, and cheap where the
    option of the policy is not set: a leader of 10,000 nodes asks at each decision.
    """

    def keep_out(
        self, document: RoundDocument, records: Mapping[str, NodeRecord], now: float
    ) -> Mapping[str, Reason]:
        """The nodes that no round may have. A round that has one ends, and nobody waits for it.

        Args:
            now: the time on the wall clock of who asks, in seconds since the epoch.
        """
        return NOTHING

    def admit(self, at: Situation, nodes: Collection[str]) -> Mapping[str, Reason]:
        """Which of these nodes the next round does not take, and why. They wait.

        Args:
            nodes: the live nodes that ask for the round which forms, or that wait while one runs.
        """
        return NOTHING

    def choose(self, at: Situation, nodes: Sequence[str]) -> Sequence[str]:
        """The participants, of the nodes that are ready or that the policy before it has chosen.

        As many as `Situation.size` in the end, in rank order. Asked once, when ranks are given.
        """
        return nodes

    def hold(self, view: View, at: Situation) -> Reason | None:
        """Why nodes that wait do not come in yet, or why a round that has enough waits for more."""
        return None

    def judge(self, view: View, at: Situation, moment: Moment) -> Action | Again | None:
        """The action that is to be done first; or, when a round would run, that it must not."""
        return None

    def note(self, view: View, at: Situation, after: RoundDocument) -> RoundDocument:
        """The document to write instead of ``after``: with what the policy keeps in it."""
        return after

    def delays(self, view: View, document: RoundDocument) -> bool:
        """Whether this node, which came while a round runs, may wait for longer than a last call.

        It is a spare then, and its join has no limit of time while that round runs.
        """
        return False

    def leave(self, view: View, document: RoundDocument) -> Failure | None:
        """Why this node, which asks for a round, is to give up."""
        return None
