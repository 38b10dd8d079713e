"""Commands that steer a run: drain, restart, resize, exclude, include, excluded, accuse."""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rdzv_plugins.cli.options import (
    DEFAULT_BACKEND,
    WAITED_IN_VAIN,
    Access,
    BackendOption,
    ConfOption,
    EndpointOption,
    JsonOption,
    RunArgument,
    RunOption,
    complete_run,
    free_soon,
    no_run,
    one_run,
    plain_console,
    print_json,
    run_and_others,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rdzv_plugins.observe.inspection import Inspection
    from rdzv_plugins.protocol.documents import Exclusion, RoundDocument
    from rdzv_plugins.protocol.effects import Effects
    from rdzv_plugins.protocol.orders import Given

__all__ = ["accuse", "drain", "exclude", "excluded", "include", "resize", "restart"]

# The name with which a command rings the leader's bell.
_GIVER = "rdzv"

# Each node of the run reads the reason with the document.
_LONGEST_REASON = 200

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 365 * _UNITS["d"]

# A node's own record wakes nobody who waits for the document.
_LOOK_SECONDS = 0.5

AllRunsOption = Annotated[
    bool, typer.Option("--all-runs", help="all runs under the prefix, also those to come")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="even if too few nodes are left for a round")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="change nothing, and say what would happen")
]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="end once the order is given, before it has an effect")
]
TimeoutOption = Annotated[float, typer.Option(help="seconds to wait for the effect at most")]


