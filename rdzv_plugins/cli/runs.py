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
from rdzv_plugins.protocol.diagnosis import diagnose
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.failure_detector import FailureDetector
from rdzv_plugins.torch_compat.rendezvous_backend import KeyValueBackend

__all__ = ["clean", "close", "status", "watch"]

_NODES_SHOWN = 64
_ROUNDS_SHOWN = 10

# How long `status` watches heartbeats while a round forms, and how long at most if none comes.
_WATCHED_SECONDS = 2.0
_LONGEST_WATCH_SECONDS = 12.0
_LOOK_SECONDS = 0.2
# A node's heartbeats are up to 1.1 intervals apart; the rest is for slow requests.
_DUE_INTERVALS = 1.2


def status(
    run_id: RunOption, backend: BackendOption = "redis", endpoint: EndpointOption = "",
    conf: ConfOption = "",
) -> None:  # fmt: skip
    """Show what a run does and waits for, its nodes, and why it restarted.

    Whether its nodes live shows in their heartbeats only: it takes up to 2 s, longer if there are
    none.
    """
    with connect(backend, endpoint, run_id, conf) as client:
        seen = _Observation(client)
        seen.watch()
        console = plain_console()
        summary, *tables = _describe(seen, run_id)
        # A pipe gets each sentence as one line, as `grep` needs it.
        console.print(summary, soft_wrap=True)
        for table in tables:
            console.print(table)


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
        seen = _Observation(client)
        while True:
            live.update(Group(*_describe(seen, run_id)), refresh=True)
            entry = client.wait(STATE_KEY, version, timeout=1.0)
            if entry is None:
                seen.look()
                continue
            version = entry.version
            if RoundDocument.decode(entry.value).phase is Phase.CLOSED:
                seen.look()
                live.update(Group(*_describe(seen, run_id)), refresh=True)
                return
            seen.look()


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


class _Observation:
    """What stands in the store, and since when each heartbeat stands still on this host's clock."""

    def __init__(self, client: KeyValueClient) -> None:
        self.client = client
        self._beats = FailureDetector()
        self._began = time.monotonic()
        self.look()

    def look(self) -> None:
        asked = time.monotonic()
        entry = self.client.get(STATE_KEY)
        self.document = RoundDocument.decode(entry.value) if entry else None
        self.records = _records(self.client)
        for node, record in self.records.items():
            self._beats.observe(node, record.beat, asked, time.monotonic())

    def watch(self) -> None:
        """Look again until it can be told who lives."""
        while not self._can_tell():
            time.sleep(_LOOK_SECONDS)
            self.look()

    def _can_tell(self) -> bool:
        document = self.document
        if document is None or document.closed:
            return True
        asked = [node for node, it in self.records.items() if it.status is not Status.LEFT]
        moved = [node for node in asked if self._beats.moved(node)]
        unknown = [node for node in asked if node not in moved and not self.is_silent(node)]
        watched = time.monotonic() - self._began
        if moved and (document.phase is not Phase.FORMING or watched >= _WATCHED_SECONDS):
            return True
        return not unknown or watched >= _LONGEST_WATCH_SECONDS

    def is_silent(self, node: str) -> bool:
        """Whether a heartbeat of the node was due and did not come."""
        due = _DUE_INTERVALS * self.records[node].interval if node in self.records else 0.0
        return self._beats.confirmed_silence(node) >= due

    @property
    def sentence(self) -> str:
        """What the run does."""
        quiet = min(map(self._beats.confirmed_silence, self.records), default=0.0)
        text = str(diagnose(self.document, self.records, self.is_silent, quiet))
        if quiet >= _LONGEST_WATCH_SECONDS and not all(map(self.is_silent, self.records)):
            text += f"; no heartbeat came in {quiet:.0f} s, but not each was due"
        return text


def _describe(seen: _Observation, run_id: str) -> list[RenderableType]:
    """The sentence and what belongs to it, and the tables."""
    document = seen.document
    if document is None and _is_torchs(seen.client):
        return [Text(f"run '{run_id}' is of handler=torch, whose state cannot be shown")]
    if document is None:
        return [Text(f"run '{run_id}': nothing is stored under this id")]
    summary = Text(f"run '{run_id}': {seen.sentence}")
    if document.master:
        summary.append(f"\nMASTER {document.master}")
    if document.reason and not document.closed:
        summary.append(f"\nwhy this round: {document.reason}")
    return [summary, _nodes(document, seen), _rounds(history.read(seen.client))]


def _nodes(document: RoundDocument, seen: _Observation) -> Table:
    records = seen.records
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
        elif record.status is not Status.LEFT and not document.closed and seen.is_silent(node):
            notes.append("silent")
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
