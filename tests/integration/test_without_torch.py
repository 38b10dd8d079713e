"""Every command but those that run agents, in an environment as a host has it that only looks.

It holds the wheel and, of what is installed here, just what the wheel's metadata brings.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import urllib.request
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from rdzv_plugins.cli import app
from rdzv_plugins.testing.threads import Background
from tests import servers
from tests.integration.test_cli import form
from tests.integration.wheels import pip

pytestmark = pytest.mark.xdist_group("wheel")

EXTRAS = {"redis", "embedded", "metrics", "dashboard"}


@pytest.fixture(scope="module")
def rdzv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in that environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-index", "--no-deps", str(wheel))
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("rdzv_plugins-*.dist-info")
    for package in needed(Distribution.at(metadata), EXTRAS):
        for top in {Path(file).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin" / "rdzv"


def needed(
    package: Distribution, extras: set[str], known: set[str] | None = None
) -> Iterator[Distribution]:
    """What pip installs with the package."""
    known = set() if known is None else known
    for line in package.requires or ():
        needs = Requirement(line)
        wanted = (
            [needs.marker.evaluate({"extra": it}) for it in ("", *extras)]
            if needs.marker
            else [True]
        )
        if any(wanted) and needs.name not in known:
            known.add(needs.name)
            found = distribution(needs.name)
            yield found
            yield from needed(found, needs.extras, known)


@pytest.fixture(scope="module")
def server() -> Iterator[servers.LocalServer]:
    with servers.start("valkey") as server:
        yield server


def run(rdzv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The prefix of the environment's own Python, whatever this process was started with.
    environ = {name: it for name, it in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [rdzv, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environ
    )


def test_there_is_no_torch(rdzv: Path) -> None:
    python = rdzv.with_name("python")
    asked = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert asked.stderr.endswith("No module named 'torch'\n")


def obey(handler: RendezvousHandler, over: threading.Event) -> None:
    """As an agent does: ask for the next round when the membership changes."""
    while not over.wait(0.1):
        if handler.num_nodes_waiting() > 0:
            handler.next_rendezvous()


# In the order in which they are run on a run of two nodes; {run} is its id.
COMMANDS: list[tuple[str, int, str]] = [
    ("status -i {run}", 0, r"run '{run}': running round 0, 2 nodes\n"),
    ("status -i {run} --json", 0, '"condition":"running"'),
    ("list", 0, "{run}.*running round 0, 2 nodes"),
    ("list --json", 0, '"run":"{run}"'),
    ("history -i {run}", 0, "first round"),
    ("restart -i {run}", 0, "round"),
    ("resize -i {run}", 0, ""),
    ("exclude -i {run} host7 --later --why tests", 0, "host7"),
    ("excluded -i {run}", 0, "host7"),
    ("include -i {run} host7", 0, "host7"),
    ("drain -i {run} nobody", 1, "has no node 'nobody'"),
    ("accuse -i {run} nobody", 1, "has no node 'nobody'"),
    ("check", 0, "unknown +torch: an agent needs torch 2.6 or later, and none is installed"),
    ("check -c handler=torch", 0, "a job works"),
    ("clean -i {run}", 1, "has live nodes"),
    ("close -i {run}", 0, "closed run '{run}'"),
    ("watch -i {run}", 0, "closed by the command rdzv close"),
    ("clean -i {run} --force", 0, r"deleted \d+ keys"),
    ("clean --dead", 0, ""),
    ("docs options --print", 0, "^# Options"),
    ("serve etcd", 1, "^rdzv: rdzv serve starts valkey or redis, and with -e .* not 'etcd'$"),
    ("demo", 1, "^rdzv: rdzv demo needs torch 2.6 or later, and none"),
    ("run --nnodes=1 train.py", 1, "^rdzv: rdzv run needs torch 2.6 or later, and none"),
]  # fmt: skip
SERVE_HTTP = {"exporter": "/metrics", "dashboard": "/"}


# Each of dozens of commands starts Python.
@pytest.mark.timeout(300)
def test_each_command_works_or_says_what_it_needs(
    rdzv: Path, server: servers.LocalServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ENDPOINT", server.endpoint)
    handlers = form(server, run_id)
    over = threading.Event()
    agents = [Background(lambda it=it: obey(it, over)) for it in handlers]  # type: ignore[misc]
    try:
        for line, status, said in COMMANDS:
            command = line.format(run=run_id).split()
            ended = run(rdzv, *command)
            shown = ended.stdout + ended.stderr
            assert ended.returncode == status, f"{command}: {shown}"
            assert re.search(said.format(run=run_id), shown, re.MULTILINE), f"{command}: {shown}"
            assert "Traceback" not in shown
    finally:
        over.set()
        for agent in agents:
            agent.result(30)
        for handler in handlers:
            handler.shutdown()


@pytest.mark.parametrize(("command", "path"), SERVE_HTTP.items())
def test_what_serves_pages_serves_them(
    rdzv: Path, server: servers.LocalServer, command: str, path: str
) -> None:
    arguments = [str(rdzv), command, "-e", server.endpoint, "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as serves:
        try:
            assert serves.stdout is not None
            first = serves.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", first)
            assert url, first
            with urllib.request.urlopen(url[0] + path, timeout=30) as answer:
                assert answer.status == 200
        finally:
            serves.send_signal(signal.SIGINT)
        assert serves.wait(30) == 0


def test_a_local_server_runs(rdzv: Path) -> None:
    with subprocess.Popen([rdzv, "serve"], stdout=subprocess.PIPE, text=True) as serves:
        assert serves.stdout is not None
        assert serves.stdout.readline().startswith("valkey runs at ")
        serves.send_signal(signal.SIGINT)
        assert serves.wait(30) == 0


def test_no_command_is_left_out() -> None:
    names = {
        it.name or (it.callback.__name__ if it.callback else "") for it in app.registered_commands
    }
    assert names == {line.split()[0] for line, _, _ in COMMANDS} | SERVE_HTTP.keys()