def drain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN NODE",
            help="the run, unless it is given with -i; then nodes, as rdzv status names them, or "
            "by their ids, or a host: all its nodes",
            autocompletion=complete_run,
        ),
    ] = None,
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    ranks: Annotated[
        list[int] | None, typer.Option("--rank", help="a node by its rank, as rdzv status shows it")
    ] = None,
    force: ForceOption = False, dry_run: DryRunOption = False, no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Take nodes out of a run for good: the others go on without them in a new round.

    The agents of these nodes stop their workers and end with status 0.
    """
    from rdzv_plugins.protocol import orders

    run_id, names = run_and_others(run_id, words)
    if not names and not ranks:
        raise typer.BadParameter("name a node, or the --rank of one", param_hint="NODE...")
    with _living(Access(backend, endpoint, conf), run_id) as seen:
        names += [_at_rank(seen, rank) for rank in ranks or ()]

        def may(would: Given) -> bool:
            return not dry_run and (force or not would.stops)

        told = _Told("drain", run_id, as_json)
        given = _give_to_living(seen, orders.drain(_GIVER, names, time.time, may, seen.is_silent))
        if given.unknown:
            raise ValueError(f"run '{run_id}' has no node '{given.unknown[0]}': nobody was drained")
        if given.stops and not force:
            raise _stops(run_id, given)
        what = f"drain of {', '.join(given.nodes)} from run '{run_id}'"
        told.say_order(what, given, seen, dry_run=dry_run)
        if no_wait and not dry_run:
            told.say_not_awaited(seen)
        elif not (dry_run or given.lacks):
            told.await_effect(seen, given, _without(given, seen), timeout)
        told.end()


def restart(
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    why: Annotated[str, typer.Option(help="the reason, for logs and rdzv history")] = "",
    no_wait: NoWaitOption = False, timeout: TimeoutOption = 300.0, as_json: JsonOption = False,
    run: RunArgument = "",
) -> None:  # fmt: skip
    """Begin a new round of a run, with the nodes that it has.

    The workers start again; no agent counts that against --max-restarts.
    """
    from rdzv_plugins.protocol import orders

    run_id = one_run(run_id, run)
    reason = "restarted by the command rdzv restart" + (f": {_short(why)}" if why else "")
    with _living(Access(backend, endpoint, conf), run_id) as seen:
        told = _Told("restart", run_id, as_json)
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

        if no_wait:
            told.say_not_awaited(seen)
        else:
            told.await_effect(seen, given, effect, timeout)
        told.end()


def resize(
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    no_wait: NoWaitOption = False, timeout: TimeoutOption = 300.0, as_json: JsonOption = False,
    run: RunArgument = "",
) -> None:  # fmt: skip
    """Let in the nodes that wait for a place, now.

    Whatever the options grow, min_uptime and resize_interval say, which make them wait.
    """
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Names

    run_id = one_run(run_id, run)
    with _living(Access(backend, endpoint, conf), run_id) as seen:
        told = _Told("resize", run_id, as_json)
        given = _give_to_living(seen, orders.resize(_GIVER))
        before = _document(given)
        if not given.nodes:
            told.say(f"no node waits for a place in run '{run_id}'", nodes=[])
            told.end()
            return
        who = f"{Names().plus(given.nodes)} {'waits' if len(given.nodes) == 1 else 'wait'}"
        told.say(f"resize of run '{run_id}' ordered; {who}", nodes=[*given.nodes])

        def effect(document: RoundDocument) -> str:
            if document.round > before.round or not _is_running(before):
                return _runs(document)
            # The leader has looked, and goes on as before.
            return "" if document.resize else f"nobody was let in ({seen.sentence})"

        if no_wait:
            told.say_not_awaited(seen)
        else:
            told.await_effect(seen, given, effect, timeout)
        told.end()


def exclude(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN HOST",
            help="the run, unless it is given with -i or --all-runs; then the address that the "
            "host's nodes use",
            autocompletion=complete_run,
        ),
    ],
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    lasts: Annotated[
        str, typer.Option("--for", help="how long: 90s, 30m, 1h, 2d; else until rdzv include")
    ] = "",
    why: Annotated[str, typer.Option(help="the reason, for logs, rdzv status and history")] = "",
    all_runs: AllRunsOption = False,
    force: ForceOption = False, dry_run: DryRunOption = False, no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Keep a host out of the rounds of a run id, also of its next runs.

    If nodes of the host are in a round, the others go on without them in a new one. The agents of
    the host wait, and join again when the exclusion ends.
    """
    from rdzv_plugins.observe.inspection import NOTHING_STORED, Condition
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Exclusion
    from rdzv_plugins.protocol.policies.kept_out import describe

    run_id, host = _run_and_host(run_id, words, all_runs)
    access, now = Access(backend, endpoint, conf), time.time()
    until = now + _seconds(lasts) if lasts else None
    exclusion = Exclusion(host, until, _short(why))
    whose = "all runs" if all_runs else f"run '{run_id}'"

    def give(seen: Inspection, may: bool) -> Given:
        work = orders.exclude(_GIVER, exclusion, time.time, lambda _: may, seen.is_silent)
        return _give(seen, work)

    told = _Told("exclude", None if all_runs else run_id, as_json)
    with ExitStack() as opened:
        found = access.inspect(_open_runs(access, run_id, all_runs), opened)
        would = {run: give(seen, False) for run, seen in found.items() if _lives(seen)}
        for run, given in would.items():
            if given.stops and not force:
                raise _stops(run, given)
        if dry_run:
            told.say(f"{describe(exclusion, now, 'would be excluded')}; from {whose}", host=host)
            for run, given in would.items():
                if given.nodes:
                    what = f"exclusion of {', '.join(given.nodes)} from run '{run}'"
                    told.say_order(what, given, found[run], dry_run=True)
            told.end()
            return
        # First where the next runs find it: one may be founded at this moment.
        access.archive(run_id).exclude(exclusion, now, all_runs=all_runs)
        told.say(f"{describe(exclusion, now)}; from {whose}", host=host, until=until)
        fresh = [it for it in _open_runs(access, run_id, all_runs) if it not in found]
        found |= access.inspect(fresh, opened)
        waits = []
        for run, seen in found.items():
            given = give(seen, True)
            if given.document is None:
                if not all_runs and seen.condition is Condition.ABSENT:
                    told.say(
                        f"run '{run}': {NOTHING_STORED}; the exclusion holds for its next runs"
                    )
                continue
            if not _lives(seen):
                told.say(f"run '{run}' is {seen.condition.value}: no round of it is ended for that")
            elif given.nodes:
                what = f"exclusion of {', '.join(given.nodes)} from run '{run}'"
                told.say_order(what, given, seen)
                if not given.lacks and _are_in_it(given.ids, seen):
                    waits.append((seen, given))
            elif not all_runs:
                told.say(
                    f"no node of run '{run}' has the address '{host}' now; rdzv status shows those "
                    "that they use"
                )
        for seen, given in waits:
            if no_wait:
                told.say_not_awaited(seen)
            else:
                told.await_effect(seen, given, _without(given, seen), timeout)
        told.end()


