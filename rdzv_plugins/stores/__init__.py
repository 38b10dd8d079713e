"""One module per store, and the functions that open a client of a run on a store.

A new store needs a module here with a class ``Client``, a row in `STORES`, and an entry point and
an extra in ``pyproject.toml``; see ``docs/writing-a-backend.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rdzv_plugins.kv import (
    Attendance,
    ExhaustedError,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousError,
    exhausted,
)
from rdzv_plugins.kv.sealed import SealedClient
from rdzv_plugins.peers.addresses import address_on
from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.settings.environment import ENVIRONMENT_PREFIX, environment
from rdzv_plugins.settings.options import Settings, UnreadableFileError
from rdzv_plugins.settings.parsing import (
    alternatives,
    cannot_import,
    option_names,
    parse_options,
    unknown_variables,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

__all__ = [
    "STORES",
    "attend",
    "client_class",
    "is_store",
    "load",
    "open_client",
    "open_run",
    "opener",
    "strange_variables",
]

STORES = {
    "redis": "rdzv_plugins.stores.redis:Client",
    "zookeeper": "rdzv_plugins.stores.zookeeper:Client",
    "dynamodb": "rdzv_plugins.stores.dynamodb:Client",
    "consul": "rdzv_plugins.stores.consul:Client",
    "etcd-v3": "rdzv_plugins.stores.etcd:Client",
    "postgres": "rdzv_plugins.stores.postgres:Client",
    "nats": "rdzv_plugins.stores.nats:Client",
    "quorum": "rdzv_plugins.stores.quorum.client:Client",
    "kubernetes": "rdzv_plugins.stores.kubernetes:Client",
    "s3": "rdzv_plugins.stores.s3:Client",
    "azure": "rdzv_plugins.stores.azure:Client",
}
"""The stores of this package, by ``--rdzv-backend``."""

# (endpoint, repr(options)) of each client that this process has opened.
_reached: set[tuple[str, str]] = set()


def load(client: str) -> type[KeyValueClient]:
    """Import a client class: one of `STORES`, or ``"<module>:<class>"``.

    Raises:
        ValueError: a required package is missing; the message gives the ``pip install``.
    """
    module, _, name = STORES.get(client, client).partition(":")
    try:
        found: type[KeyValueClient] = getattr(import_module(module), name)
    except ImportError as error:
        # A module of this package has the same name as its pip extra.
        package, _, store = module.rpartition(".")
        extra = f"rdzv-plugins[{store}]" if package == __name__ else module.partition(".")[0]
        raise cannot_import(f"the {store} backend", extra, error) from error
    return found


def client_class(name: str) -> type[KeyValueClient]:
    """The client class of ``--rdzv-backend=<name>``, of this package or of another.

    Raises:
        ValueError: no such backend, or a required package is missing.
    """
    client = _registered(name)
    if client is None:
        raise ValueError(f"unknown backend '{name}'; {alternatives(name, STORES)}")
    return load(client)


def is_store(name: str) -> bool:
    """Whether ``--rdzv-backend=<name>`` uses this package's handler."""
    return _registered(name) is not None


def _registered(name: str) -> str | None:
    """The argument of `load`; other packages register theirs by `entry_points.handler_factory`."""
    if name in STORES:
        return name
    for point in entry_points(group="torchrun.handlers", name=name):
        client = getattr(point.load(), "client", None)
        if isinstance(client, str):
            return client
    return None


def strange_variables(
    environ: Mapping[str, str], known: Iterable[str], backend: str
) -> Iterator[tuple[str, str]]:
    """A line and advice for each RDZV_PLUGINS_* variable that is no option in ``known``.

    There is no advice for an option of another store, because hosts may set it for all jobs.
    """
    for variable, nearest in unknown_variables(environ, known):
        if other := _store_with(variable):
            yield f"${variable} is an option of {other}, and has no effect on {backend}", ""
            continue
        advice = f"did you mean ${nearest}?" if nearest else "see rdzv docs options"
        yield f"${variable} is no option and has no effect", advice


