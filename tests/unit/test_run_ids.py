"""Which run ids are possible: what none can have is refused before any store is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.settings.run_ids import refuse_unless_possible, why_no_log_folder
from rdzv_plugins.stores import STORES
from rdzv_plugins.torch.torchrun import makes_log_folders

RESERVED = ["!runs", "!excluded", "!archive/job", "!"]
IMPOSSIBLE = [*RESERVED, "a\nb", "a\tb", "a\x7f", "x" * 513, "ü" * 257, "a\udc80"]

# Nobody listens there: what asks the store fails with another error, and later.
NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command gives up on a store that does not answer after this time; by default after 5 s."""
    monkeypatch.setenv("RDZV_PLUGINS_HEARTBEAT_TIMEOUT", "0.2")


@pytest.mark.parametrize("run_id", [*IMPOSSIBLE, ""])
def test_what_no_run_can_have_is_refused_in_one_line(run_id: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-id") as refused:
        refuse_unless_possible(run_id)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", ["rdzv", "torch"])
def test_a_worker_of_a_run_makes_no_node_of_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only torch's agent sets that variable, and only in the environment of its workers."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job1")
    ours, another = (
        RendezvousParameters("redis", NOWHERE, run_id, 1, 1, handler=kind, heartbeat_timeout=0.1)
        for run_id in ("job1", "job2")
    )
    with pytest.raises(ValueError, match="use --standalone for one host, or an --rdzv-id"):
        create_handler("redis", ours)
    with pytest.raises(RendezvousConnectionError):
        create_handler("redis", another)


@pytest.mark.parametrize("run_id", ["none", "job 1", "a/b", ".", "..", "ü" * 256, "a!b", "日本"])
def test_others_are_possible(run_id: str) -> None:
    assert refuse_unless_possible(run_id) == run_id


@pytest.mark.parametrize("handler", ["rdzv", "torch"])
@pytest.mark.parametrize("backend", STORES)
def test_the_agent_refuses_it(backend: str, handler: str, caplog: pytest.LogCaptureFixture) -> None:
    params = RendezvousParameters(backend, NOWHERE, "!excluded", 1, 1, handler=handler)
    with pytest.raises(ValueError, match="reserved"):
        create_handler(backend, params)
    assert [it.levelname for it in caplog.records] == ["ERROR"]


COMMANDS = [
    ["status"], ["history"], ["watch"], ["close"], ["drain", "node"], ["restart"], ["resize"],
    ["exclude", "host"], ["include", "host"], ["excluded"], ["clean"], ["clean", "--force"],
    ["accuse", "node"], ["dashboard", "--port", "0"], ["exporter", "--port", "0"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "backend"),
    [
        pytest.param(
            command,
            backend,
            # Each command once, and each store once.
            marks=() if backend == "redis" or command == ["status"] else pytest.mark.full,
            id=f"{' '.join(command)}-{backend}",
        )
        for command in COMMANDS
        for backend in STORES
    ],
)
def test_each_command_refuses_it(command: list[str], backend: str) -> None:
    said = CliRunner().invoke(app, [*command, "-b", backend, "-e", NOWHERE, "-i", "!excluded"])
    assert isinstance(said.exception, ValueError)
    assert "reserved" in str(said.exception)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_empty_id_is_not_the_same_as_none(command: list[str]) -> None:
    """As of a variable of the shell that is not set."""
    said = CliRunner().invoke(app, [*command, "-e", NOWHERE, "-i", ""])
    assert isinstance(said.exception, ValueError)
    assert str(said.exception) == "--rdzv-id is empty: give the run an id"


@pytest.mark.parametrize(("run_id", "why"), [("!excluded", "reserved"), ("", "is empty")])
def test_a_member_by_hand_refuses_it(run_id: str, why: str) -> None:
    said = CliRunner().invoke(app, ["serve", "quorum", "-e", "127.0.0.1", "-i", run_id])
    assert isinstance(said.exception, ValueError)
    assert why in str(said.exception)


@pytest.mark.parametrize("command", [["exclude", "host"], ["include", "host"], ["excluded"]])
def test_none_is_needed_for_all_runs(command: list[str]) -> None:
    said = CliRunner().invoke(app, [*command, "--all-runs", "-e", NOWHERE])
    assert isinstance(said.exception, RendezvousConnectionError)


def test_there_is_no_other_command_that_takes_an_id() -> None:
    """Each callback that has a run id is in the list above, or is tested beside it."""
    named = {command[0] for command in COMMANDS} | {"check", "serve"}
    takes = {
        it.name or it.callback.__name__.replace("_runs", "")
        for it in app.registered_commands
        if it.callback is not None and "run_id" in it.callback.__annotations__
    }
    assert takes == named


def test_a_command_says_it_in_one_line() -> None:
    command = [sys.executable, "-m", "rdzv_plugins.cli", "clean", "-i", "!excluded", "--force"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 1
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("rdzv: --rdzv-id '!excluded': ids that begin with '!' are res")


@pytest.mark.parametrize("backend", STORES)
def test_check_says_it(backend: str) -> None:
    said = CliRunner().invoke(app, ["check", "-b", backend, "-e", NOWHERE, "-i", "!runs"])
    assert said.exit_code == 2
    assert "ids that begin with '!' are reserved" in said.stdout


def test_check_refuses_an_empty_id_and_needs_none() -> None:
    empty = CliRunner().invoke(app, ["check", "-e", NOWHERE, "-i", ""])
    assert empty.exit_code == 2
    assert "--rdzv-id is empty: give the run an id" in empty.stdout
    assert "--rdzv-id" not in CliRunner().invoke(app, ["check", "-e", NOWHERE]).stdout


@pytest.mark.parametrize("run_id", ["job1/x", "a/b/c", "x" * 247, "x" * 300, "ü" * 124])
def test_check_knows_which_ids_torch_makes_no_folder_for(run_id: str, tmp_path: Path) -> None:
    assert why_no_log_folder(run_id)
    with pytest.raises(OSError, match=r"File name too long|No such file"):
        DefaultLogsSpecs(log_dir=str(tmp_path))._make_log_dir(str(tmp_path), run_id)
    said = CliRunner().invoke(app, ["check", "-e", NOWHERE, "-i", run_id])
    assert "torch names a folder of its --log-dir after the run id" in said.stdout


@pytest.mark.parametrize("run_id", ["job1", ".", "..", "x" * 246, "ü" * 123, "a b*?\\"])
def test_torch_makes_a_folder_for_the_other_ids(run_id: str, tmp_path: Path) -> None:
    assert why_no_log_folder(run_id) is None
    made = DefaultLogsSpecs(log_dir=str(tmp_path))._make_log_dir(str(tmp_path), run_id)
    assert Path(made).is_dir()


@pytest.mark.parametrize(
    ("arguments", "makes"),
    [([], True), (["--log-dir", tempfile.gettempdir()], True), (["--log-dir", os.devnull], False)],
)
def test_only_torchrun_with_a_folder_is_warned(
    arguments: list[str], makes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not makes_log_folders()
    monkeypatch.setattr(sys, "argv", ["torchrun", *arguments, "script.py"])
    assert makes_log_folders() is makes