def include(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN HOST",
            help="the run, unless it is given with -i or --all-runs; then the host as it was "
            "excluded",
            autocompletion=complete_run,
        ),
    ],
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    all_runs: AllRunsOption = False, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Take an exclusion back; nodes of the host that wait join the next round."""
    from rdzv_plugins.process.driver import carry_out
    from rdzv_plugins.protocol import orders

    run_id, host = _run_and_host(run_id, words, all_runs)
    access = Access(backend, endpoint, conf)
    archive = access.archive(run_id)
    found = archive.include(host, time.time(), all_runs=all_runs)
    for run in _open_runs(access, run_id, all_runs):
        with access.connect(run) as client:
            work = orders.include(_GIVER, host)
            given = carry_out(client, access.archive(run), work, tell=lambda _: None)
            found = found or bool(given.nodes)
    whose = "all runs" if all_runs else f"run '{run_id}'"
    if not found:
        raise ValueError(f"'{host}' is not excluded from {whose}: see rdzv excluded")
    told = _Told("include", None if all_runs else run_id, as_json)
    told.say(f"{host} may join {whose} again", host=host)
    if not all_runs and any(it.host == host for it in archive.exclusions(time.time(), True)):
        told.say(
            f"but {host} is excluded from all runs: rdzv include {shlex.quote(host)} --all-runs"
        )
    told.end()


def excluded(
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    as_json: JsonOption = False, all_runs: AllRunsOption = False,
    run: RunArgument = "",
) -> None:  # fmt: skip
    """List the hosts that are excluded from a run id, or quarantined, until when and why.

    People exclude hosts, with rdzv exclude; a run quarantines those that keep ending its rounds.
    """
    from datetime import UTC, datetime

    from rich.table import Table

    from rdzv_plugins.protocol.documents import STATE_KEY, RoundDocument
    from rdzv_plugins.protocol.policies.kept_out import as_data, in_force

    run_id = one_run(run_id, run, needed=False)
    if not run_id and not all_runs:
        raise typer.BadParameter("name a run, or all with --all-runs", param_hint="RUN")
    access, now = Access(backend, endpoint, conf), time.time()
    archive = access.archive(run_id)
    found = {it.host: (it, "all runs") for it in archive.exclusions(now, True)}
    quarantined: tuple[Exclusion, ...] = ()
    if not all_runs:
        found |= {it.host: (it, run_id) for it in archive.exclusions(now, False)}
        with access.connect(run_id) as client:
            entry = client.get(STATE_KEY)
        document = RoundDocument.decode(entry.value) if entry is not None else None
        if document is not None and not document.closed:
            held = in_force(document, now)
            found |= {host: (it, run_id) for host, it in held.items() if host not in found}
            quarantined = document.quarantined
    table = Table("host", "kept out by", "until (UTC)", "from", "why")
    for it, whose in found.values():
        by = "quarantine" if it in quarantined else "exclusion"
        if as_json:
            print_json({"schema": 1, **as_data(it), "from": whose, "by": by})
            continue
        until = "rdzv include"
        if it.until is not None:
            until = datetime.fromtimestamp(it.until, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(it.host, by, until, whose, it.why)
    if not as_json:
        plain_console().print(table if found else "no host is excluded", soft_wrap=not found)


def accuse(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN NODE",
            help="the run, unless it is given with -i; then nodes, as rdzv status names them, or "
            "by their ids, or a host: all its nodes",
            autocompletion=complete_run,
        ),
    ],
    run_id: RunOption = "",
    backend: BackendOption = DEFAULT_BACKEND, endpoint: EndpointOption = "", conf: ConfOption = "",
    timeout: Annotated[float, typer.Option(help="seconds to wait for an answer at most")] = 10.0,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Ask nodes of a run to show that they live, for whoever believes that they do not.

    Nobody is lost for want of an answer: that takes a participant whose link to the node was
    refused, or its lease.
    """
    from rdzv_plugins.protocol import orders

    run_id, names = run_and_others(run_id, words)
    if not names:
        raise typer.BadParameter("name a node, or a host: all its nodes", param_hint="NODE...")
    with _living(Access(backend, endpoint, conf), run_id) as seen:
        told = _Told("accuse", run_id, as_json)
        given = _give_to_living(seen, orders.accuse(_GIVER, names))
        if given.unknown:
            raise ValueError(f"run '{run_id}' has no node '{given.unknown[0]}': nobody was asked")
        told.say(
            f"{', '.join(given.nodes)} of run '{run_id}' asked to show that they live",
            nodes=[*given.nodes],
        )
        told.await_answers(seen, given, timeout)
        told.end()


