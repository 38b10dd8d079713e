"""The pure parts of the benchmarks: statistics, the page and the plots from stored results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from benchmarks import plots
from benchmarks.__main__ import STORES, Plan
from benchmarks.crowd import World, shares
from benchmarks.floors import FLOORS
from benchmarks.page import page
from benchmarks.quotes import quoted, quoting_pages
from benchmarks.rendezvous import KILLED, LIFE, TORCH_OWN
from benchmarks.restart import PHASES, TOLD, TOTAL, split
from benchmarks.results import Figure, Machine, Results
from benchmarks.usage import Usage
from rdzv_plugins.observe.history import Row
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.protocol.round_record import Durations

MACHINE = Machine(
    cores=2,
    processor="a processor",
    kernel="Linux 6",
    memory_gb=8,
    load=0.1,
    commit="0123456789ab",
    versions={"python": "3.11.7", "server redis": "redis 7.0.15"},
)


def results() -> Results:
    """Some of each scenario."""
    figures = [
        Figure.of("request", "redis", 1, "compare-and-set", [0.0001, 0.0002, 0.0003]),
        Figure.of("form", "redis", 2, "s", [0.004, 0.005, 0.009]),
        Figure.of("form", "redis", 1024, "s", [1.5, 1.2, 1.0]),
        Figure.of("form", "redis", 1024, "node ms", [1.8]),
        Figure.of("form", "redis", 1024, "bytes a node", [17_800]),
        Figure.of("form", "redis: the least program", 1024, "s", [1.0]),
        Figure.of("form", "c10d", 2, "s", [1.1]),
        Figure.of("form", "c10d", 1024, "s", [None]),
        Figure.of("late", "redis", 64, "s", [0.02]),
        *(Figure.of(scenario, "redis", 64, "s", [-0.2, 0.3]) for scenario in LIFE),
        *(Figure.of("killed", "redis", 64, f"{whom} s", [0.7]) for whom in KILLED),
        Figure.of("rest", "redis", 64, "bytes a node and s", [276]),
        Figure.of("rest", "redis", 64, "server us a node and s", [21.5]),
        Figure.of("swarm", "redis", 10_000, "s", [10.0]),
        Figure.of("swarm", "redis", 10_000, "server s", [4.0]),
        *(
            Figure.of("restart", "redis, busy", 3, it, [4.56, 6.12])
            for it in (TOTAL, *PHASES, TOLD)
        ),
        Figure.of("start-up", "torch.distributed.elastic", 1, "ms without", [20.0]),
        Figure.of("start-up", "torch.distributed.elastic", 1, "ms more", [1.5, 2.5]),
    ]
    return Results(machine=MACHINE, figures=figures, limits={"c10d": "it does not finish."})


def test_a_figure_has_the_median_the_spread_and_the_failures() -> None:
    figure = Figure.of("form", "redis", 4, "s", [3.0, None, 1.0, 2.00004])
    assert (figure.median, figure.least, figure.most) == (2.0, 1.0, 3.0)
    assert (figure.samples, figure.failed) == (3, 1)


def test_a_figure_without_samples_says_how_many_failed() -> None:
    figure = Figure.of("form", "c10d", 256, "s", [None])
    assert (figure.median, figure.samples, figure.failed) == (None, 0, 1)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "benchmarks.json"
    results().write(file)
    assert Results.read(file) == results()


def test_the_page_has_a_table_of_each_scenario() -> None:
    text = page(results())
    for line in (
        "| redis | 0.20 (0.10..0.30) | - | - |",
        "|  | N=2 | N=1,024 |",
        "| redis | 0.005 | 1.20 |",
        "| c10d | 1.10 | not in time |",
        "| redis | 1024 | 17,800 | - |",
        f"| redis | 64 |{' 0.050 (-0.200..0.300) |' * 3}",
        f"| redis | 64 |{' 0.700 (0.700..0.700) |' * 2}",
        "| redis | 64 | 276 | 21.5 |",
        "| redis | 10000 | 10.00 | 4.00 | - | - |",
        f"| redis, busy | 5.34 (4.56..6.12) |{' 5.34 |' * 6}",
    ):
        assert line in text.splitlines()
    assert "2 (1.5..2.5) ms more with this package installed (2 pairs)" in text
    assert "- c10d: it does not finish." in text
    assert "commit 0123456789ab" in text
    assert "python 3.11.7, redis 7.0.15." in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_a_later_run_replaces_and_adds_subjects() -> None:
    figures = [
        Figure.of("form", "s3", 2, "s", [0.5]),
        Figure.of("form", "redis: the least program", 1024, "s", [2.0]),
    ]
    versions = {**MACHINE.versions, "server s3": "weed 4.48"}
    machine = replace(MACHINE, commit="abcdef", versions=versions)
    limits = {"s3, azure": "up to 64", "redis": "none"}
    later = Results(machine=machine, figures=figures, limits=limits)
    both = results().with_later(later, (*STORES, *FLOORS, *TORCH_OWN))
    text = page(both)
    assert "0123456789ab, python 3.11.7, redis 7.0.15. Measured later:\n\n- s3; redis: " in text
    assert "commit abcdef, weed 4.48." in text
    rows = [it.subject for it in both.of("form", "s") if it.nodes in (2, 1024)]
    assert [*dict.fromkeys(rows)] == ["redis", "s3", "redis: the least program", "c10d"]
    found = both.get("form", "redis: the least program", 1024, "s")
    assert found is not None
    assert found.median == 2.0
    assert both.limits == {"c10d": "it does not finish.", "s3, azure": "up to 64"}


def test_a_later_run_of_a_scenario_leaves_the_others() -> None:
    figures = [Figure.of("late", "redis", 64, "s", [0.05]), Figure.of("killed", "s3", 64, "s", [1])]
    later = Results(machine=replace(MACHINE, commit="abcdef"), figures=figures, limits={})
    both = results().with_later(later, (*STORES, *FLOORS, *TORCH_OWN))
    found, before = both.get("late", "redis", 64, "s"), both.get("form", "redis", 2, "s")
    assert found is not None
    assert (found.median, before) == (0.05, results().get("form", "redis", 2, "s"))
    assert "\n- redis (late); s3: " in page(both)


def test_the_page_of_some_scenarios_has_no_empty_tables() -> None:
    some = Results(machine=MACHINE, figures=[Figure.of("swarm", "redis", 64, "s", [0.02])])
    text = page(some)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Large rounds in one process",
        "## The machine",
    ]


def test_the_plots_are_svg_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    files = plots.write(results(), tmp_path)
    assert [file.name for file in files] == [*plots.PLOTS]
    texts = [file.read_text() for file in files]
    for text in texts:
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert ">c10d<" in texts[0]
    assert [file.read_text() for file in plots.write(results(), tmp_path)] == texts


def test_the_full_plan_measures_every_subject_with_64_nodes_or_more() -> None:
    plan = Plan()
    assert plan.form_of.keys() < {*STORES, *FLOORS, *TORCH_OWN}
    assert all(64 in sizes and sizes == tuple(sorted(sizes)) for sizes in plan.form_of.values())
    assert plan.form[-1] == 4096


def test_every_figure_of_the_full_plan_has_five_samples() -> None:
    plan = Plan()
    assert min(plan.repeats, plan.requests // 7, plan.start_up, *plan.more.values()) >= 5


@pytest.mark.parametrize(("nodes", "processes"), [(1, 4), (4, 4), (10, 4), (1024, 3)])
def test_the_shares_are_nearly_equal(nodes: int, processes: int) -> None:
    found = shares(nodes, processes)
    assert sum(found) == nodes
    assert max(found) - min(found) <= 1
    assert all(found)


def test_a_world_is_whole_if_it_is_one_with_all_ranks() -> None:
    def world(ranks: tuple[int, ...], *worlds: tuple[int, str]) -> World:
        return World(0.0, ranks, frozenset(worlds), 0.0, None, ())

    assert world((1, 0, 2), (3, "a:1")).is_whole
    assert not world((1, 0, 2), (3, "a:1"), (3, "a:2")).is_whole
    assert not world((1, 1, 2), (3, "a:1")).is_whole
    assert not world((0, 1), (3, "a:1")).is_whole


def test_usage_counts_bytes_where_the_server_does() -> None:
    assert Usage(3.0, 500).since(Usage(1.0, 200)) == Usage(2.0, 300)
    assert Usage(3.0).since(Usage(1.0)) == Usage(2.0)


def test_the_phases_of_a_restart_add_up() -> None:
    def row(second: str, **seconds: float) -> Row:
        return Row(
            incarnation="a", round=1, phase=Phase.RUNNING, nodes=2, seconds=Durations(**seconds),
            at=f"1970-01-01T00:01:{second}+00:00",
        )  # fmt: skip

    rows = [
        row("02", noticed=0.4, gathering=1.2, confirming=0.3),
        row("04", gathering=1.5, last_call=1.0, started=3.0, first_step=0.5),
    ]
    sample = split(at=10.0, wall=60.0, rows=rows, resumed=17.0, stepped=17.5)
    expected = dict(zip(PHASES, (0.5, 2.5, 1.0, 0.0, 3.0, 0.5), strict=True))
    assert sample == pytest.approx({TOTAL: 7.5, **expected, TOLD: 6.9, "rounds": 2})
    assert sum(expected.values()) == sample[TOTAL]


def test_a_quoted_figure_is_the_one_that_was_measured() -> None:
    key = "restart; redis, busy; 3; kill to step"
    stale = f"after <!-- {key} -->1 s<!-- --> (<!-- {key}; spread -->?<!-- -->)"
    shown = f"after <!-- {key} -->5.3 s<!-- --> (<!-- {key}; spread -->4.6 to 6.1 s<!-- -->)"
    assert quoted(results(), stale) == quoted(results(), shown) == shown
    with pytest.raises(LookupError, match="redis, calm"):
        quoted(results(), stale.replace("busy", "calm"))


def test_the_pages_quote_the_stored_figures() -> None:
    root = Path(__file__).parents[2]
    stored = Results.read(root / "docs" / "benchmarks.json")
    pages = quoting_pages(root)
    assert root / "README.md" in pages
    for file in pages:
        text = file.read_text(encoding="utf-8")
        assert text == quoted(stored, text), f"{file}: python -m benchmarks --page renews it"
