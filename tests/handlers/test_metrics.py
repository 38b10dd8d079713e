"""What a node measures, and where it shows it: real handlers over the in-memory store."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics as opentelemetry
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousParameters

from rdzv_plugins.kv import MemoryServer, RendezvousConnectionError
from rdzv_plugins.kv.contract import KeyValueClient
from rdzv_plugins.observe.metrics import (
    CAUSES,
    METRICS,
    STATES,
    TABLE,
    Measured,
    Metric,
    MetricKind,
    build,
)
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import Cause, Phase
from rdzv_plugins.protocol.states import State
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import parse_options
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import LEASE, Site
from tests.handlers.site import site as make_site
from tests.unit.test_store_client import DictClient

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    # A real TCPStore takes 5 s to open where a resolver loses a question, and costs the round.
    monkeypatch.setattr(StoreRendezvousHandler, "_open_master", lambda *_: "127.0.0.1:1")
    with make_site() as site:
        yield site


def page(handler: StoreRendezvousHandler, path: str) -> str:
    assert handler._report is not None
    with urllib.request.urlopen(f"{handler._report._server.url}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def value_of(handler: StoreRendezvousHandler, name: str, **labels: str) -> float | None:
    """A sample on the node's page; None: it is not there."""
    for family in text_string_to_metric_families(page(handler, "/metrics")):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


