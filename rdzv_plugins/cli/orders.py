"""Commands that steer a run: drain, restart, resize, exclude, include, excluded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rdzv_plugins.cli.options import (
    Access,
    BackendOption,
    ConfOption,
    EndpointOption,
    JsonOption,
    RunOption,
    no_run,
    plain_console,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rdzv_plugins.kv import KeyValueClient
    from rdzv_plugins.protocol.documents import Exclusion
    from rdzv_plugins.protocol.effects import Effects
    from rdzv_plugins.protocol.orders import Given

__all__ = ["drain", "exclude", "excluded", "include", "resize", "restart"]

# Who rings the leader's bell.
_GIVER = "rdzv"

# Each node of the run reads the reason with the document.
_LONGEST_REASON = 200

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 365 * _UNITS["d"]

AllRunsOption = Annotated[
    bool, typer.Option("--all-runs", help="of all runs under the prefix, also those to come")
]


def drain(
    nodes: Annotated[
        list[str],
        typer.Argument(metavar="NODE...", help="address[pid], node id, or a host: all its nodes"),
    ],
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
) -> None:  # fmt: skip
    """Take nodes out of a run for good: the others go on without them in a new round, begun now.

    The agents of these nodes stop their workers and end with status 0.
    """
    from rdzv_plugins.protocol import orders

    access = Access(backend, endpoint, conf)
    given = _give(access, run_id, orders.drain(_GIVER, nodes, time.time))
    if given.unknown:
        raise ValueError(f"run '{run_id}' has no node '{given.unknown[0]}': nobody was drained")
    typer.echo(
        f"drained {', '.join(given.nodes)} from run '{run_id}': the others go on in a new round, "
        "begun now; the agents of the drained nodes end with status 0"
    )
    _warn_if_short(given)


def restart(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
    why: Annotated[str, typer.Option(help="the reason, for logs and rdzv history")] = "",
) -> None:  # fmt: skip
    """Begin a new round of a run, with the nodes that it has; counts against no --max-restarts."""
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Phase

    access = Access(backend, endpoint, conf)
    reason = "restarted by the command rdzv restart" + (f": {_short(why)}" if why else "")
    given = _give(access, run_id, orders.restart(_GIVER, reason))
    assert given.document is not None
    number = given.document.round
    if given.done:
        raise ValueError(
            f"run '{run_id}' is about to end: the workers of {', '.join(given.done)} succeeded, "
            "and would run again; nobody was restarted"
        )
    if given.document.phase is Phase.RUNNING:
        typer.echo(f"restarted run '{run_id}': round {number + 1} begins")
    else:
        typer.echo(f"run '{run_id}' is between two rounds: round {number} forms already")


def resize(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
) -> None:  # fmt: skip
    """Let in the nodes that wait, now: whatever grow, min_uptime and resize_interval say."""
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Names, Phase

    access = Access(backend, endpoint, conf)
    given = _give(access, run_id, orders.resize(_GIVER))
    assert given.document is not None
    if not given.nodes:
        typer.echo(f"no node waits for a place in run '{run_id}'")
    elif given.document.phase is not Phase.RUNNING:
        typer.echo(f"run '{run_id}' is between two rounds: round {given.document.round} forms")
    else:
        waiting = Names().plus(given.nodes)
        typer.echo(f"run '{run_id}' lets in who waits, if there is room: {waiting}")


def exclude(
    host: Annotated[str, typer.Argument(metavar="HOST", help="the address that its nodes use")],
    run_id: RunOption = "",
    backend: BackendOption = "redis", endpoint: EndpointOption = "", conf: ConfOption = "",
    lasts: Annotated[
        str, typer.Option("--for", help="how long, such as 90s, 30m, 1h, 2d; else until include")
    ] = "",
    why: Annotated[str, typer.Option(help="the reason, for logs, rdzv status and history")] = "",
    all_runs: AllRunsOption = False,
) -> None:  # fmt: skip
    """Keep a host out of the rounds of a run id, also of its next runs.

    If nodes of the host are in a round, the others go on without them in a new one, begun now. The
    agents of the host wait, and join again when the exclusion ends.
    """
    from rdzv_plugins.protocol import orders
    from rdzv_plugins.protocol.documents import Exclusion
    from rdzv_plugins.protocol.kept_out import describe

    access, now = Access(backend, endpoint, conf), time.time()
    until = now + _seconds(lasts) if lasts else None
    exclusion = Exclusion(host, until, _short(why))
    # First where the next runs find it: one may be founded at this moment.
    _check_run(run_id, all_runs)
    access.archive(run_id).exclude(exclusion, now, all_runs=all_runs)
    whose = "all runs" if all_runs else f"run '{run_id}'"
    typer.echo(f"{describe(exclusion, now)}; from {whose}")
    for of_run, given in _give_to_open(
        access, run_id, all_runs, lambda: orders.exclude(_GIVER, exclusion, time.time)
    ):
        if given.nodes:
            typer.echo(f"run '{of_run}' goes on without {', '.join(given.nodes)}")
            _warn_if_short(given)
        elif not all_runs:
            typer.echo(
                f"no node of run '{of_run}' has the address '{host}' now; rdzv status shows those "
                "that they use"
            )


def include(
    host: Annotated[str, typer.Argument(metavar="HOST", help="as it was excluded")],
    run_id: RunOption = "",
    backend: BackendOption = "redis", endpoint: EndpointOption = "", conf: ConfOption = "",
    all_runs: AllRunsOption = False,
) -> None:  # fmt: skip
    """Take an exclusion back; nodes of the host that wait join the next round."""
    from rdzv_plugins.protocol import orders

    access = Access(backend, endpoint, conf)
    _check_run(run_id, all_runs)
    archive = access.archive(run_id)
    found = archive.include(host, time.time(), all_runs=all_runs)
    for _, given in _give_to_open(access, run_id, all_runs, lambda: orders.include(_GIVER, host)):
        found = found or bool(given.nodes)
    whose = "all runs" if all_runs else f"run '{run_id}'"
    if not found:
        raise ValueError(f"'{host}' is not excluded from {whose}: see rdzv excluded")
    typer.echo(f"{host} may join {whose} again")
    if not all_runs and any(it.host == host for it in archive.exclusions(time.time(), True)):
        typer.echo(f"but {host} is excluded from all runs: rdzv include {host} --all-runs")


def excluded(
    run_id: RunOption = "",
    backend: BackendOption = "redis", endpoint: EndpointOption = "", conf: ConfOption = "",
    as_json: JsonOption = False, all_runs: AllRunsOption = False,
) -> None:  # fmt: skip
    """List the hosts that are excluded from a run id, or quarantined, until when and why."""
    from datetime import UTC, datetime

    from rich.table import Table

    from rdzv_plugins.protocol.documents import STATE_KEY, RoundDocument
    from rdzv_plugins.protocol.kept_out import as_data, in_force

    access, now = Access(backend, endpoint, conf), time.time()
    _check_run(run_id, all_runs)
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


def _check_run(run_id: str, all_runs: bool) -> None:
    if not run_id and not all_runs:
        raise typer.BadParameter("name a run, or all with --all-runs", param_hint="--rdzv-id")


def _give_to_open(
    access: Access, run_id: str, all_runs: bool, order: Callable[[], Effects[Given]]
) -> Iterator[tuple[str, Given]]:
    """Give an order to the run of this id, or to all, where one is open."""
    from rdzv_plugins.archive import list_runs
    from rdzv_plugins.driver import carry_out

    runs = [run_id]
    if all_runs:
        runs = sorted(run for run, it in list_runs(access.open).items() if it.outcome is None)
    for run in runs:
        with access.connect(run) as client:
            given = carry_out(client, access.archive(run), order(), tell=lambda _: None)
        if given.document is not None:
            yield run, given


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


def _give(access: Access, run_id: str, work: Effects[Given]) -> Given:
    """Carry out an order; `ValueError` where there is no open run."""
    from rdzv_plugins.driver import carry_out

    with access.connect(run_id) as client:
        given = carry_out(client, access.archive(run_id), work, tell=lambda _: None)
        if given.document is None:
            raise _why_not(client, run_id)
    return given


def _why_not(client: KeyValueClient, run_id: str) -> ValueError:
    from rdzv_plugins.protocol.documents import STATE_KEY

    if client.get(STATE_KEY) is not None:
        return ValueError(f"run '{run_id}' is closed")
    return no_run(client, run_id)


def _warn_if_short(given: Given) -> None:
    if given.falls_short and given.document is not None:
        needs, left = given.document.min_nodes, given.left
        typer.echo(
            f"its rounds need {needs} nodes, and {left} {'is' if left == 1 else 'are'} left: "
            "they wait for others until join_timeout"
        )


def _short(why: str) -> str:
    """A reason in one line, not too long for each node to read."""
    text = " ".join(why.split())
    if len(text) > _LONGEST_REASON:
        raise ValueError(f"--why: longer than {_LONGEST_REASON} characters")
    return text
