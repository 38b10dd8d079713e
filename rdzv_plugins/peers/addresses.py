"""The address at which other nodes reach this node: their MASTER_ADDR if this node is rank 0."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal, NamedTuple, TypeVar

import ifaddr

from rdzv_plugins.kv.base import in_background
from rdzv_plugins.kv.exhaustion import exhausted, require_descriptors
from rdzv_plugins.kv.gate import is_host
from rdzv_plugins.settings.endpoint import Place, is_loopback

T = TypeVar("T")
Address = IPv4Address | IPv6Address

ANY_PORT = range(1)
"""Any free port."""

# An unreachable DNS must not delay the start: the resolver's own time-out is 10 s or more per name.
_RESOLVER_SECONDS = 2.0

# Addresses for documentation (RFC 5737, RFC 3849): their routes are the default routes.
_ANYWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))

_SIOCGIFFLAGS, _IFF_UP = 0x8913, 0x1


class Candidate(NamedTuple):
    """An address of this host, and the interface that has it."""

    address: Address
    interface: str

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"

    @property
    def is_global(self) -> bool:
        """Whether other hosts may reach it: it is neither loopback nor link-local."""
        return not (self.address.is_loopback or self.address.is_link_local)


class OwnAddress(NamedTuple):
    """The IP address that a node announces, or the name in ``--local-addr``; and the reason."""

    address: str
    why: str


def node_address(
    local_addr: str | None,
    store_hosts: Iterable[tuple[str, int]],
    *,
    interface: str | None = None,
    network: str | None = None,
    alone: bool = False,
) -> OwnAddress:
    """An address of this host to which a server can bind and its peers can connect.

    In this order: ``local_addr``; the first address of ``interface`` in ``network``; the address
    from which the host reaches the store; if that is loopback or unknown, the address of the
    default route, or of the first interface that other hosts may reach; loopback. A name is never
    chosen: nobody else may be able to resolve it.

    Args:
        store_hosts: (name, port) of the store's servers. Nothing is sent to them.
        alone: no other node will be in the run, so loopback is good enough.

    Returns within 2 s even if name resolution hangs. Raises `ValueError` if no address of this host
    is on the interface and in the network, and OSError if this host can open no socket.
    """
    options = {"interface": interface, "network": network}
    asked = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    if local_addr:
        overrides = f", which overrides {asked}" if asked else ""
        return OwnAddress(local_addr, f"--local-addr{overrides}")
    if (chosen := address_on(interface, network)) is not None:
        return OwnAddress(chosen, asked)
    route = _route_in_time(store_hosts)
    if route is not None and (alone or not route.is_loopback):
        return OwnAddress(str(route), "from it this host reaches the store")
    store = "it is not known where the store is" if route is None else "the store is at loopback"
    default = route_to(_ANYWHERE)
    if default is not None and not (default.is_loopback or default.is_link_local):
        return OwnAddress(str(default), f"that of the default route, for {store}")
    first = next((it for it in candidates() if it.is_global), None)
    if first is not None:
        return OwnAddress(
            str(first.address), f"the first one, for {store}, and there is no default route"
        )
    return OwnAddress(str(route or "127.0.0.1"), f"this host has no other address, and {store}")


def address_on(interface: str | None, network: str | None) -> str | None:
    """The first address of this host on the interface and in the network; None: neither is given.

    Raises `ValueError` if this host has no such address, and OSError if it can open no socket.
    """
    if interface is None and network is None:
        return None
    every = candidates()
    inside = ip_network(network, strict=False) if network is not None else None
    for it in every:
        if interface in (None, it.interface) and (inside is None or it.address in inside):
            return str(it.address)
    where = f"on interface '{interface}' " if interface is not None else ""
    where += f"in network '{network}'" if network is not None else ""
    names = ", ".join(map(str, every)) or "none"
    raise ValueError(f"this host has no address {where.rstrip()}; it has {names}")


def candidates() -> list[Candidate]:
    """The addresses of this host; first the addresses that other hosts are likeliest to reach.

    Interfaces are in the order in which they came up, so bridges and tunnels are last. Interfaces
    that are down are left out. IPv4 comes before IPv6; IPv6's link-local addresses are left out.
    """
    found = (
        it for it in _addresses() if not (it.address.version == 6 and it.address.is_link_local)
    )
    return sorted(found, key=lambda it: (not it.is_global, it.address.version))


def lacking_version(address: str) -> Literal[0, 4, 6]:
    """The IP version of which this host has no address that others may reach; 0: it has both.

    0 also if ``address``, which others dial, is no address of this host that others may reach.
    """
    versions = {str(it.address): it.address.version for it in candidates() if it.is_global}
    if address not in versions or {4, 6} <= {*versions.values()}:
        return 0
    return 6 if versions[address] == 4 else 4


def interface_of(address: str) -> str | None:
    """The interface that has an IP address; None: ``address`` is a name, or another host's."""
    return next((it.interface for it in candidates() if str(it.address) == address), None)


