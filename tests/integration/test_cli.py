"""The rdzv command, as a person runs it: a process with arguments, output and an exit status."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from redis import Redis
from redis.exceptions import AuthenticationError
from rich.table import Table
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousParameters,
)
from typer.testing import CliRunner, Result

from rdzv_plugins.cli import app
from rdzv_plugins.cli.options import BackendOption, plain_console
from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.observe.history import Archive, list_runs
from rdzv_plugins.observe.inspection import delete_run
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
)
from rdzv_plugins.protocol.round_record import record_of
from rdzv_plugins.stores import STORES, open_client
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background, together
from tests import servers
from tests.handlers.site import succeed
from tests.integration import forked
from tests.integration.stores import RunningStore, kind_of, started
from tests.integration.test_dashboard import record, write_run


@pytest.fixture(scope="module")
def server() -> Iterator[servers.LocalServer]:
    with servers.start("redis") as server:
        yield server


def rdzv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "rdzv_plugins.cli", *arguments])


def invoke(*arguments: str, **environ: str) -> Result:
    """The same in this process, without the time that a new one takes to start."""
    return CliRunner().invoke(app, [*arguments], env=environ)


def form(server: servers.LocalServer, run_id: str, **conf: str) -> list[RendezvousHandler]:
    """Two nodes in a round."""
    handlers = [
        create_handler(
            "redis",
            RendezvousParameters(
                "redis",
                server.endpoint,
                run_id,
                2,
                2,
                local_addr="127.0.0.1",
                keep_alive_interval="0.5",
                **conf,
            ),
        )
        for _ in range(2)
    ]
    together([handler.next_rendezvous for handler in handlers])
    return handlers


def test_help_comes_without_importing_torch() -> None:
    code = (
        "import sys; sys.argv = ['rdzv', 'status', '--help']\n"
        "from rdzv_plugins.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'redis', 'rdzv_plugins.kv'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "--rdzv-id" in shown.stdout


def test_help_names_all_stores() -> None:
    (store,) = (it.help for it in get_args(BackendOption)[1:])
    assert set(STORES) <= set(re.split(r"[ ,]+", store))


@pytest.mark.parametrize(
    ("command", "lines"),
    {
        "list": ("the store: redis", "where the store is", "unknown; may be given more than once"),
        "status": ("wait until the run is: running, forming, absent, dead, closed", "write JSON"),
        "excluded": ("-i or $RDZV_ID may name it instead", "all runs under the prefix"),
        "clean": ("all dead runs under the prefix instead of one", "even if nodes are alive"),
        "check": ("write JSON, which rdzv docs check describes",),
        "exporter": (
            "port to listen at; 0: a free one",
            "if other hosts can reach it, a token is needed",
        ),
    }.items(),
)
def test_the_help_says_what_each_option_is(command: str, lines: tuple[str, ...]) -> None:
    """No flag has an opposite that nobody needs, and no line leaves its subject to be guessed."""
    shown = invoke(command, "-h", COLUMNS="200", NO_COLOR="1").stdout
    words = " ".join(shown.replace("│", " ").split())
    for line in lines:
        assert line in words
    assert "--no-dead" not in words


def test_status_says_who_is_in_a_run_and_why_it_restarted(
    server: servers.LocalServer, run_id: str
) -> None:
    handlers = form(server, run_id)
    shown = rdzv("status", "-e", server.endpoint, "-i", run_id)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"run '{run_id}': running round 0, 2 nodes\n")
    assert "why this round: first round" in shown.stdout
    assert "leader" in shown.stdout
    for handler in handlers:
        handler.shutdown()
    closed = rdzv("status", "-e", server.endpoint, "-i", run_id).stdout
    assert "closed by" in closed
    free = rf"^its id is free in \d+ s; now: rdzv clean -i {run_id} -b redis -e {server.endpoint}$"
    assert re.search(free, closed, re.MULTILINE), closed


def test_status_of_a_run_without_a_sign_of_life(server: servers.LocalServer, run_id: str) -> None:
    handlers = form(server, run_id)
    for handler in handlers:
        assert isinstance(handler, StoreRendezvousHandler)
        handler._driver.stop(5)
    result = invoke("status", "-e", server.endpoint, "-i", run_id)
    assert result.exit_code == 5
    shown = result.stdout.splitlines()
    dead = "dead: round 0 is running, but none of its nodes lives; the last heartbeat came at"
    assert re.fullmatch(rf"run '{run_id}': {dead} [0-9:]{{8}} UTC", shown[0])
    assert [line for line in shown if re.fullmatch("2 nodes at [0-9:]{8} UTC: 2 silent", line)]
    assert len([line for line in shown if "│ silent" in line]) == 2
    for handler in handlers:
        handler.shutdown()


def test_status_counts_the_nodes_that_wait(server: servers.LocalServer, run_id: str) -> None:
    params = RendezvousParameters(
        "redis", server.endpoint, run_id, 3, 3, local_addr="127.0.0.1", keep_alive_interval="0.2"
    )
    handlers = [create_handler("redis", params) for _ in range(3)]
    joins = [Background(handler.next_rendezvous) for handler in handlers[:2]]
    with closing(open_client("redis", server.endpoint, run_id)) as client:
        assert until(lambda: len(client.list(NODES_PREFIX)) == 2, 30)
        sentence = f"run '{run_id}': waiting for 1 node: 2 of 3 are here; forming since "

        def told() -> bool:
            result = invoke("status", "-e", server.endpoint, "-i", run_id)
            return result.exit_code == 3 and result.stdout.startswith(sentence)

        assert until(told, 30)
        invoke("close", "-e", server.endpoint, "-i", run_id)
    for join in joins:
        with pytest.raises(RendezvousClosedError):
            join.result(10)
    for handler in handlers:
        handler.shutdown()


def test_status_waits_for_what_it_is_told(server: servers.LocalServer, run_id: str) -> None:
    where = ("-e", server.endpoint, "-i", run_id)
    waits = Background(lambda: invoke("status", *where, "--wait", "running", "--timeout", "30"))
    handlers = form(server, run_id)
    assert waits.result(40).exit_code == 0
    late = invoke("status", *where, "--wait", "closed", "--timeout", "0.1")
    assert late.exit_code == 7
    assert late.stderr == f"rdzv: run '{run_id}' was not closed within 0.1 s\n"
    assert "running round 0" in late.stdout
    assert "--wait" in invoke("status", *where, "--wait", "asleep").stderr
    for handler in handlers:
        handler.shutdown()


def test_the_run_is_named_by_the_environment(
    server: servers.LocalServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = form(server, run_id)
    monkeypatch.setenv("RDZV_BACKEND", "redis")
    monkeypatch.setenv("RDZV_ENDPOINT", server.endpoint)
    monkeypatch.setenv("RDZV_ID", run_id)
    assert "running round 0" in invoke("status").stdout
    for handler in handlers:
        handler.shutdown()


COMMANDS = {
    "status": (), "history": (), "watch": (), "close": (), "restart": (), "resize": (), "clean": (),
    "excluded": (), "drain": ("node9",), "exclude": ("node9",), "include": ("node9",),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_run_is_the_first_argument_or_that_of_i(
    command: str, server: servers.LocalServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, others = ("-e", server.endpoint), COMMANDS[command]

    def end(*arguments: str) -> tuple[int, str]:
        done = invoke(command, *where, *arguments)
        # `watch` writes when.
        return done.exit_code, re.sub(r"^\S+T\S+ ", "", done.stdout) + str(done.exception)

    named = end("-i", run_id, *others)
    assert named[0] != 2
    assert end(run_id, *others) == named
    without = invoke(command, *where, *others)
    assert without.exit_code == 2
    assert re.search(r"name a (run|node|host)", without.stderr), without.stderr
    monkeypatch.setenv("RDZV_ID", run_id)
    assert end(*others) == named
    if not others:
        assert end("another")[0] != 2
        assert end(run_id, "-i", run_id) == named
        assert end("one", "-i", "two")[0] == 2


def test_the_shell_completes_the_ids_of_runs(server: servers.LocalServer, run_id: str) -> None:
    where = ("-e", server.endpoint, "-c", f"prefix={run_id}")
    handlers = form(server, "drift", prefix=run_id)
    handlers += form(server, "train", prefix=run_id)

    def completed(words: str) -> list[str]:
        """What bash is told after these words."""
        words = f"rdzv {words}"
        done = CliRunner().invoke(app, [], prog_name="rdzv", env={
            "_RDZV_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        })  # fmt: skip
        assert done.stderr == ""
        return sorted(done.stdout.split())

    store = " ".join(where)
    assert until(lambda: completed(f"status {store} ") == ["drift", "train"], 30)
    assert completed(f"status {store} dr") == ["drift"]
    assert completed(f"status {store} -i tr") == ["train"]
    for command in COMMANDS:
        assert completed(f"{command} {store} t") == ["train"]
    assert completed(f"drain {store} drift t") == []
    assert completed("status -e redis://127.0.0.1:1 dr") == []
    assert completed("list --condition de") == ["dead"]
    for handler in handlers:
        handler.shutdown()


def test_status_as_data(server: servers.LocalServer, run_id: str) -> None:
    handlers = form(server, run_id)
    where = ("-e", server.endpoint, "-i", run_id)
    found: dict[str, Any] = {}

    def all_run() -> bool:
        found.update(json.loads(invoke("status", *where, "--json").stdout))
        return [node["state"] for node in found["nodes"]] == ["running", "running"]

    assert until(all_run, 30), found
    assert (found["schema"], found["run"], found["condition"]) == (1, run_id, "running")
    assert found["sentence"] == "running round 0, 2 nodes"
    assert [node["rank"] for node in found["nodes"]] == [0, 1]
    assert len([node for node in found["nodes"] if node["leader"]]) == 1
    assert all(0 <= node["silence"] < 10 for node in found["nodes"])
    for handler in handlers:
        handler.shutdown()


def test_a_run_is_listed_and_its_rounds_are_kept_when_it_has_ended(
    server: servers.LocalServer, run_id: str
) -> None:
    where = ("-e", server.endpoint, "-c", f"prefix={run_id}")
    handlers = form(server, "of two", prefix=run_id)

    def line() -> str:
        lines = invoke("list", *where).stdout.splitlines()
        return next((line for line in lines if "of two" in line), "")

    assert until(lambda: "running round 0" in line(), 30), line()
    assert "running" in line()
    for handler in handlers:
        assert isinstance(handler, StoreRendezvousHandler)
        succeed(handler)
    with closing(open_client("redis", server.endpoint, "of two", {"prefix": run_id})) as client:
        delete_run(client)
    assert "succeeded" in line()
    assert "closed" in line()
    found = [json.loads(row) for row in invoke("list", *where, "--json").stdout.splitlines()]
    assert [(row["run"], row["condition"]) for row in found] == [("of two", "closed")]
    assert invoke("status", "-i", "of two", *where).exit_code == 6

    rows = invoke("history", "-i", "of two", *where, "--json").stdout.splitlines()
    end, first = (json.loads(row) for row in rows)
    assert (end["phase"], end["outcome"]) == ("closed", "succeeded")
    assert (first["phase"], first["round"], first["nodes"]) == ("running", 0, 2)
    assert [member["rank"] for member in first["members"]] == [0, 1]
    assert {member["address"] for member in first["members"]} == {"127.0.0.1"}
    assert first["seconds"]["gathering"] >= 0
    assert first["seconds"]["confirming"] > 0
    table = invoke("history", "-i", "of two", *where, "--limit", "1").stdout
    assert "succeeded" in table
    assert "first round" not in table


def test_the_list_has_what_is_asked_for_in_the_order_that_is_asked_for(
    server: servers.LocalServer, run_id: str
) -> None:
    where = ("-e", server.endpoint, "-c", f"prefix={run_id}")

    def runs_of(*arguments: str) -> list[str]:
        rows = invoke("list", *where, "--json", *arguments).stdout.splitlines()
        return [json.loads(row)["run"] for row in rows]

    handlers = form(server, "older", prefix=run_id)
    assert until(lambda: runs_of() == ["older"], 30)
    handlers += form(server, "newer", prefix=run_id)
    dead = form(server, "killed", prefix=run_id)
    for handler in dead:
        assert isinstance(handler, StoreRendezvousHandler)
        handler._driver.stop(5)
    assert until(lambda: runs_of("--condition", "dead") == ["killed"], 30), runs_of()
    assert runs_of() == ["killed", "newer", "older"]
    assert runs_of("--sort", "age") == ["older", "newer", "killed"]
    assert runs_of("--sort", "run") == ["killed", "newer", "older"]
    lives = "--condition", "running", "--condition", "forming"
    assert until(lambda: runs_of(*lives) == ["newer", "older"], 30), runs_of()
    # The running ones first.
    assert until(lambda: runs_of("--sort", "condition")[2] == "killed", 30), runs_of()
    nobody = invoke("list", *where, "--condition", "closed")
    assert nobody.stdout == "there is no run that is closed under this prefix\n"
    for wrong in (("--condition", "asleep"), ("--sort", "size")):
        refused = invoke("list", *where, *wrong)
        assert refused.exit_code == 2
        assert wrong[0] in refused.stderr

    def shown(pattern: str, *arguments: str, **environ: str) -> bool:
        return re.search(pattern, invoke("list", *where, *arguments, **environ).stdout) is not None

    line = r"│ killed │ dead +│ 2 +│ \d+ s │ "
    assert until(lambda: shown(line, "--condition", "dead"), 30)
    assert until(lambda: shown("\x1b\\[31mdead", FORCE_COLOR="1"), 30)
    assert until(lambda: shown(" dead", FORCE_COLOR="1", NO_COLOR="1"), 30)
    assert not shown("\x1b\\[31m", FORCE_COLOR="1", NO_COLOR="1")
    for handler in (*handlers, *dead):
        handler.shutdown()


def test_the_list_comes_soon_whatever_the_intervals_are(
    server: servers.LocalServer, run_id: str
) -> None:
    """A dead run with a long interval is not known to be dead: the others are not kept waiting."""
    where = ("-e", server.endpoint, "-c", f"prefix={run_id}")
    handlers = [it for number in range(4) for it in form(server, f"live{number}", prefix=run_id)]
    dead = form(server, "dead", prefix=run_id)
    for handler in dead:
        assert isinstance(handler, StoreRendezvousHandler)
        handler._driver.stop(5)
    with closing(open_client("redis", server.endpoint, "dead", {"prefix": run_id})) as client:
        for key, entry in client.list(NODES_PREFIX).items():
            record = NodeRecord.decode(entry.value)
            old = replace(record, interval=60.0, lease=180.0, at=record.at - 600)
            client.put(key, old.encode())
    assert until(lambda: len(list_runs(lambda run: client_of(server, run, run_id))) == 5, 30)
    began = time.monotonic()
    rows = [json.loads(row) for row in invoke("list", *where, "--json").stdout.splitlines()]
    assert time.monotonic() - began < 6, "to know that it is dead takes 12 s and more"
    conditions = {row["run"]: row["condition"] for row in rows}
    assert conditions == {"dead": "unknown", **{f"live{it}": "running" for it in range(4)}}
    (told,) = (row["sentence"] for row in rows if row["run"] == "dead")
    assert told.startswith("not known yet whether its nodes live: they send heartbeats every 60 s")
    for handler in (*handlers, *dead):
        handler.shutdown()


def test_a_list_opens_no_connection_for_a_run_that_has_ended() -> None:
    """Ten of twelve runs had cost six connections each."""
    with started(kind_of("redis")) as store:
        for name in ("one", "two"):
            write_run(store, name, {"n0": record(0, "10.0.0.1")})
        with closing(Redis.from_url(store.endpoint)) as redis:

            def connections() -> tuple[int, int]:
                """How many a list opens, and how many runs it shows."""
                before = redis.info("stats")["total_connections_received"]
                rows = invoke("list", "-e", store.endpoint, "--json").stdout.splitlines()
                return redis.info("stats")["total_connections_received"] - before, len(rows)

            opened, shown = connections()
            assert shown == 2
            for number in range(10):
                note_end(store, f"over {number}")
            assert connections() == (opened, 12)
            assert opened <= 6
            # `clean --dead`, which notes the end of the other two, opens none for these either.
            before = redis.info("stats")["total_connections_received"]
            cleaned = invoke("clean", "--dead", "-e", store.endpoint).stdout.splitlines()
            assert len(cleaned) == 2
            assert redis.info("stats")["total_connections_received"] - before < 40


def test_a_run_that_cannot_be_read_hides_no_other() -> None:
    with started(kind_of("redis")) as store:
        for name in ("one", "two"):
            write_run(store, name, {"n0": record(0, "10.0.0.1")})
        with closing(store.open("two")) as client:
            client.put(STATE_KEY, b"damaged")
        listed = invoke("list", "-e", store.endpoint, "--json").stdout.splitlines()
        rows = {row["run"]: row for row in map(json.loads, listed)}
        assert rows["two"]["condition"] == "unknown"
        assert "the round document is unreadable" in rows["two"]["sentence"]
        assert rows["one"]["sentence"].startswith(("running round 0", "not known", "dead"))
        for order in (("exclude", "10.0.0.9", "--all-runs"), ("include", "10.0.0.9", "--all-runs")):
            said = invoke(*order, "-e", store.endpoint)
            assert said.exit_code == 0
            assert "run 'two' is left out: the round document is unreadable" in said.stderr
        cleaned = invoke("clean", "--dead", "-e", store.endpoint)
        assert "run 'two' is left out" in cleaned.stderr
        assert re.fullmatch(r"deleted \d+ keys of run 'one', .*\n", cleaned.stdout)


def note_end(store: RunningStore, run_id: str) -> None:
    """As whoever closes a run does, whose keys are gone by now."""
    ended = RoundDocument(
        incarnation="it", round=0, phase=Phase.CLOSED, outcome=Outcome.SUCCEEDED, leader=None,
        min_nodes=1, max_nodes=1, cause=Cause(note="done"),
    )  # fmt: skip
    Archive(store.open, run_id, 600).note(record_of(ended, {}))


def client_of(server: servers.LocalServer, run_id: str, prefix: str) -> KeyValueClient:
    return open_client("redis", server.endpoint, run_id, {"prefix": prefix})


@pytest.mark.parametrize("command", [(), ("list",), ("drain",), ("check",)])
def test_h_is_help(command: tuple[str, ...]) -> None:
    assert invoke(*command, "-h").stdout == invoke(*command, "--help").stdout


def test_dead_runs_are_marked_and_cleaned(server: servers.LocalServer, run_id: str) -> None:
    where = ("-e", server.endpoint, "-c", f"prefix={run_id}")
    alive = form(server, "alive", prefix=run_id)
    dead = form(server, "killed", prefix=run_id)
    for handler in dead:
        assert isinstance(handler, StoreRendezvousHandler)
        handler._driver.stop(5)

    def conditions() -> dict[str, str]:
        rows = map(json.loads, invoke("list", *where, "--json").stdout.splitlines())
        return {row["run"]: row["condition"] for row in rows}

    assert until(lambda: conditions() == {"alive": "running", "killed": "dead"}, 30), conditions()
    cleaned = invoke("clean", "--dead", *where).stdout
    assert "of run 'killed'" in cleaned
    assert "alive" not in cleaned
    assert invoke("status", "-i", "alive", *where).exit_code == 0
    shown = invoke("status", "-i", "killed", *where)
    assert shown.exit_code == 6
    assert f": cleaned by hand, by rdzv clean on {socket.gethostname()}" in shown.stdout
    for handler in (*alive, *dead):
        handler.shutdown()


def test_watch_writes_a_line_an_event_and_survives_an_outage(run_id: str) -> None:
    with servers.start("redis") as own:
        handlers = form(own, run_id)
        command = [sys.executable, "-m", "rdzv_plugins.cli", "watch"]
        watching = subprocess.Popen(
            [*command, "-e", own.endpoint, "-i", run_id, "-c", "heartbeat_timeout=1"],
            stdout=subprocess.PIPE,
            text=True,
        )
        output = watching.stdout
        assert output is not None
        lines: list[str] = []
        reader = Background(lambda: lines.extend(iter(output.readline, "")))
        assert until(lambda: any("running round 0" in line for line in lines), 30), lines
        own.nodes[0].stop()
        assert until(lambda: any("could not be reached" in line for line in lines), 30), lines
        own.nodes[0].start()
        told = len(lines)
        assert until(lambda: any("running round 0" in line for line in lines[told - 1 :]), 30)
        rdzv("close", "-e", own.endpoint, "-i", run_id)
        assert watching.wait(30) == 0
        reader.result(10)
        assert "closed by the command" in lines[-1]
        for handler in handlers:
            handler.shutdown()


def test_watch_goes_on_while_the_store_has_lost_the_run() -> None:
    """The run's nodes write it again."""
    with started(kind_of("redis")) as store:
        write_run(store, "job", {"n0": record(0, "10.0.0.1")})
        command = [sys.executable, "-m", "rdzv_plugins.cli", "watch", "-e", store.endpoint, "job"]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert watching.stdout is not None
            assert "run 'job'" in watching.stdout.readline()
            with closing(Redis.from_url(store.endpoint)) as redis:
                redis.flushall()
            while "nothing is stored" not in (line := watching.stdout.readline()):
                assert line
            write_run(store, "job", {"n0": record(0, "10.0.0.1")})
            assert "run 'job'" in watching.stdout.readline()
        finally:
            watching.kill()
            watching.communicate()


