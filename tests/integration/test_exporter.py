"""The exporter, scraped over real runs on a real redis."""

from __future__ import annotations

import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from typer.testing import CliRunner

from rdzv_plugins.cli import app, pages
from rdzv_plugins.cli.options import Access
from rdzv_plugins.observe.history import list_runs
from rdzv_plugins.observe.inspection import Condition
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background
from tests.integration.agents import await_beats
from tests.integration.forked import serving
from tests.integration.jobs import Job
from tests.integration.stores import RunningStore
from tests.integration.test_dashboard import record, write_run

Scrape = dict[tuple[str, ...], float]


@contextmanager
def exporter(store: RunningStore, *options: str) -> Iterator[str]:
    """The address of an exporter of the store, as a person starts and ends it."""
    command = [sys.executable, "-m", "rdzv_plugins.cli", "exporter", "--port", "0", *options]
    with serving([*command, *store.where], signal.SIGTERM) as said:
        yield said[0].partition("/metrics ")[0]


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return str(answer.read().decode())


def scrape(address: str) -> Scrape:
    return samples(page(f"{address}/metrics"))


def samples(shown: str) -> Scrape:
    """The samples by their name, their run and the value of their other label."""
    return {
        (
            sample.name,
            *(value for _, value in sorted(sample.labels.items(), key=_run_first)),
        ): sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
    }


def _run_first(label: tuple[str, str]) -> bool:
    return label[0] != "run"


def test_it_tells_of_a_lost_node_and_of_an_outage(store: RunningStore, tmp_path: Path) -> None:
    job = Job(tmp_path, store, nodes="2:3", run_id="job")
    with exporter(store) as address:
        try:
            assert scrape(address) == {("rdzv_store_up",): 1.0}
            assert page(f"{address}/why") == "there are no runs under this prefix\n"
            job.begin("abc")
            assert until(lambda: shows(address, nodes=3, round=job.round()), 30)
            job.await_begun("ac", after=job.agents["b"].kill())
            assert until(lambda: shows(address, nodes=2, round=job.round()), 30)
            # A round is released to its agents before its leader notes it.
            lost = ("rdzv_restarts_total", "job", "lost")
            assert until(lambda: scrape(address)[lost] == 1, 30)
            found = scrape(address)
            assert found["rdzv_nodes", "job", "running"] == 2
            assert found["rdzv_phase", "job", "running"] == 1
            assert found["rdzv_nodes_waiting", "job"] == 0
            assert found["rdzv_leader_silence_seconds", "job"] < 3
            # With last_call_timeout=0.3, and three nodes allowed.
            assert 0.25 < found["rdzv_restart_seconds", "job", "last_call"] < 5
            assert 0.3 < found["rdzv_restart_seconds", "job", "noticed"] < 15
            for phase in ("stopped", "formed"):
                assert 0 < found["rdzv_restart_seconds", "job", phase] < 15
            why = f"run 'job': running round {job.round()}, 2 of 2..3 nodes\n"
            assert page(f"{address}/why") == why
            for name in "ac":
                job.finish(name)
            job.await_ends("ac")
            closed = ("rdzv_condition", "job", "closed")
            assert until(lambda: scrape(address).get(closed) == 1, 30)
            assert ("rdzv_round", "job") not in scrape(address)
        finally:
            job.close()
        assert store.server is not None
        store.server.nodes[0].kill()
        assert until(lambda: scrape(address) == {("rdzv_store_up",): 0.0}, 30)
        assert page(f"{address}/healthz") == "the store is away; /why says which\n"
        assert page(f"{address}/why").startswith("the store is away: redis at ")


def shows(address: str, *, nodes: int, round: int) -> bool:
    found = scrape(address)
    return (
        found.get(("rdzv_round_nodes", "job")) == nodes
        and found.get(("rdzv_round", "job")) == round
        and found.get(("rdzv_condition", "job", "running")) == 1
    )


def die(store: RunningStore, run_id: str, *, nodes: int = 2, **conf: str) -> None:
    """A run of two nodes that end without a word in their first round, or while one waits."""
    conf = {"keep_alive_interval": "0.2", "local_addr": "127.0.0.1", **conf}
    params = RendezvousParameters(store.backend, store.endpoint, run_id, 2, 2, **conf)
    handlers = [create_handler(store.backend, params) for _ in range(nodes)]
    joins = [Background(handler.next_rendezvous) for handler in handlers]
    if nodes == 2:
        for join in joins:
            join.result(20)
    listed = partial(list_runs, store.open)
    phase = Phase.RUNNING if nodes == 2 else Phase.FORMING
    assert until(lambda: run_id in listed() and listed()[run_id].phase is phase, 30)
    # A leader has set a deadline of the keys by its second beat.
    await_beats(store, run_id, nodes, 30)
    await_beats(store, run_id, nodes, 30)
    for handler in handlers:
        assert isinstance(handler, StoreRendezvousHandler)
        handler._driver.stop(5)


