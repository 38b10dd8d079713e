"""A node's own checks of whether it may join, run before it asks for a round.

`gate` runs them one after the other, each within a time limit. `command` runs the user's command;
`gpu`, `disk` and `network` are this package's checks. Other checks are entry points in the group
``rdzv_plugins.health``: callables without arguments that return None, or why the node is unfit.
Nothing here imports torch or knows the protocol.
"""

from rdzv_plugins.health.gate import SHIPPED, Gate, gate_of, refuse_unknown_checks

__all__ = ["SHIPPED", "Gate", "gate_of", "refuse_unknown_checks"]
