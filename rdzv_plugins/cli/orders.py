"""Commands that steer a run: drain, restart, resize, exclude, include, excluded, accuse."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rdzv_plugins.cli.options import (
    AboutRun,
    Access,
    OneRun,
    complete_run,
    free_soon,
    in_vain,
    no_run,
    one_run,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rdzv_plugins.observe.inspection import Inspection
    from rdzv_plugins.protocol.documents import Exclusion, RoundDocument
    from rdzv_plugins.protocol.effects import Effects
    from rdzv_plugins.protocol.orders import Given

T = TypeVar("T")

# A command rings the leader's bell with this name.
_GIVER = "rdzv"

# Short, because each node of the run reads the reason with the document.
_LONGEST_REASON = 200

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 365 * _UNITS["d"]

# Look this often, because a node's record does not wake a command that waits for the document.
_LOOK_SECONDS = 0.5

NodesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN NODE",
        help="the run, if not given with -i; then nodes, as rdzv status names them, or "
        "hosts, by name or address: all nodes there",
        autocompletion=complete_run,
    ),
]
HostArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN HOST",
        help="the run, if not given with -i or --all-runs; then the host: its name, its "
        "address, or a node on it as rdzv status names it",
        autocompletion=complete_run,
    ),
]
AllRunsOption = Annotated[
    bool, typer.Option("--all-runs", help="all runs under the prefix, also those to come")
]
WhyOption = Annotated[str, typer.Option(help="the reason, for logs, rdzv status and rdzv history")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="even if too few nodes are left for a round")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="change nothing, and say what would happen")
]


@dataclass(frozen=True)
class Waiting:
    """Whether a command waits for the effect of its order, and for how long."""

    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="exit once the order is given, before its effect")
    ] = False
    timeout: Annotated[float, typer.Option(help="longest time to wait, in seconds")] = 300.0


def drain(
    about: AboutRun,
    waiting: Waiting,
    words: NodesArgument = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--rank", help="a node by its rank, as rdzv status shows it")
    ] = None,
    why: WhyOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Take nodes out of a run for good; the other nodes go on in a new round.

    The agents of these nodes stop their workers and exit with status 0.
    """
    from rdzv_plugins.protocol import orders

    run_id, names = _run_and_others(about, words)
    if not names and not ranks:
        raise typer.BadParameter("name a node, or the --rank of one", param_hint="NODE...")
    with _order_to("drain", about, run_id) as (seen, told):
        names += [_at_rank(seen, rank) for rank in ranks or ()]

        def may(would: Given) -> bool:
            return not dry_run and (force or not would.stops)

        reason = _short(why)
        work = orders.drain(_GIVER, names, time.time, may, seen.is_silent, reason)
        given = _give_to_living(seen, work)
        if given.unknown:
            raise _no_node(seen, given.unknown[0], "nobody was drained")
        _refuse_to_stop(run_id, given, force)
        what = f"drain of {', '.join(given.nodes)} from run '{run_id}'"
        told.say_order(what, given, seen, dry_run=dry_run)
        for name in _members_on(about, seen, given):
            told.say(
                f"{name} runs a member of the store, which stays until the run ends: leave the "
                "host up until then, or the store has one member less"
            )
        if not (dry_run or given.lacks):
            told.await_effect(seen, given, _without(given, seen), waiting)


def _members_on(access: Access, seen: Inspection, given: Given) -> list[str]:
    """The hosts of the order's nodes that run a member of the store."""
    from rdzv_plugins.stores import client_class

    members = {it.lower() for it in client_class(access.backend).locate(access.endpoint).names}
    of_order = (seen.records[it] for it in given.ids if it in seen.records)
    return sorted({it.host for it in of_order if members.intersection(it.called)})


