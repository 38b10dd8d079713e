"""Growth: when a running round ends for newcomers, and how long a round waits for more nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv_plugins.protocol.documents import Phase, RoundDocument
from rdzv_plugins.protocol.policies.policy import Policy, Reason
from rdzv_plugins.protocol.rules import Rules, View

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

GROWTH = ("grow", "min_uptime", "resize_interval")
"""The options that may keep newcomers waiting, as in ``--rdzv-conf``."""


class Growth(Policy):
    """Rule: last call. Rule: growth."""

    def hold(self, view: View, at: Situation) -> Reason | None:
        if at.document.phase is Phase.FORMING:
            left = last_call_seconds(view.rules, at.document, at.size) - (view.enough_for or 0.0)
            return Reason(seconds=left) if left > 0 else None
        return why_not_grow(view, at, at.may_grow or _has_saved(at.document))

    def delays(self, view: View, document: RoundDocument) -> bool:
        rules = view.rules
        return rules.grow != "now" or rules.min_uptime > 0 or rules.resize_interval > 0


def _has_saved(document: RoundDocument) -> bool:
    return document.saving is not None and document.saving.saved


def why_not_grow(view: View, at: Situation, permitted: bool) -> Reason | None:
    """Why the round does not end for newcomers; None: it may end. Rule: growth.

    ``permitted``: workers have said that now is a good moment.
    """
    rules, absent = view.rules, at.absent
    if at.document.resize or at.document.size <= len(absent):
        return None  # If all nodes are absent, newcomers disturb nobody.
    closed = rules.grow == "never" or (rules.grow == "checkpoint" and not permitted)
    if closed and not absent:
        return Reason(f"grow={rules.grow}")
    limits = [
        (rules.min_uptime - view.uptime, "to min_uptime"),
        (rules.resize_interval - view.grown_for, "to resize_interval"),
    ]
    if at.growth < at.room and not permitted:
        # The last call runs while the participants train.
        limits.append((rules.last_call_timeout - (view.enough_for or 0.0), "of last call left"))
    seconds, limit = max(limits)
    return Reason(seconds=seconds, limit=limit) if seconds > 0 else None


def last_call_seconds(rules: Rules, document: RoundDocument, size: int = 0) -> float:
    """Seconds that a forming round with enough nodes, ``size``, waits for more. Rule: growth.

    A restart waits only for replacements, until the round is as large as the last one, because new
    nodes were gathered while that round ran.
    """
    if document.round == 0:
        return rules.last_call_timeout
    cause = document.cause
    gone = cause.lost.count + cause.left.count + cause.evicted.count
    if gone == 0 or size >= len(document.previous) + gone:
        return 0.0
    given = rules.replacement_timeout
    return rules.last_call_timeout if given is None else given
