"""Makes the handler of ``--rdzv-backend`` from torchrun's parameters, and connects to the store."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

from rdzv_plugins.health import refuse_unknown_checks
from rdzv_plugins.kv import (
    Attempts,
    Attendance,
    KeyValueClient,
    LateCredentialsError,
    RendezvousConnectionError,
    RendezvousStateError,
    exhausted,
)
from rdzv_plugins.kv.sealed import SealedClient
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.logs import set_up, told
from rdzv_plugins.observe.metrics import refuse_unless_installed
from rdzv_plugins.observe.page_access import refuse_open_metrics
from rdzv_plugins.peers.addresses import host_names, is_at_loopback, is_out_of_reach, node_address
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.process.signals import deaf_parent
from rdzv_plugins.process.worker import refuse_in_a_worker
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.protocol.sizes import Sizes
from rdzv_plugins.settings.endpoint import Place, redact
from rdzv_plugins.settings.environment import environment
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import as_typed, idle_options, option_names, without_effect
from rdzv_plugins.settings.run_ids import refuse_unless_possible, why_no_log_folder
from rdzv_plugins.settings.topology import find_domain
from rdzv_plugins.stores import attend, load, opener, strange_variables
from rdzv_plugins.torch.events import Events
from rdzv_plugins.torch.torchrun import idle_arguments, makes_log_folders, max_restarts

__all__ = ["create_handler", "rules_of"]

log = logging.getLogger(__name__)

# Seconds within which a store that pushes wakes a node, and the node writes its heartbeat.
_ANSWER_SECONDS = 0.5
# The time limit of requests for history and exclusions: the node sends no heartbeat meanwhile.
_OPTIONAL_SECONDS = 1.0


def create_handler(client: str, params: RendezvousParameters) -> RendezvousHandler:
    """The handler of ``--rdzv-backend``.

    Args:
        client: see `rdzv_plugins.entry_points.HandlerFactory.client`.

    Raises:
        ValueError: a bad endpoint or option, or a missing client package.
        RendezvousConnectionError: the store cannot be reached, or refuses this node.
    """
    try:
        return _create(client, params)
    except Exception as error:
        Events(params.run_id, socket.gethostname(), "").failed("create_handler", error)
        raise


def _create(client: str, params: RendezvousParameters) -> RendezvousHandler:
    try:
        refuse_unless_possible(params.run_id)
        refuse_in_a_worker(params.run_id)
        store = load(client)
        settings, connect = opener(store, params)
        settings = _placed(settings, params)
        set_up(settings.log_level)
        _tell_what_is_idle(store, params, settings)
        if (parent := deaf_parent()) is not None:
            log.warning(
                "run '%s': the parent of this agent, PID 1 (%s), passes no SIGTERM on, so that the "
                "agent has no time to leave when its container is stopped: start it with exec, and "
                "without a pipe",
                params.run_id,
                parent,
            )
        refuse_unless_installed(settings)
        refuse_open_metrics(settings)
        refuse_unknown_checks(settings)
        if (why := why_no_log_folder(params.run_id)) is not None and makes_log_folders():
            log.warning(
                "run '%s': %s, so that the workers cannot start: use another id, or "
                "--log-dir=/dev/null",
                params.run_id,
                why,
            )
        return _make_patiently(store, connect, params, settings)
    except (ValueError, RendezvousConnectionError, RendezvousStateError) as error:
        set_up("INFO")
        # Log the error first, because torchrun prints its own frames before it.
        log.error("run '%s': %s", params.run_id, error)
        told(error)
        raise error.with_traceback(None) from None


def _make_patiently(
    store: type[KeyValueClient],
    connect: Callable[..., KeyValueClient],
    params: RendezvousParameters,
    settings: Settings,
) -> RendezvousHandler:
    """Make the handler; retry for ``join_timeout`` while this host lacks a resource."""
    deadline, attempts = time.monotonic() + settings.join_timeout, Attempts()
    attendance: Attendance | None = None
    try:
        while True:
            try:
                attendance = attendance or attend(store, params, settings)
                return _make(store, connect, attendance, params, settings)
            except Exception as error:
                late = error if isinstance(error, LateCredentialsError) else None
                if (missing := late or exhausted(error)) is None:
                    raise
                if time.monotonic() >= deadline:
                    raise missing from None
                if attempts.fail():
                    log.warning(
                        "run '%s': this node cannot join yet: %s; it tries again for %g s",
                        params.run_id,
                        missing,
                        settings.join_timeout,
                    )
            time.sleep(attempts.seconds_left)
    except BaseException:
        if attendance is not None:
            attendance.hurry()
            attendance.close()
        raise


def _make(
    store: type[KeyValueClient],
    connect: Callable[..., KeyValueClient],
    attendance: Attendance | None,
    params: RendezvousParameters,
    settings: Settings,
) -> RendezvousHandler:
    place = store.locate(params.endpoint)
    address = _own_address(place, params, settings)
    if attendance is None:
        opened = connect(params.run_id)
    else:
        opened = attendance.open(partial(connect, params.run_id), settings.join_timeout)
    try:
        # Open connections for the driver and the agent before other nodes wait for this node.
        opened.hold(2)
        name, at = opened.name, redact(params.endpoint)
        log.info("run '%s': connected to %s '%s'", params.run_id, name, at)
        seconds = min(settings.request_timeout, _OPTIONAL_SECONDS)
        briefly = partial(connect, request_timeout=seconds)
        where = as_typed(name, params.endpoint, params.config, store.options)
        archive = Archive(connect, params.run_id, settings.history_ttl, briefly, where)
        return _over(opened, archive, attendance, params, settings, address, place)
    except BaseException:
        opened.close()
        raise


def _tell_what_is_idle(
    store: type[KeyValueClient], params: RendezvousParameters, settings: Settings
) -> None:
    """Log each option, argument and variable that has no effect."""
    known, nnodes = option_names(Settings, store.options), (params.min_nodes, params.max_nodes)
    idle = [
        *without_effect(params.config, known),
        *idle_options(params.config, environment(), settings, nnodes),
        *idle_arguments(),
    ]
    for line in idle:
        log.info("run '%s': %s", params.run_id, line)
    for found, advice in strange_variables(environment(), known, store.name):
        if advice:
            log.warning("run '%s': %s; %s", params.run_id, found, advice)
        else:
            log.info("run '%s': %s", params.run_id, found)


def _placed(settings: Settings, params: RendezvousParameters) -> Settings:
    """Add this node's domain; raises `ValueError` if the node could never be in a round."""
    if settings.handler == "torch":
        return settings
    rules = rules_of(settings, params.min_nodes, params.max_nodes)
    Sizes.of(rules).refuse_if_impossible()
    if not rules.minds_domains:
        return settings
    domain = find_domain(settings.domain, os.environ)
    if domain is None and rules.segment > 1:
        raise ValueError(
            f"segment={rules.segment} needs the domain of this node, which neither Slurm nor NVML "
            "tells: set domain=... or $RDZV_PLUGINS_DOMAIN"
        )
    return replace(settings, domain=domain)