def _addresses() -> Iterator[Candidate]:
    for adapter in sorted(ifaddr.get_adapters(), key=lambda it: it.index or 0):
        for ip in adapter.ips if _is_up(adapter.name) else ():
            # An IPv6 address comes with its flow and scope.
            address = ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0])
            yield Candidate(address, adapter.name)


def _is_up(interface: str) -> bool:
    # Not /sys/class/net: it may show another network namespace.
    asked = struct.pack("16sH14x", os.fsencode(interface), 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            flags: int = struct.unpack("16sH14x", fcntl.ioctl(line, _SIOCGIFFLAGS, asked))[1]
    except (OSError, struct.error):
        return True
    return bool(flags & _IFF_UP)


def is_at_loopback(store: Place) -> bool:
    """Whether this host reaches a store by a socket's path, or all its hosts at loopback."""
    if store.of_nodes:
        # A member on this host listens at the address that other hosts dial, even if its name means
        # loopback here.
        return bool(store.hosts) and all(is_loopback(host) for host, _ in store.hosts)
    if store.on_socket:
        return True
    route = _route_in_time(store.dialled)
    return route is not None and route.is_loopback


def is_out_of_reach(address: str, store_hosts: Iterable[tuple[str, int]]) -> bool:
    """Whether ``address`` is loopback, but by its route the store is on another host."""
    if not is_loopback(address):
        return False
    route = _route_in_time(store_hosts)
    return route is not None and not route.is_loopback


def is_local(address: str) -> bool:
    """Whether an address or name is this host's own. Raises OSError if it cannot be resolved."""
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    return any(_binds(family, target) for family, _, _, _, target in found)


def is_own_ip(address: str) -> bool:
    """Whether ``address`` is an IP address of this host. Looks up no name, which may take long."""
    try:
        own = ip_address(address)
    except ValueError:
        return False
    return _binds(_family(own), (str(own), 0))


def own_names() -> set[str]:
    """This host's name, in full and up to its first dot, in lower case; never ``localhost``."""
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0]} - {"localhost"}


def host_names(local_addr: str | None, members: Iterable[str]) -> tuple[str, ...]:
    """What people call this host, in lower case; they see the first name.

    In this order: its name among the members of a store that nodes run, ``local_addr``, its own
    name. Returns within 2 s even if name resolution hangs.
    """
    mine = own_names()

    def is_mine(name: str) -> bool:
        return name in mine or any(is_own_ip(it) and not is_loopback(it) for it in resolved(name))

    named = [it.lower() for it in members if not is_ip(it)]
    named = _in_time(lambda: [it for it in named if is_mine(it)], [])
    every = [*named, (local_addr or "").lower(), *sorted(mine, key=len, reverse=True)]
    return tuple(dict.fromkeys(it for it in every if is_host(it) and it != "localhost"))


