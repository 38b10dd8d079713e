"""Options that several commands share, named as torchrun's are, and the console.

Commands import what they need only when they run: ``--help`` comes at once.
"""

from __future__ import annotations

import inspect
import json
import os
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console
    from rich.table import Table

    from rdzv_plugins.kv import KeyValueClient
    from rdzv_plugins.observe.history import Archive
    from rdzv_plugins.observe.inspection import Inspection
    from rdzv_plugins.observe.survey import Survey
    from rdzv_plugins.settings.options import Settings

# The exit status of a command whose time to wait is over.
_WAITED_IN_VAIN = 7

# A shell waits for a store for at most this many seconds.
_COMPLETION_SECONDS = 2

DEFAULT_BACKEND = "redis"

BackendOption = Annotated[
    str,
    typer.Option(
        "--rdzv-backend",
        "-b",
        envvar="RDZV_BACKEND",
        # Not from `stores.STORES`, whose import takes a quarter of a second.
        help="the store: redis, zookeeper, dynamodb, consul, etcd-v3, postgres, nats, quorum, "
        "kubernetes, s3, azure or another package's",
    ),
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--rdzv-endpoint",
        "-e",
        envvar="RDZV_ENDPOINT",
        help="where the store is, as for torchrun; empty: on this host, or as the store's own "
        "configuration says",
    ),
]


