"""What the tests measured is shown; those that share a process in ``make test`` are grouped."""

from __future__ import annotations

import functools
import gc
import logging
import signal
from importlib import import_module
from typing import Any

import hypothesis
import pytest

from rdzv_plugins.settings import environment
from tests.integration import forked

_TORCHS_EVENTS = logging.getLogger("torchelastic-events-dynamic_rendezvous")

# The imports and the collected tests stay: each process would search them for garbage for a second.
gc.disable()

# Else an example that takes 0.2 s fails, on a machine that has other things to do.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Their agents fill all cores: the files of a row run one after the other, so that no more than five
# jobs start at a time.
_JOBS = {
    "scenarios": ("test_torchrun", "test_edges", "test_gpu_check"),
    "run": (
        "test_run", "test_newcomers", "test_unfit_nodes", "test_workers_ends", "test_exhausted",
        "test_steps", "test_places", "test_options", "test_trainings",
    ),
    "pages": ("test_readme", "test_start", "test_policies"),
    "hosts": ("test_addresses", "test_network_check", "test_slow_resolver", "test_two_worlds"),
    "ensembles": ("test_quorum", "test_ensembles", "test_rotation"),
}  # fmt: skip
_ROW = {file: row for row, files in _JOBS.items() for file in files}
# The longest come first, then those of minutes, so that no process ends long after the others.
_LONG = ("test_torch_handler", "test_signals", "test_check")
# Each value of this fixture or argument is a group of its own: tests that wait for most of their
# time, and mutants, which fill the processors at the end.
_APART = {"test_torch_handler": "run", "test_signals": "case", "test_simulation": "name"}


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: the process that starts the others calls it.
def pytest_configure_node(node: Any) -> None:
    """Let all processes share a fork server: each would import torch in one of its own."""
    node.workerinput["forks"] = forked.serve()


def pytest_configure(config: pytest.Config) -> None:
    # A script's background job ignores SIGINT, and the agents that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if address := getattr(config, "workerinput", {}).get("forks"):
        forked.use(address)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # pytest captures each logger that does not propagate: torch's events would stand among a test's
    # lines. The tests of those events enable it, and so does each set-up of a server's logs.
    _TORCHS_EVENTS.disabled = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Handlers that a test had crash withhold its secrets for ever: the next test has none."""
    environment._withheld.clear()
    environment._withholders = 0


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's reads the groups.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    if session.config.getoption("loadgroup", False):
        # pytest-xdist writes an attribute of pytest's own, which pytest 9.2 no longer reads.
        assert all("@" in item.nodeid for item in session.items), "the groups have no effect"


def _row(item: pytest.Item) -> str | None:
    return _ROW.get(item.path.stem) if item.path.parent.name == "integration" else None


def _turn(item: pytest.Item) -> int:
    """When its group's turn comes; groups of one turn come in the order of their first tests."""
    is_seed = item.path.stem == "test_simulation" and _apart(item) is None
    if _row(item) is not None or is_seed:
        return 0
    return 1 if item.path.stem in _LONG or _store(item) is not None else 2


def _group(item: pytest.Item) -> str:
    """The tests on one running store, so that it is started once; else those of a row or a file."""
    stem, apart = item.path.stem, _apart(item)
    return _store(item) or _row(item) or (f"{stem} {apart}" if apart else stem)


def _apart(item: pytest.Item) -> Any:
    return _param(item, _APART.get(item.path.stem, ""))


def _store(item: pytest.Item) -> str | None:
    store = _param(item, "running_store")
    return str(store.name) if store else None


def _param(item: pytest.Item, fixture: str) -> Any:
    parametrised: Any = getattr(item, "callspec", None)
    return parametrised.params.get(fixture) if parametrised else None


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> None:
    """typer makes all commands anew each time that a test invokes one: 0.03 s of a processor."""
    testing: Any = import_module("typer.testing")
    testing._get_command = functools.cache(testing._get_command)


@pytest.fixture
def cheap_method_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handler asks inspect.stack() twice for each event's name, which searches all modules.

    A call takes 0.1 s of a processor where all tests are imported: torch needed a minute to close.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda: "a method")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = [
        (report.nodeid.rpartition("/")[2].partition("@")[0], report.user_properties)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        if report.when == "call" and report.user_properties
    ]
    if measured:
        terminalreporter.section("measured")
    for name, properties in measured:
        values = ", ".join(f"{key}: {value}" for key, value in properties)
        terminalreporter.write_line(f"{name}: {values}")