def is_ip(host: str) -> bool:
    """Whether ``host`` is an IP address, not a name."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def dialled_here(names: Iterable[str]) -> dict[str, list[str]]:
    """The names and addresses at which this host dials each of these hosts.

    Debian resolves a host's own name to loopback. For a name that means loopback here, or this
    host's name without an address, the answer has all addresses of this host too. Returns within
    2 s even if name resolution hangs.
    """
    every = list(names)
    mine = own_names()

    def is_at_loopback(name: str) -> bool:
        found = resolved(name)
        if name in ("localhost", *found):
            return False  # `found` has the name itself if the name is an address.
        if name.lower() in mine:
            return not any(is_own_ip(it) and not is_loopback(it) for it in found)
        return bool(found) and all(map(is_loopback, found))

    at_loopback: set[str] = _in_time(lambda: {it for it in every if is_at_loopback(it)}, set())
    own = [str(it.address) for it in candidates() if it.is_global] if at_loopback else []
    return {name: [*own, name] if name in at_loopback else [name] for name in every}


def resolved(name: str) -> list[str]:
    """The addresses of a name, as this host resolves it; empty: none is known."""
    try:
        return list(dict.fromkeys(str(it[4][0]) for it in socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):
        return []


def gloo_address() -> Address | None:
    """The address at which gloo listens in this host's workers; None: not known.

    gloo takes the first address of the host's name to which it can bind, else loopback, unless
    ``GLOO_SOCKET_IFNAME`` names an interface. Raises OSError if this host can open no socket.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    return _in_time(_first_of_own_name, None)


def _first_of_own_name() -> Address:
    with _unless_exhausted():
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, _, _, _, target in found:
            if _binds(family, target):
                return ip_address(str(target[0]).partition("%")[0])
    return IPv4Address("127.0.0.1")


def listen(address: str | None = None, ports: Sequence[int] = ANY_PORT) -> socket.socket:
    """A socket that listens on the first free port of ``ports``; raises OSError if none is free.

    It listens only at ``address`` if that is an IP address of this host, else on all addresses.
    """
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return _listen(address, port)
    return _listen(address, ports[-1])


def _listen(address: str | None, port: int) -> socket.socket:
    if address is not None and is_own_ip(address):
        return socket.create_server((address, port), family=_family(ip_address(address)))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def dial_self(address: str, seconds: float, ports: Sequence[int] = ANY_PORT) -> int:
    """Open a port where rank 0 would, and connect to it at ``address``; returns the port.

    Raises OSError, and UnicodeError if ``address`` cannot be a name.
    """
    with listen(address, ports) as server:
        port: int = server.getsockname()[1]
        socket.create_connection((address, port), seconds).close()
        return port


@cache
def loopback() -> str:
    """The loopback address to which c10d connects without a DNS look-up of its name.

    c10d connects to 127.0.0.1 as ::ffff:127.0.0.1, which no /etc/hosts contains; the /etc/hosts of
    every distribution and container with IPv6 contains ::1.
    """
    return "::1" if is_own_ip("::1") else "127.0.0.1"


def route_to(hosts: Iterable[tuple[str, int]]) -> Address | None:
    """The local address of a socket connected to the first host that has a route.

    Loopback only if no host has another route, because some of a store's hosts may be this host.

    Raises OSError if this host can open no socket.
    """
    own: Address | None = None
    for host, port in hosts:
        with _unless_exhausted():
            for family, kind, _, _, target in socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            ):
                with _unless_exhausted(), socket.socket(family, kind) as probe:
                    # Connecting a datagram socket looks up the route and sends nothing.
                    probe.connect(target)
                    found = ip_address(str(probe.getsockname()[0]).partition("%")[0])
                    if not found.is_loopback:
                        return found
                    own = own or found
    return own


def _route_in_time(hosts: Iterable[tuple[str, int]]) -> Address | None:
    return _in_time(partial(route_to, [*hosts]), None)


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET


@contextlib.contextmanager
def _unless_exhausted() -> Iterator[None]:
    """Suppress errors that say that an address is bad; raise an exhausted host's errors."""
    try:
        yield
    except socket.gaierror:
        # A resolver that can open no socket reports an unknown name.
        require_descriptors(1)
    except (OSError, UnicodeError) as error:
        if exhausted(error) is not None:
            raise


def _binds(family: int, target: tuple[object, ...]) -> bool:
    # Bind a socket, because only bind() tells whether this host has the address.
    with _unless_exhausted(), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(target)
        return True
    return False


def _in_time(question: Callable[[], T], otherwise: T) -> T:
    """The answer, or ``otherwise`` after 2 s: name resolution has no time-out."""
    try:
        return in_background("rdzv-resolver", question).result(_RESOLVER_SECONDS)
    except TimeoutError:
        return otherwise
