"""Commands about runs: list, status, history, watch, close, clean."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rdzv_plugins.cli.options import (
    Access,
    JsonOption,
    OneRun,
    free_soon,
    in_vain,
    no_run,
    one_run,
    plain_console,
    print_json,
    print_table,
    tell,
)

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from rdzv_plugins.kv import KeyValueClient
    from rdzv_plugins.observe.history import Archive, Listed, Row
    from rdzv_plugins.observe.inspection import Inspection, NodeState
    from rdzv_plugins.observe.survey import Seen, Survey
    from rdzv_plugins.protocol.documents import RoundDocument

_NODES_SHOWN = 32
_ROUNDS_SHOWN = 10
# A small screen shows _ROUNDS_KEPT rounds before nodes without a problem. A table's frame takes
# _FRAME lines.
_ROUNDS_KEPT = 3
_FRAME = 4
_AS_IT_SHOULD_BE = 2

STATUSES = {"running": 0, "forming": 3, "absent": 4, "dead": 5, "closed": 6}
"""Exit statuses by `inspection.Condition`; 1 and 2 are for errors."""

_UNKNOWN = "unknown"
"""The condition, in a list, of a run that is unreadable or not watched for long enough."""

_COLOURS = {
    "running": "green", "forming": "yellow", "absent": "", "dead": "red", "closed": "dim",
    _UNKNOWN: "",
}  # fmt: skip

_SORTED_BY: dict[str, Callable[[Listed, Seen], Any]] = {
    "age": lambda listed, _: listed.began,
    "run": lambda listed, _: listed.run,
    "nodes": lambda listed, seen: (-_size(listed, seen), listed.run),
    "condition": lambda _, seen: [*_COLOURS].index(_known(seen)),
}

# What `rdzv list` leaves out of the report of a run.
_OF_NODES = "nodes", "told"

_LOOK_SECONDS = 1.0
_DOUBT_SECONDS = 0.3
_LOOK_FOR_BEATS_SECONDS = 0.2
_PAUSE_IN_AN_OUTAGE = 1.0


def list_runs(
    access: Access,
    as_json: JsonOption = False,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--condition",
            help=f"only runs of this condition: {', '.join(_COLOURS)}; may be given more than once",
            autocompletion=lambda: [*_COLOURS],
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="age (the oldest first), run, nodes (the most first) or condition",
            autocompletion=lambda: [*_SORTED_BY],
        ),
    ] = "",
) -> None:
    """List the runs under a prefix, the newest first, and what each does.

    The prefix is the option of that name, "rdzv" by default. Runs that have ended are listed for a
    week (history_ttl). A run is "unknown" if a second does not show whether its nodes are alive.
    """
    for condition in conditions or ():
        _refuse_unless_one_of(condition, _COLOURS, "--condition")
    if sort:
        _refuse_unless_one_of(sort, _SORTED_BY, "--sort")
    from rich.table import Table
    from rich.text import Text

    with ExitStack() as opened:
        surveys = [opened.enter_context(closing(it)) for it in access.surveys()]
        _settle(surveys)
        every = (it for survey in surveys for it in survey.runs.values())
        found = [(it.listed, it) for it in every if it.listed is not None]
        found.sort(key=lambda pair: pair[0].began, reverse=True)
        if conditions:
            found = [(it, seen) for it, seen in found if _known(seen) in conditions]
        if sort:
            found.sort(key=lambda pair: _SORTED_BY[sort](*pair))
        now = time.time()
        table = Table("run", "condition", "nodes", "age", "began (UTC)", "what it does")
        for it, seen in found:
            report = seen.report()  # Call report() first, because it may find the run unreadable.
            condition, age, sentence = _known(seen), _age(it, now), _sentence(seen)
            if as_json:
                report |= {"condition": condition, "sentence": sentence, "age": round(age, 3)}
                print_json({name: it for name, it in report.items() if name not in _OF_NODES})
            shown, began = Text(condition, style=_COLOURS[condition]), it.began[:19]
            nodes = str(_size(it, seen))
            table.add_row(it.run, shown, nodes, _rounded(age), began.replace("T", " "), sentence)
        if found and not as_json:
            print_table(table)
        elif not as_json:
            which = f" that is {' or '.join(conditions)}" if conditions else ""
            plain_console().print(f"there is no run{which} under this prefix")


def _settle(surveys: Sequence[Survey]) -> None:
    """Settle all surveys; say which stores are away, and raise the error if all are."""
    from rdzv_plugins.kv import RendezvousConnectionError

    away = []
    for survey in surveys:
        try:
            survey.settle()
        except RendezvousConnectionError as error:
            away.append(error)
            if len(away) == len(surveys):
                raise
    for missed in away:
        typer.echo(f"rdzv: {missed}", err=True)


def _refuse_unless_one_of(value: str, allowed: Iterable[str], option: str) -> None:
    if value not in (allowed := [*allowed]):
        raise typer.BadParameter(f"'{value}' is none of {', '.join(allowed)}", param_hint=option)


def _known(seen: Seen) -> str:
    condition = seen.condition
    return condition.value if condition is not None and seen.is_known else _UNKNOWN


def _sentence(seen: Seen) -> str:
    read = seen.inspection if seen.error is None else None
    return seen.sentence if seen.is_known or read is None else read.why_unknown


def _size(listed: Listed, seen: Seen) -> int:
    document = seen.inspection.document if seen.inspection is not None else None
    return document.size if document is not None else listed.nodes


def _age(listed: Listed, now: float) -> float:
    """Seconds since the run was founded, by two wall clocks."""
    return max(0.0, now - datetime.fromisoformat(listed.began).timestamp())


def _rounded(seconds: float) -> str:
    """A duration such as "47 s", "12 min", "5 h" or "3 d"."""
    units = (86400.0, "d"), (3600.0, "h"), (60.0, "min")
    unit, name = next((it for it in units if seconds >= 2 * it[0]), (1.0, "s"))
    return f"{seconds / unit:.0f} {name}"


def status(
    about: OneRun,
    wait: Annotated[str, typer.Option(help=f"wait until the run is: {', '.join(STATUSES)}")] = "",
    timeout: Annotated[float, typer.Option(help="longest time to wait, in seconds")] = 300.0,
    every: Annotated[bool, typer.Option("--all", help="all nodes, however many")] = False,
) -> None:
    """Show what a run does and waits for, its nodes, and why it restarted.

    Exit status: 0 running, 3 forming, 4 no such run, 5 dead, 6 closed, 7 --timeout is over. If the
    last heartbeats are old, it first waits for new ones: up to 2 s, or 12 s if one is missing.
    """
    from msgspec import to_builtins

    from rdzv_plugins.observe.history import goodput

    if wait:
        _refuse_unless_one_of(wait, STATUSES, "--wait")
    run_id = about.run
    with about.inspect_one(run_id) as seen:
        if wait:
            _await(seen, wait, timeout)
        while seen.in_doubt:
            seen.await_change(_DOUBT_SECONDS)
            seen.look()
        condition = seen.condition.value
        if about.as_json:
            rows = seen.archive.rows()
            found = {"goodput": goodput(rows, datetime.now(UTC)), "rounds": to_builtins(rows[::-1])}
            print_json(seen.report() | found)
        else:
            nodes, rows = seen.nodes(), seen.archive.rows()[::-1]
            # In a pipe each sentence is one line, for `grep`.
            plain_console().print(_summary(seen, nodes, rows), soft_wrap=True)
            most = len(nodes) if every else _NODES_SHOWN
            for table in _tables(nodes, rows, most, _ROUNDS_SHOWN):
                print_table(table)
            if len(nodes) > most:
                typer.echo("--all shows all nodes")
    if wait and condition != wait:
        raise in_vain(f"run '{run_id}' was not {wait} within {timeout:g} s")
    raise typer.Exit(STATUSES[condition])


def history(
    about: OneRun,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="rows at most")] = 50,
) -> None:
    """Show the rounds of a run id and how its runs ended, the newest first.

    The last fifty are kept for a week (history_ttl), also after the run has ended.
    """
    from msgspec import to_builtins

    from rdzv_plugins.protocol.documents import STATE_KEY

    run_id, archive = about.run, about.archive(about.run)
    rows = archive.rows()[::-1][:limit]
    if not rows:
        if said := archive.why_unreadable():
            raise ValueError(said)
        with about.connect(run_id) as client:
            if client.get(STATE_KEY) is None and archive.last() is None:
                raise no_run(client, run_id)
        raise ValueError(
            f"run '{run_id}' has no history: no round of it has run yet, or it has history_ttl=0"
        )
    if about.as_json:
        for row in rows:
            print_json({"schema": 1, **to_builtins(row)})
        return
    print_table(_rounds(rows))


def watch(about: OneRun) -> None:
    """Show the status and keep it up to date, until Ctrl-C or until the run is closed.

    In a pipe it writes one line for each change. It continues through an outage of the store, and
    while the store has lost the run. Exit status: 0, or 4 if there is no such run at the start.
    """
    from rich.live import Live
    from rich.text import Text

    from rdzv_plugins.observe.inspection import Condition

    console = plain_console()
    with about.inspect_one(about.run) as seen:
        if about.as_json or not console.is_terminal:
            told = ""

            def say(event: str) -> None:
                nonlocal told
                if event == told:
                    return
                told, at = event, datetime.now(UTC).isoformat(timespec="milliseconds")
                if about.as_json:
                    print_json(seen.report() | {"at": at, "event": event})
                else:
                    typer.echo(f"{at} {event}")

            _look_on(seen, lambda: say(f"run '{seen.run_id}': {seen.event}"), say)
        else:
            with Live(console=console, auto_refresh=False) as live:
                show = partial(live.update, refresh=True)
                _look_on(seen, lambda: show(_on_a_screen(seen, console)), lambda it: show(Text(it)))
    if seen.condition is Condition.ABSENT:
        raise typer.Exit(STATUSES[seen.condition.value])


def close(about: OneRun) -> None:
    """Close a run: the current round trains to its end, and no further round forms.

    It first waits up to 12 s for a heartbeat, to see whether the run is alive. The id is free once
    no node trains in the run.
    """
    from rdzv_plugins.observe.inspection import Condition
    from rdzv_plugins.process.driver import carry_out
    from rdzv_plugins.protocol.cleanup import close_run
    from rdzv_plugins.protocol.documents import Outcome

    run_id, why = about.run, "closed by the command rdzv close"
    stood: list[RoundDocument] = []

    def may_close(document: RoundDocument) -> bool:
        stood.append(document)
        return True

    with about.inspect_one(run_id, surely=True) as seen:
        was, ttl = seen.condition, about.settings.sweep_after
        say = partial(tell, about.as_json, order="close", run=run_id)
        gone = seen.document is None
        if (
            gone
            and was is Condition.DEAD
            and seen.archive.end_by_hand(f"{why}; nobody lived in it")
        ):
            said = f"closed run '{run_id}': nobody lives in it; its id is free"
            say(said, was=was.value, free_in=0.0)
            return
        if was is not Condition.CLOSED:
            work = close_run("rdzv", None, Outcome.CLOSED, why, ttl, may_close)
            # The line below says so.
            if gone or not carry_out(seen.client, seen.archive, work, tell=lambda _: None):
                raise no_run(seen.client, run_id)
        if stood:
            free_in, line = _what_goes_on(seen, stood[-1], ttl)
            say(f"closed run '{run_id}': {line}", was=was.value, free_in=free_in)
            return
        seen.look()  # Another command closed it, now or before.
        how = seen.document.reason if seen.document is not None else seen.sentence
        free_in, free = free_soon(seen)
        said = f"run '{run_id}' was closed before: {how}{free}"
        say(said, was=Condition.CLOSED.value, free_in=free_in)


def _what_goes_on(seen: Inspection, before: RoundDocument, ttl: float) -> tuple[float | None, str]:
    """Seconds until the id of a just closed run is free (None: unknown), and a line."""
    from rdzv_plugins.observe.inspection import Condition
    from rdzv_plugins.protocol.documents import Names, Phase, labels

    if seen.condition is Condition.DEAD:
        now = seen.archive.command("clean")
        return ttl, f"nobody lives in it; its id is free in {ttl:g} s; now: {now}"
    if before.phase is not Phase.RUNNING:
        said = "no round runs, and none forms; the agents that wait end"
        return ttl, f"{said}; its id is free in {ttl:g} s"
    live = (node for node in before.ranks if node in seen.records and not seen.is_silent(node))
    who = Names().plus(labels(seen.records, live)) or f"{before.size} nodes"
    latest = "" if seen.is_sure else f" if they live, whose last heartbeat came at {seen.last_beat}"
    return None, (
        f"{who} train on in round {before.round}{latest}, and no further round forms; its id is "
        f"free {ttl:g} s after their workers have ended"
    )


def clean(
    about: OneRun,
    dead: Annotated[
        bool, typer.Option("--dead", help="all dead runs under the prefix instead of one")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="even if nodes are alive; they write their keys again")
    ] = False,
) -> None:
    """Delete all keys of a run, so that its id can be used again at once.

    It first waits for a heartbeat of each node, and refuses if a node is alive. In rdzv list,
    history and the metrics, a dead run then counts as closed.
    """
    from rdzv_plugins.kv.sealed import why_unreadable
    from rdzv_plugins.observe.history import list_runs
    from rdzv_plugins.observe.inspection import Condition, is_torchs
    from rdzv_plugins.protocol.documents import STATE_KEY, Names, RoundDocument

    run_id = one_run(about.run_id, about.first, needed=False)
    if dead:
        with ExitStack() as opened:
            # A run whose end is recorded is not dead.
            left = sorted(run for run, it in list_runs(about.open).items() if it.outcome is None)
            for run, seen in about.inspect(left, opened, of_all=True).items():
                if seen.condition is Condition.DEAD:
                    _delete(seen.client, seen.archive, run, ended=True, as_json=about.as_json)
        return
    if not run_id:
        raise typer.BadParameter("name a run, or all dead runs with --dead", param_hint="RUN")
    with about.connect(run_id) as client:
        if not force and (why := why_unreadable(client, "the run", STATE_KEY)):
            raise ValueError(f"{why}; --force deletes it all the same")
        if not force and is_torchs(client):
            raise ValueError(f"run '{run_id}' is of handler=torch and may be live: use --force")
        alive = _beating(client)
        if alive and not force:
            closed = (entry := client.get(STATE_KEY)) and RoundDocument.decode(entry.value).closed
            then = "wait until their workers have ended" if closed else "close it first"
            raise ValueError(
                f"run '{run_id}' has live nodes: {Names().plus(alive)}; {then}, or use --force"
            )
        archive = about.archive(run_id)
        _delete(client, archive, run_id, ended=not alive, as_json=about.as_json)


def _delete(
    client: KeyValueClient, archive: Archive, run_id: str, *, ended: bool, as_json: bool
) -> None:
    """Delete a run's keys; ``ended``: none of its nodes lives."""
    from rdzv_plugins.observe.inspection import delete_run

    keys = delete_run(client)
    if not keys and archive.last() is None:
        raise no_run(client, run_id)
    said = f"deleted {keys} keys of run '{run_id}'"
    by = f"cleaned by hand, by rdzv clean on {socket.gethostname()}"
    if noted := ended and archive.end_by_hand(by):
        said += ", which had no end before: it is listed as closed now"
    tell(as_json, said, order="clean", run=run_id, keys=keys, noted=noted)


