"""What a seed stands for: a run's settings, its network, and the faults that will befall it.

All times are virtual seconds; the keep-alive interval is one of them. Each seed draws from a few
kinds of fault only, so that each kind also meets runs in which little else goes wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rdzv_plugins.decisions import Rules

__all__ = ["FASTEST", "KINDS", "LONG_JOIN", "QUIET_AFTER", "SLOWEST", "Fault", "Plan"]

FASTEST, SLOWEST = 2.0, 0.5
"""Rates of the hosts' clocks against virtual time."""

QUIET_AFTER = 20.0
"""When faults stop."""

LONG_JOIN = 600.0
"""Torch's default for ``join_timeout``, in seconds of a host's clock."""

KINDS = {
    "crash": 3,
    "crash, then restart as a newcomer": 3,
    "stall": 4,
    "stall with the clock standing still": 1,
    "leave": 3,
    "worker failure": 4,
    "newcomer": 4,
    "partition": 3,
    "outage": 2,
    "slow store": 2,
    "amnesia": 2,
    "clock changes its rate": 1,
    "newcomer with other --nnodes": 1,
    "close": 1,
    "close, then resubmit": 1,
}
"""Kinds of planned faults and their weights."""

_MOST_KINDS = 6
_AMBUSHES = (
    "crash",
    "crash, then restart as a newcomer",
    "stall",
    "leave",
    "worker failure",
    "partition",
    "amnesia",
    "amnesia",
)


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Drawn by `draw`, the same for the same seed.

    Attributes:
        nodes: hosts that start the run, within ``arrival`` seconds.
        rates: range of the clocks' rates.
        latency: longest one-way time of a request in quiet times.
        lost, unacknowledged, late: chance that a request is lost, that it is done without its
            answer arriving, that it is done after its sender gave up.
        staleness: how much older than its answer a listing may be.
        poll: how long a waiter may take to notice a change; 0: the store pushes.
        stop: longest time that an agent takes to stop its workers.
        ambush: kind of a fault that is apt to come just when a document is written; None: none is.
        join_timeout: of the nodes that start while there are faults.
        rejoins: chance that an agent whose join failed asks again instead of exiting.
    """

    seed: int
    rules: Rules
    nodes: int
    arrival: float
    rates: tuple[float, float]
    latency: float
    request_timeout: float
    lost: float
    unacknowledged: float
    late: float
    staleness: float
    poll: float
    stop: float
    join_timeout: float
    rejoins: float
    ambush: str | None
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int, most_nodes: int) -> Plan:
        chance = random.Random(seed)
        # Few hosts get into as much trouble as many, in less time.
        fewest, usual = (1, 3) if most_nodes <= 12 else (most_nodes // 2, most_nodes)
        nodes = round(chance.triangular(fewest, most_nodes, usual))
        most = max(1, nodes + chance.choice((-2, -1, 0, 0, 0, 1, 2)))
        least = chance.choice((1, max(1, most // 2), max(1, most - 1), most))
        intervals = chance.choice((2, 3, 3, 3, 4, 6))
        rules = Rules(
            min_nodes=min(least, nodes),
            max_nodes=most,
            lease=float(intervals),
            interval=1.0,
            last_call=chance.choice((0.0, 0.2, 1.0, 3.0)),
            restart_on_loss=chance.random() < 0.75,
            rank_order=chance.choice(("natural", "stable", "hint")),
        )
        # A lease tells slow from dead only while it is longer than the slowest clock's beats.
        spread = min(FASTEST / SLOWEST, 0.8 * intervals / 1.1)
        slowest = chance.uniform(SLOWEST, FASTEST / spread)
        rates = (slowest, slowest * spread) if chance.random() < 0.6 else (1.0, 1.0)

        def sometimes(share: float, low: float, high: float) -> float:
            return chance.uniform(low, high) if chance.random() < share else 0.0

        return cls(
            seed=seed,
            rules=rules,
            nodes=nodes,
            arrival=chance.choice((0.0, 0.5, 5.0)),
            rates=rates,
            latency=chance.choice((0.001, 0.01, 0.05)),
            request_timeout=chance.choice((1.0, 3.0)),
            lost=sometimes(0.3, 0.005, 0.1),
            unacknowledged=sometimes(0.3, 0.005, 0.1),
            late=sometimes(0.2, 0.005, 0.05),
            staleness=sometimes(0.25, 0.05, 0.5),
            poll=sometimes(0.25, 0.05, 0.5),
            stop=chance.choice((0.05, 0.5, 4.0)),
            join_timeout=chance.choice((LONG_JOIN, LONG_JOIN, LONG_JOIN, 25.0)),
            rejoins=chance.choice((0.0, 0.5)),
            ambush=chance.choice(_AMBUSHES) if chance.random() < 0.4 else None,
            faults=_faults(chance),
        )


def _faults(chance: random.Random) -> tuple[Fault, ...]:
    kinds = list(KINDS)
    weights = [KINDS[kind] for kind in kinds]
    drawn = set(chance.choices(kinds, weights, k=chance.randint(1, _MOST_KINDS)))
    chosen = [kind for kind in kinds if kind in drawn]
    # Close together they meet in the middle of one another's rounds.
    centres = [chance.uniform(0.0, QUIET_AFTER - 1) for _ in range(chance.randint(1, 5))]
    spread = chance.choice((0.05, 0.5, 3.0))
    faults = []
    for _ in range(chance.randint(1, 12)):
        at = chance.choice(centres) + chance.uniform(-spread, spread)
        faults.append(Fault(min(max(at, 0.0), QUIET_AFTER - 0.5), chance.choice(chosen)))
    return tuple(sorted(faults, key=lambda fault: fault.at))
