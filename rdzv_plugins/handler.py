"""The shared dynamic handler: torch's RendezvousHandler over any store of this package."""

from __future__ import annotations

import atexit
import logging
import os
import random
import secrets
import socket
import sys
import time
import weakref
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from rdzv_plugins.addresses import node_address, store_hosts
from rdzv_plugins.backends import BACKENDS, open_client
from rdzv_plugins.closing import close_run
from rdzv_plugins.config import Settings, option_names, parse_options, redact
from rdzv_plugins.decisions import Failure, Rules
from rdzv_plugins.documents import STATE_KEY, STORE_PREFIX, NodeRecord, Phase, RoundDocument, Wants
from rdzv_plugins.driver import Driver, carry_out
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.node import Node
from rdzv_plugins.retry import retry, store_is_away
from rdzv_plugins.steps import Outcome
from rdzv_plugins.store import KeyValueStore

__all__ = ["StoreRendezvousHandler", "create_handler"]

log = logging.getLogger(__name__)

# How long shutdown waits for a thread that hangs in a request to a store that does not answer.
_STOP_SECONDS = 2.0


class StoreRendezvousHandler(RendezvousHandler):
    """One node of one run.

    Args:
        client: the run's namespace; the handler owns it and closes it.
        run_id: as in ``--rdzv-id``.
        rules: the run's settings.
        settings: the handler's options.
        address: under which the other nodes reach this one.
    """

    def __init__(
        self,
        client: KeyValueClient,
        run_id: str,
        rules: Rules,
        settings: Settings,
        address: str,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._rules = rules
        self._settings = settings
        self._address = address
        self._server: TCPStore | None = None
        record = NodeRecord(
            address=address,
            pid=os.getpid(),
            beat=0,
            wants=Wants.JOIN,
            round=-1,
            min_nodes=rules.min_nodes,
            max_nodes=rules.max_nodes,
            rank=settings.rank,
        )
        self._node = Node(
            # 40 random bits: two of 4,096 nodes share one in 1 of 130,000 runs.
            secrets.token_hex(5),
            record,
            rules,
            settings.join_timeout,
            time.monotonic,
            random.Random(secrets.randbits(64)),
        )
        self._driver = Driver(self._node, client, self._open_master, f"rdzv-{run_id}")
        self._ended = False
        # torch's launcher does not call shutdown() after a signal, lest it close the run; but the
        # others must not wait for this node's lease. Weak, or the handler would never be freed.
        itself = weakref.ref(self)
        self._at_exit = lambda: handler._leave() if (handler := itself()) is not None else None
        atexit.register(self._at_exit)

    def get_backend(self) -> str:
        return self._client.name

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share rank 0's TCPStore; torch's own switch turns it off."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    @property
    def loss_shows_within(self) -> float:
        """Seconds after which the loss of a participant shows in `num_nodes_waiting`.

        Longer only if the store was away, or the leader was lost together with its heirs.
        """
        # Its last beat is seen up to 1.1 intervals late; then heirs and the store need their time.
        return self._rules.lease + 1.1 * self._rules.interval + 2.0

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; blocks until it runs.

        Raises:
            RendezvousClosedError: the run is closed.
            RendezvousGracefulExitError: the run was closed while this node was a spare.
            RendezvousTimeoutError: no round within ``join_timeout``.
            RendezvousConnectionError: the store was away for as long.
            RendezvousStateError: the round document is unreadable, or the run was started with
                another ``--nnodes``.
        """
        outcome = Outcome() if self._ended else self._driver.join()
        if self._ended:
            raise RendezvousClosedError(f"this handler of run '{self._run_id}' was shut down")
        document = outcome.document
        if document is None:
            raise self._explain(outcome)
        rank, world_size = document.ranks[self._node.id], len(document.participants)
        address, _, port = (document.master or "").rpartition(":")
        log.info(
            "run '%s', round %d: rank %d of %d (%s)",
            self._run_id, document.round, rank, world_size, document.reason,
        )  # fmt: skip
        return RendezvousInfo(
            KeyValueStore(self._client, f"{STORE_PREFIX}{document.round}/"),
            rank,
            world_size,
            RendezvousStoreInfo(address, int(port)),
        )

    def num_nodes_waiting(self) -> int:
        """Above 0 when the agent should join again; from memory, without I/O. Never raises."""
        return self._node.waiting

    def is_closed(self) -> bool:
        latest = self._node.latest
        if self._driver.running and latest is not None:
            return latest.phase is Phase.CLOSED
        entry = self._client.get(STATE_KEY)
        return entry is not None and RoundDocument.decode(entry.value).phase is Phase.CLOSED

    def set_closed(self) -> None:
        """Close the run for all nodes; raises `RendezvousConnectionError` after close_timeout."""
        never_seen = RoundDocument(
            round=0,
            phase=Phase.FORMING,
            leader=None,
            min_nodes=self._rules.min_nodes,
            max_nodes=self._rules.max_nodes,
        )
        reason = f"closed by {self._node.record.label}"

        def close() -> None:
            latest = self._node.latest or never_seen
            carry_out(self._client, close_run(self._node.id, latest, reason))
            self._client.expire(self._settings.sweep_after)

        retry(close, timeout=self._settings.close_timeout, passing=store_is_away)

    def shutdown(self) -> bool:
        """End this node; closes the run if this node is in it, as torch's handler does.

        A node that is in no round only leaves: that it was refused, timed out or was replaced is
        no reason to end the run of the others. So does one that got a signal: its launcher means
        to take it away, but the agent of torch 2.6 calls this then too; later ones do not.
        Returns False if the store could not be told.
        """
        if self._ended:
            return True
        if not self._node.in_round or isinstance(sys.exception(), SignalException):
            return self._leave()
        self._stop()
        try:
            self.set_closed()
            return True
        except (RendezvousConnectionError, RendezvousStateError) as error:
            log.warning("run '%s' could not be closed: %s", self._run_id, error)
            return False
        finally:
            self._release()

    def _leave(self) -> bool:
        """Tell the others that this node is gone, without closing the run."""
        if self._ended:
            return True
        self._stop()
        try:
            if self._node.latest is None or self._node.latest.phase is not Phase.CLOSED:
                carry_out(self._client, self._node.farewell())
            return True
        except (RendezvousConnectionError, RendezvousStateError) as error:
            log.warning("this node could not announce that it leaves: %s", error)
            return False
        finally:
            self._release()

    def _stop(self) -> None:
        self._ended = True
        atexit.unregister(self._at_exit)
        self._driver.stop(_STOP_SECONDS)

    def _release(self) -> None:
        self._client.close()
        self._server = None

    def _open_master(self) -> str:
        """A fresh TCPStore for each round: workers of two rounds must never meet in one.

        torch's workers connect to MASTER_PORT without a prefix per round.
        """
        self._server = None
        if not self.use_agent_store:
            return f"{self._address}:{_free_port()}"
        try:
            self._server = TCPStore(
                host_name=self._address,
                port=0,
                is_master=True,
                wait_for_workers=False,
                # It dials itself, and by default keeps trying for minutes in which nobody beats.
                timeout=timedelta(seconds=self._settings.heartbeat_timeout),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise RendezvousStateError(
                f"cannot open a TCPStore on '{self._address}' ({error}); name an address of this "
                "host with --local-addr"
            ) from error
        return f"{self._address}:{self._server.port}"

    def _explain(self, outcome: Outcome) -> Exception:
        run = f"run '{self._run_id}'"
        match outcome.failure:
            case Failure.CLOSED:
                return RendezvousClosedError(
                    f"{run} is closed; its id can be used again after closed_ttl "
                    f"({self._settings.sweep_after:g} s)"
                )
            case Failure.SPARE_CLOSED:
                return RendezvousGracefulExitError(f"{run} ended while this node was a spare")
            case Failure.MISMATCH:
                document = self._node.document
                theirs = f"{document.min_nodes}:{document.max_nodes}" if document else "others"
                return RendezvousStateError(
                    f"{run} was started with --nnodes={theirs}, this node with "
                    f"--nnodes={self._rules.min_nodes}:{self._rules.max_nodes}; "
                    "use the same on every node, or another --rdzv-id"
                )
            case Failure.TIMEOUT:
                rules, patience = self._rules, self._settings.join_timeout
                more = ""
                if rules.min_nodes < rules.max_nodes and patience <= rules.last_call:
                    more = f"; last_call_timeout alone is {rules.last_call:g} s"
                return RendezvousTimeoutError(
                    f"{run} did not complete a round of {rules.min_nodes} to {rules.max_nodes} "
                    f"nodes within {patience:g} s{more}"
                )
        return outcome.error or RendezvousStateError(f"{run} ended without an outcome")


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def create_handler(backend: str, params: RendezvousParameters) -> RendezvousHandler:
    """What ``--rdzv-backend`` stands for; see `rdzv_plugins.entry_points`.

    Raises:
        ValueError: a bad endpoint or option, or a missing client package.
        RendezvousConnectionError: the store cannot be reached or refuses us.
    """
    store_options = option_names(BACKENDS[backend].load().Options)
    settings = parse_options(Settings, params.config, os.environ, also_allowed=store_options)
    own = option_names(Settings)
    rest = {name: value for name, value in params.config.items() if name not in own}
    client = open_client(
        backend, params.endpoint, params.run_id, rest, request_timeout=settings.heartbeat_timeout
    )
    log.debug("connected to %s at '%s'", backend, redact(params.endpoint))
    try:
        return _over(client, backend, params, settings)
    except BaseException:
        client.close()
        raise


def _over(
    client: KeyValueClient, backend: str, params: RendezvousParameters, settings: Settings
) -> RendezvousHandler:
    if settings.handler == "torch":
        from rdzv_plugins.torch_handler import create_torch_handler

        return create_torch_handler(backend, params, settings, client)
    rules = Rules(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        lease=settings.lease,
        interval=settings.keep_alive_interval,
        last_call=settings.last_call_timeout,
        restart_on_loss=settings.restart_on_loss,
        rank_order=settings.rank_order,
    )
    address = node_address(params.local_addr, store_hosts(params.endpoint))
    return StoreRendezvousHandler(client, params.run_id, rules, settings, address)