def possible(given: typer.Context, option: typer.CallbackParam, run_id: str) -> str:
    """Refuse an id that no run can have, except the default "": no id was given."""
    from rdzv_plugins.settings.run_ids import refuse_unless_possible

    # Compare the class's name: some versions of typer bundle their own click.
    source = given.get_parameter_source(option.name or "")
    is_default = source is not None and source.name == "DEFAULT"
    return run_id if is_default else refuse_unless_possible(run_id)


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The runs under the prefix that the command line names so far, for the shell."""
    from rdzv_plugins.observe.history import list_runs

    given = context.params
    if given.get("run_id") or given.get("words"):
        return []
    conf = given.get("conf") or ""
    try:
        if "heartbeat_timeout" not in parse_conf(conf):
            conf += f",heartbeat_timeout={_COMPLETION_SECONDS}"
        access = Access(given.get("backend") or DEFAULT_BACKEND, given.get("endpoint") or "", conf)
        listed = list_runs(access.open)
    except Exception:  # A shell cannot show any error here.
        return []
    return [
        (run_id, f"{it.outcome or it.phase}, round {it.round}")
        for run_id, it in listed.items()
        if run_id.startswith(incomplete)
    ]


RunOption = Annotated[
    str,
    typer.Option(
        "--rdzv-id",
        "-i",
        callback=possible,
        help="the run's id; else $RDZV_ID",
        autocompletion=complete_run,
    ),
]
ConfOption = Annotated[
    str,
    typer.Option(
        "--rdzv-conf",
        "-c",
        help="the job's options, such as prefix: <option>=<value>,... as for torchrun",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="write JSON (see rdzv docs commands)")]


def one_run(run_id: str, first: str, *, needed: bool = True) -> str:
    """The run that a command is about: its argument, or --rdzv-id, or $RDZV_ID; "": none."""
    from rdzv_plugins.settings.run_ids import refuse_unless_possible

    if first and run_id and first != run_id:
        raise typer.BadParameter(f"two runs, '{first}' and '{run_id}': name one")
    found = first or run_id or os.environ.get("RDZV_ID", "")
    if not found and needed:
        raise typer.BadParameter("name a run, as RUN, with -i or in $RDZV_ID", param_hint="RUN")
    return refuse_unless_possible(found) if found else ""


class UnknownRunError(ValueError):
    """No node runs the store of this run."""


@dataclass(frozen=True)
class Access:
    """The command line's arguments for reaching the runs under a prefix of a store."""

    backend: BackendOption = DEFAULT_BACKEND
    endpoint: EndpointOption = ""
    conf: ConfOption = ""

    def open(self, run_id: str, job: str | None = None) -> KeyValueClient:
        """A client of a run's namespace; see `stores.open_client` for arguments and errors."""
        from rdzv_plugins.stores import open_client

        if job or not run_id.startswith("!"):
            _refuse_unknown(self, job or run_id)
        own, timeout = self._options(of_handler=False), self.settings.request_timeout
        return open_client(
            self.backend, self.endpoint, run_id, own, request_timeout=timeout, job=job
        )

    def clusters(self, job: str = "") -> tuple[set[str], bool] | None:
        """See `KeyValueClient.clusters`; for ``job`` or all jobs. None: the store has servers."""
        from rdzv_plugins.settings.parsing import parse_options
        from rdzv_plugins.stores import client_class

        client = client_class(self.backend)
        if client.run_by != "nodes":
            return None
        options = parse_options(client.options, self._options(of_handler=False), os.environ)
        return client.clusters(self.endpoint, client.of_run(options, job))

    def surveys(self, job: str = "") -> list[Survey]:
        """A survey of all runs of the store, or of each store that nodes run there."""
        from rdzv_plugins.observe.survey import Survey

        found = None if job else self.clusters()
        return [
            Survey(partial(self.open, job=it or None), partial(self.archive, job=it or None))
            for it in ([job] if found is None else sorted(found[0]))
        ]

    def connect(self, run_id: str) -> closing[KeyValueClient]:
        """Like `open`, for a ``with`` statement."""
        return closing(self.open(run_id))

    def archive(self, run_id: str, job: str | None = None) -> Archive:
        from rdzv_plugins.observe.history import Archive

        opened, kept = partial(self.open, job=job or run_id), self.settings.history_ttl
        return Archive(opened, run_id, kept, where=self.where)

    @property
    def where(self) -> list[str]:
        """The arguments that name the same store."""
        from rdzv_plugins.settings.parsing import as_typed
        from rdzv_plugins.stores import client_class

        options = client_class(self.backend).options
        return as_typed(self.backend, self.endpoint, parse_conf(self.conf), options)

    def inspect(
        self,
        run_ids: Iterable[str],
        opened: ExitStack,
        *,
        surely: bool = False,
        of_all: bool = False,
    ) -> dict[str, Inspection]:
        """Inspections of the runs after `settle`; ``opened`` closes their connections.

        ``of_all``: leave out runs that cannot be read, with a line about each.
        """
        from rdzv_plugins.observe.inspection import Inspection, settle

        found: dict[str, Inspection] = {}

        def leave_out(seen: Inspection, error: Exception) -> None:
            typer.echo(f"rdzv: run '{seen.run_id}' is left out: {error}", err=True)
            del found[seen.run_id]

        for run_id in run_ids:
            client = opened.enter_context(self.connect(run_id))
            found[run_id] = Inspection(client, self.archive(run_id), run_id)
        settle(found.values(), surely=surely, leave_out=leave_out if of_all else None)
        return found

    @contextmanager
    def inspect_one(self, run_id: str, *, surely: bool = False) -> Iterator[Inspection]:
        """Like `inspect`, but for one run and a ``with`` statement."""
        with ExitStack() as opened:
            yield self.inspect([run_id], opened, surely=surely)[run_id]

    @property
    def prefix(self) -> str:
        """The first part of every key."""
        from rdzv_plugins.settings.options import StoreOptions
        from rdzv_plugins.settings.parsing import parse_options

        own = {name: it for name, it in parse_conf(self.conf).items() if name == "prefix"}
        return parse_options(StoreOptions, own, os.environ).prefix

    @property
    def settings(self) -> Settings:
        """The handler's options in ``--rdzv-conf``."""
        from rdzv_plugins.settings.options import Settings
        from rdzv_plugins.settings.parsing import parse_options

        return parse_options(Settings, self._options(of_handler=True), os.environ)

    def _options(self, *, of_handler: bool) -> dict[str, str]:
        """The handler's options, or the store's, in ``--rdzv-conf``."""
        from rdzv_plugins.settings.options import Settings
        from rdzv_plugins.settings.parsing import option_names

        theirs = option_names(Settings)
        every = parse_conf(self.conf).items()
        return {name: it for name, it in every if (name in theirs) is of_handler}


