"""What a seed stands for: a run's settings, its network, and the faults that will befall it.

All times are virtual seconds; the keep-alive interval is one of them. Each seed draws from a few
kinds of fault only, so that each kind also meets runs in which little else goes wrong.
"""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rdzv_plugins.protocol.rules import Rules

__all__ = [
    "AT_ONCE",
    "EPOCH",
    "EVERYTHING",
    "FAILURES",
    "FASTEST",
    "KINDS",
    "LINKS",
    "LONGEST_PAUSE",
    "ORDERS",
    "OTHER_SETTINGS",
    "QUIET_AFTER",
    "REFUSALS",
    "SKEW",
    "SLOWEST",
    "TORCH_TIMEOUT",
    "Fault",
    "Focus",
    "Plan",
    "settling",
]

FASTEST, SLOWEST = 2.0, 0.5
"""Rates of the hosts' clocks against virtual time."""

OTHER_SETTINGS = (0.5, 2.0)
"""The keep-alive interval and the lease of a host with other settings, in those of the run."""

EPOCH = 1.8e9
"""What wall clocks show when a seed begins."""

SKEW = 2.0
"""How far the wall clocks of hosts are off at most, in seconds."""

QUIET_AFTER = 20.0
"""When faults stop."""

TORCH_TIMEOUT = 60.0
"""How long torch's agent waits in its exchange of roles; 300 s, scaled."""

_PROBATION = 12.0
"""For how long a node is new to a run; 60 s, scaled."""

LONGEST_PAUSE = 4.0
"""How long a node at most waits until it is checked again; 60 s, scaled."""

KINDS = {
    "crash": 3,
    "crash, then restart as a newcomer": 3,
    "stall": 4,
    "stall with the clock standing still": 1,
    "leave": 3,
    "worker failure": 4,
    "workers succeed": 1,
    "abandoned join": 2,
    "wedged agent": 1,
    "newcomer": 4,
    "partition": 3,
    "grey host": 3,
    "outage": 2,
    "slow store": 2,
    "amnesia": 2,
    "fail-over": 2,
    "corrupt document": 1,
    "clock changes its rate": 1,
    "newcomer with other --nnodes": 1,
    "close": 1,
    "close, then resubmit": 2,
    "kill all, then resubmit": 1,
}
"""Kinds of planned faults and their weights."""

AT_ONCE = ("many crash at once", "many are late at once")
"""Kinds that befall a large part of a large world; runs of few hosts have none of them."""

ORDERS = ("drain", "drain", "restart", "resize", "exclude", "exclude", "include")
"""Kinds of orders from people, each as often as it is named."""

LINKS = ("cut off", "cut off", "unreachable", "hidden", "bad link", "bad link", "slow")
"""Kinds of faults between hosts, each as often as it is named."""

BREAKS = ("refuse", "refuse", "refuse", "hang", "break")
"""What befalls the links of hosts that live, each as often as it is named."""

REFUSALS = ("one", "one", "some", "all", "blind")
"""Which nodes the store refuses for a time, each as often as it is named.

"blind": one, which may write. Besides there is "mute": all, who may read.
"""

FAILURES = ("agent", "agent", "newcomer", "newcomer", "agents", "after a loss")
"""What fails though its run may go on, each as often as it is named: see `faults.fail`."""

_ANSWER = 0.5
"""As of a store that pushes."""
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
    "fail-over",
    "abandoned join",
    "grey host",
)


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """What plans are narrowed to, so that a rare combination comes often.

    Attributes:
        kinds: the only kinds of planned faults, each as often as it is named; none: all of them.
        settings: fields of `Plan` and of its `Rules` by name, that are not to be drawn.
        notices: whether each run is to save often.
    """

    kinds: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    notices: bool = False

    def __str__(self) -> str:
        """As options of ``python -m tests.simulation``."""
        given = [f"{name}={value!r}" for name, value in self.settings.items()]
        kinds = ["--kinds", *self.kinds] if self.kinds else []
        settings = ["--settings", *given] if given else []
        return shlex.join([*kinds, *settings, *(["--notices"] if self.notices else [])])