class _Told:
    """The report of an order: a line whenever there is news, or all at the end as data.

    Args:
        order: the command.
        run_id: None: of all runs.
    """

    def __init__(self, order: str, run_id: str | None, as_json: bool) -> None:
        self._began = time.monotonic()
        self._data: dict[str, Any] = {"schema": 1, "order": order, "run": run_id}
        self._lines: list[str] = []
        self._as_json = as_json

    def say(self, line: str, **data: Any) -> None:
        self._data |= data
        self._lines.append(line)
        if not self._as_json:
            typer.echo(line)

    def say_order(
        self, what: str, given: Given, seen: Inspection, *, dry_run: bool = False
    ) -> None:
        """Say what is ordered, and what comes of it."""
        verb = "would be ordered" if dry_run else "ordered"
        data = {"nodes": [*given.nodes], "left": given.left, "size": given.size}
        self.say(f"{what} {verb}; {_to_come(given, seen)}", dry_run=dry_run, **data)

    def say_not_awaited(self, seen: Inspection) -> None:
        """Say what was seen of those who are to carry an order out, which may have died by now."""
        if latest := seen.last_beat:
            self.say(
                "whether it is carried out was not waited for; the last heartbeat of run "
                f"'{seen.run_id}' came at {latest}"
            )

    def await_effect(
        self, seen: Inspection, given: Given, effect: Callable[[RoundDocument], str], timeout: float
    ) -> None:
        """Wait for what comes of an order, and say it; the command ends if the time is over.

        Args:
            effect: of the document as it stands; "": there is none yet.
        """
        deadline = self._began + timeout
        while not (line := effect(document := _look(seen, given))):
            if (left := deadline - time.monotonic()) <= 0:
                self.end()
                typer.echo(
                    f"rdzv: run '{seen.run_id}': the order stands, and is not carried out after "
                    f"{timeout:g} s: {seen.sentence}",
                    err=True,
                )
                raise typer.Exit(WAITED_IN_VAIN)
            seen.await_change(min(left, _LOOK_SECONDS))
        seconds = time.monotonic() - self._began
        self.say(
            f"{line} after {seconds:.1f} s",
            round=document.round, world=document.size, seconds=round(seconds, 3),
        )  # fmt: skip

    def await_answers(self, seen: Inspection, given: Given, timeout: float) -> None:
        """Wait until each node has beaten, has ended or is found gone; say so of each."""
        beats = {it.node: it.beat for it in _document(given).accused}
        deadline, silent = self._began + timeout, [*given.ids]
        answered, gone = [], []
        while silent:
            document = _look(seen, given)
            lost = {it.node for it in document.accused if it.lost}
            for node in [*silent]:
                record = seen.records.get(node)
                name = record.label if record is not None else node
                if node in lost:
                    gone.append(name)
                    self.say(f"{name} is lost: its process is gone")
                elif record is None or record.has_ended or record.beat > beats[node]:
                    ended = record is None or record.has_ended
                    answered.append(name)
                    self.say(f"{name} {'has ended' if ended else 'lives'}")
                else:
                    continue
                silent.remove(node)
            left = deadline - time.monotonic()
            if silent and left <= 0:
                break
            if silent:
                seen.await_change(min(left, _LOOK_SECONDS))
        names = sorted(seen.records[it].label for it in silent if it in seen.records)
        self._data |= {"answered": answered, "gone": gone, "silent": names}
        if silent:
            self.end()
            typer.echo(
                f"rdzv: run '{seen.run_id}': no answer of {', '.join(names)} within {timeout:g} s; "
                f"that alone takes nobody out of a round: {seen.sentence}",
                err=True,
            )
            raise typer.Exit(WAITED_IN_VAIN)

    def end(self) -> None:
        """Write the data."""
        if self._as_json:
            print_json(self._data | {"said": self._lines})


