"""Shared by several commands: options, with the same names as torchrun's, and the console."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console

from rdzv_plugins.config import Settings, option_names, parse_options
from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.stores import STORES, open_client

__all__ = [
    "BackendOption",
    "ConfOption",
    "EndpointOption",
    "RunOption",
    "connect",
    "delete_run",
    "open_run",
    "plain_console",
    "settings",
]

BackendOption = Annotated[
    str, typer.Option("--rdzv-backend", "-b", help=f"one of: {', '.join(STORES)}")
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--rdzv-endpoint",
        "-e",
        help="as for torchrun; empty: this host (dynamodb: AWS's configuration)",
    ),
]
RunOption = Annotated[str, typer.Option("--rdzv-id", "-i", help="the run's id")]
ConfOption = Annotated[
    str, typer.Option("--rdzv-conf", "-c", help="<option>=<value>,... as for torchrun")
]


def connect(backend: str, endpoint: str, run_id: str, conf: str) -> closing[KeyValueClient]:
    """A client of the run's namespace, to be used in a ``with`` statement.

    Raises:
        ValueError: a bad option, or a missing client package.
        RendezvousConnectionError: the store cannot be reached or refuses the credentials.
    """
    return closing(open_run(backend, endpoint, run_id, conf))


def open_run(backend: str, endpoint: str, run_id: str, conf: str) -> KeyValueClient:
    """A client of the run's namespace; raises as `connect` does."""
    config = _parse(conf)
    handler_options = option_names(Settings)
    own = {name: value for name, value in config.items() if name not in handler_options}
    return open_client(
        backend, endpoint, run_id, own, request_timeout=settings(conf).heartbeat_timeout
    )


def delete_run(client: KeyValueClient) -> int:
    """Delete all keys of the client's run; returns their number."""
    keys = [*client.list("")]
    client.delete_many(keys)
    # Also cancel the deadline of a closed run: it must not expire the next run with this id.
    client.expire(0)
    return len(keys)


def plain_console() -> Console:
    """Shows text as it is: rich would take ``[fd00::1]`` for a style and ``:b:`` for an emoji."""
    return Console(markup=False, emoji=False)


def settings(conf: str) -> Settings:
    """The handler's options among those of ``--rdzv-conf``."""
    config = _parse(conf)
    handler_options = option_names(Settings)
    own = {name: value for name, value in config.items() if name in handler_options}
    return parse_options(Settings, own, os.environ)


def _parse(conf: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in conf.split(",") if item.strip()]
    for name, _, value in pairs:
        if not value.strip():
            raise ValueError(f"--rdzv-conf: the option '{name.strip()}' has no value")
    return {name.strip(): value.strip() for name, _, value in pairs}