EVERYTHING = Focus()
"""Plans as they are drawn."""

UNSTEERED: Mapping[str, Any] = {
    "replacement_timeout": None,
    "min_uptime": 0.0,
    "resize_interval": 0.0,
    "grow": "now",
    "no_progress_rounds": 0,
    "checkpoints": (),
    "pace": 0.0,
    "save_timeout": 0.0,
    "notices": (),
    "step_timeout": 0.0,
    "hangs": (),
    "node_unit": 1,
    "segment": 1,
    "topology": False,
    "domains": (),
    "unfit": 0.0,
    "orders": (),
    "quarantine_after": 0,
    "network_check": False,
    "answer_timeout": None,
    "links": (),
    "breaks": (),
    "refusals": (),
    "outage_limit": math.inf,
    "failures": (),
    "torchrun": False,
    "failing": "one",
}
"""Settings without policies and without orders from people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Drawn by `draw`, the same for the same seed.

    Attributes:
        nodes: hosts that start the run, within ``arrival`` seconds.
        rates: range of the clocks' rates.
        latency: longest one-way time of a request in quiet times.
        lost, unacknowledged, late: chance that a request is lost, that it is done without its
            answer arriving, that it is done after its sender gave up.
        retries: chance that a client which cannot reach the store tries on within its time-out.
        staleness: how much older than its answer a listing may be.
        poll: how long a waiter may take to notice a change; 0: the store pushes.
        stop: longest time that an agent takes to stop its workers.
        max_restarts: torchrun's ``--max-restarts``.
        slow_master, no_master: chance that a TCPStore takes long to open, or cannot be opened.
        other_settings: chance that a host has another keep-alive interval and lease.
        cut_short: chance that a closer of a run dies between two of its requests.
        ambush: kind of a fault that is apt to come just when a document is written; None: none is.
        join_timeout: of the nodes that start while there are faults.
        rejoins: chance that an agent whose join failed asks again instead of exiting.
        relaunches: chance that a launcher starts an agent again that failed.
        strays_return: a node that is refused for its --nnodes is started again, again and again.
        stays_grey: a host whose listings fail stays so when the faults stop.
        writes_refused: its listings pass, and the store refuses it the document instead.
        pace: seconds that a step of the workers takes; 0: they tell no steps.
        notices: when a node is told to leave, and may have the run save first.
        hangs: when a worker does no further step.
        checkpoints: when a worker says that now is a good moment to let newcomers in.
        topology: whether ranks follow the domains, instead of the ``rank_order`` drawn.
        domains: where hosts are, one after the other; empty: they have no domain.
        unfit: chance that the check of a node fails that is about to ask for a round, until the
            faults stop.
        checks_restarts: nodes that were in a round are checked too.
        exits_unfit: a node whose check failed ends, and another is started in its place.
        orders: what people order, and when.
        links: what befalls the network between hosts, and when.
        breaks: what befalls the links of nodes that live, and when.
        without_links: chance that a host has no links in a run that has them.
        refusals: which nodes the store refuses, and when.
        one_stays_bad: one link stays bad when the faults stop.
        without_check: chance that a host has no network check in a run that has it.
        failures: whose agent fails, or whose workers fail though it is new, and when.
        torchrun: the workers of all fail with those of one, so that a newcomer whose workers fail
            again leaves; else as under ``rdzv run``.
        ending: how the run ends once it stands still: "succeeds", "fails", or "is left".
        failing: what fails then for good: the workers of "one" node, those of "all workers", or
            "all agents".
    """

    seed: int
    rules: Rules
    nodes: int
    arrival: float
    rates: tuple[float, float]
    latency: float
    lost: float
    unacknowledged: float
    late: float
    staleness: float
    poll: float
    stop: float
    max_restarts: int
    slow_master: float
    no_master: float
    other_settings: float
    cut_short: float
    join_timeout: float
    rejoins: float
    relaunches: float
    strays_return: bool
    stays_grey: bool
    ending: str
    ambush: str | None
    faults: tuple[Fault, ...]
    retries: float
    pace: float = 0.0
    notices: tuple[float, ...] = ()
    hangs: tuple[float, ...] = ()
    checkpoints: tuple[float, ...] = ()
    topology: bool = False
    domains: tuple[str, ...] = ()
    unfit: float = 0.0
    checks_restarts: bool = False
    exits_unfit: bool = False
    orders: tuple[Fault, ...] = ()
    links: tuple[Fault, ...] = ()
    refusals: tuple[Fault, ...] = ()
    breaks: tuple[Fault, ...] = ()
    without_links: float = 0.0
    one_stays_bad: bool = False
    without_check: float = 0.0
    failures: tuple[Fault, ...] = ()
    torchrun: bool = False
    failing: str = "one"
    writes_refused: bool = False

    @property
    def long_join(self) -> float:
        """A ``join_timeout``, on a host's clock, in which no run that can form fails to."""
        return (QUIET_AFTER + settling(self) + 5) * self.rates[1]

    @classmethod
    def draw(cls, seed: int, most_nodes: int, focus: Focus = EVERYTHING) -> Plan:
        chance = random.Random(seed)
        # Few hosts get into as much trouble as many, in less time.
        fewest, usual = (1, 3) if most_nodes <= 12 else (most_nodes // 2, most_nodes)
        nodes = round(chance.triangular(fewest, most_nodes, usual))
        most = max(1, nodes + chance.choice((-2, -1, 0, 0, 0, 1, 2)))
        least = chance.choice((1, max(1, most // 2), max(1, most - 1), most))
        intervals = chance.choice((2, 3, 3, 3, 4, 6))
        request_timeout = chance.choice((1.0, 3.0))
        rules = Rules(
            min_nodes=min(least, nodes),
            max_nodes=most,
            lease=float(intervals),
            interval=1.0,
            last_call_timeout=chance.choice((0.0, 0.2, 1.0, 3.0)),
            restart_on_loss=chance.random() < 0.75,
            rank_order=chance.choice(("natural", "stable", "hint")),
            request_timeout=request_timeout,
            rejoin_timeout=intervals * chance.choice((12.0, 30.0)),
            sweep_after=chance.choice((1.0, 3.0, 8.0)),
            abandoned_ttl=intervals * chance.choice((8.0, 40.0)),
            probation=_PROBATION,
        )
        # A lease tells slow from dead only while it is longer than the slowest clock's beats.
        spread = min(FASTEST / SLOWEST, 0.8 * intervals / 1.1)
        slowest = chance.uniform(SLOWEST, FASTEST / spread)
        rates = (slowest, slowest * spread) if chance.random() < 0.6 else (1.0, 1.0)

        def sometimes(share: float, low: float, high: float) -> float:
            return chance.uniform(low, high) if chance.random() < share else 0.0

        plan = cls(
            seed=seed,
            rules=rules,
            nodes=nodes,
            arrival=chance.choice((0.0, 0.5, 5.0)),
            rates=rates,
            latency=chance.choice((0.001, 0.01, 0.05)),
            lost=sometimes(0.3, 0.005, 0.1),
            unacknowledged=sometimes(0.3, 0.005, 0.1),
            late=sometimes(0.2, 0.005, 0.05),
            staleness=sometimes(0.25, 0.05, 0.5),
            poll=sometimes(0.25, 0.05, 0.5),
            stop=chance.choice((0.05, 0.5, 4.0)),
            max_restarts=chance.choice((0, 1, 100, 100, 100, 100)),
            slow_master=sometimes(0.2, 0.1, 0.6),
            no_master=sometimes(0.15, 0.1, 0.6),
            other_settings=sometimes(0.2, 0.1, 0.6),
            cut_short=sometimes(0.3, 0.1, 0.5),
            join_timeout=chance.choice((0.0, 0.0, 0.0, 25.0)),
            rejoins=chance.choice((0.0, 0.5)),
            relaunches=chance.choice((0.0, 0.5, 1.0)),
            strays_return=chance.random() < 0.7,
            stays_grey=chance.random() < 0.5,
            ending=chance.choice(("succeeds", "fails", "is left")),
            ambush=chance.choice(_ambushes(focus.kinds)) if chance.random() < 0.4 else None,
            faults=_faults(chance, focus.kinds),
            retries=chance.choice((0.0, 0.5, 1.0)),
        )
        # It has a source of its own: the other draws of a seed are as they were without it.
        inline = random.Random(f"roster of {seed}").choice((1, 2, 128))
        plan = _steered(replace(plan, rules=replace(rules, inline=inline)))
        writes_refused = random.Random(f"writes of {seed}").random() < 0.3
        plan = replace(plan, writes_refused=writes_refused)
        if most_nodes > 12 and not focus.kinds:
            # Drawn apart, so that all else is as it would be without.
            more = _at_once(random.Random(f"{seed}, at once"))
            faults = sorted((*plan.faults, *more), key=lambda fault: fault.at)
            plan = replace(plan, faults=tuple(faults))
        if focus.notices:
            plan = _saves_often(plan)
        of_rules = {item.name for item in fields(Rules)}
        given = {name: value for name, value in focus.settings.items() if name in of_rules}
        others = {name: value for name, value in focus.settings.items() if name not in of_rules}
        plan = replace(plan, rules=replace(plan.rules, **given), **others)
        if plan.topology:
            plan = replace(plan, rules=replace(plan.rules, rank_order="topology"))
        return plan


def _steered(plan: Plan) -> Plan:
    """With policies and orders: each of its own source, so that all else is as without it."""
    plan = _trains(_placed(_paced(plan)))
    plan = _with_links(_with_quarantine(_with_orders(_with_checks(plan))))
    return _with_accusations(_with_failures(_with_outage_limit(_with_refusals(plan))))


def _with_accusations(plan: Plan) -> Plan:
    chance = random.Random(f"accusations of {plan.seed}")
    if chance.random() < 0.5 or plan.staleness or plan.rules.outage_limit < math.inf:
        return plan
    breaks = _at_any_time(chance, BREAKS, 6) if chance.random() < 0.7 else ()
    answer = _ANSWER + plan.poll + 4 * plan.latency
    return replace(
        plan,
        rules=replace(plan.rules, answer_timeout=answer),
        breaks=breaks,
        without_links=chance.choice((0.0, 0.0, 0.2)),
    )


def _with_failures(plan: Plan) -> Plan:
    chance = random.Random(f"failures of {plan.seed}")
    failing = chance.choice(("one", "one", "all workers", "all agents"))
    plan = replace(plan, failing=failing, torchrun=chance.random() < 0.5)
    if chance.random() < 0.7:
        return plan
    return replace(plan, failures=_at_any_time(chance, FAILURES, 4))


def _with_refusals(plan: Plan) -> Plan:
    chance = random.Random(f"refusals of {plan.seed}")
    if chance.random() < 0.75:
        return plan
    return replace(plan, refusals=_at_any_time(chance, REFUSALS, 4))


def _at_any_time(chance: random.Random, kinds: tuple[str, ...], most: int) -> tuple[Fault, ...]:
    given = (
        Fault(chance.uniform(0.0, QUIET_AFTER - 0.5), chance.choice(kinds))
        for _ in range(chance.randint(1, most))
    )
    return tuple(sorted(given, key=lambda fault: fault.at))


def _with_outage_limit(plan: Plan) -> Plan:
    chance = random.Random(f"outage limit of {plan.seed}")
    if chance.random() < 0.75:
        return plan
    rules = plan.rules
    limit = chance.choice((2.0 * rules.interval, rules.lease, 1.5 * rules.lease))
    return replace(plan, rules=replace(rules, outage_limit=limit))


def _with_links(plan: Plan) -> Plan:
    chance = random.Random(f"network of {plan.seed}")
    if chance.random() < 0.8:
        return plan
    given = (
        Fault(chance.choice((0.0, chance.uniform(0.0, QUIET_AFTER - 0.5))), chance.choice(LINKS))
        for _ in range(chance.randint(1, 5))
    )
    return replace(
        plan,
        rules=replace(plan.rules, network_check=True),
        links=tuple(sorted(given, key=lambda fault: fault.at)),
        one_stays_bad=plan.rules.min_nodes > 2 and chance.random() < 0.5,
        without_check=chance.choice((0.0, 0.0, 0.2)),
    )


def _with_quarantine(plan: Plan) -> Plan:
    chance = random.Random(f"quarantine of {plan.seed}")
    if chance.random() < 0.8:
        return plan
    after, window = chance.choice((None, 1, 1, 2, 3)), chance.choice((5.0, 10.0, 30.0))
    rules = replace(plan.rules, quarantine_after=after, quarantine_window=window)
    return replace(plan, rules=rules)


def _with_orders(plan: Plan) -> Plan:
    chance = random.Random(f"orders of {plan.seed}")
    if chance.random() < 0.8:
        return plan
    return replace(plan, orders=_at_any_time(chance, ORDERS, 5))


def _with_checks(plan: Plan) -> Plan:
    health = random.Random(f"health of {plan.seed}")
    return replace(
        plan,
        unfit=health.choice((0.0, 0.0, 0.0, 0.3, 0.7)),
        checks_restarts=health.random() < 0.7,
        exits_unfit=health.random() < 0.2,
    )


def _paced(plan: Plan) -> Plan:
    pace = random.Random(f"pace of {plan.seed}")
    if pace.random() < 0.7:
        return plan
    rules = replace(
        plan.rules,
        replacement_timeout=pace.choice((None, 0.0, 0.5, 2.0)),
        min_uptime=pace.choice((0.0, 0.0, 1.0, 5.0)),
        resize_interval=pace.choice((0.0, 0.0, 2.0, 8.0)),
        grow=pace.choice(("now", "now", "now", "checkpoint", "never")),
        no_progress_rounds=pace.choice((0, 0, 0, 2, 4)),
        no_progress_uptime=pace.choice((0.5, 3.0)),
    )
    moments = sorted(pace.uniform(0.0, QUIET_AFTER) for _ in range(pace.choice((0, 2, 8))))
    return replace(plan, rules=rules, checkpoints=tuple(moments))


def _placed(plan: Plan) -> Plan:
    """With units, segments and domains, where a round of the plan's nodes can have them."""

    def drawn(name: str, share: float, *choices: Any) -> Any:
        chance = random.Random(f"{name} of {plan.seed}")
        return chance.choice(choices) if chance.random() < share else None

    def fits(step: int) -> bool:
        return -(-plan.rules.min_nodes // step) * step <= min(plan.nodes, plan.rules.max_nodes)

    unit = drawn("node_unit", 0.2, 2, 2, 3, 4) or 1
    segment = drawn("segment", 0.15, 2, 2, 3) or 1
    segment = segment if fits(segment) else 1
    unit = unit if fits(math.lcm(unit, segment)) else 1
    topology = drawn("topology", 0.2, True) is not None
    domains: tuple[str, ...] = ()
    if segment > 1 or topology:
        chance = random.Random(f"domains of {plan.seed}")
        racks = [f"s{rack % 2}/r{rack}" for rack in range(chance.randint(1, 3))]
        domains = tuple(chance.choice(racks) for _ in range(chance.randint(len(racks), 9)))
    rules = replace(plan.rules, node_unit=unit, segment=segment)
    return replace(plan, rules=rules, topology=topology, domains=domains)


def _trains(plan: Plan) -> Plan:
    """With workers that tell their steps."""
    chance = random.Random(f"steps of {plan.seed}")
    if chance.random() < 0.7:
        return plan
    rules = replace(plan.rules, save_timeout=chance.choice((2.0, 6.0, 20.0)))
    notices = sorted(chance.uniform(0.0, QUIET_AFTER) for _ in range(chance.choice((0, 1, 3))))
    pace = chance.choice((0.02, 0.1, 0.5, 2.0))
    hangs: list[float] = []
    if chance.random() < 0.5:
        rules = replace(rules, step_timeout=chance.choice((5.0, 9.0)))
        hangs = sorted(chance.uniform(0.0, QUIET_AFTER) for _ in range(chance.choice((0, 1, 3))))
    plan = replace(plan, rules=rules, pace=pace)
    return replace(plan, notices=tuple(notices), hangs=tuple(hangs))


def _saves_often(plan: Plan) -> Plan:
    """With workers that tell their steps, and with many notices and orders to restart."""
    chance = random.Random(f"saves of {plan.seed}")
    rules = replace(plan.rules, save_timeout=chance.choice((2.0, 6.0, 20.0)))
    notices = tuple(chance.uniform(0.0, QUIET_AFTER) for _ in range(chance.choice((1, 3, 5))))
    every, pace = chance.choice((2, 3, 4)), chance.choice((0.02, 0.1, 0.5, 2.0))
    times = (chance.uniform(it, it + every) for it in range(0, int(QUIET_AFTER), every))
    orders = (*plan.orders, *(Fault(at, "restart") for at in times))
    return replace(plan, rules=rules, pace=pace, notices=notices, orders=orders)


def settling(plan: Plan) -> float:
    """Seconds after the last fault within which a run that can form must stand still."""
    longest = plan.rules.lease * (OTHER_SETTINGS[-1] if plan.other_settings else 1.0)
    rules = plan.rules
    pace = max(
        rules.last_call_timeout,
        rules.replacement_timeout or 0.0,
        rules.min_uptime,
        rules.resize_interval,
    )
    pace += rules.save_timeout + rules.step_timeout
    settling = (8 * longest + pace) / plan.rates[0] + 2 * plan.stop + 10
    if any(fault.kind == "wedged agent" for fault in plan.faults):
        settling += plan.rules.rejoin_timeout / plan.rates[0]
    if rules.network_check:
        # Some rounds that do not run, each for as long as a dial takes that fails, with pauses.
        settling += (10 * longest + 2 * LONGEST_PAUSE) / plan.rates[0]
    if plan.unfit:
        settling += 2 * LONGEST_PAUSE / plan.rates[0]
    return settling


def _at_once(chance: random.Random) -> tuple[Fault, ...]:
    return tuple(
        Fault(chance.uniform(1.0, QUIET_AFTER - 0.5), chance.choice(AT_ONCE))
        for _ in range(chance.choice((0, 1, 1, 2)))
    )


def _ambushes(named: tuple[str, ...]) -> tuple[str | None, ...]:
    """Those of the kinds that are named; all where none is."""
    if not named:
        return _AMBUSHES
    return tuple(kind for kind in _AMBUSHES if kind in named) or (None,)


def _faults(chance: random.Random, named: tuple[str, ...]) -> tuple[Fault, ...]:
    kinds = list(KINDS)
    weights = [KINDS[kind] for kind in kinds]
    drawn = set(chance.choices(kinds, weights, k=chance.randint(1, _MOST_KINDS)))
    chosen = named or [kind for kind in kinds if kind in drawn]
    # Close together they meet in the middle of one another's rounds.
    centres = [chance.uniform(0.0, QUIET_AFTER - 1) for _ in range(chance.randint(1, 5))]
    spread = chance.choice((0.05, 0.5, 3.0))
    faults = []
    for _ in range(chance.randint(1, 12)):
        at = chance.choice(centres) + chance.uniform(-spread, spread)
        faults.append(Fault(min(max(at, 0.0), QUIET_AFTER - 0.5), chance.choice(chosen)))
    return tuple(sorted(faults, key=lambda fault: fault.at))