@pytest.mark.parametrize("gone", [False, True], ids=["stored", "expired"])
def test_a_person_ends_the_alert_of_a_dead_run(store: RunningStore, gone: bool) -> None:
    where = ("-b", store.backend, "-e", store.endpoint)
    # At least four leases.
    conf = {"abandoned_ttl": "2.4"} if gone else {}
    runs = "closed", "cleaned", "one of many", "without a round"
    for run_id in runs:
        die(store, run_id, nodes=1 if run_id == "without a round" else 2, **conf)
    if gone:
        for run_id in runs:
            with closing(store.open(run_id)) as client:
                assert until(lambda client=client: not client.list(""), 30)  # type: ignore[misc]
    name = "rdzv_condition"
    with exporter(store) as address:

        def conditions() -> dict[str, set[str]]:
            """Each run's; it has exactly one."""
            found = scrape(address)
            return {
                run_id: {it.value for it in Condition if found.get((name, run_id, it.value)) == 1}
                for run_id in runs
            }

        assert until(lambda: conditions() == {it: {"dead"} for it in runs}, 30), conditions()
        said = rdzv("close", "-i", "closed", *where)
        assert said.startswith("closed run 'closed': nobody lives in it; its id is free")
        after = {it: {"dead"} for it in runs} | {"closed": {"closed"}}
        assert until(lambda: conditions() == after, 30), conditions()
        said = rdzv("clean", "-i", "cleaned", *where)
        assert said.endswith("it is listed as closed now\n")
        after |= {"cleaned": {"closed"}}
        assert until(lambda: conditions() == after, 30), conditions()
        said = rdzv("clean", "--dead", *where)
        assert ("run 'one of many'" in said, "run 'without a round'" in said) == (True, True)
        assert "run 'cleaned'" not in said
        assert until(lambda: conditions() == {it: {"closed"} for it in runs}, 30), conditions()
    host = socket.gethostname()
    listed = rdzv("list", *where)
    assert listed.count(f": cleaned by hand, by rdzv clean on {host}") == 3, listed
    assert "closed by the command rdzv close" in listed
    assert " dead " not in listed
    assert "absent" not in listed
    shown = rdzv("history", "-i", "without a round", *where)
    assert f"cleaned by hand, by rdzv clean on {host}" in shown


def rdzv(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("runs", [10, pytest.param(100, marks=pytest.mark.full)])
def test_it_scrapes_runs_of_64_nodes(
    store: RunningStore, runs: int, record_property: Callable[[str, object], None]
) -> None:
    for number in range(runs):
        nodes = {f"n{node:02}": record(node, f"host{node}") for node in range(64)}
        write_run(store, f"run-{number:03}", nodes)
    with exporter(store) as address:
        taken: list[float] = []
        for beat in range(2, 7):
            for number in range(runs):
                move(store, f"run-{number:03}", beat)
            time.sleep(1.0)  # What was read longer ago is read again.
            began = time.monotonic()
            shown = page(f"{address}/metrics")
            taken.append(time.monotonic() - began)
            found = samples(shown)
            assert sum(key[0] == "rdzv_round_nodes" for key in found) == runs
            assert found["rdzv_nodes", f"run-{runs - 1:03}", "running"] == 64
    record_property("seconds of a scrape, the first", round(taken[0], 2))
    record_property("of four more", ", ".join(f"{seconds:.2f}" for seconds in taken[1:]))
    assert min(taken) < 1.0
    assert max(taken) < 5.0


def move(store: RunningStore, run_id: str, beat: int) -> None:
    """A heartbeat of each node: the exporter decodes each record again."""
    with closing(store.open(run_id)) as client:
        client.put_many(
            {
                f"nodes/n{node:02}": record(node, f"host{node}", beat=beat).encode()
                for node in range(64)
            }
        )


def test_an_exporter_that_others_reach_needs_a_token(
    store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loopback, as nobody can tell from its spelling.
    with pytest.raises(
        ValueError, match=r"^anyone who reaches 127\.1 would read .* without a token: set"
    ):
        pages.exporter(Access("redis", store.endpoint), host="127.1")
    file = tmp_path / "token"
    file.write_text("of Prometheus\n")
    monkeypatch.setenv("RDZV_PLUGINS_PAGE_TOKEN_FILE", str(file))
    with exporter(store, "--host", "127.1") as address:
        with pytest.raises(HTTPError, match="401"):
            page(f"{address}/metrics")
        with pytest.raises(HTTPError, match="401"):
            page(f"{address}/why")
        assert page(f"{address}/healthz") == "ok\n"
        asked = urllib.request.Request(f"{address}/metrics")
        asked.add_header("Authorization", "Bearer of Prometheus")
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert samples(answer.read().decode()) == {("rdzv_store_up",): 1.0}


def test_a_taken_port_and_a_missing_library_are_one_line(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = store.address[1]
    with pytest.raises(ValueError, match=rf"^cannot listen at 127.0.0.1:{taken} \(.*--port$"):
        pages.exporter(Access("redis", store.endpoint), port=taken)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r'pip install "rdzv-plugins\[metrics\]"$'):
        pages.exporter(Access("redis", store.endpoint))