def restart(
    about: OneRun,
    waiting: Waiting,
    why: WhyOption = "",
) -> None:
    """Restart all nodes of a run.

    A new round begins; no agent counts that against --max-restarts.
    """
    from rdzv_plugins.protocol import orders

    reason = "restarted by the command rdzv restart" + (f": {_short(why)}" if why else "")
    run_id = about.run
    with _order_to("restart", about, run_id) as (seen, told):
        given = _give_to_living(seen, orders.restart(_GIVER, reason, time.time, seen.is_silent))
        if given.done:
            raise ValueError(
                f"run '{run_id}' is about to end: the workers of {', '.join(given.done)} "
                "succeeded, and would run again; nobody was restarted"
            )
        before = _document(given)
        between = not _is_running(before)
        if between:
            told.say(f"run '{run_id}' is between two rounds: round {before.round} forms already")
        else:
            told.say_order(f"restart of run '{run_id}'", given, seen)

        def effect(document: RoundDocument) -> str:
            return _runs(document) if between or document.round > before.round else ""

        told.await_effect(seen, given, effect, waiting)


def resize(about: OneRun, waiting: Waiting) -> None:
    """Let the nodes that wait join now.

    The options grow, min_uptime and resize_interval may have made them wait.
    """
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Names

    run_id = about.run
    with _order_to("resize", about, run_id) as (seen, told):
        given = _give_to_living(seen, orders.resize(_GIVER))
        before = _document(given)
        if not given.nodes:
            told.say(f"no node waits for a place in run '{run_id}'", nodes=[])
            return
        who = f"{Names().plus(given.nodes)} {'waits' if len(given.nodes) == 1 else 'wait'}"
        told.say(f"resize of run '{run_id}' ordered; {who}", nodes=[*given.nodes])

        def effect(document: RoundDocument) -> str:
            if document.round > before.round or not _is_running(before):
                return _runs(document)
            # The leader has looked, and goes on as before.
            return "" if document.resize else f"nobody was let in ({seen.sentence})"

        told.await_effect(seen, given, effect, waiting)


