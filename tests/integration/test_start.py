"""Each start page, followed to the letter; and what cannot run here, compared with the code.

Run as a program in an empty folder, in a network of its own, it follows a page of docs/start and
then every-store.md, and prints the seconds of each part as JSON.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from rdzv_plugins.stores import STORES, _dynamodb_table, dynamodb, s3
from rdzv_plugins.stores import redis as redis_store
from rdzv_plugins.testing.harness import until
from tests import Measure, servers
from tests.integration.hosts import bring_up_loopback, in_namespaces
from tests.integration.pages import PATIENCE, START, Terminal, blocks
from tests.integration.stores import absent
from tests.servers.process import find_file

TRAIN = "../../examples/train.py"

PAGES = [
    "quorum", "redis", "zookeeper", "dynamodb", "consul", "etcd", "postgres", "nats",
    # A recipe has the shorter name.
    "kubernetes-api", "s3", "azure",
]  # fmt: skip
TOOLS = {
    "redis": "redis-cli", "zookeeper": "zkCli.sh", "consul": "consul", "etcd": "etcdctl",
    "postgres": "psql", "nats": "nats-server",
}  # fmt: skip

RUN_HERE = ("redis", "postgres")
every_page = pytest.mark.parametrize("name", PAGES)


def page(name: str) -> Path:
    return START / f"{name}.md"


# The address of the host for which a terminal stands.
_HOST = re.compile(r"(--local-addr=127\.0\.0\.)1")

_JOINED = re.compile(r"joined as \S*\[(\d+)\]")


def on_hosts(text: str) -> list[str]:
    """The command of each terminal, if they stand for hosts."""
    found = _HOST.search(text)
    return [_HOST.sub(rf"\g<1>{digit}", text) for digit in (1, 2, 3)] if found else []


def path() -> str:
    """The reader's PATH, with the stores' command-line tools."""
    consul = find_file("consul", ["consul"])
    folders = [Path(sys.executable).parent, *([consul.parent] if consul else [])]
    # Debian has ZooKeeper's outside PATH.
    usual = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/usr/share/zookeeper/bin"]
    return ":".join([*map(str, folders), *usual])


def of_three(text: str) -> str:
    """What the page on every store shows of two agents, as three show it."""
    text = re.sub(r"\bof ([12])\b", lambda it: f"of {int(it[1]) + 1}", text)
    for two, three in (
        ("--nnodes=1:2", "--nnodes=2:3"), ("rank 1 of", "rank … of"),
        ("forms: lost", "forms: …lost"), ("(lost", "(…lost"), ("found)", "found…)"),
    ):  # fmt: skip
        text = text.replace(two, three)
    return text


class Reader:
    """Does what the page says, block after block.

    What a fenced block is for, stands behind its backquotes. A page may have no other blocks:

    - ``sh install``: what pip installs; the extras must exist.
    - ``sh server``: runs in a terminal of its own until the page ends; `rdzv-plugins` is the
      checkout.
    - ``sh``: runs to its end, which must be a success; what it exports, later blocks have too.
    - ``sh terminals``: the same in new terminals, in which nothing was exported yet.
    - ``sh job``: runs in two terminals; with --local-addr=127.0.0.1 in three, as on
      hosts, with 127.0.0.2 and 127.0.0.3 too.
    - ``sh kill``: kills the agent of rank 0; the number on the page stands for its process id.
    - ``sh again``: starts the killed agent again; "…" stands for its arguments.
    - ``text``: lines that the command before shows; "…" stands for anything within a line.
    - a language and a file's name: the reader saves it in a file of that name.
    - a language and ``elsewhere``: cannot run here, because it needs Docker, a cloud or more hosts.
    """

    def __init__(self) -> None:
        # To a reader's eye nothing is set.
        self._empty = {"PATH": path(), "HOME": str(Path.cwd()), "LANG": "C.UTF-8"}
        self._set(self._empty)
        self.terminals: list[Terminal] = []
        self._servers: list[Terminal] = []
        self._jobs: list[Terminal] = []
        self._commands: dict[Terminal, str] = {}
        self._killed = ""
        # What the last command showed, if it has ended; and how much each terminal showed before.
        self._said = ""
        self._old: dict[Terminal, int] = {}

    def follow(self, purpose: str, text: str) -> None:
        _, _, detail = purpose.partition(" ")
        if detail == "elsewhere":
            return
        if "." in detail:
            Path(detail).write_text(text)
            return
        actions: dict[str, Callable[[str], object]] = {
            "sh install": self._install,
            "sh server": self._serve,
            "sh": self._run,
            "sh terminals": self._open_terminals,
            "sh job": self._start_job,
            "sh kill": self._kill,
            "sh again": self._start_again,
            "text": self._see,
        }
        if purpose not in actions:
            raise ValueError(f"a block of an unknown kind: '{purpose}'")
        if purpose != "text":
            self._said = ""
            self._old = {it: len(it.shown) for it in self.terminals}
        actions[purpose](text)

    def _set(self, environment: dict[str, str]) -> None:
        os.environ.clear()
        os.environ.update(environment)

    def _install(self, text: str) -> None:
        asked = re.fullmatch(r'pip install "rdzv-plugins\[([\w,]+)\]"\n', text)
        assert asked is not None, text
        extras = metadata("rdzv-plugins").get_all("Provides-Extra") or []
        assert set(asked[1].split(",")) <= set(extras), text

    def _open(self, text: str) -> Terminal:
        self.terminals.append(terminal := Terminal(text))
        return terminal

    def _serve(self, text: str) -> None:
        Path("rdzv-plugins").symlink_to(START.parents[1])
        self._servers.append(self._open(text))

    def _run(self, text: str) -> None:
        shell = f"set -eo pipefail; trap 'env -0 >.environment' EXIT\n{text}"
        ended = subprocess.run(
            ["bash", "-c", shell],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
        )  # fmt: skip
        self._said = ended.stdout
        # The verdict of `rdzv check`, which the page shows, tells of warnings.
        if ended.returncode not in ((0, 1) if "rdzv check" in text else (0,)):
            raise RuntimeError(f"{text} ended with {ended.returncode}:\n{ended.stdout}")
        pairs = Path(".environment").read_text().rstrip("\0").split("\0")
        self._set(dict(pair.split("=", 1) for pair in pairs))

    def _open_terminals(self, text: str) -> None:
        self._set(self._empty)
        self._run(text)

    def _start_job(self, text: str) -> None:
        Path("train.py").write_text((START / TRAIN).read_text())
        for command in on_hosts(text) or [text, text]:
            self._start_agent(command)

    def _start_again(self, text: str) -> None:
        assert text == "rdzv run …\n"
        self._start_agent(self._killed)

    def _start_agent(self, text: str) -> None:
        self._jobs.append(self._open(text))
        self._commands[self._jobs[-1]] = text

    def _kill(self, text: str) -> None:
        (first,) = (it for it in self._jobs if it.is_in_a_world_of(len(self._jobs))())
        joined = _JOINED.search(first.shown)
        # A process that this program started, and no other.
        assert joined is not None
        assert int(joined[1]) == first.process.pid
        assert re.fullmatch(r"kill -9 \d+\n", text) is not None, text
        subprocess.run(["bash", "-c", re.sub(r"\d+$", joined[1], text.rstrip())], check=True)
        first.process.wait(PATIENCE)
        self._jobs.remove(first)
        self._killed = self._commands[first]

    def _see(self, text: str) -> None:
        """Wait for all lines, each in any terminal; nothing but the killed agent may end."""
        for line in text.splitlines():
            pattern = re.compile(".*".join(map(re.escape, line.split("…"))))

            def shown(pattern: re.Pattern[str] = pattern) -> bool:
                new = [it.shown[self._old.get(it, 0) :] for it in self.terminals]
                return any(map(pattern.search, [self._said, *new]))

            def over(shown: Callable[[], bool] = shown) -> bool:
                running = (*self._servers, *self._jobs)
                return shown() or any(it.process.poll() is not None for it in running)

            if not until(over, PATIENCE) or not shown():
                raise TimeoutError(f"the page promises: {line}")

    def end(self) -> None:
        """As the page says: Ctrl-C in the job's terminals, and then in the server's."""
        for terminals in (self._jobs, self._servers):
            for terminal in terminals:
                os.killpg(terminal.process.pid, signal.SIGINT)
            for terminal in terminals:
                terminal.process.wait(PATIENCE)

    def complain(self) -> None:
        """Show all terminals."""
        for shown in (self._said, *(it.shown for it in self.terminals)):
            sys.stderr.write(f"--- terminal ---\n{shown}\n")


# In the full run on the one that most run, and on one whose users need rights; the README's example
# runs without a server. The others, whose jobs begin with the same lines, in the long run.
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(it, marks=pytest.mark.full) for it in RUN_HERE),
        *(pytest.param(it, marks=pytest.mark.soak) for it in PAGES if it not in RUN_HERE),
    ],
)
@pytest.mark.timeout(420)
def test_the_page_leads_to_a_job_that_survives(
    name: str, tmp_path: Path, record_property: Measure
) -> None:
    tool = TOOLS.get(name)
    if tool is not None and which(tool, path=path()) is None:
        absent(f"{tool} is not installed: scripts/install-servers {name}")
    try:
        servers.KINDS[name.removesuffix("-api")](servers.Security())
    except servers.NotInstalledError as error:
        absent(str(error))
    began = time.monotonic()
    followed = subprocess.run(
        in_namespaces("tests.integration.test_start", name),
        stdout=subprocess.PIPE, cwd=tmp_path, timeout=400,
        env={**os.environ, "PYTHONPATH": str(START.parents[1])},
    )  # fmt: skip
    assert followed.returncode == 0
    parts: dict[str, float] = json.loads(followed.stdout)
    shown = {"all": time.monotonic() - began, "check": parts["sh"], "job": parts["sh job"]}
    shown |= {"alone after": parts["sh kill"], "back after": parts["sh again"]}
    for what, seconds in shown.items():
        record_property(what, f"{seconds:.1f} s")


def test_each_store_has_a_page() -> None:
    assert {name.removesuffix("-v3") for name in STORES} == {
        it.removesuffix("-api") for it in PAGES
    }
    listed = re.findall(r"^- \[.*\]\(([\w-]+)\.md\)$", page("index").read_text(), re.MULTILINE)
    assert listed == PAGES


@every_page
def test_only_what_cannot_run_here_is_left_out(name: str) -> None:
    left_out = [text for purpose, text in blocks(page(name)) if purpose == "sh elsewhere"]
    assert left_out
    for text in left_out:
        begins = ("docker compose ", "aws ", "az ", "nats kv ", "rdzv serve quorum ", "kubectl ")
        # Hosts with such names are not here.
        assert text.startswith(begins) or "node1,node2,node3" in text, text


@every_page
def test_each_command_is_there(name: str) -> None:
    """A block that lost its mark would be left out in silence."""
    purposes = [purpose for purpose, _ in blocks(page(name)) if purpose.startswith("sh ")]
    server = [] if name == "quorum" else ["sh server"]
    assert [it for it in purposes if it != "sh elsewhere"] == [
        "sh install", *server, "sh terminals", "sh job",
    ]  # fmt: skip
    on_any = [purpose for purpose, _ in blocks(page("every-store")) if purpose != "text"]
    assert on_any == ["sh kill", "sh again"]


@every_page
def test_the_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page(name).read_text())
    assert TRAIN in links
    assert [it for it in links if not (START / it).exists()] == []


def test_the_rights_on_redis_are_the_documented_ones() -> None:
    (line,) = (text for _, text in blocks(page("redis")) if "ACL SETUSER" in text)
    documented = re.search(r"The user needs ``([^`]*)``", redis_store.__doc__ or "")
    assert documented is not None
    assert re.findall(r"\+\S+", line) == [*documented[1].split(), "+info"]


def test_the_rights_on_dynamodb_are_for_what_is_called() -> None:
    policy = saved("dynamodb", "policy.json")
    assert policy["Version"] == "2012-10-17"
    table = "arn:aws:dynamodb:eu-central-1:123456789012:table/rdzv-plugins"
    runs, check = policy["Statement"]
    for statement in (runs, check):
        assert set(statement) == {"Sid", "Effect", "Action", "Resource"}
        assert statement["Effect"] == "Allow"
    assert runs["Resource"] == [table, f"{table}/index/{_dynamodb_table.INDEX}"]
    assert check["Resource"] == table
    described = {"describe_table", "describe_time_to_live"}
    assert {*check["Action"]} == set(map(action, described))
    assert runs["Action"] == sorted(set(map(action, requests() - described)))


def test_the_rights_on_s3_are_the_documented_ones() -> None:
    policy = saved("s3", "policy.json")
    objects, listing = policy["Statement"]
    documented = re.search(r"needs ``s3:([^`]*)`` on the objects", s3.__doc__ or "")
    assert documented is not None
    assert objects["Action"] == sorted(f"s3:{it}" for it in documented[1].split(", "))
    assert listing["Action"] == "s3:ListBucket"
    assert objects["Resource"].startswith(f"{listing['Resource']}/")


def action(request: str) -> str:
    """What a request of boto3 needs."""
    needed = {
        # The transactions write; the statements update.
        "transact_write_items": "PutItem",
        "batch_execute_statement": "PartiQLUpdate",
    }
    return "dynamodb:" + needed.get(request, request.title().replace("_", ""))


def requests() -> set[str]:
    """The names of all requests in the client's source."""
    tree = ast.parse(Path(dynamodb.__file__).read_text())
    asked = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "ask"
        and isinstance(node.args[1], ast.Constant)
    }
    return {str(it) for it in asked}


def test_the_table_on_dynamodb_is_the_one_that_agents_create() -> None:
    described = _dynamodb_table._description(_dynamodb_table.Options().table)
    assert saved("dynamodb", "table.json") == described


def saved(name: str, file: str) -> Any:
    """What the reader saves in a JSON file."""
    (text,) = (text for purpose, text in blocks(page(name)) if purpose == f"json {file}")
    return json.loads(text)


def main(name: str) -> None:
    bring_up_loopback()
    reader = Reader()
    seconds: dict[str, float] = {}
    part = ""
    try:
        on_any = blocks(page("every-store"))
        if name == "quorum":
            on_any = [(purpose, of_three(text)) for purpose, text in on_any]
        for purpose, text in (*blocks(page(name)), *on_any):
            began = time.monotonic()
            reader.follow(purpose, text)
            # What is waited for, counts for the command before.
            part = part if purpose == "text" else purpose
            seconds[part] = seconds.get(part, 0.0) + time.monotonic() - began
        reader.end()
    except BaseException:
        reader.complain()
        raise
    finally:
        for terminal in reader.terminals:
            terminal.end()
    json.dump(seconds, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
