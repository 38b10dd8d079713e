"""Shared by several commands: options, with the same names as torchrun's, and the console.

Commands import what they need only when they run: ``--help`` comes at once. None but ``run`` and
``demo`` needs torch.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rdzv_plugins.archive import Archive
    from rdzv_plugins.config import Settings
    from rdzv_plugins.kv import KeyValueClient

__all__ = [
    "WAITED_IN_VAIN",
    "Access",
    "BackendOption",
    "ConfOption",
    "EndpointOption",
    "JsonOption",
    "RunOption",
    "no_run",
    "parse_conf",
    "plain_console",
    "print_json",
]

WAITED_IN_VAIN = 7
"""The exit status of a command whose time to wait is over."""

BackendOption = Annotated[
    str,
    typer.Option(
        "--rdzv-backend",
        "-b",
        envvar="RDZV_BACKEND",
        help="redis, zookeeper, dynamodb, consul, etcd-v3, postgres or another package's",
    ),
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--rdzv-endpoint",
        "-e",
        envvar="RDZV_ENDPOINT",
        help="as for torchrun; empty: this host (dynamodb: AWS's configuration)",
    ),
]


def _possible(given: typer.Context, option: typer.CallbackParam, run_id: str) -> str:
    """Refuse an id that no run can have; "" stands for none where none was given."""
    from rdzv_plugins.run_ids import refuse_unless_possible

    # By its name: some versions of typer have a click of their own.
    source = given.get_parameter_source(option.name or "")
    is_default = source is not None and source.name == "DEFAULT"
    return run_id if is_default else refuse_unless_possible(run_id)


RunOption = Annotated[
    str,
    typer.Option("--rdzv-id", "-i", envvar="RDZV_ID", callback=_possible, help="the run's id"),
]
ConfOption = Annotated[
    str, typer.Option("--rdzv-conf", "-c", help="<option>=<value>,... as for torchrun")
]
JsonOption = Annotated[bool, typer.Option("--json", help="plain data, as rdzv docs commands says")]


@dataclass(frozen=True)
class Access:
    """How to reach the runs under a prefix of a store, as the command line says it."""

    backend: str
    endpoint: str
    conf: str

    def open(self, run_id: str) -> KeyValueClient:
        """A client of a run's namespace.

        Raises:
            ValueError: a bad option, or a missing client package.
            RendezvousConnectionError: the store cannot be reached or refuses the credentials.
        """
        from rdzv_plugins.config import Settings, option_names
        from rdzv_plugins.stores import open_client

        handler_options = option_names(Settings)
        own = {
            name: it for name, it in parse_conf(self.conf).items() if name not in handler_options
        }
        timeout = self.settings.heartbeat_timeout
        return open_client(self.backend, self.endpoint, run_id, own, request_timeout=timeout)

    def connect(self, run_id: str) -> closing[KeyValueClient]:
        """The same, to be used in a ``with`` statement."""
        return closing(self.open(run_id))

    def archive(self, run_id: str) -> Archive:
        from rdzv_plugins.archive import Archive

        return Archive(self.open, run_id, self.settings.history_ttl)

    @property
    def prefix(self) -> str:
        """The first part of every key."""
        from rdzv_plugins.config import StoreOptions, parse_options

        given = parse_conf(self.conf)
        own = {"prefix": given["prefix"]} if "prefix" in given else {}
        return parse_options(StoreOptions, own, os.environ).prefix

    @property
    def settings(self) -> Settings:
        """The handler's options among those of ``--rdzv-conf``."""
        from rdzv_plugins.config import Settings, option_names, parse_options

        handler_options = option_names(Settings)
        own = {name: it for name, it in parse_conf(self.conf).items() if name in handler_options}
        return parse_options(Settings, own, os.environ)


def parse_conf(conf: str) -> dict[str, str]:
    """The options of ``--rdzv-conf``; raises `ValueError` for one without a value."""
    pairs = [item.partition("=") for item in conf.split(",") if item.strip()]
    for name, _, value in pairs:
        if not value.strip():
            raise ValueError(f"--rdzv-conf: the option '{name.strip()}' has no value")
    names = [name.strip() for name, _, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--rdzv-conf: the option '{name}' is given twice")
    return {name.strip(): value.strip() for name, _, value in pairs}


def no_run(client: KeyValueClient, run_id: str) -> ValueError:
    """The error where no run of this package's handler stands under the id."""
    from rdzv_plugins.inspection import is_torchs

    only = " of handler=rdzv, only one of handler=torch" if is_torchs(client) else ""
    return ValueError(f"there is no run '{run_id}'{only}")


def plain_console() -> Console:
    """Shows text as it is: rich would take ``[fd00::1]`` for a style and ``:b:`` for an emoji."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def print_json(value: Any) -> None:
    """One line of JSON."""
    typer.echo(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
