"""Measure every store and torch's own handlers in one run, and write docs/benchmarks.md.

python -m benchmarks --help
"""

from __future__ import annotations

import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from torch.distributed.elastic.rendezvous.api import RendezvousError

from benchmarks import first_step, plots, rendezvous, requests, restart, startup, swarm
from benchmarks.crowd import FailedError
from benchmarks.floors import FLOORS
from benchmarks.page import page as page_of
from benchmarks.quotes import write_quotes
from benchmarks.rendezvous import LIFE, TORCH_OWN, Sample, Target
from benchmarks.results import Figure, Results, machine
from tests.fleet.agents import TORCHRUN, TrainingError
from tests.servers import ServerError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STORES = (
    "redis",
    "valkey",
    "zookeeper",
    "consul",
    "etcd-v3",
    "dynamodb",
    "postgres",
    "nats",
    "quorum",
    "kubernetes",
    "s3",
    "azure",
)
SCENARIOS = (
    "requests",
    "form",
    "late",
    "life",
    "killed",
    "rest",
    "swarm",
    "first-step",
    "restart",
    "start-up",
)
ENSEMBLES = ("zookeeper", "consul", "etcd-v3", "nats", "quorum")
# A round that takes longer has failed.
LIMIT = 60.0
# On three servers that share the machine with the nodes, and of swarms.
LONG_LIMIT = 120.0


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    Attributes:
        form: numbers of nodes.
        form_of: others, by subject; `WHY` says why.
        late: numbers of nodes of the stores; of redis also `late_large`.
        ensemble: numbers of nodes on three servers.
        seldom: seconds between heartbeats there, by subject and number of nodes; else the default.
        life: seconds between heartbeats by number of nodes; of redis also `life_large`.
        killed: numbers of nodes; of redis also `killed_large`.
        kills: samples of each restart; those under torchrun, and of silent hosts, have a quarter.
        busy: processes that compute beside the second half of the restarts; 0: there is none.
        repeats: samples of each figure; those in `more` have more, by number of nodes.
    """

    form: tuple[int, ...] = (2, 16, 64, 256, 1024, 2048, 4096)
    form_of: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "valkey": (2, 16, 64, 256, 1024),
            **dict.fromkeys(FLOORS, (2, 16, 64, 256, 1024, 4096)),
            "zookeeper": (2, 16, 64, 256),
            "consul": (2, 16, 64, 256),
            "etcd-v3": (2, 16, 64, 256),
            "dynamodb": (2, 16, 64, 512),
            "postgres": (2, 16, 64, 256, 512),
            "nats": (2, 16, 64, 256),
            # One member; three are below.
            "quorum": (2, 16, 64, 256),
            "kubernetes": (2, 16, 64, 256),
            "s3": (2, 16, 64),
            "azure": (2, 16, 64),
            "c10d": (2, 16, 64, 128, 256),
            "etcd-v2": (2, 16, 64, 128, 256),
        }
    )
    late: tuple[int, ...] = (64,)
    late_large: tuple[int, ...] = (1024,)
    ensemble: tuple[int, ...] = (64, 1024)
    ensemble_of: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"quorum": (2, 64, 256)}
    )
    ensemble_rest: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"quorum": (64, 1000)}
    )
    seldom: Mapping[tuple[str, int], float] = field(
        default_factory=lambda: {("zookeeper", 1024): 30.0}
    )
    life: Mapping[int, float] = field(default_factory=lambda: {64: 1.0})
    life_large: Mapping[int, float] = field(default_factory=lambda: {256: 1.0, 1024: 2.0})
    killed: tuple[int, ...] = (16, 64)
    killed_large: tuple[int, ...] = (256, 1024)
    rest: tuple[int, ...] = (64, 1024, 4096)
    rest_seconds: float = 5.5
    swarm: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"redis": (1024, 4096, 10_000), "etcd-v3": (1024,)}
    )
    requests: int = 200
    start_up: int = 10
    first_step: tuple[int, ...] = (2, 3)
    kills: int = 20
    busy: int = 4
    repeats: int = 5
    more: Mapping[int, int] = field(default_factory=lambda: {4096: 10})


QUICK = Plan(
    form=(2, 16, 64),
    form_of={},
    late_large=(),
    ensemble=(16,),
    ensemble_of={},
    ensemble_rest={"quorum": (16,)},
    first_step=(2,),
    kills=1,
    life={16: 0.5},
    life_large={},
    killed=(16,),
    killed_large=(),
    rest=(64,),
    swarm={"redis": (256,), "etcd-v3": (64,)},
    requests=50,
    start_up=3,
    repeats=2,
    more={},
)

WHY = {
    "valkey": "it speaks the protocol of redis: measured up to 1,024 nodes.",
    "zookeeper, consul, etcd-v3": "one server up to 256 nodes, three servers for 1,024.",
    "zookeeper, 3 servers": "keep_alive_interval=30 at 1,024 nodes: with the default, heartbeats "
    "come late, because servers and nodes share two cores.",
    "dynamodb": "DynamoDB Local, which is one process.",
    "kubernetes": "one API server with one etcd.",
    "s3, azure": "SeaweedFS and Azurite. SeaweedFS answers some writers that lose a race after 1 "
    "to 8 s.",
    "postgres": "the server allows 600 connections here.",
    "c10d, etcd-v2": "up to the first number of nodes that did not finish within 60 s.",
}


class Bench:
    """One run: takes the samples, keeps the figures."""

    def __init__(
        self, plan: Plan, processes: int | None, conf: dict[str, str], console: Console
    ) -> None:
        self.plan = plan
        self.console = console
        self.figures: list[Figure] = []
        self.versions: dict[str, str] = {}
        self._given = processes
        self._conf = conf
        self._began = time.monotonic()

    def _processes(self, nodes: int) -> int:
        """Those that run the handlers: hundreds of threads in one wait for each other's lock."""
        return self._given or min(16, max(4, nodes // 128))

    def subject(self, name: str, scenarios: Sequence[str]) -> None:
        """All of a store, a floor or a backend of torch's, on one server."""
        store = name in STORES
        conf = self._conf if store else {}
        with rendezvous.started(name) as target:
            if target.version:
                self.versions[f"server {name}"] = target.version
            if store and "requests" in scenarios:
                self._requests(name, target)
            if "form" in scenarios:
                self._warm_up(target)
                sizes = self.plan.form_of.get(name, self.plan.form)
                self._form(name, target, sizes, conf, LIMIT)
                # Redis counts its own; a quorum's members are at another address than the proxy.
                if store and name not in ("redis", "valkey", "quorum"):
                    take = partial(rendezvous.count_bytes, target, limit=LIMIT)
                    self._take("form", name, self.plan.late[0], take)
            if store and "late" in scenarios:
                large = self.plan.late_large if name == "redis" else ()

                def late(nodes: int, processes: int) -> Sample | None:
                    return rendezvous.late(target, nodes, processes, LIMIT, **conf)

                for size in (*self.plan.late, *large):
                    self._take("late", name, size, late)
            if store and "life" in scenarios:
                large_life = self.plan.life_large if name == "redis" else {}
                for size, interval in {**self.plan.life, **large_life}.items():
                    self._life(name, target, size, interval)
            if store and "killed" in scenarios:
                large = self.plan.killed_large if name == "redis" else ()
                for size in (*self.plan.killed, *large):
                    take = partial(rendezvous.killed, target, limit=LIMIT)
                    self._take("killed", name, size, take)
            if name == "redis" and "rest" in scenarios:
                for size in self.plan.rest:
                    self._rest(name, target, size)

    def ensemble(self, name: str) -> None:
        """Form rounds on three servers."""
        with rendezvous.started(name, ensemble=3) as target:
            self._warm_up(target)
            for size in self.plan.ensemble_of.get(name, self.plan.ensemble):
                seldom = self.plan.seldom.get((name, size))
                conf = {"keep_alive_interval": f"{seldom:g}"} if seldom is not None else {}
                conf |= self._conf
                if not self._form(f"{name}, 3 servers", target, [size], conf, LONG_LIMIT):
                    break
            for size in self.plan.ensemble_rest.get(name, ()):
                self._rest(f"{name}, 3 servers", target, size)

    def swarm(self, name: str) -> None:
        """Rounds of nodes without threads."""
        for size in self.plan.swarm.get(name, ()):
            rounds: list[Sample | None] = []
            rests: list[Sample | None] = []
            for _ in range(self.plan.repeats):
                formed, rest = swarm.sample(name, size, LONG_LIMIT, self.plan.rest_seconds)
                rounds.append(formed)
                self._show("swarm", name, size, formed)
                if formed is None:
                    break
                rests.append(rest)
            self._keep("swarm", name, size, rounds)
            self._keep("swarm at rest", name, size, rests)

    def first_step(self) -> None:
        """Measure the subjects in turn, so that what else the machine does meets all alike."""
        for size in self.plan.first_step:
            samples: dict[str, list[Sample | None]] = defaultdict(list)
            for _ in range(self.plan.repeats):
                for subject in first_step.SUBJECTS:
                    samples[subject].append(first_step.measure(subject, size))
                    self._show("first step", subject, size, samples[subject][-1])
            for subject, taken in samples.items():
                self._keep("first step", subject, size, taken)

    def restart(self, store: str) -> None:
        """From the kill of a node to the next step of the others."""
        few = -(-self.plan.kills // 4)
        with restart.Restarts(store) as restarts:
            self._restart(store, [restarts.sample] * self.plan.kills)
            if self.plan.busy:
                sample = partial(restarts.sample, self.plan.busy)
                self._restart(f"{store}, busy", [sample] * self.plan.kills)
        with restart.Restarts(store, restart.WARM) as restarts:
            self._restart(f"{store}, warm", [restarts.sample] * self.plan.kills)
        if store == "redis":
            with restart.Restarts(store, TORCHRUN) as restarts:
                self._restart(f"{store}, torchrun", [restarts.sample] * few)
        if store in restart.ON_HOSTS:
            samples = restart.silent_hosts(store, few)
            self._restart(f"{store}, silent host", [partial(next, samples)] * few)

    def _restart(self, subject: str, takes: Sequence[Callable[[], Sample | None]]) -> None:
        samples: list[Sample | None] = []
        for take in takes:
            sample: Sample | None = None
            try:
                sample = take()
            except TrainingError as error:
                self.console.print(f"{subject}: {error}", style="red", markup=False)
            samples.append(sample)
            self._show("restart", subject, restart.NODES, sample)
            if sample is None:
                break
        self._keep("restart", subject, restart.NODES, samples)

    def start_up(self) -> None:
        """What the import costs."""
        samples = startup.measure(self.plan.start_up)
        self._keep("start-up", "torch.distributed.elastic", 1, [*samples])

    def _rest(self, name: str, target: Target, size: int) -> None:
        windows = rendezvous.rest(
            target, size, self._processes(size), LIMIT, self.plan.repeats, self.plan.rest_seconds
        )
        self._keep("rest", name, size, windows or [None])

    def _requests(self, name: str, target: Target) -> None:
        found = requests.measure(target.backend, target.endpoint, target.config, self.plan.requests)
        for measure, seconds in found.items():
            self.figures.append(Figure.of("request", name, 1, measure, seconds))

    def _warm_up(self, target: Target) -> None:
        """The first round on a server compiles scripts, creates tables, and the like."""
        rendezvous.form(target, 2, self._processes(2), LIMIT)

    def _form(
        self,
        name: str,
        target: Target,
        sizes: Iterable[int],
        conf: Mapping[str, str],
        limit: float,
    ) -> bool:
        """Whether rounds of all sizes came to an end; more nodes than in one that did not would
        not finish either."""

        def take(nodes: int, processes: int) -> Sample | None:
            return rendezvous.form(target, nodes, processes, limit, **conf)

        return all(self._take("form", name, size, take) for size in sizes)

    def _life(self, name: str, target: Target, nodes: int, interval: float) -> None:
        samples: dict[str, list[Sample | None]] = defaultdict(list)
        for _ in range(self.plan.repeats):
            found: Mapping[str, Sample] = {}
            try:
                found = rendezvous.life(target, nodes, self._processes(nodes), LIMIT, interval)
            except FailedError as error:
                self.console.print(f"life {name} N={nodes}: {error}", style="red", markup=False)
            for scenario in LIFE:
                samples[scenario].append(found.get(scenario))
                self._show(scenario, name, nodes, found.get(scenario))
        for scenario, taken in samples.items():
            self._keep(scenario, name, nodes, taken)

    def _take(
        self, scenario: str, name: str, nodes: int, take: Callable[[int, int], Sample | None]
    ) -> bool:
        """Take all samples; whether any came to an end. The first failure ends a scenario."""
        samples: list[Sample | None] = []
        for _ in range(self.plan.more.get(nodes, self.plan.repeats)):
            try:
                sample = take(nodes, self._processes(nodes))
            except FailedError as error:
                self.console.print(f"{name} N={nodes}: {error}", style="red", markup=False)
                sample = None
            self._show(scenario, name, nodes, sample)
            samples.append(sample)
            if not any(samples):
                break
        self._keep(scenario, name, nodes, samples)
        return any(samples)

    def _show(self, scenario: str, name: str, nodes: int, sample: Sample | None) -> None:
        took = time.monotonic() - self._began
        shown = "not in time"
        if sample is not None:
            shown = ", ".join(f"{measure} {value:.4g}" for measure, value in sample.items())
        self.console.print(
            f"{took:6.0f} s  {scenario} {name} N={nodes}: {shown}",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )

    def _keep(self, scenario: str, name: str, nodes: int, samples: Sequence[Sample | None]) -> None:
        done = [sample for sample in samples if sample is not None]
        failed = len(samples) - len(done)
        names = dict.fromkeys(measure for sample in done for measure in sample) or ["s"]
        for measure in names:
            values = [sample[measure] for sample in done if measure in sample]
            self.figures.append(
                Figure.of(scenario, name, nodes, measure, [*values, *[None] * failed])
            )


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="few nodes, two samples; writes to build/benchmarks")
    ] = False,
    add: Annotated[
        bool, typer.Option("--add", help="keep what the results have of all else")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="measure nothing: write the page from the results")
    ] = False,
    subjects: Annotated[
        str, typer.Option("--subjects", "--stores", help="comma-separated names")
    ] = ",".join((*STORES, *FLOORS, *TORCH_OWN)),
    scenarios: Annotated[str, typer.Option(help="comma-separated names")] = ",".join(SCENARIOS),
    nodes: Annotated[str, typer.Option(help="form rounds of these numbers of nodes only")] = "",
    repeats: Annotated[int, typer.Option(help="samples of each figure; 0: the plan's")] = 0,
    kills: Annotated[int, typer.Option(help="kills for each restart; 0: the plan's")] = 0,
    busy: Annotated[
        int, typer.Option(help="processes that compute beside half of the restarts; 0: none")
    ] = Plan.busy,
    processes: Annotated[
        int | None, typer.Option(help="that run the handlers; else 4 to 16, by the nodes")
    ] = None,
    conf: Annotated[str, typer.Option(help="options of form and late, as in --rdzv-conf")] = "",
    output: Annotated[Path | None, typer.Option(help="folder of page, plots and results")] = None,
) -> None:
    """Measure, and write benchmarks.json, benchmarks.md and the plots."""
    # The agents end with this process, also where a time limit ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    names, parts = _listed(subjects, (*STORES, *FLOORS, *TORCH_OWN)), _listed(scenarios, SCENARIOS)
    whole = not (quick or nodes or conf) and len(names) + len(parts) == len(
        (*STORES, *FLOORS, *TORCH_OWN, *SCENARIOS)
    )
    # A part of the figures must not replace all of them.
    folder = output or (DOCS if whole or add else ROOT / "build" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "benchmarks.json"
    if page:
        _write(Results.read(file), folder, console)
        return
    plan = _replaced(QUICK if quick else Plan(), busy=busy)
    if kills:
        plan = _replaced(plan, kills=kills)
    if repeats:
        plan = _replaced(plan, repeats=repeats, more={})
    if nodes:
        plan = _replaced(plan, form=tuple(int(it) for it in nodes.split(",")), form_of={})
    options = dict(pair.split("=", 1) for pair in conf.split(",") if pair)
    here = machine()
    stored = Results.read(file) if add else None
    bench = Bench(plan, processes, options, console)

    def save() -> Results:
        facts = msgspec.structs.replace(here, versions={**here.versions, **bench.versions})
        limits = {} if quick or nodes else WHY
        results = Results(machine=facts, figures=bench.figures, limits=limits)
        if stored is not None:
            results = stored.with_later(results, (*STORES, *FLOORS, *TORCH_OWN))
        results.write(file)
        return results

    for work in _works(bench, names, parts):
        try:
            work()
        except (ImportError, ServerError, FailedError, RendezvousError) as error:
            # The other figures of a run that takes most of an hour are kept.
            console.print(f"left out: {error}", style="red", markup=False)
        save()
    _write(save(), folder, console)


def _works(
    bench: Bench, names: Sequence[str], parts: Sequence[str]
) -> Iterable[Callable[[], None]]:
    on_servers = [it for it in parts if it not in ("swarm", "first-step", "restart", "start-up")]
    for name in names:
        if on_servers:
            yield lambda name=name: bench.subject(name, on_servers)  # type: ignore[misc]
        if name in ENSEMBLES and "form" in parts:
            yield lambda name=name: bench.ensemble(name)  # type: ignore[misc]
        if "swarm" in parts:
            yield lambda name=name: bench.swarm(name)  # type: ignore[misc]
        if "restart" in parts and name in restart.STORES:
            yield lambda name=name: bench.restart(name)  # type: ignore[misc]
    if "first-step" in parts:
        yield bench.first_step
    if "start-up" in parts:
        yield bench.start_up


def _replaced(plan: Plan, **changes: object) -> Plan:
    return Plan(**{**plan.__dict__, **changes})


def _listed(text: str, known: Sequence[str]) -> list[str]:
    found = [it for it in text.split(",") if it]
    if unknown := [it for it in found if it not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(known)}")
    return found


def _write(results: Results, folder: Path, console: Console) -> None:
    (folder / "benchmarks.md").write_text(page_of(results), encoding="utf-8")
    for file in (folder / "benchmarks.md", *plots.write(results, folder)):
        console.print(f"wrote {file}")
    if folder == DOCS:
        write_quotes(results, ROOT)


if __name__ == "__main__":
    typer.run(main)
