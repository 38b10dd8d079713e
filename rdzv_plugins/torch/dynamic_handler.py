"""torch's own dynamic handler over our stores, with its two fatal faults mended.

It still polls once a second, compares wall clocks between hosts, lets all nodes write one state,
and ends the agent at an outage of the store. ``handler=rdzv`` does none of this.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from rdzv_plugins.kv import (
    Attendance,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.settings.environment import give_back, withhold
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import option_names
from rdzv_plugins.torch.c10d_store import KeyValueStore
from rdzv_plugins.torch.rendezvous_backend import TORCH_STORE_PREFIX, KeyValueBackend

TAKES_KEEP_ALIVE = (
    "keep_alive_interval" in signature(DynamicRendezvousHandler.from_backend).parameters
)
"""Whether this torch's handler can be told how often to beat; torch 2.6's beats every 5 s."""


class MendedDynamicRendezvousHandler(DynamicRendezvousHandler):
    """torch's handler with a new MASTER_ADDR, MASTER_PORT and TCPStore server in each round.

    torch keeps the first round's: survivors of a lost rank 0 dial a dead host, and a node that
    joins later meets a server whose keys the last round's workers have used. When the run ends, the
    agent of a spare ends with status 0; torch's handler fails with AttributeError.
    """

    # Set by create_torch_handler, because torch's from_backend calls the constructor.
    _client: KeyValueClient
    _attendance: Attendance | None = None
    _closed_ttl: float
    # Whether this handler has removed passwords and torchrun's options from the environment that
    # workers inherit.
    _withholds = False

    def next_rendezvous(self) -> RendezvousInfo:
        # torch makes a new TCPStore only if these private attributes are None. No public option
        # resets them while workers share the agent's TCPStore.
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        try:
            info = super().next_rendezvous()
        except RendezvousGracefulExitError:
            # The run ended while this node was a spare. torch's error makes its launcher fail.
            raise SystemExit(0) from None
        if not self._withholds:
            self._withholds = True
            withhold()
        if info.rank == 0:
            self._delete_past_rounds()
        return info

    def set_closed(self) -> None:
        super().set_closed()
        self._client.expire(self._closed_ttl)

    def shutdown(self) -> bool:
        """Close the run, let its keys expire after ``closed_ttl``, and close the client."""
        try:
            closed = super().shutdown()
            # The run is closed. If only its id stays taken, raise no error.
            with contextlib.suppress(RendezvousConnectionError, RendezvousStateError):
                if closed:
                    self._client.expire(self._closed_ttl)
            return closed
        finally:
            if self._withholds:
                self._withholds = False
                give_back()
            self._client.close()
            if self._attendance is not None:
                self._attendance.close()

    def _delete_past_rounds(self) -> None:
        # torch puts a round's keys under torch.rendezvous.<run id>.<round>/. Keep the last two
        # rounds, because a slow agent may still read there.
        prefix = f"{TORCH_STORE_PREFIX}torch.rendezvous.{self.get_run_id()}."
        with contextlib.suppress(RendezvousConnectionError, RendezvousStateError):
            rounds: dict[int, list[str]] = {}
            for key in self._client.list(prefix):
                number = key.removeprefix(prefix).partition("/")[0]
                if number.isdecimal() and len(number) < 19:  # Other keys are not torch's.
                    rounds.setdefault(int(number), []).append(key)
            for past in sorted(rounds)[:-2]:
                self._client.delete_many(rounds[past])


def create_torch_handler(
    params: RendezvousParameters,
    settings: Settings,
    client: KeyValueClient,
    address: str,
    attendance: Attendance | None = None,
) -> MendedDynamicRendezvousHandler:
    """The handler of ``--rdzv-conf handler=torch``, which ends the client and the attendance.

    Raises `ValueError` for an empty run id, and for an option that torch's handler does not have.
    """
    handler: MendedDynamicRendezvousHandler = MendedDynamicRendezvousHandler.from_backend(
        params.run_id,
        KeyValueStore(client, TORCH_STORE_PREFIX),
        KeyValueBackend(client, params.backend),
        params.min_nodes,
        params.max_nodes,
        address,
        RendezvousTimeout(
            join=timedelta(seconds=settings.join_timeout),
            # torch refuses 0.
            last_call=timedelta(seconds=max(settings.last_call_timeout, 1e-6)),
            close=timedelta(seconds=settings.close_timeout),
            heartbeat=timedelta(seconds=settings.request_timeout),
        ),
        **check_settings(settings),
    )
    handler._client = client
    handler._attendance = attendance
    handler._closed_ttl = settings.sweep_after
    return handler


def check_settings(settings: Settings) -> dict[str, Any]:
    """The heartbeat's options as torch's handler takes them.

    Raises `ValueError` if an option is set that torch's handler does not have.
    """
    every = option_names(Settings)
    names = ["master_port", "metrics_port", "metrics_host", "otel", "page_token_file"]
    for first, last in ("restart_on_loss", "outage_limit"), ("abandoned_ttl", "check_disk_free"):
        names += every[every.index(first) : every.index(last) + 1]
    if given := [name for name in names if getattr(settings, name) != getattr(Settings(), name)]:
        raise ValueError(f"handler=torch has no {', '.join(given)}; leave out, or use handler=rdzv")
    # The interval is declared as int, but torch only hands it to timedelta.
    beats = ("keep_alive_interval", "keep_alive_max_attempt")
    values = {name: getattr(settings, name) for name in beats}
    if TAKES_KEEP_ALIVE:
        return values
    fixed = {name: getattr(Settings(), name) for name in beats}
    if values != fixed:
        raise ValueError(
            f"the handler of torch {torch.__version__} beats every {fixed[beats[0]]:g} s and is "
            f"given up after {fixed[beats[1]]}; {' and '.join(beats)} need a later torch, or "
            "handler=rdzv"
        )
    return {}