def _over(
    client: KeyValueClient,
    archive: Archive,
    attendance: Attendance | None,
    params: RendezvousParameters,
    settings: Settings,
    address: str,
    place: Place,
) -> RendezvousHandler:
    if settings.handler == "torch":
        from rdzv_plugins.torch.dynamic_handler import create_torch_handler

        if not isinstance(client, SealedClient):
            log.warning(
                "run '%s': handler=torch unpickles what stands in the store: whoever can write "
                "there runs code on this node. A secret, in $RDZV_PLUGINS_SECRET on all nodes, "
                "keeps strangers out",
                params.run_id,
            )
        return create_torch_handler(params, settings, client, address, attendance)
    answer_timeout = _answer_timeout(client, settings) if params.max_nodes > 1 else None
    rules = rules_of(settings, params.min_nodes, params.max_nodes, answer_timeout)
    if settings.rank_order == "topology" and settings.domain is None:
        log.warning(
            "run '%s': rank_order=topology, but nobody knows the domain of this node; its rank "
            "follows those of all domains. Set domain=... or $RDZV_PLUGINS_DOMAIN",
            params.run_id,
        )
    if params.min_nodes < params.max_nodes and max_restarts() == 0:
        log.warning(
            "run '%s': torchrun runs with --max-restarts=0, its default. If a node is lost and the "
            "workers of another fail before the lease (%g s) has run out, that failure ends the "
            "job: set --max-restarts, or start the agents with rdzv run",
            params.run_id,
            rules.lease,
        )
    return StoreRendezvousHandler(
        client,
        archive,
        params.run_id,
        rules,
        settings,
        address,
        names=host_names(params.local_addr, place.names),
        store_is_here=partial(is_at_loopback, place),
        attendance=attendance,
    )


def _own_address(store: Place, params: RendezvousParameters, settings: Settings) -> str:
    """The address that this node announces; raises `ValueError` if the options allow none."""
    own = node_address(
        params.local_addr,
        store.dialled,
        interface=settings.interface,
        network=settings.network,
        alone=params.max_nodes == 1,
    )
    overridden = params.local_addr and (settings.interface or settings.network)
    level = logging.INFO if overridden else logging.DEBUG
    log.log(level, "run '%s': other nodes dial '%s' (%s)", params.run_id, own.address, own.why)
    if params.max_nodes > 1 and is_out_of_reach(own.address, store.dialled):
        log.warning(
            "run '%s': the address of this node, '%s', is loopback, but the store is on another "
            "host: other hosts cannot reach this one. Name an address with --local-addr",
            params.run_id,
            own.address,
        )
    return own.address


def _answer_timeout(client: KeyValueClient, settings: Settings) -> float | None:
    """The value of `Rules.answer_timeout`; None: leases alone decide.

    A read that may be stale proves no silence. With on_outage=stop, two worlds must never train at
    once, which only leases ensure.
    """
    stops = settings.patience_in_an_outage < math.inf
    if stops or not (settings.links and client.capabilities.linearizable):
        return None
    return _ANSWER_SECONDS + (0.0 if client.capabilities.push else client.longest_poll)


def rules_of(
    settings: Settings, min_nodes: int, max_nodes: int, answer_timeout: float | None = None
) -> Rules:
    """The rules of the protocol, from the handler's options."""
    of_run = {it.name for it in fields(settings) if it.metadata["of_run"]}
    options = {it.name: getattr(settings, it.name) for it in fields(Rules) if it.name in of_run}
    # Shorter than the join_timeout of the nodes that wait.
    longest = 0.8 * settings.join_timeout
    if options["replacement_timeout"] is None:
        options["replacement_timeout"] = settings.last_call_timeout
    options["replacement_timeout"] = min(options["replacement_timeout"], longest)
    return Rules(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        lease=settings.lease,
        interval=settings.keep_alive_interval,
        last_call_timeout=settings.last_call_timeout,
        request_timeout=settings.request_timeout,
        rejoin_timeout=min(settings.rejoin_timeout, longest),
        outage_limit=settings.patience_in_an_outage,
        answer_timeout=answer_timeout,
        sweep_after=settings.sweep_after,
        abandoned_ttl=max(settings.abandoned_ttl, 4 * settings.lease),
        **options,
    )
