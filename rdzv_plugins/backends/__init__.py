"""The table of stores: one row a store, one module a row.

A new store is one module here, one row in `BACKENDS`, one entry point and one extra in
``pyproject.toml``; see ``docs/writing-a-backend.md``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rdzv_plugins.config import StoreOptions, parse_options, redact
from rdzv_plugins.kv import KeyValueClient

__all__ = ["BACKENDS", "Backend", "open_client"]


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a store's client lives and what to install for it.

    ``requires`` is the package of the store's client; None: the standard library is enough.
    The module has ``Options``, a `StoreOptions`, and ``Client``, a `KeyValueClient` made from
    ``(endpoint, namespace, options, request_timeout)``.
    """

    module: str
    extra: str
    requires: str | None

    def load(self) -> Any:
        """The module; raises `ValueError` naming the ``pip install`` that mends a missing one."""
        try:
            if self.requires is not None:
                import_module(self.requires)
        except ImportError as error:
            raise ValueError(
                f"the {self.extra} backend needs the package '{self.requires}', which cannot be "
                f'imported ({error}). Install it with: pip install "rdzv-plugins[{self.extra}]"'
            ) from error
        return import_module(self.module)

    @property
    def options(self) -> type[StoreOptions]:
        options: type[StoreOptions] = import_module(self.module).Options
        return options


BACKENDS: dict[str, Backend] = {
    "redis": Backend("rdzv_plugins.backends.redis", "redis", "redis"),
    "zookeeper": Backend("rdzv_plugins.backends.zookeeper", "zookeeper", "kazoo"),
    "dynamodb": Backend("rdzv_plugins.backends.dynamodb", "dynamodb", "boto3"),
    "consul": Backend("rdzv_plugins.backends.consul", "consul", None),
    "etcd-v3": Backend("rdzv_plugins.backends.etcd", "etcd", None),
}


def open_client(
    name: str,
    endpoint: str,
    run_id: str,
    config: Mapping[str, object] | None = None,
    *,
    request_timeout: float = 5.0,
) -> KeyValueClient:
    """Connect to a run's namespace.

    Args:
        name: a key of `BACKENDS`.
        endpoint: as in ``--rdzv-endpoint``; "" means the store's usual port on this host.
        run_id: as in ``--rdzv-id``.
        config: as in ``--rdzv-conf``, the store's own options only.
        request_timeout: seconds that one request may take, its retries included.

    Raises:
        ValueError: an unknown backend, a bad endpoint or option, or a missing client package.
        RendezvousConnectionError: the store cannot be reached or refuses us.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend '{name}'; there are: {', '.join(BACKENDS)}")
    module = BACKENDS[name].load()
    options = parse_options(module.Options, config or {}, os.environ)
    try:
        client: KeyValueClient = module.Client(
            endpoint, f"{options.prefix}/{run_id}", options, request_timeout
        )
    except ValueError as error:
        raise ValueError(f"{name} at '{redact(endpoint)}': {error}") from error
    return client
