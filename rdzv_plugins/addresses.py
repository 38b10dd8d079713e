"""The address at which other nodes reach this node: their MASTER_ADDR if this node is rank 0."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from rdzv_plugins.endpoint import parse_endpoint

__all__ = [
    "dial_self",
    "is_local",
    "is_out_of_reach",
    "is_own_ip",
    "listen",
    "loopback",
    "node_address",
    "route_to",
    "store_hosts",
]

T = TypeVar("T")
Address = IPv4Address | IPv6Address

# An unreachable DNS must not delay the start: the resolver's own time-out is 10 s or more per name.
_RESOLVER_SECONDS = 2.0

# An address for documentation (RFC 5737): its route is the default route.
_ANYWHERE = ("192.0.2.1", 9)


def node_address(local_addr: str | None, store_hosts: Iterable[tuple[str, int]]) -> str:
    """An address of this host to which a server can bind and its peers can connect.

    In this order: ``local_addr``; the host's fully qualified name, if it resolves to an address of
    this host that is neither loopback nor link-local; the address from which the host reaches the
    store, or, if that is loopback or unknown, the address of its short name; loopback. A name
    without a dot is not returned: nobody else can resolve a container's name (pytorch #150532).

    Args:
        local_addr: as in ``--local-addr``.
        store_hosts: (name, port) of the store's servers; if none resolves, the default route
            decides. Nothing is sent to them.

    Returns:
        A name or an IP address, within 4 s even if name resolution hangs.
    """
    if local_addr:
        return local_addr
    unknown: tuple[str, Address | None] = ("", None)
    name, own = _within(_RESOLVER_SECONDS, _own_name, unknown)
    if own is not None and "." in name:
        return name
    hosts = list(store_hosts)
    route = _within(_RESOLVER_SECONDS, lambda: route_to(hosts), None) or route_to([_ANYWHERE])
    if route is not None and not route.is_loopback:
        return str(route)
    return str(own or route or "127.0.0.1")


def store_hosts(endpoint: str) -> list[tuple[str, int]]:
    """(name, port) of each host in the endpoint of any store; empty if it names no host."""
    scheme = endpoint.partition("://")[0] if "://" in endpoint else ""
    if not endpoint.strip() or scheme == "unix":
        return []
    try:
        # The port does not affect the route: any port will do.
        return [*parse_endpoint(endpoint, default_port=_ANYWHERE[1], schemes=[scheme]).hosts]
    except ValueError:
        return []


def is_out_of_reach(address: str, store_hosts: Iterable[tuple[str, int]]) -> bool:
    """Whether ``address`` is loopback while the store, as its route shows, is on another host."""
    try:
        if address != "localhost" and not ip_address(address).is_loopback:
            return False
    except ValueError:
        return False
    hosts = list(store_hosts)
    route = _within(_RESOLVER_SECONDS, lambda: route_to(hosts), None)
    return route is not None and not route.is_loopback


def is_local(address: str) -> bool:
    """Whether an address or name is this host's own. Raises OSError if it cannot be resolved."""
    for family, kind, protocol, _, target in socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(target)
            return True
    return False


def is_own_ip(address: str) -> bool:
    """Whether it is an IP address of this host; no name is looked up, which may take long."""
    try:
        return _is_own(ip_address(address))
    except ValueError:
        return False


def listen() -> socket.socket:
    """A socket on a free port of all addresses, as a TCPStore's is."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def dial_self(address: str, seconds: float) -> int:
    """Open a port on all addresses, and connect to it at ``address``; returns the port.

    Raises OSError, and UnicodeError for what cannot be a name.
    """
    with listen() as server:
        port: int = server.getsockname()[1]
        socket.create_connection((address, port), seconds).close()
        return port


@cache
def loopback() -> str:
    """The loopback address to which c10d connects without a DNS look-up of its name.

    c10d connects to 127.0.0.1 as ::ffff:127.0.0.1, which no /etc/hosts contains; the /etc/hosts of
    every distribution and container with IPv6 contains ::1.
    """
    return "::1" if _is_own(IPv6Address("::1")) else "127.0.0.1"


def _own_name() -> tuple[str, Address | None]:
    """The host's name, and its first address to which peers may be able to connect."""
    name = socket.getfqdn()
    for address in _resolve(name):
        if not address.is_loopback and not address.is_link_local and _is_own(address):
            return name, address
    return name, None


def _resolve(name: str) -> list[Address]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    # UnicodeError: a name that the IDNA codec refuses.
    except (OSError, UnicodeError):
        return []
    return [ip_address(str(item[4][0]).partition("%")[0]) for item in found]


def _is_own(address: Address) -> bool:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def route_to(hosts: Iterable[tuple[str, int]]) -> Address | None:
    """The local address of a socket connected to the first host that has a route."""
    for host, port in hosts:
        with contextlib.suppress(OSError, UnicodeError):
            for family, kind, _, _, target in socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            ):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    # Connecting a datagram socket looks up the route and sends nothing.
                    probe.connect(target)
                    return ip_address(str(probe.getsockname()[0]).partition("%")[0])
    return None


def _within(seconds: float, question: Callable[[], T], otherwise: T) -> T:
    """The answer, or ``otherwise`` after ``seconds``: name resolution has no time-out."""
    answers: list[T] = []
    thread = threading.Thread(
        target=lambda: answers.append(question()), name="rdzv-resolver", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise
