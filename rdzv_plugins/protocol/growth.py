"""When a running round is ended for newcomers, and how long a round waits for more nodes."""

from __future__ import annotations

from dataclasses import dataclass

from rdzv_plugins.protocol.documents import RoundDocument
from rdzv_plugins.protocol.rules import Rules, View

__all__ = ["GROWTH", "Hold", "hold", "holds_newcomers", "last_call"]

GROWTH = ("grow", "min_uptime", "resize_interval")
"""The options that may keep newcomers waiting, as in ``--rdzv-conf``."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Why newcomers wait though a running round has room for them.

    Attributes:
        why: the option that holds them, where no time ends it.
        seconds: until it lets them in; None: until somebody says so.
        limit: what ends then, as in `words.Diagnosis`.
    """

    why: str = ""
    seconds: float | None = None
    limit: str = ""


def hold(view: View, newcomers: int, room: int, permitted: bool, lost: int = 0) -> Hold | None:
    """The reason not to end the round for newcomers; None: there is none. Rule: growth.

    Args:
        newcomers: how many would be let in.
        room: for how many the round has room at most.
        permitted: workers have said that now is a good moment.
        lost: how many nodes of the round are lost, without which it goes on
            (restart_on_loss=false). If all are, newcomers disturb nobody.
    """
    rules, document = view.rules, view.document
    if document is not None and (document.resize or document.size <= lost):
        return None
    held = rules.grow == "never" or (rules.grow == "checkpoint" and not permitted)
    if held and not lost:
        return Hold(f"grow={rules.grow}")
    limits = [
        (rules.min_uptime - view.uptime, "to min_uptime"),
        (rules.resize_interval - view.grown_for, "to resize_interval"),
    ]
    if newcomers < room and not permitted:
        # The last call, while the others train.
        limits.append((rules.last_call - (view.enough_for or 0.0), "of last call left"))
    seconds, limit = max(limits)
    return Hold(seconds=seconds, limit=limit) if seconds > 0 else None


def holds_newcomers(rules: Rules) -> bool:
    """Whether newcomers may have to wait for longer than a last call, as spares do."""
    paced = rules.grow != "now" or rules.min_uptime > 0 or rules.resize_interval > 0
    return paced or rules.node_unit > 1 or rules.segment > 1


def last_call(rules: Rules, document: RoundDocument, size: int = 0) -> float:
    """Seconds that a forming round with enough nodes waits for more. Rule: growth.

    A restart waits only for replacements, until it is as large as the last round. Those who are new
    were gathered while that ran.

    Args:
        size: how many nodes the round would have now.
    """
    if document.round == 0:
        return rules.last_call
    cause = document.cause
    gone = cause.lost.count + cause.left.count + cause.evicted.count
    if gone == 0 or size >= len(document.previous) + gone:
        return 0.0
    return rules.last_call if rules.replacement is None else rules.replacement
