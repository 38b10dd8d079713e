"""The TCPStores that this node opens as rank 0, one for each round."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rdzv_plugins.kv import (
    ExhaustedError,
    RendezvousConnectionError,
    RendezvousStateError,
    exhausted,
)
from rdzv_plugins.peers.addresses import dial_self, is_local, is_own_ip, listen
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.torch.master_store import open_store

# The least time-out for opening a TCPStore, which takes 10 s if a DNS server does not answer.
_OPEN_SECONDS = 30.0


class MasterServers:
    """Opens TCPStores, and keeps the one of the current round.

    Args:
        address: where other nodes reach this node.
        ports: where a TCPStore may listen.
        option: the value of ``master_port``, for messages.
        name: the name of the thread that listens before torch does.
    """

    def __init__(
        self, address: str, ports: Sequence[int], option: str | None, rules: Rules, name: str
    ) -> None:
        self._address = address
        self._ports = ports
        self._option = option or "any"
        self._rules = rules
        self._name = name
        # `open` checks other addresses, because the look-up of a name may hang.
        self._is_checked = is_own_ip(address)
        self._servers: dict[str, TCPStore] = {}

    def keep(self, world_id: str | None) -> None:
        """End the TCPStores of all other rounds; None: of all rounds."""
        self._servers = {it: server for it, server in self._servers.items() if it == world_id}

    def open(self, world_id: str, port_before: str, *, for_workers: bool) -> str:
        """Open a new TCPStore for a round, and return its ``address:port``.

        Workers connect to MASTER_PORT without a prefix per round, so workers of two rounds must
        never meet in one TCPStore. A worker that was cut off still dials its own round's port.
        Hence no round has the port of the round before, and each round tries the ports in its own
        order.

        This call may hang, because c10d looks up the name of an address before it dials.

        Args:
            port_before: the port of the round before; "": unknown.
            for_workers: only find a port, at which a worker opens the TCPStore.

        Raises:
            RendezvousConnectionError: no port is free now, or the host lacks a resource.
            RendezvousStateError: this host does not reach itself at the address.
        """
        if not self._is_checked:
            self._check_address()
            self._is_checked = True
        order = random.Random(world_id).sample(self._ports, len(self._ports))
        ports = [port for port in order if str(port) != port_before]
        try:
            if for_workers:
                with listen(self._address, ports) as server:
                    return f"{self._address}:{server.getsockname()[1]}"
            timeout = max(_OPEN_SECONDS, self._rules.lease)
            opened = open_store(self._address, timeout, ports, self._name)
        except OSError as error:
            if (missing := exhausted(error)) is not None:
                raise ExhaustedError(f"cannot open a TCPStore ({missing})") from None
            if not self._servers:
                raise RendezvousConnectionError(
                    f"no port of master_port={self._option} is free at '{self._address}' "
                    f"({error}): name more, or end what listens there"
                ) from error
            # This node's TCPStores of earlier rounds may hold the ports; their workers have ended.
            self.keep(None)
            return self.open(world_id, port_before, for_workers=for_workers)
        except (RuntimeError, ValueError) as error:
            raise RendezvousConnectionError(f"cannot open a TCPStore ({error})") from error
        self._servers[world_id] = opened
        return f"{self._address}:{opened.port}"

    def _check_address(self) -> None:
        """Raise if this host does not reach itself at its address.

        If no interface has the address, for example because a router translates it, dial it. A new
        socket listens meanwhile, because the TCPStore's only thread would look up the caller's
        name.
        """
        try:
            if not is_local(self._address):
                dial_self(self._address, self._rules.request_timeout, self._ports)
        except (OSError, UnicodeError) as error:
            if (missing := exhausted(error)) is not None:
                raise missing from None
            retryable = isinstance(error, TimeoutError) or (
                isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            )
            kind = RendezvousConnectionError if retryable else RendezvousStateError
            raise kind(
                f"this host does not reach itself at '{self._address}' ({error}); "
                "name an address of this host with --local-addr"
            ) from error