def _to_come(given: Given, seen: Inspection) -> str:
    document = _document(given)
    if given.lacks:
        few = "node is" if given.left == 1 else "nodes are"
        return (
            f"{given.left} {few} left, {given.lacks} fewer than a round needs: no round forms "
            "until others come"
        )
    if given.ids and not _are_in_it(given.ids, seen):
        return f"round {document.round} is not ended for that"
    # While a round forms nobody is in it.
    number = document.round + (document.size > 0)
    return f"round {number} forms with {_count(given.size)}"


def _are_in_it(nodes: Iterable[str], seen: Inspection) -> bool:
    """Whether one of them is in the round as it was read, or was in the last one.

    The document of an order has not the nodes that stand in shards.
    """
    assert seen.document is not None
    return any(map(seen.document.names, nodes))


def _without(given: Given, seen: Inspection) -> Callable[[RoundDocument], str]:
    """The effect of an order that takes nodes out, which have been looked at before it."""
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
def _living(access: Access, run_id: str) -> Iterator[Inspection]:
    """A run in which somebody lives who carries an order out; `ValueError` names its state."""
    with ExitStack() as opened:
        seen = access.inspect([run_id], opened)[run_id]
        condition, sentence = seen.condition.value, seen.sentence
        if condition == "dead":
            raise ValueError(
                f"run '{run_id}' is dead, and nobody carries an order out: "
                f"{sentence.removeprefix('dead: ')}; its id is free after rdzv clean -i "
                f"{shlex.quote(run_id)}"
            )
        if condition == "closed":
            _, free = free_soon(seen)
            how = sentence.removeprefix("closed: ")
            raise ValueError(f"run '{run_id}' is closed: {how}{free}")
        if seen.document is None:
            raise no_run(seen.client, run_id)
        yield seen


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


def _stops(run_id: str, given: Given) -> ValueError:
    left = f"{given.left} {'node' if given.left == 1 else 'nodes'}"
    return ValueError(
        f"run '{run_id}' would stop without {', '.join(given.nodes)}: {left} would be left, "
        f"{given.lacks} fewer than a round needs; nothing was changed. --force does it all the same"
    )


def _run_and_host(run_id: str, words: list[str], all_runs: bool) -> tuple[str, str]:
    """The run, or "" for all of them, and the host that a command is about."""
    run_id, hosts = ("", words) if all_runs else run_and_others(run_id, words)
    if len(hosts) != 1:
        raise typer.BadParameter(
            "name a run and a host, or --all-runs and a host", param_hint="HOST"
        )
    return run_id, hosts[0]


def _open_runs(access: Access, run_id: str, all_runs: bool) -> list[str]:
    """This run, or all whose end is not noted."""
    from rdzv_plugins.observe.history import list_runs

    if not all_runs:
        return [run_id]
    return sorted(run for run, it in list_runs(access.open).items() if it.outcome is None)


def _seconds(text: str) -> float:
    """Seconds that "90s", "30m", "1h" or "2d" stands for."""
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"--for: '{text}' is no time such as 90s, 30m, 1h or 2d, up to 365d")
    return seconds


def _give(seen: Inspection, work: Effects[Given]) -> Given:
    """Carry out an order to an open run."""
    from rdzv_plugins.process.driver import carry_out

    return carry_out(seen.client, seen.archive, work, tell=lambda _: None)


def _give_to_living(seen: Inspection, work: Effects[Given]) -> Given:
    given = _give(seen, work)
    if given.document is None:
        raise ValueError(f"run '{seen.run_id}' ended meanwhile")
    return given


def _short(why: str) -> str:
    """A reason in one line, not too long for each node to read."""
    text = " ".join(why.split())
    if len(text) > _LONGEST_REASON:
        raise ValueError(f"--why: longer than {_LONGEST_REASON} characters")
    return text