@pytest.mark.parametrize("json_", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("command", [it for it in COMMANDS if it not in ("excluded", "include")])
def test_an_unknown_run_is_told_alike(
    command: str, json_: tuple[str, ...], server: servers.LocalServer, run_id: str
) -> None:
    done = invoke(command, *json_, "-e", server.endpoint, run_id, *COMMANDS[command])
    said = done.stdout if done.stdout else f"rdzv: {done.exception}\n"
    assert "nothing is stored under this id: check the id and the prefix" in said
    assert f"'{run_id}'" in said or json.loads(said)["run"] == run_id
    statuses = {"status": 4, "watch": 4}
    assert done.exit_code == statuses.get(command, 1)


def test_a_run_without_a_round_is_not_unknown(server: servers.LocalServer, run_id: str) -> None:
    """Its history is empty, and so is that of a run with history_ttl=0."""
    handlers = form(server, run_id, history_ttl="0")
    for json_ in ((), ("--json",)):
        done = invoke("history", *json_, "-e", server.endpoint, run_id)
        assert str(done.exception) == (
            f"run '{run_id}' has no history: no round of it has run yet, or it has history_ttl=0"
        )
    for handler in handlers:
        handler.shutdown()


def test_watch_ends_when_the_run_is_closed(server: servers.LocalServer, run_id: str) -> None:
    handlers = form(server, run_id)
    command = [sys.executable, "-m", "rdzv_plugins.cli"]
    watching = subprocess.Popen(
        [*command, "watch", "-e", server.endpoint, "-i", run_id],
        stdout=subprocess.PIPE,
        text=True,
    )
    closed = rdzv("close", "-e", server.endpoint, "-i", run_id, "-c", "closed_ttl=30")
    assert closed.returncode == 0, closed.stderr
    output, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "closed" in output
    assert until(lambda: all(handler.is_closed() for handler in handlers), 30)
    for handler in handlers:
        handler.shutdown()


def test_clean_refuses_a_run_that_lives(server: servers.LocalServer, run_id: str) -> None:
    handlers = form(server, run_id)
    conf = ("-e", server.endpoint, "-i", run_id)
    refused = rdzv("clean", *conf)
    assert refused.returncode == 1
    assert "live nodes" in refused.stderr
    # What lives has not ended, and writes itself back.
    forced = invoke("clean", "--force", *conf).stdout
    assert re.fullmatch(rf"deleted \d+ keys of run '{run_id}'\n", forced)
    assert until(lambda: invoke("status", *conf).exit_code == 0, 30)
    for handler in handlers:
        handler.shutdown()
    assert "deleted" in rdzv("clean", *conf).stdout
    ended = invoke("status", *conf)
    assert ended.exit_code == 6
    assert "cleaned by hand" not in ended.stdout  # How it ended is kept.


@pytest.fixture(scope="module")
def consul() -> Iterator[servers.LocalServer]:
    with servers.start("consul") as server:
        yield server


def test_a_cleaned_run_that_was_closed_can_begin_anew(
    consul: servers.LocalServer, run_id: str
) -> None:
    with closing(open_client("consul", consul.endpoint, run_id)) as client:
        client.put("key", b"old")
        client.expire(2)
        began = time.monotonic()
        cleaned = invoke("clean", "-b", "consul", "-e", consul.endpoint, run_id)
        assert "deleted 1 keys" in cleaned.stdout
        client.put("key", b"new")
        past = began + 4 - time.monotonic()
        assert not until(lambda: client.get("key") is None, past), "the old deadline was kept"


def test_a_host_is_excluded_from_all_runs_and_included_again(
    server: servers.LocalServer, run_id: str
) -> None:
    host, where = "10.0.0.9", ("-e", server.endpoint, "-c", f"prefix={run_id}")

    def held() -> list[list[str]]:
        shown = [invoke("status", "-i", name, *where, "--json") for name in ("one", "two")]
        return [[it["host"] for it in json.loads(of.stdout)["excluded"]] for of in shown]

    def listed() -> set[str]:
        rows = invoke("list", *where, "--json").stdout.splitlines()
        return {json.loads(row)["run"] for row in rows}

    handlers = form(server, "one", prefix=run_id)
    assert until(lambda: listed() == {"one"}, 30)
    said = invoke("exclude", host, "--all-runs", "--for", "1h", "--why", "ECC errors", *where)
    assert said.exit_code == 0, said.stderr
    assert re.fullmatch(rf"{host} excluded until .* UTC: ECC errors; from all runs\n", said.stdout)
    # A run that begins later has it from its leader, once that has time to read it.
    handlers += form(server, "two", prefix=run_id)
    assert until(lambda: held() == [[host], [host]], 30), held()

    (row,) = invoke("excluded", "-i", "two", *where, "--json").stdout.splitlines()
    data = json.loads(row)
    assert (data["host"], data["from"], data["by"]) == (host, "all runs", "exclusion")
    assert data["why"] == "ECC errors"

    assert until(lambda: listed() == {"one", "two"}, 30)
    said = invoke("include", host, "--all-runs", *where)
    assert (said.exit_code, said.stdout) == (0, f"{host} may join all runs again\n")
    assert held() == [[], []]
    said = invoke("include", host, "--all-runs", *where)
    hint = f"rdzv excluded -b redis {shlex.join(where)} --all-runs"
    assert str(said.exception) == f"'{host}' is not excluded from all runs: see {hint}"
    for handler in handlers:
        handler.shutdown()


def test_the_console_leaves_addresses_as_they_are() -> None:
    console = plain_console()
    table = Table("node")
    table.add_row("[fd00::1]:29400")
    with console.capture() as shown:
        console.print("[fd00:b:1]:29400", table)
    assert "[fd00:b:1]:29400" in shown.get()
    assert "[fd00::1]:29400" in shown.get()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "-i", "x", "-e", "redis://127.0.0.1:1"), "could not be reached"),
        (("status", "-i", "x", "-b", "rediss"), "unknown backend 'rediss'"),
        (("status", "-i", "x", "-c", "clustr=true"), "did you mean 'cluster'"),
        (("status", "-i", "x", "-c", "password=hunter2"), "$RDZV_PLUGINS_PASSWORD"),
        (("serve", "oracle"), "this host's member of a quorum, not 'oracle'"),
        (("serve", "quorum"), "with -e HOST,HOST,HOST this host's member of a quorum"),
        (("serve", "valkey", "-e", "127.0.0.1"), "not 'valkey' with -e"),
        (("serve", "redis", "-i", "job"), "redis takes neither -i nor -c"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    shown = rdzv(*arguments)
    assert shown.returncode == 1
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr
    assert "hunter2" not in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_serve_runs_a_server_until_it_is_interrupted() -> None:
    command = [sys.executable, "-u", "-m", "rdzv_plugins.cli", "serve", "valkey"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    endpoint = serving.stdout.readline().split(" runs at ")[1].split(";")[0]
    assert rdzv("check", "-e", endpoint).returncode == 0
    serving.send_signal(signal.SIGINT)
    assert serving.wait(30) == 0
    assert rdzv("check", "-e", endpoint, "-c", "heartbeat_timeout=1").returncode == 2


def test_serve_asks_for_the_password_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every account of this host reaches loopback."""
    monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", "hunter2")
    command = [sys.executable, "-u", "-m", "rdzv_plugins.cli", "serve", "valkey"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            endpoint = serving.stdout.readline().split(" runs at ")[1].split(";")[0]
            with Redis.from_url(endpoint) as stranger, pytest.raises(AuthenticationError):
                stranger.get("key")
            assert rdzv("check", "-e", endpoint).returncode == 0
        finally:
            serving.send_signal(signal.SIGINT)


def test_serve_names_a_password_file_that_it_cannot_make() -> None:
    said = invoke("serve", "redis", RDZV_PLUGINS_PASSWORD_FILE="/nowhere/password")
    assert str(said.exception) == (
        "cannot make password_file '/nowhere/password': No such file or directory"
    )


def test_serve_names_the_address_at_which_the_port_is_taken() -> None:
    """Another program has it there, and nobody at 127.0.0.1, where the server listens too."""
    with socket.create_server(("127.0.0.5", 0)) as other:
        port = other.getsockname()[1]
        refused = rdzv("serve", "redis", "--host", "127.0.0.5", "--port", str(port))
    assert refused.returncode == 1
    assert refused.stderr == (f"rdzv: port {port} of 127.0.0.5 is taken (Address already in use)\n")


def test_serve_says_that_a_port_is_taken(server: servers.LocalServer) -> None:
    taken = str(server.nodes[0].port)
    refused = rdzv("serve", "redis", "--port", taken)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"rdzv: port {taken} of 127.0.0.1 is taken")


def test_serve_ends_with_its_server() -> None:
    serving = subprocess.Popen(
        [sys.executable, "-m", "rdzv_plugins.cli", "serve", "redis"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    endpoint = serving.stdout.readline().split(" runs at ")[1].split(";")[0]
    with Redis.from_url(endpoint) as client:
        client.shutdown(nosave=True)
    _, errors = serving.communicate(timeout=30)
    assert serving.returncode == 1
    assert " has ended:" in errors