@cache
def _refuse_unknown(access: Access, job: str) -> None:
    """Raise `UnknownRunError` if no node runs the store of the job."""
    found = access.clusters(job)
    if found is None or found[0] or not found[1]:
        return
    others, _ = access.clusters() or ((), True)
    there = f"; there are {', '.join(sorted(others))}" if others else ""
    raise UnknownRunError(
        f"no run '{job}' is known at {access.endpoint}: is the id right{there}? A store that "
        "nodes run knows a run while its agents run"
    )


@dataclass(frozen=True)
class AboutRun(Access):
    """The options of a command about a run."""

    run_id: RunOption = ""
    as_json: JsonOption = False


@dataclass(frozen=True)
class OneRun(AboutRun):
    """The options of a command that takes a run and no other name."""

    first: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            callback=possible,
            help="the run's id; -i or $RDZV_ID may name it instead",
            autocompletion=complete_run,
        ),
    ] = ""

    @property
    def run(self) -> str:
        """The id of the run that the command line names."""
        return one_run(self.run_id, self.first)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command in typer's form: the fields of its dataclasses become options."""
    classes: dict[str, Any] = {}
    options: dict[str, inspect.Parameter] = {}
    for name, it in inspect.signature(command, eval_str=True).parameters.items():
        if is_dataclass(it.annotation):
            classes[name] = it.annotation
        else:
            options[name] = it.replace(kind=it.KEYWORD_ONLY)
    for cls in classes.values():
        its = inspect.signature(cls).parameters
        for name, hint in get_type_hints(cls, include_extras=True).items():
            options[name] = its[name].replace(kind=its[name].KEYWORD_ONLY, annotation=hint)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, cls in classes.items():
            given[name] = cls(**{field.name: given.pop(field.name) for field in fields(cls)})
        command(**given)

    # Join the lines of a paragraph, which the terminal breaks again.
    paragraphs = (command.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(it.split()) for it in paragraphs)
    run.__annotations__ = {name: it.annotation for name, it in options.items()}
    run.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]
    return run


def parse_conf(conf: str) -> dict[str, str]:
    """The options of ``--rdzv-conf``; raises `ValueError` for one without a value."""
    found: dict[str, str] = {}
    for item in filter(str.strip, conf.split(",")):
        name, _, value = map(str.strip, item.partition("="))
        if not value:
            raise ValueError(f"--rdzv-conf: the option '{name}' has no value")
        if name in found:
            raise ValueError(f"--rdzv-conf: the option '{name}' is given twice")
        found[name] = value
    return found


def no_run(client: KeyValueClient, run_id: str) -> ValueError:
    """The error if this package's handler has no run with this id."""
    from rdzv_plugins.kv.sealed import why_unreadable
    from rdzv_plugins.observe.inspection import NOTHING_STORED, is_torchs
    from rdzv_plugins.protocol.documents import STATE_KEY

    if said := why_unreadable(client, "the run", STATE_KEY):
        return ValueError(said)
    if is_torchs(client):
        return ValueError(
            f"run '{run_id}' is of handler=torch: no order reaches it, and no history"
        )
    return ValueError(f"run '{run_id}': {NOTHING_STORED}")


def free_soon(seen: Inspection) -> tuple[float | None, str]:
    """Seconds until the id of a closed run is free (None: unknown), and a text."""
    from datetime import UTC, datetime

    document = seen.document
    if document is None:
        return None, ""
    seconds, words = seen.archive.free_in(document, datetime.now(UTC), seen.at_work)
    return None if seconds is None else round(seconds, 3), f"; {words}"


def plain_console() -> Console:
    """A console without markup: rich takes ``[fd00::1]`` for a style and ``:b:`` for an emoji."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def print_table(table: Table) -> None:
    """Print a table; in a pipe, which has no width, without wrapping."""
    console = plain_console()
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    typer.echo(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def in_vain(line: str) -> typer.Exit:
    """The exit of a command that has waited too long; prints the line."""
    typer.echo(f"rdzv: {line}", err=True)
    return typer.Exit(_WAITED_IN_VAIN)


def tell(as_json: bool, line: str, **data: Any) -> None:
    """Print what a command has done: the line, or data that includes the line."""
    if as_json:
        print_json({"schema": 1, **data, "said": [line]})
    else:
        typer.echo(line)