def _await(seen: Inspection, condition: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while seen.condition.value != condition and (left := deadline - time.monotonic()) > 0:
        seen.await_change(min(left, _LOOK_SECONDS))
        seen.look()


def _look_on(seen: Inspection, show: Callable[[], None], fail: Callable[[str], None]) -> None:
    """Look at the run until it is over; in an outage ``fail`` gets the error."""
    from rdzv_plugins.kv import RendezvousConnectionError
    from rdzv_plugins.observe.inspection import Condition

    is_known = False
    while True:
        try:
            seen.look()
            show()
        except RendezvousConnectionError as error:
            fail(str(error))
        is_known = is_known or seen.document is not None
        # A store that lost a run gets it back from the run's nodes.
        if seen.condition is Condition.CLOSED or (
            seen.condition is Condition.ABSENT and not is_known
        ):
            return
        try:
            seen.await_change(_LOOK_SECONDS)
        except RendezvousConnectionError:
            time.sleep(_PAUSE_IN_AN_OUTAGE)


def _beating(client: KeyValueClient) -> set[str]:
    """Names of nodes that send heartbeats; empty if all heartbeats were due, and none came."""
    from rdzv_plugins.protocol.documents import NODES_PREFIX
    from rdzv_plugins.protocol.record_cache import RecordCache

    records, began = RecordCache(), time.monotonic()
    before = records.decode(client.list(NODES_PREFIX))
    intervals = [it.interval for it in before.values() if not it.has_ended]
    while time.monotonic() < began + 1.5 * max(intervals, default=0.0):
        time.sleep(_LOOK_FOR_BEATS_SECONDS)
        after = records.decode(client.list(NODES_PREFIX))
        beats = {node: it.beat for node, it in before.items()}
        if alive := {it.label for node, it in after.items() if beats.get(node) != it.beat}:
            return alive
    return set()


def _summary(seen: Inspection, nodes: Sequence[NodeState], rows: Sequence[Row]) -> Text:
    """The sentence and its details, the most important first; ``rows``: the newest first."""
    from rich.text import Text

    from rdzv_plugins.observe.history import goodput

    lines = [f"run '{seen.run_id}': {seen.sentence}"]
    document = seen.document
    if document is not None:
        if document.master:
            lines.append(f"MASTER {document.master}")
        if document.reason and not document.closed:
            lines.append(f"why this round: {document.reason}")
        if document.closed:
            lines.append(free_soon(seen)[1].removeprefix("; "))
        if seen.steps is not None and not seen.steps.stalled:
            lines.append(str(seen.steps))
        lines.append(_counts(nodes))
    if (good := goodput(rows[::-1], datetime.now(UTC))) is not None:
        lines.append(f"goodput {good:.1%}")
    lines += [seen.clocks, seen.away]
    return Text("\n".join(filter(None, lines)))


def _counts(nodes: Sequence[NodeState]) -> str:
    """How many nodes are in each state; odd states come first."""
    from rdzv_plugins.protocol.states import State

    counts = Counter(node.state for node in nodes)
    states = sorted(State, key=lambda state: not state.is_odd)
    named = ", ".join(f"{counts[state]} {state.value}" for state in states if counts[state])
    size = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{size} at {datetime.now(UTC):%H:%M:%S} UTC{f': {named}' if named else ''}"


def _on_a_screen(seen: Inspection, console: Console) -> Group:
    """As much as fits on a screen: the summary, odd nodes, the last rounds, other nodes."""
    from rich.console import Group

    nodes, rows = seen.nodes(), seen.archive.rows()[::-1]
    summary = _summary(seen, nodes, rows)
    left = console.size.height - 1 - len(console.render_lines(summary))
    if seen.document is None:
        return Group(summary, *_tables([], rows, 0, min(_ROUNDS_SHOWN, left - _FRAME)))
    odd = sum(_later(node) < _AS_IT_SHOULD_BE for node in nodes)
    # A line is left for the number of nodes that are not shown.
    left -= _FRAME + 1
    kept = min(len(rows), _ROUNDS_KEPT) + _FRAME if rows else 0
    shown = min(len(nodes), max(odd, left - kept), left)
    rounds = min(_ROUNDS_SHOWN, left - shown - _FRAME)
    return Group(summary, *_tables(nodes, rows, shown, rounds, one_line=True))


def _tables(
    nodes: Sequence[NodeState], rows: Sequence[Row], most: int, rounds: int, one_line: bool = False
) -> list[Table]:
    """Tables of at most ``most`` nodes and ``rounds`` rounds; ``one_line``: cut long rows."""
    tables = [_nodes(nodes, most, one_line)] if nodes and most > 0 else []
    if rows and rounds > 0:
        tables.append(_rounds(rows[:rounds], one_line))
    return tables


def _later(node: NodeState) -> int:
    """A sort key: odd nodes come first."""
    if node.state.is_odd:
        return 0
    return 1 if node.clock is not None else _AS_IT_SHOULD_BE


def _nodes(nodes: Sequence[NodeState], most: int, one_line: bool) -> Table:
    from rdzv_plugins.observe.inspection import ahead_or_behind
    from rdzv_plugins.protocol.wall_clock import shown

    table = _table("rank", "node", "state", "last beat", "", one_line=one_line)
    now = time.time()
    for node in sorted(nodes, key=_later)[:most]:
        notes = ["leader"] if node.leader else []
        if node.awaited:
            notes.append("was in the last round")
        notes += filter(None, (node.kept_out, node.unfit))
        if node.clock is not None:
            notes.append(f"its clock is {ahead_or_behind(node.clock)}")
        if node.state.value in ("silent", "lost") and node.silence >= 1:
            notes.append(f"no beat in {node.silence:.0f} s watched")
        rank = "-" if node.rank is None else str(node.rank)
        table.add_row(rank, node.name, node.state.value, shown(node.at, now), ", ".join(notes))
    if len(nodes) > most:
        table.add_row("", f"and {len(nodes) - most} more", "", "", "")
    return table


def _rounds(rows: Iterable[Row], one_line: bool = False) -> Table:
    """A table of rounds in the order of ``rows``."""
    table = _table("round", "when (UTC)", "nodes", "took", "why", one_line=one_line)
    for row in rows:
        when = row.at[:19].replace("T", " ")
        table.add_row(str(row.round), when, str(row.nodes), row.took, row.reason)
    return table


def _table(*names: str, one_line: bool) -> Table:
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=one_line, overflow="ellipsis") for name in names]
    if one_line:
        columns[-1].ratio = 1  # The last column is cut.
    return Table(*columns, expand=one_line)