def exclude(
    about: AboutRun,
    waiting: Waiting,
    words: HostArgument = None,
    all_runs: AllRunsOption = False,
    lasts: Annotated[
        str, typer.Option("--for", help="how long: 90s, 30m, 1h, 2d; else until rdzv include")
    ] = "",
    why: WhyOption = "",
    later: Annotated[
        bool, typer.Option("--later", help="also if the run has no node on the host yet")
    ] = False,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Keep a host out of a run, and out of later runs with its id.

    If the host has nodes in the running round, a new round begins without them. The host's agents
    wait, and join again when the exclusion ends.
    """
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Exclusion
    from rdzv_plugins.protocol.policies.kept_out import describe

    run_id, host, whose = _run_and_host(about, words, all_runs)
    now = time.time()
    until = now + _seconds(lasts) if lasts else None
    exclusion = Exclusion(host, until, _short(why))

    def give(seen: Inspection, may: bool) -> Given:
        work = orders.exclude(_GIVER, exclusion, time.time, lambda _: may, seen.is_silent)
        return _give(seen, work)

    with ExitStack() as opened, _Told("exclude", run_id, about.as_json) as told:
        known = _open_runs(about, run_id)
        found = about.inspect(known, opened, of_all=all_runs)
        if not (all_runs or later) and not _hosts_called(host, found.values()):
            raise _no_node(
                found[run_id], host, "nobody was excluded; --later keeps the host out once it comes"
            )
        would = {run: give(seen, False) for run, seen in found.items() if _lives(seen)}
        for run, given in would.items():
            _refuse_to_stop(run, given, force)
        if dry_run:
            would_be = describe(exclusion, now, "would be excluded")
            told.say(f"{would_be}; from {whose}", host=host, until=until, dry_run=True)
            for run, given in would.items():
                if given.nodes:
                    told.say_order(_exclusion(run, given), given, found[run], dry_run=True)
            return
        # First exclude the host for later runs: a run may begin at this moment.
        about.archive(run_id).exclude(exclusion, now, all_runs=all_runs)
        told.say(f"{describe(exclusion, now)}; from {whose}", host=host, until=until)
        fresh = [it for it in _open_runs(about, run_id) if it not in known]
        found |= about.inspect(fresh, opened, of_all=all_runs)
        orders_given = [(seen, give(seen, True)) for seen in found.values()]
        awaited = [it for it in orders_given if _say_exclusion(told, *it, all_runs, host)]
        for seen, given in awaited:
            told.await_effect(seen, given, _without(given, seen), waiting)


def _exclusion(run_id: str, given: Given) -> str:
    return f"exclusion of {', '.join(given.nodes)} from run '{run_id}'"


def _say_exclusion(
    told: _Told, seen: Inspection, given: Given, of_all_runs: bool, host: str
) -> bool:
    """Say what an exclusion does to an open run; returns whether to wait for an effect."""
    from rdzv_plugins.observe.inspection import NOTHING_STORED, Condition

    run = f"run '{seen.run_id}'"
    if given.document is None:
        if not of_all_runs and seen.condition is Condition.ABSENT:
            told.say(f"{run}: {NOTHING_STORED}; the exclusion holds for its next runs")
    elif not _lives(seen):
        told.say(f"{run} is {seen.condition.value}: no round of it is ended for that")
    elif given.nodes:
        told.say_order(_exclusion(seen.run_id, given), given, seen)
        return not given.lacks and _are_in_it(given.ids, seen)
    elif not of_all_runs:
        told.say(f"no node of {run} is on {host} now")
    return False


def include(about: AboutRun, words: HostArgument = None, all_runs: AllRunsOption = False) -> None:
    """End an exclusion; nodes of the host that wait join the next round."""
    from rdzv_plugins.protocol import orders

    run_id, host, whose = _run_and_host(about, words, all_runs)
    archive = about.archive(run_id)
    with ExitStack() as opened:
        seen = about.inspect(_open_runs(about, run_id), opened, of_all=all_runs).values()
        hosts = _hosts_called(host, seen) | {host}
        found = archive.include(hosts, time.time(), all_runs=all_runs)
        for run in seen:
            found |= _give(run, orders.include(_GIVER, hosts))
    if not found:
        hint = archive.command("excluded", *(["--all-runs"] if all_runs else []))
        raise ValueError(f"'{host}' is not excluded from {whose}: see {hint}")
    with _Told("include", run_id, about.as_json) as told:
        told.say(f"{host} may join {whose} again", host=host)
        if run_id and any(it.host in hosts for it in archive.exclusions(time.time(), True)):
            told.say(
                f"but {host} is excluded from all runs: "
                f"{archive.command('include', host, '--all-runs')}"
            )


def excluded(about: OneRun, all_runs: AllRunsOption = False) -> None:
    """List the hosts that are excluded or quarantined, until when and why.

    People exclude hosts with rdzv exclude. A run quarantines hosts that keep ending its rounds.
    """
    from datetime import UTC, datetime

    from rich.table import Table

    from rdzv_plugins.protocol.documents import STATE_KEY, RoundDocument
    from rdzv_plugins.protocol.policies.kept_out import as_data, in_force

    run_id = one_run(about.run_id, about.first, needed=False)
    if not run_id and not all_runs:
        raise typer.BadParameter("name a run, or all with --all-runs", param_hint="RUN")
    now, archive = time.time(), about.archive(run_id)
    found = {it.host: (it, "all runs") for it in archive.exclusions(now, True)}
    quarantined: tuple[Exclusion, ...] = ()
    if not all_runs:
        found |= {it.host: (it, run_id) for it in archive.exclusions(now, False)}
        with about.connect(run_id) as client:
            entry = client.get(STATE_KEY)
        document = RoundDocument.decode(entry.value) if entry is not None else None
        if document is not None and not document.closed:
            held = in_force(document, now)
            found |= {host: (it, run_id) for host, it in held.items() if host not in found}
            quarantined = document.quarantined
    table = Table("host", "kept out by", "until (UTC)", "from", "why")
    for it, whose in found.values():
        by = "quarantine" if it in quarantined else "exclusion"
        if about.as_json:
            print_json({"schema": 1, **as_data(it), "from": whose, "by": by})
            continue
        until = "rdzv include"
        if it.until is not None:
            until = datetime.fromtimestamp(it.until, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(it.host, by, until, whose, it.why)
    if found and not about.as_json:
        print_table(table)
    elif not about.as_json:
        typer.echo("no host is excluded")


def accuse(
    about: AboutRun,
    words: NodesArgument = None,
    timeout: Annotated[float, typer.Option(help="longest time to wait, in seconds")] = 10.0,
) -> None:
    """Ask nodes of a run to prove that they are alive.

    A node that does not answer is not taken out by this command alone.
    """
    from rdzv_plugins.protocol import orders

    run_id, names = _run_and_others(about, words)
    if not names:
        raise typer.BadParameter("name a node, or a host: all its nodes", param_hint="NODE...")
    with _order_to("accuse", about, run_id) as (seen, told):
        given = _give_to_living(seen, orders.accuse(_GIVER, names))
        if given.unknown:
            raise _no_node(seen, given.unknown[0], "nobody was asked")
        told.say(
            f"{', '.join(given.nodes)} of run '{run_id}' asked to show that they live",
            nodes=[*given.nodes],
        )
        told.await_answers(seen, given, timeout)


class _Told:
    """The report of an order: a line for each event, or data with all lines at the end."""

    def __init__(self, order: str, run_id: str, as_json: bool) -> None:
        self._began = time.monotonic()
        self._data: dict[str, Any] = {"schema": 1, "order": order, "run": run_id or None}
        self._lines: list[str] = []
        self._as_json = as_json

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Print the data, even if the command has waited too long."""
        if self._as_json and error in (None, typer.Exit):
            print_json(self._data | {"said": self._lines})

    def say(self, line: str, **data: Any) -> None:
        self._data |= data
        self._lines.append(line)
        if not self._as_json:
            typer.echo(line)

    def say_order(
        self, what: str, given: Given, seen: Inspection, *, dry_run: bool = False
    ) -> None:
        """Say what is ordered, and what its effect will be."""
        verb = "would be ordered" if dry_run else "ordered"
        data = {"nodes": [*given.nodes], "left": given.remaining, "size": given.size}
        self.say(f"{what} {verb}; {_to_come(given, seen)}", dry_run=dry_run, **data)

    def await_effect(
        self,
        seen: Inspection,
        given: Given,
        effect: Callable[[RoundDocument], str],
        waiting: Waiting,
    ) -> None:
        """Wait for an order's effect, and say it; ends the command after too long a wait.

        ``effect`` returns a document's effect in words; "": there is none yet.
        """
        if waiting.no_wait:
            # The nodes that should carry out the order may have died by now.
            if latest := seen.last_beat:
                self.say(
                    "whether it is carried out was not waited for; the last heartbeat of run "
                    f"'{seen.run_id}' came at {latest}"
                )
            return
        deadline = self._began + waiting.timeout
        while not (line := effect(document := _look(seen, given))):
            if (left := deadline - time.monotonic()) <= 0:
                raise in_vain(
                    f"run '{seen.run_id}': the order stands, and is not carried out after "
                    f"{waiting.timeout:g} s: {seen.sentence}"
                )
            seen.await_change(min(left, _LOOK_SECONDS))
        seconds = time.monotonic() - self._began
        self.say(
            f"{line} after {seconds:.1f} s",
            round=document.round, world=document.size, seconds=round(seconds, 3),
        )  # fmt: skip

    def await_answers(self, seen: Inspection, given: Given, timeout: float) -> None:
        """Wait until each node has beaten, has ended or is found gone, and say which."""
        beats = {it.node: it.beat for it in _document(given).accused}
        silent, answered, gone = [*given.ids], list[str](), list[str]()
        while silent:
            lost = {it.node for it in _look(seen, given).accused if it.lost}
            for node in [*silent]:
                record = seen.records.get(node)
                name = record.label if record is not None else node
                said = ""
                if node in lost:
                    said = "is lost: its process is gone"
                elif record is None or record.has_ended:
                    said = "has ended"
                elif record.beat > beats[node]:
                    said = "lives"
                if said:
                    self.say(f"{name} {said}")
                    (gone if node in lost else answered).append(name)
                    silent.remove(node)
            if (left := self._began + timeout - time.monotonic()) <= 0:
                break
            if silent:
                seen.await_change(min(left, _LOOK_SECONDS))
        names = sorted(seen.records[it].label for it in silent if it in seen.records)
        self._data |= {"answered": answered, "gone": gone, "silent": names}
        if silent:
            raise in_vain(
                f"run '{seen.run_id}': no answer of {', '.join(names)} within {timeout:g} s; "
                f"that alone takes nobody out of a round: {seen.sentence}"
            )


def _to_come(given: Given, seen: Inspection) -> str:
    document = _document(given)
    if given.lacks:
        return (
            f"{_count(given.remaining)} {'is' if given.remaining == 1 else 'are'} left, "
            f"{given.lacks} fewer than a round needs: no round forms until others come"
        )
    if given.ids and not _are_in_it(given.ids, seen):
        return f"round {document.round} is not ended for that"
    # A forming round has size 0.
    number = document.round + (document.size > 0)
    return f"round {number} forms with {_count(given.size)}"


def _are_in_it(nodes: Iterable[str], seen: Inspection) -> bool:
    """Whether one of the nodes is in the round of ``seen``, or was in the round before.

    The document of an order lacks nodes in shards.
    """
    assert seen.document is not None
    return any(map(seen.document.names, nodes))


def _without(given: Given, seen: Inspection) -> Callable[[RoundDocument], str]:
    """The effect of an order that takes nodes out; ``seen`` is from before the order."""
    before, nodes = _document(given), {*given.ids}
    were_in_it = _are_in_it(nodes, seen)

    def effect(document: RoundDocument) -> str:
        if not were_in_it:
            over = all(it not in seen.records or seen.records[it].has_ended for it in nodes)
            return f"{', '.join(given.nodes)} ended" if over else ""
        later = document.round > before.round or not _is_running(before)
        return _runs(document) if later and not nodes & document.ranks.keys() else ""

    return effect


def _is_running(document: RoundDocument) -> bool:
    from rdzv_plugins.protocol.documents import Phase

    return document.phase is Phase.RUNNING


def _runs(document: RoundDocument) -> str:
    if not _is_running(document):
        return ""
    return f"round {document.round} runs with {_count(document.size)}"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


@contextmanager
def _order_to(name: str, about: AboutRun, run_id: str) -> Iterator[tuple[Inspection, _Told]]:
    """A run with live nodes for an order, and the report; `ValueError`: no node lives.

    ``name``: the command's name.
    """
    with about.inspect_one(run_id) as seen:
        condition, sentence = seen.condition.value, seen.sentence
        if condition == "dead":
            raise ValueError(
                f"run '{run_id}' is dead, and nobody carries an order out: "
                f"{sentence.removeprefix('dead: ')}; its id is free after "
                f"{seen.archive.command('clean')}"
            )
        if condition == "closed":
            how = sentence.removeprefix("closed: ")
            raise ValueError(f"run '{run_id}' is closed: {how}{free_soon(seen)[1]}")
        if seen.document is None:
            raise no_run(seen.client, run_id)
        with _Told(name, run_id, about.as_json) as told:
            yield seen, told


def _lives(seen: Inspection) -> bool:
    return seen.document is not None and seen.condition.value in ("running", "forming")


def _look(seen: Inspection, given: Given) -> RoundDocument:
    """The document of the run that got the order; `ValueError` if that run is over."""
    seen.look()
    document = seen.document
    if document is None or document.incarnation != _document(given).incarnation:
        raise ValueError(f"run '{seen.run_id}' ended meanwhile, and is no longer stored")
    if document.closed:
        raise ValueError(f"run '{seen.run_id}' was closed meanwhile: {document.reason}")
    if not _lives(seen):
        raise ValueError(f"run '{seen.run_id}' died meanwhile: {seen.sentence}")
    return document


def _document(given: Given) -> RoundDocument:
    assert given.document is not None
    return given.document


def _at_rank(seen: Inspection, rank: int) -> str:
    """The id of the node that has this rank now."""
    assert seen.document is not None
    for node, its in seen.document.ranks.items():
        if its == rank:
            return node
    raise ValueError(f"run '{seen.run_id}' has no node of rank {rank} now: {seen.sentence}")


def _refuse_to_stop(run_id: str, given: Given, force: bool) -> None:
    if given.stops and not force:
        raise ValueError(
            f"run '{run_id}' would stop without {', '.join(given.nodes)}: "
            f"{_count(given.remaining)} would be left, {given.lacks} fewer than a round needs; "
            "nothing was changed. --force does it all the same"
        )


def _run_and_others(about: AboutRun, words: list[str] | None) -> tuple[str, list[str]]:
    """The run and the other words; the first word is the run without --rdzv-id and $RDZV_ID."""
    run_id, others = about.run_id, [*(words or ())]
    if not (run_id or os.environ.get("RDZV_ID")) and others:
        run_id = others.pop(0)
    return one_run(run_id, ""), others


def _run_and_host(about: AboutRun, words: list[str] | None, all_runs: bool) -> tuple[str, str, str]:
    """The run ("": all runs), the host, and the run in words."""
    from rdzv_plugins.protocol.orders import host_and_pid

    run_id, hosts = ("", words or []) if all_runs else _run_and_others(about, words)
    if len(hosts) != 1:
        raise typer.BadParameter(
            "name a run and a host, or --all-runs and a host", param_hint="HOST"
        )
    return run_id, host_and_pid(hosts[0])[0], "all runs" if all_runs else f"run '{run_id}'"


def _open_runs(access: Access, run_id: str) -> list[str]:
    """The given run; without an id, all runs whose end is not recorded."""
    from rdzv_plugins.observe.history import list_runs

    if run_id:
        return [run_id]
    return sorted(run for run, it in list_runs(access.open).items() if it.outcome is None)


def _seconds(text: str) -> float:
    """The seconds of a text such as "90s", "30m", "1h" or "2d"."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd])", text, re.ASCII)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"--for: '{text}' is no time such as 90s, 30m, 1h or 2d, up to 365d")
    return seconds


def _hosts_called(name: str, runs: Iterable[Inspection]) -> set[str]:
    """All names and addresses of the hosts with this name that have nodes of these runs."""
    records = [record for seen in runs for record in seen.records.values()]
    return {it for record in records if name in record.called for it in record.called}


def _no_node(seen: Inspection, name: str, effect: str) -> ValueError:
    """The error for a name that no node of the run has; ``effect``: what the order has done."""
    from rdzv_plugins.protocol.documents import Names

    if seen.document is None:
        return no_run(seen.client, seen.run_id)
    known = Names().plus(it.label for it in seen.records.values() if not it.has_ended)
    who = f"; it has {known}" if known else ""
    return ValueError(f"run '{seen.run_id}' has no node '{name}': {effect}{who}")


def _give(seen: Inspection, work: Effects[T]) -> T:
    from rdzv_plugins.process.driver import carry_out

    return carry_out(seen.client, seen.archive, work, tell=lambda _: None)


def _give_to_living(seen: Inspection, work: Effects[Given]) -> Given:
    given = _give(seen, work)
    if given.document is None:
        raise ValueError(f"run '{seen.run_id}' ended meanwhile")
    return given


def _short(why: str) -> str:
    """A reason in one line; raises `ValueError` if it is too long."""
    text = " ".join(why.split())
    if len(text) > _LONGEST_REASON:
        raise ValueError(f"--why: longer than {_LONGEST_REASON} characters")
    return text
