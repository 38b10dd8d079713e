"""The metrics of real torchrun agents, scraped while a node is killed."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rdzv_plugins.testing.harness import until
from tests.integration.jobs import LEASE, PATIENCE, Job
from tests.integration.stores import RunningStore

Scrape = dict[str, float]


@pytest.fixture
def job(store: RunningStore, tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, store, nodes="1:2", metrics_port=0) as job:
        yield job  # type: ignore[misc]


def url(job: Job, name: str) -> str:
    """Where an agent serves its metrics, as its log says."""
    line = job.await_line(name, "metrics are served at", timeout=PATIENCE)
    return line.rpartition(" ")[2].removesuffix("/metrics")


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())


def scrape(address: str) -> Scrape:
    """The samples, by name and the value of their label."""
    families = text_string_to_metric_families(page(f"{address}/metrics"))
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


@contextmanager
def scraped(address: str) -> Iterator[list[Scrape]]:
    """The scrapes of a thread that never stops to scrape, and waits for none."""
    seen: list[Scrape] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            while not ended.is_set():
                seen.append(scrape(address))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
    assert failed == []


def test_a_node_that_is_killed(job: Job) -> None:
    job.begin("ab")
    address = url(job, "a")
    # "a" may have been in a round alone before "b" came.
    rounds = scrape(address)["rdzv_rounds_total"]
    with scraped(address) as seen:
        assert until(lambda: bool(seen), 30)
        killed = job.agents["b"].kill()
        job.await_begun("a", after=killed)
        assert until(lambda: seen[-1]["rdzv_rounds_total"] == rounds + 1, 30)
        assert until(lambda: seen[-1].get("rdzv_nodes/running") == 1, 30)
    first, last = seen[0], seen[-1]
    assert (first["rdzv_restarts_total/lost"], last["rdzv_restarts_total/lost"]) == (0, 1)
    causes = [key for key in last if key.startswith("rdzv_restarts_total/")]
    assert sum(last[key] - first[key] for key in causes) == 1
    assert (first["rdzv_round_nodes"], last["rdzv_round_nodes"]) == (2, 1)
    number = job.round()
    assert (last["rdzv_round"], last["rdzv_leads"], last["rdzv_phase/running"]) == (number, 1, 1)
    assert last["rdzv_forming_seconds_count/gathering"] == rounds + 1
    assert max(scrape["rdzv_heartbeat_age_seconds"] for scrape in seen) < LEASE
    assert max(scrape["rdzv_store_up"] for scrape in seen) == 1
    for name in ("rdzv_store_request_seconds_count/put_many", "rdzv_rounds_total"):
        values = [scrape.get(name, 0.0) for scrape in seen]
        assert values == sorted(values), f"{name} went back"
    assert last["/".join(["rdzv_info", "redis", job.label("a"), job.run_id, version()])] == 1
    assert page(f"{address}/healthz") == "ok\n"
    assert page(f"{address}/why").startswith(f"running round {number}, 1 of 1..2 nodes")
    job.finish("a")
    assert job.await_ends("a") == {"a": 0}
    with pytest.raises(urllib.error.URLError):
        page(f"{address}/healthz")


def test_the_store_goes_away_and_comes_back(job: Job, store: RunningStore) -> None:
    job.begin("a")
    address = url(job, "a")
    assert until(lambda: scrape(address).get("rdzv_rounds_total") == 1, 30)
    assert scrape(address)["rdzv_store_retries_total"] == 0
    assert store.server is not None
    with scraped(address) as seen:
        store.server.nodes[0].stop()
        assert until(lambda: bool(seen) and seen[-1]["rdzv_store_up"] == 0, 30)
        assert until(lambda: seen[-1]["rdzv_store_outage_seconds_total"] > 0.5, 30)
        assert until(lambda: seen[-1]["rdzv_store_retries_total"] > 0, 30)
        store.server.nodes[0].start(empty=False)
        assert until(lambda: seen[-1]["rdzv_store_up"] == 1, 30)
    assert seen[-1]["rdzv_rounds_total"] == 1
    failures = [key for key in seen[-1] if key.startswith("rdzv_store_failures_total/")]
    assert sum(seen[-1][key] for key in failures) > 0
    job.finish("a")
    assert job.await_ends("a") == {"a": 0}


def test_two_agents_that_want_one_port(job: Job) -> None:
    job.start_at("a")
    address = url(job, "a")
    port = int(address.rpartition(":")[2])
    job.start_at("b", metrics_port=port)
    job.await_begun("ab")
    job.await_line("b", "this node serves no metrics", str(port))
    for name in "ab":
        job.finish(name)
    assert job.await_ends("ab") == {"a": 0, "b": 0}


def version() -> str:
    from rdzv_plugins import __version__

    return __version__
