"""Commands about one run: status, watch, close, clean."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rdzv_plugins import history
from rdzv_plugins.cli.options import (
    BackendOption,
    ConfOption,
    EndpointOption,
    RunOption,
    connect,
    delete_run,
    open_run,
    plain_console,
    settings,
)
from rdzv_plugins.kv import KeyValueClient, RendezvousStateError
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
)
from rdzv_plugins.torch_compat.rendezvous_backend import KeyValueBackend

__all__ = ["clean", "close", "status", "watch"]

_NODES_SHOWN = 64
_ROUNDS_SHOWN = 10


def status(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
) -> None:  # fmt: skip
    """Show the nodes in a run, the nodes that wait, and why the run restarted."""
    with connect(backend, endpoint, run_id, conf) as client:
        plain_console().print(_describe(client, run_id))


def watch(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
) -> None:  # fmt: skip
    """Show the status and keep it up to date, until Ctrl-C or until the run is closed."""
    with (
        connect(backend, endpoint, run_id, conf) as client,
        Live(console=plain_console(), auto_refresh=False) as live,
    ):
        version = None
        while True:
            live.update(_describe(client, run_id), refresh=True)
            entry = client.wait(STATE_KEY, version, timeout=1.0)
            if entry is None:
                continue
            version = entry.version
            if RoundDocument.decode(entry.value).phase is Phase.CLOSED:
                live.update(_describe(client, run_id), refresh=True)
                return


def close(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
) -> None:  # fmt: skip
    """Close a run: the current round trains to its end, and no further round forms."""
    from rdzv_plugins.driver import carry_out
    from rdzv_plugins.protocol.cleanup import close_run
    from rdzv_plugins.tombstones import Tombstones, tombstone_run_id

    with connect(backend, endpoint, run_id, conf) as client:
        entry = client.get(STATE_KEY)
        if entry is None:
            only = " of handler=rdzv, only one of handler=torch" if _is_torchs(client) else ""
            raise ValueError(f"there is no run '{run_id}'{only}")
        ttl = settings(conf).sweep_after
        tombstones = Tombstones(
            partial(open_run, backend, endpoint, tombstone_run_id(run_id), conf)
        )
        why = "closed by the command rdzv close"
        work = close_run("rdzv", None, Outcome.CLOSED, why, ttl, may_close=lambda _: True)
        # The line below tells it.
        carry_out(client, tombstones, work, tell=lambda _: None)
        typer.echo(
            f"closed run '{run_id}': the current round continues, no further round forms; "
            f"its id can be used again in {ttl:g} s"
        )


def clean(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
    force: Annotated[bool, typer.Option(help="even if nodes are live: they write again")] = False,
) -> None:  # fmt: skip
    """Delete all keys of a run, so that its id can be used again at once.

    Live nodes are detected by their heartbeats: give the run's own keep_alive_interval in
    --rdzv-conf.
    """
    with connect(backend, endpoint, run_id, conf) as client:
        if not force and _is_torchs(client):
            raise ValueError(f"run '{run_id}' is of handler=torch and may be live: use --force")
        if not force and (alive := _beating(client, settings(conf).keep_alive_interval)):
            raise ValueError(
                f"run '{run_id}' has live nodes: {', '.join(sorted(alive)[:4])}; "
                "close it first, or use --force"
            )
        typer.echo(f"deleted {delete_run(client)} keys of run '{run_id}'")


def _is_torchs(client: KeyValueClient) -> bool:
    """Whether the run has handler=torch, whose state is a pickle, which is never loaded here."""
    return client.get(KeyValueBackend.KEY) is not None


def _beating(client: KeyValueClient, interval: float) -> set[str]:
    """Names of the nodes that send a heartbeat within an interval and a half."""
    before = _records(client)
    if not before:
        return set()
    time.sleep(1.5 * interval)
    after = _records(client)
    return {
        record.label
        for node, record in after.items()
        if node not in before or before[node].beat != record.beat
    }


def _records(client: KeyValueClient) -> dict[str, NodeRecord]:
    records = {}
    for key, entry in client.list(NODES_PREFIX).items():
        try:
            records[key.removeprefix(NODES_PREFIX)] = NodeRecord.decode(entry.value)
        except RendezvousStateError:
            continue
    return records


def _describe(client: KeyValueClient, run_id: str) -> RenderableType:
    entry = client.get(STATE_KEY)
    if entry is None and _is_torchs(client):
        return Text(f"run '{run_id}' is of handler=torch, whose state cannot be shown")
    if entry is None:
        return Text(f"run '{run_id}': nothing is stored under this id")
    document = RoundDocument.decode(entry.value)
    records = _records(client)
    summary = Text(
        f"run '{run_id}': round {document.round} {document.phase.value}, "
        f"{len(document.participants)} of {document.min_nodes} to {document.max_nodes} nodes"
    )
    if document.master:
        summary.append(f", MASTER {document.master}")
    if document.reason:
        summary.append(f"\nwhy this round: {document.reason}")
    return Group(summary, _nodes(document, records), _rounds(history.read(client)))


def _nodes(document: RoundDocument, records: dict[str, NodeRecord]) -> Table:
    table = Table("rank", "node", "status", "round", "heartbeat", "", title_justify="left")
    others = sorted(set(records) - set(document.participants))
    for node in [*document.participants, *others][:_NODES_SHOWN]:
        record = records.get(node)
        rank = str(document.participants.index(node)) if node in document.participants else "-"
        notes = []
        if node == document.leader:
            notes.append("leader")
        if node in document.lost or record is None:
            notes.append("lost")
        if node in document.previous:
            notes.append("was in the last round")
        table.add_row(
            rank,
            record.label if record else node,
            record.status.value if record else "?",
            str(record.round) if record else "?",
            str(record.beat) if record else "?",
            ", ".join(notes),
        )
    hidden = len(document.participants) + len(others) - _NODES_SHOWN
    if hidden > 0:
        table.add_row("", f"and {hidden} more", "", "", "", "")
    return table


def _rounds(rows: list[history.Row]) -> Table:
    table = Table("round", "when (UTC)", "nodes", "formed in", "why")
    for row in rows[-_ROUNDS_SHOWN:]:
        took = f"{row.seconds * 1000:,.0f} ms" if row.phase == "running" else row.phase
        table.add_row(str(row.round), row.at[:23], str(row.nodes), took, row.reason)
    return table