def total(handler: StoreRendezvousHandler, name: str, label: str) -> dict[str, float]:
    """All samples of a metric that are not 0, by one label."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(page(handler, "/metrics"))
        for sample in family.samples
        if sample.name == name and sample.value
    }


class TestWhatANodeMeasures:
    def test_when_a_last_call_ends(self, site: Site) -> None:
        """By the leader's clock, also on the page of a node that follows."""
        options: dict[str, Any] = {
            "metrics_port": 0,
            "last_call_timeout": 60.0,
            "join_timeout": 120.0,
        }
        pair = [site.handler(2, 3, **options) for _ in range(2)]
        joins = [Background(handler.next_rendezvous) for handler in pair]

        def ends(handler: StoreRendezvousHandler) -> float:
            return value_of(handler, "rdzv_last_call_ends_timestamp_seconds") or 0.0

        site.await_that(lambda: all(ends(it) > 0 for it in pair))
        leads = [value_of(it, "rdzv_leads") for it in pair]
        assert sorted(map(bool, leads)) == [False, True]
        for handler in pair:
            assert 30 < ends(handler) - time.time() < 61
            began = value_of(handler, "rdzv_phase_began_timestamp_seconds") or 0.0
            assert began <= time.time() <= ends(handler)
        pair[0].set_closed()
        for join in joins:
            with pytest.raises(RendezvousClosedError):
                join.result(20.0)
        assert isnan(value_of(pair[0], "rdzv_phase_began_timestamp_seconds") or 0.0)
        assert isnan(ends(pair[0]))

    def test_the_life_of_a_pair(self, site: Site) -> None:
        first, second = (site.handler(1, 2, metrics_port=0) for _ in range(2))
        site.join(first, second)
        site.await_that(lambda: value_of(second, "rdzv_rounds_total") == 1)
        site.await_that(lambda: value_of(first, "rdzv_rounds_total") == 1)
        for handler in (first, second):
            assert total(handler, "rdzv_restarts_total", "cause") == {}, "a first round is none"
            assert total(handler, "rdzv_forming_seconds_count", "phase") == {
                "gathering": 1,
                "confirming": 1,
            }
            assert total(handler, "rdzv_phase", "phase") == {"running": 1}
            assert value_of(handler, "rdzv_round") == 0
            assert value_of(handler, "rdzv_round_nodes") == 2
            assert value_of(handler, "rdzv_lease_seconds") == pytest.approx(LEASE)
            assert value_of(handler, "rdzv_store_up") == 1
            for age in ("rdzv_heartbeat_age_seconds", "rdzv_leader_silence_seconds"):
                site.await_that(lambda it=handler, age=age: 0 <= (value_of(it, age) or 0) < LEASE)
            requests = total(handler, "rdzv_store_request_seconds_count", "kind")
            assert requests.keys() >= {"get", "put_many", "wait"}
        leads = [handler for handler in (first, second) if value_of(handler, "rdzv_leads")]
        assert len(leads) == 1
        assert total(leads[0], "rdzv_store_request_seconds_count", "kind").keys() >= {
            "list",
            "compare_and_set",
        }

        began = [value_of(it, "rdzv_phase_began_timestamp_seconds") for it in (first, second)]
        assert len({*began}) == 1, "both tell when the leader wrote that the round runs"
        assert abs((began[0] or 0) - time.time()) < 60
        assert isnan(value_of(first, "rdzv_last_call_ends_timestamp_seconds") or 0)

        def states() -> dict[str, float]:
            return total(leads[0], "rdzv_nodes", "state")

        site.await_that(lambda: states() == {"running": 2})
        assert value_of(leads[0], "rdzv_nodes", state="waiting") == 0
        (other,) = {first, second} - {*leads}
        assert value_of(other, "rdzv_nodes") is None, "only the leader sees all"

    @pytest.mark.parametrize("cause", ["lost", "left", "failed", "joined"])
    def test_a_node_tells_why_it_restarts(self, site: Site, cause: str) -> None:
        stays, other = (site.handler(1, 2, metrics_port=0) for _ in range(2))
        if cause == "joined":
            site.join(stays)
            joins = Background(other.next_rendezvous)
            site.await_that(stays.num_nodes_waiting)
        else:
            site.join(stays, other)
            if cause == "lost":
                site.kill(other)
            elif cause == "left":
                other._leave()
        if cause == "failed":
            site.join(stays, other)
        else:
            site.await_that(stays.num_nodes_waiting)
            site.await_that(lambda: value_of(stays, "rdzv_nodes_waiting") == 1)
            site.join(stays)
        if cause == "joined":
            joins.result(20.0)
        site.await_that(lambda: total(stays, "rdzv_restarts_total", "cause") == {cause: 1})
        assert value_of(stays, "rdzv_rounds_total") == 2

    def test_an_outage(self, site: Site) -> None:
        client = site.client()
        alone = site.handler(1, 1, client, metrics_port=0)
        site.join(alone)
        assert value_of(alone, "rdzv_store_outage_seconds_total") == 0
        client.cut()
        site.await_that(lambda: value_of(alone, "rdzv_store_up") == 0)
        site.await_that(lambda: (value_of(alone, "rdzv_store_outage_seconds_total") or 0) > 0.3)
        site.await_that(lambda: (value_of(alone, "rdzv_heartbeat_age_seconds") or 0) > LEASE)
        assert page(alone, "/healthz") == "the store is away; this node keeps trying\n"
        assert sum(total(alone, "rdzv_store_failures_total", "kind").values()) > 0
        client.down = False
        site.await_that(lambda: value_of(alone, "rdzv_store_up") == 1)
        seconds = value_of(alone, "rdzv_store_outage_seconds_total")
        site.await_that(lambda: (value_of(alone, "rdzv_heartbeat_age_seconds") or 9) < LEASE)
        assert value_of(alone, "rdzv_store_outage_seconds_total") == seconds

    def test_before_the_first_round(self, site: Site) -> None:
        fresh = site.handler(1, 1, metrics_port=0)
        assert page(fresh, "/healthz") == "the agent has not asked for a round yet\n"
        text = page(fresh, "/metrics")
        assert "rdzv_round NaN" in text
        assert "rdzv_heartbeat_age_seconds NaN" in text
        assert value_of(fresh, "rdzv_info", run="run", backend="memory") == 1


class TestTheSentence:
    def test_it_says_what_the_node_waits_for(self, site: Site) -> None:
        waits = site.handler(2, 2, metrics_port=0)
        join = Background(waits.next_rendezvous)
        site.await_that(lambda: "1 of 2 is here" in page(waits, "/why"))
        assert re.fullmatch(
            r"waiting for 1 node: 1 of 2 is here; forming since [0-9:]{8} UTC; "
            r"\d+ s to join_timeout\n",
            page(waits, "/why"),
        )
        site.join(site.handler(2, 2))
        join.result(20.0)
        assert page(waits, "/why").startswith("running round 0, 2 nodes")
        waits.set_closed()
        site.await_that(lambda: page(waits, "/why").startswith("closed: by request"))