def _store_with(variable: str) -> str | None:
    """A store that has this option."""
    for store in STORES:
        with suppress(ValueError):  # Its package is not installed.
            for name in option_names(load(store).options):
                if variable == ENVIRONMENT_PREFIX + name.upper():
                    return store
    return None


def open_client(
    name: str,
    endpoint: str,
    run_id: str,
    config: Mapping[str, object] | None = None,
    *,
    request_timeout: float = 5.0,
    job: str | None = None,
) -> KeyValueClient:
    """Connect to a run's namespace.

    Args:
        name: as in ``--rdzv-backend``.
        endpoint: as in ``--rdzv-endpoint``; "": the store's default, mostly its port on this host.
        run_id: as in ``--rdzv-id``.
        config: as in ``--rdzv-conf``, the store's own options only.
        request_timeout: seconds that one request may take, its retries included.
        job: the run's id, if ``run_id`` names records that are kept beside that run.

    Raises:
        ValueError: an unknown backend, a bad endpoint or option, or a missing client package.
        RendezvousConnectionError: the store cannot be reached or refuses the credentials, or this
            host has run out of threads, descriptors or memory.
    """
    client = client_class(name)
    options = parse_options(client.options, config or {}, environment())
    return open_run(client, endpoint, run_id, options, request_timeout=request_timeout, job=job)


def opener(
    client: type[KeyValueClient], params: RendezvousParameters
) -> tuple[Settings, Callable[..., KeyValueClient]]:
    """The settings in torchrun's parameters, and `open_run` for a run id, with these settings.

    Raises:
        ValueError: a bad option; the message names the option and what is allowed.
    """
    also_allowed = option_names(client.options)
    settings = parse_options(Settings, params.config, environment(), also_allowed=also_allowed)
    return settings, partial(
        open_run,
        client,
        params.endpoint,
        options=parse_options(client.options, _own_options(params), environment()),
        request_timeout=settings.request_timeout,
        patience=settings.lease,
        job=params.run_id,
    )


def attend(
    client: type[KeyValueClient], params: RendezvousParameters, settings: Settings
) -> Attendance | None:
    """The node's part in a store that nodes run; None: the store has servers.

    Raises:
        ValueError: a bad endpoint or option, a missing package, or no address that fits the
            settings.
        OSError: this host can open no socket.
    """
    options = parse_options(client.options, _own_options(params), environment())
    options = client.of_run(options, params.run_id)
    local_addr = params.local_addr or address_on(settings.interface, settings.network)
    return client.attend(params.endpoint, options, local_addr, params.run_id)


def _own_options(params: RendezvousParameters) -> dict[str, object]:
    """The options of the store in torchrun's parameters."""
    ours = option_names(Settings)
    return {name: value for name, value in params.config.items() if name not in ours}


def open_run(
    client: type[KeyValueClient],
    endpoint: str,
    run_id: str,
    options: Any,
    *,
    request_timeout: float,
    job: str | None = None,
    patience: float = Settings().lease,
) -> KeyValueClient:
    """Like `open_client`, but takes the client's class and parsed options.

    If a secret is set, returns a `SealedClient` with ``patience``.

    An unreadable file counts as an outage if this process has reached the store with it before.
    """
    options = client.of_run(options, job or run_id)
    connect: Any = client
    try:
        secrets = options.secrets()
        opened: KeyValueClient = connect(
            endpoint, f"{options.prefix}/{run_id}", options, request_timeout
        )
        if secrets:
            opened = SealedClient(
                opened, options.prefix, run_id, options.secrets, options.secret_file, patience
            )
    except Exception as error:
        if not isinstance(error, RendezvousError) and (missing := exhausted(error)) is not None:
            # A client makes threads and other parts before its first request.
            where = f"{client.name} at '{redact(endpoint)}'"
            raise ExhaustedError(f"{where} could not be asked: {missing}") from None
        if not isinstance(error, ValueError):
            raise
        text = f"{client.name} at '{redact(endpoint)}': {error}"
        if isinstance(error, UnreadableFileError) and (endpoint, repr(options)) in _reached:
            raise RendezvousConnectionError(f"{text}; is it being replaced?") from None
        raise ValueError(text) from error
    _reached.add((endpoint, repr(options)))
    return opened