class TestTheServer:
    def test_a_node_that_stands_still_is_not_well(self, site: Site) -> None:
        alone = site.handler(1, 1, metrics_port=0, heartbeat_timeout=0.1)
        site.join(alone)
        assert page(alone, "/healthz") == "ok\n"
        assert alone._report is not None
        alone._driver._perform = threading.Event().wait  # type: ignore[assignment]

        def is_well() -> bool:
            with suppress(urllib.error.HTTPError):
                return bool(page(alone, "/healthz"))
            return False

        site.await_that(lambda: not is_well())
        with pytest.raises(urllib.error.HTTPError) as caught:
            page(alone, "/healthz")
        assert caught.value.code == 503
        assert re.fullmatch(rb"the node has stood still for \d+ s\n", caught.value.read())

    def test_other_paths_name_the_pages(self, site: Site) -> None:
        alone = site.handler(1, 1, metrics_port=0)
        with pytest.raises(urllib.error.HTTPError) as caught:
            page(alone, "/")
        assert caught.value.code == 404
        assert caught.value.read() == b"there are /metrics, /healthz and /why\n"

    def test_it_listens_on_loopback_only_and_the_log_says_where(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "rdzv_plugins")
        alone = site.handler(1, 1, metrics_port=0)
        assert alone._report is not None
        url = alone._report._server.url
        assert url.startswith("http://127.0.0.1:")
        assert f"run 'run': metrics are served at {url}/metrics" in caplog.messages

    def test_on_ipv6(self, site: Site) -> None:
        alone = site.handler(1, 1, metrics_port=0, metrics_host="::1")
        assert alone._report is not None
        assert alone._report._server.url.startswith("http://[::1]:")
        assert page(alone, "/healthz")

    def test_without_a_token_no_agent_starts_that_would_tell_anybody(self, site: Site) -> None:
        conf = {"metrics_port": "0", "metrics_host": "0.0.0.0"}
        params = RendezvousParameters("redis", "redis://127.0.0.1:1", "run", 1, 1, **conf)
        with pytest.raises(ValueError, match=r"^anyone who reaches 0\.0\.0\.0 would read the"):
            create_handler("redis", params)

    def test_a_taken_port_is_a_warning_and_the_node_goes_on(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            alone = site.handler(1, 1, metrics_port=port)
            (line,) = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
            assert line.startswith(
                f"run 'run': this node serves no metrics: 127.0.0.1:{port} cannot be"
            )
            assert "\n" not in line
            site.join(alone)
            assert alone.shutdown()

    def test_its_thread_has_a_name_and_ends_with_the_handler(self, site: Site) -> None:
        alone = site.handler(1, 1, metrics_port=0)
        site.join(alone)
        assert alone._report is not None
        url = alone._report._server.url
        (thread,) = [it for it in threading.enumerate() if it.name == "rdzv-run-metrics"]
        assert thread.daemon
        assert alone.shutdown()
        assert not thread.is_alive()
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5)

    def test_a_node_that_is_not_made_without_its_thread_leaves_no_listener(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "rdzv-run-metrics":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            site.handler(1, 2, metrics_port=0, network_check=True)
        assert "rdzv-run-answers" not in {it.name for it in threading.enumerate()}

    def test_a_client_that_sends_nothing_does_not_hold_up_the_end(self, site: Site) -> None:
        alone = site.handler(1, 1, metrics_port=0)
        site.join(alone)
        assert alone._report is not None
        with socket.create_connection(alone._report._server._server.server_address[:2]):
            ends = Background(alone.shutdown)
            assert ends.result(5.0)

    def test_a_forked_child_does_not_keep_the_port_of_an_agent_that_is_killed(self) -> None:
        program = """
import os, signal, sys
from prometheus_client import CollectorRegistry
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.observe.metrics_server import MetricsServer
from rdzv_plugins.observe.page_access import PageAccess
server = MetricsServer(
    "127.0.0.1", 0, PageAccess("127.0.0.1", Settings()), CollectorRegistry(),
    before_metrics=str, health=lambda: (True, "ok"), why=str, name="rdzv-run-metrics",
)
begun = os.pipe()
if os.fork() == 0:
    os.write(begun[1], b"!")
    sys.stdin.read()
    os._exit(0)
os.read(begun[0], 1)
print(server.url.rpartition(":")[2], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        agent = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert agent.stdin is not None
        assert agent.stdout is not None
        with agent.stdin, agent.stdout:
            port = int(agent.stdout.readline())
            agent.wait(20)
            # The child lives until its input ends.
            with socket.create_server(("127.0.0.1", port)):
                pass


class TestWithoutMetrics:
    def test_nothing_is_on_the_path(self, site: Site) -> None:
        client = site.client()
        alone = site.handler(1, 1, client)
        site.join(alone)
        assert alone._client is client
        assert alone._report is None
        assert alone._watchers == []
        assert not [it for it in threading.enumerate() if "metrics" in it.name]

    def test_neither_library_is_imported(self) -> None:
        program = (
            "import sys, rdzv_plugins.process.handler, rdzv_plugins.observe.metrics\n"
            "assert not {'prometheus_client', 'opentelemetry', 'wsgiref'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=100)

    @pytest.mark.parametrize(
        ("option", "package", "extra"),
        [
            ("metrics_port=0", "prometheus_client", "metrics"),
            ("otel=true", "opentelemetry", "otel"),
        ],
    )
    def test_a_missing_library_is_one_line_with_the_install(
        self, monkeypatch: pytest.MonkeyPatch, option: str, package: str, extra: str
    ) -> None:
        name, _, value = option.partition("=")
        # Makes its import fail as if it were not installed.
        for module in [it for it in sys.modules if it.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        params = RendezvousParameters("redis", "localhost:1", "r", 1, 1, **{name: value})
        with pytest.raises(ValueError, match=f"^option '{name}' needs the package '{package}") as e:
            create_handler("redis", params)
        assert str(e.value).endswith(f'pip install "rdzv-plugins[{extra}]"')
        assert "\n" not in str(e.value)

    def test_a_port_that_is_none(self) -> None:
        with pytest.raises(ValueError, match="'metrics_port': '65536' must be at most 65535"):
            parse_options(Settings, {"metrics_port": "65536"}, {})


class TestTheClient:
    def note(self) -> tuple[list[tuple[str, bool]], Measured, DictClient]:
        noted: list[tuple[str, bool]] = []
        client = DictClient(MemoryServer(), "run", request_timeout=0.2)
        measured = Measured(
            client,
            lambda kind, seconds, error: noted.append((kind, error is None)),
            lambda: noted.append(("retry", True)),
        )
        return noted, measured, client

    def test_every_request_of_the_contract_is_measured(self) -> None:
        noted, client, inner = self.note()
        version = client.put("a", b"1")
        client.put_many({"b": b"2"})
        assert client.get("a") == inner.get("a")
        assert client.get_many(["a", "b"]).keys() == {"a", "b"}
        assert client.list("").keys() == {"a", "b"}
        assert client.compare_and_set("a", b"3", version)[1]
        assert client.add("n", 2) == 2
        assert client.wait("a", None, 0.0) is not None
        client.expire(100)
        client.delete("a")
        client.delete_many(["b"])
        client.interrupt()
        client.close()
        kinds = [kind for kind, _ in noted]
        methods = KeyValueClient.__abstractmethods__ | {"get_many", "put_many", "delete_many"}
        assert {*kinds} == methods - {"interrupt", "close"}
        assert len(kinds) == len({*kinds})

    def test_it_is_the_client_in_all_else(self) -> None:
        _, client, inner = self.note()
        assert (client.name, client.capabilities) == (inner.name, inner.capabilities)
        assert (client.members_up, client.on_retry) == (inner.members_up, inner.on_retry)

    def test_retries_and_failures(self) -> None:
        noted, client, inner = self.note()
        inner.failures += [(OSError("lost"), False)]
        assert client.compare_and_set("a", b"1", None)[1]
        assert noted == [("retry", True), ("compare_and_set", True)]
        noted.clear()
        inner.failures += [(OSError("lost"), False)] * 1000
        with pytest.raises(RendezvousConnectionError):
            client.compare_and_set("a", b"2", None) if client.get("a") is None else (
                client.compare_and_set("b", b"2", None)
            )
        assert noted[-1] == ("compare_and_set", False)
        assert noted.count(("retry", True)) > 1

    def test_the_end_is_no_failure(self) -> None:
        noted, client, _ = self.note()
        client.close()
        with pytest.raises(RendezvousConnectionError):
            client.get("a")
        assert noted == []


class TestOpenTelemetry:
    def test_the_same_metrics_under_the_same_names(self, site: Site) -> None:
        reader = InMemoryMetricReader()
        # No `set_meter_provider` here: a process has one for ever, and other tests share it.
        provider = MeterProvider([reader])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opentelemetry, "get_meter", provider.get_meter)
            alone = site.handler(1, 1, otel=True, metrics_port=0)

        def reported() -> dict[str, list[Any]]:
            data = reader.get_metrics_data()
            scopes = data.resource_metrics[0].scope_metrics if data else []
            return {
                metric.name: [*metric.data.data_points]
                for scope in scopes
                for metric in scope.metrics
            }

        site.join(alone)
        site.await_that(lambda: value_of(alone, "rdzv_rounds_total") == 1)
        found = reported()
        assert [point.value for point in found["rdzv_rounds_total"]] == [1]
        assert {point.attributes["phase"] for point in found["rdzv_phase"]} == {*Phase}
        (bounds,) = {point.explicit_bounds for point in found["rdzv_store_request_seconds"]}
        assert bounds[0] == 0.0005, "not those of the SDK, which are for milliseconds"
        kinds = {point.attributes["kind"] for point in found["rdzv_store_request_seconds"]}
        assert kinds >= {"put_many", "compare_and_set"}
        shown = {
            sample.name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            for family in text_string_to_metric_families(page(alone, "/metrics"))
            for sample in family.samples
            if not sample.name.endswith("_created") and sample.value == sample.value
        }
        # Nothing failed, and OpenTelemetry shows no counter that was not counted, and no NaN.
        quiet = {
            "rdzv_store_failures_total", "rdzv_store_retries_total",
            "rdzv_store_outage_seconds_total",
        }  # fmt: skip
        assert {*found} == shown - quiet
        assert alone.shutdown()
        gauges = {metric.name for metric in METRICS if metric.kind is MetricKind.GAUGE}
        assert not {*reported()} & gauges

    def test_no_page_without_a_port(self, site: Site) -> None:
        alone = site.handler(1, 1, otel=True)
        site.join(alone)
        assert alone._report is not None
        assert alone._report._server is None
        assert alone.shutdown()


class TestTheTable:
    def test_a_registry_has_each_metric_as_the_table_says(self) -> None:
        registry = CollectorRegistry()
        build(registry)
        found = {
            family.name + ("_total" if family.type == "counter" else ""): family.type
            for family in registry.collect()
        }
        assert found == {metric.name: metric.kind.value for metric in METRICS}

    def test_causes_and_states_are_the_protocols(self) -> None:
        others = ("by_accusation", "ended", "apart", "unfit", "why", "note")
        fields = [name for name in Cause.__struct_fields__ if name not in others]
        assert [*CAUSES[:-1]] == fields
        assert {*STATES} == {*State}

    def test_the_page_shows_the_table(self) -> None:
        text = (ROOT / "docs" / "metrics.md").read_text()
        shown = [line for line in text.splitlines() if line.startswith("| `rdzv_")]
        assert shown == [row(metric) for metric in TABLE]


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.by} | {metric.kind} | {labels} | {metric.text} |"


def names_in(text: str) -> set[str]:
    return {*re.findall(r"\brdzv_[a-z_]+", text)}


def exported() -> set[str]:
    """The names of all samples: Prometheus shows a histogram as three."""
    return {
        metric.name + suffix
        for metric in METRICS
        for suffix in (
            ("_bucket", "_count", "_sum") if metric.kind is MetricKind.HISTOGRAM else ("",)
        )
    }


class TestTheDashboard:
    dashboard: Any = json.loads((ROOT / "examples" / "grafana.json").read_text())

    def queries(self) -> list[str]:
        targets = [
            target["expr"]
            for panel in self.dashboard["panels"]
            for target in panel.get("targets", ())
        ]
        variables = [str(it.get("query", "")) for it in self.dashboard["templating"]["list"]]
        return targets + variables

    def test_each_name_is_one_that_the_package_exports(self) -> None:
        queries = self.queries()
        assert len(queries) > 10
        assert all(names_in(query) for query in queries if query != "prometheus")
        assert set().union(*map(names_in, queries)) <= exported()

    def test_each_metric_is_in_it(self) -> None:
        used = set().union(*map(names_in, self.queries()))
        for metric in METRICS:
            assert any(name.startswith(metric.name) for name in used), metric.name

    def test_each_label_is_one_of_its_metric(self) -> None:
        labels = {metric.name: {*metric.labels} for metric in METRICS}
        for query in self.queries():
            for name, selector in re.findall(r"(rdzv_[a-z_]+)\{([^}]*)\}", query):
                base = re.sub(r"_(bucket|count|sum)$", "", name)
                used = {*re.findall(r"(\w+)\s*=", selector)}
                assert used <= labels[base] | {"instance", "le"}, query
