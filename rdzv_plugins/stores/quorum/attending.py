"""A node's part in the store ``quorum``: it runs its host's member, if the endpoint names the host.

If another agent of this host runs the member, this agent watches it, and replaces it once it ends.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rdzv_plugins.kv import Attempts
from rdzv_plugins.kv.contract import (
    AccessDeniedError,
    Attendance,
    KeyValueClient,
    MembersUp,
    RendezvousConnectionError,
)
from rdzv_plugins.kv.sealed import SealedClient
from rdzv_plugins.peers.addresses import is_own_ip, listen, node_address, own_names, resolved
from rdzv_plugins.settings.endpoint import at, is_loopback
from rdzv_plugins.stores.quorum.members import Members
from rdzv_plugins.stores.quorum.server import MemberThread
from rdzv_plugins.stores.quorum.wire import ALIKE, OtherClusterError, SecretError, identify

if TYPE_CHECKING:
    from rdzv_plugins.stores.quorum.client import Client

log = logging.getLogger(__name__)

# How often the thread looks at this host's member, and `close` at the nodes that still need it.
_LOOK_SECONDS, _PRESENCE_SECONDS = 0.5, 0.05
# How long a member may take to answer; this host's member may be slow, or suspended.
_ANSWER_SECONDS, _OWN_ANSWER_SECONDS = 0.5, 2.0
# Seconds between two log lines that name the missing members.
_TELL_SECONDS = 15.0
# Log no line about members that are away, or nodes to wait for, for less than this.
_BRIEF_SECONDS = 2.0
# How long a member may outlive its node after a signal.
_HURRY_SECONDS = 5.0
# How long `close` waits for the thread, which may hang in the look-up of a name.
_STOP_SECONDS = 7.0
_LONGEST_PAUSE = 10.0


@dataclass(frozen=True)
class OwnMember:
    """The index of this host's member, and the address where it listens."""

    host: int
    address: str


class Attending(Attendance):
    """A node of a run whose nodes run the store."""

    def __init__(self, members: Members, local_addr: str | None, run_id: str) -> None:
        self._members, self._local_addr, self._run = members, local_addr, run_id
        self._secret = members.options.secret_bytes()
        self._member: MemberThread | None = None
        self._own: OwnMember | None = None
        # The port at which another agent of this host runs the member.
        self._port_of_other: int | None = None
        self._attempts = Attempts(longest=_LONGEST_PAUSE)
        self._warned: set[str] = set()
        # The number of members up in the last log line, and how many looks since found another
        # number. A clock would count the time for which this host was suspended.
        self._up_logged, self._up_looks = len(members.hosts), 0
        self._ending, self._ends_by = threading.Event(), float("inf")
        self._stays = self._closed = False
        self._thread = threading.Thread(
            target=self._keep_member, name=f"rdzv-{run_id}-member", daemon=True
        )
        if len(members.hosts) == 1:
            log.warning(
                "run '%s': the store has one member, on %s, whose death costs the run a restart: "
                "name three hosts to survive that of any",
                run_id, members,
            )  # fmt: skip
        if not self._secret:
            log.info(
                "run '%s': whoever reaches the ports of the store's members may join, as with "
                "c10d; a secret, in $RDZV_PLUGINS_SECRET on all nodes, keeps strangers out",
                run_id,
            )

    def open(self, connect: Callable[[], KeyValueClient], patience: float) -> KeyValueClient:
        self._begin()
        deadline, tell_at = time.monotonic() + patience, 0.0
        while True:
            try:
                opened = connect()
                client = opened.client if isinstance(opened, SealedClient) else opened
                try:
                    cast("Client", client).take_part()
                except BaseException:
                    opened.close()
                    raise
                return opened
            except AccessDeniedError:
                raise
            except RendezvousConnectionError:
                now = time.monotonic()
            if now >= deadline:
                lacks, said = self._what_it_lacks()
                raise RendezvousConnectionError(
                    f"quorum at {self._members} had no {lacks} within {patience:g} s: {said}"
                )
            if now >= tell_at:
                tell_at = now + _TELL_SECONDS
                log.info(
                    "run '%s': waiting for the store, which has no %s yet: %s",
                    self._run, *self._what_it_lacks(),
                )  # fmt: skip

    def member_runs(self) -> bool:
        self._begin()
        runs = self._member is not None or self._port_of_other is not None
        if not runs and not self._thread.is_alive():
            raise ValueError(
                f"this host is none of {self._members}: run it on one of them, or name the "
                "address that this host has among them"
            )
        return runs

    def hurry(self) -> None:
        self._ends_by = min(self._ends_by, time.monotonic() + _HURRY_SECONDS)

    def stay(self) -> None:
        self._stays = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._stays:
            self._ends_by = min(self._ends_by, time.monotonic() + self._members.options.linger)
        tell_at = time.monotonic() + _BRIEF_SECONDS
        while self._member is not None and self._member.nodes:
            left = self._ends_by - time.monotonic()
            if left <= 0:
                break
            if time.monotonic() >= tell_at:
                tell_at = float("inf")
                until = "until the run ends" if self._stays else f"for up to {left:.0f} s (linger)"
                log.info(
                    "run '%s': the member of the store on this host stays for the other nodes, %s",
                    self._run, until,
                )  # fmt: skip
            time.sleep(min(left, _PRESENCE_SECONDS))
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)
        if self._member is not None:
            self._member.stop()

    def _begin(self) -> None:
        """Start the thread that keeps this host's member, once; raises `RuntimeError`."""
        if self._thread.ident is None:
            self._thread.start()

    def _keep_member(self) -> None:
        while not self._ending.is_set():
            try:
                if self._own is None:
                    self._own, unknown = own_member(self._members, self._local_addr)
                    if self._own is None and not unknown:
                        return
                is_running = self._member is not None and self._member.is_alive()
                if self._own is not None and not is_running:
                    self._start(self._own)
                self._log_who_is_up()
                pause = _LOOK_SECONDS
            # An exhausted host raises RuntimeError (no thread) or MemoryError.
            except (OSError, RuntimeError, MemoryError, ValueError) as error:
                self._attempts.fail()
                pause = max(_LOOK_SECONDS, self._attempts.seconds_left)
                self._warn(f"the member of the store on this host cannot start: {error}")
            self._ending.wait(pause)

    def _start(self, own: OwnMember) -> None:
        port, taken, listener = free_port(self._members, own, self._secret, self._port_of_other)
        self._port_of_other = None if listener else port
        if listener is None:
            return
        for line in taken:
            self._warn(f"{line}, so this host's member of the store listens on {port}")
        peers = [[] if it == own.host else self._members.places(it) for it in self._every]
        cluster, name = self._members.greeting, f"rdzv-{self._run}-register"
        try:
            member = MemberThread(listener, peers, own.host, cluster, self._secret, name)
            member.start()
        except BaseException:
            listener.close()
            raise
        self._member = member
        self._attempts.succeed()
        log.info(
            "run '%s': this host runs a member of the store, at %s",
            self._run, at(own.address, port),
        )  # fmt: skip

    @property
    def _every(self) -> range:
        return range(len(self._members.hosts))

    def _warn(self, text: str) -> None:
        """Warn once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("run '%s': %s", self._run, text)

    def _log_who_is_up(self) -> None:
        """Log the members once their number has differed for `_BRIEF_SECONDS`; not at the end."""
        if self._member is None:
            return
        up = self._member.up
        same = len(up) == self._up_logged or self._closed
        self._up_looks = 0 if same else self._up_looks + 1
        if self._up_looks * _LOOK_SECONDS > _BRIEF_SECONDS:
            self._up_logged, size = len(up), len(self._members.hosts)
            away = [name for it, (name, _) in enumerate(self._members.hosts) if it not in up]
            members_up = MembersUp(len(up), size)
            if away:
                log.warning("run '%s': %s; away: %s", self._run, members_up, ", ".join(away))
            else:
                log.info("run '%s': %s", self._run, members_up)

    def _what_it_lacks(self) -> tuple[str, str]:
        """What the store lacks, and what its members say."""
        found = [look_at(self._members, host, self._secret) for host in self._every]
        names = [name for name, _ in self._members.hosts]
        answering = sum(port is not None for port, _ in found)
        if 2 * answering > len(names):
            return "agreement of its members", f"{answering} of {len(names)} are up"
        told = (f"{name} {said}" for name, (_, said) in zip(names, found, strict=True))
        return "majority of its members", ", ".join(told)


def own_member(members: Members, local_addr: str | None) -> tuple[OwnMember | None, bool]:
    """This host's member, and whether the answer may change because a name has no address yet.

    Raises:
        ValueError: ``local_addr`` is a member's address, and not this host's.
    """
    names = [host for host, _ in members.hosts]
    resolutions = [resolved(host) for host in names]
    own_name = own_names() if local_addr is None else {*own_names(), local_addr.lower()}
    own_name -= {"localhost"}
    # Only in a test or a trial all members are at loopback.
    all_here = all(resolutions) and all(is_loopback(it) for them in resolutions for it in them)
    all_here = all_here and not own_name.intersection(name for name in names if name[0].isalpha())

    def member(is_own: Callable[[str], bool]) -> OwnMember | None:
        for host, addresses in enumerate(resolutions):
            for address in addresses:
                if is_own(address) and (all_here or not is_loopback(address)):
                    return OwnMember(host, address)
        return None

    if local_addr is not None:
        local = {local_addr, *resolved(local_addr)}
        if (own := member(local.__contains__)) is not None:
            if not is_own_ip(own.address):
                stands = "is" if own.address == local_addr else f"stands for {own.address},"
                raise ValueError(
                    f"--local-addr={local_addr} {stands} no address of this host: name one of its "
                    "own, or mend the name in the DNS or /etc/hosts"
                )
            return own, False
        if is_loopback(local_addr):
            return None, not all(resolutions)
    if (own := member(is_own_ip)) is not None:
        return own, False
    for host, addresses in enumerate(resolutions):
        if names[host] in own_name or any(map(is_own_ip, addresses)):
            # Debian resolves the host's own name to 127.0.1.1, which other hosts cannot reach.
            return OwnMember(host, _address_among(members, host, local_addr)), False
    return None, not all(resolutions)


def _address_among(members: Members, host: int, local_addr: str | None) -> str:
    """The address at which the other members reach this host."""
    if local_addr is not None and is_own_ip(local_addr):
        return local_addr
    others = [(name, port or 9) for name, port in members.hosts if name != members.hosts[host][0]]
    return node_address(None, others).address


def free_port(
    members: Members, own: OwnMember, secret: bytes, port_of_other: int | None = None
) -> tuple[int, list[str], socket.socket | None]:
    """The port of this host's member.

    Args:
        port_of_other: where another agent of this host ran the member before.

    Returns:
        The port; lines about the earlier ports and their owners; and a listening socket, or None if
        another agent of this host runs the member.

    Raises:
        OSError: other programs have all its ports.
    """
    taken: list[str] = []
    for port in members.ports(own.host):
        try:
            return port, taken, listen(own.address, [port])
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        who = "another program's"
        try:
            index = identify(own.address, port, members.greeting, secret, _OWN_ANSWER_SECONDS)
            if index == own.host:
                return port, taken, None
            who = f"that of the member on {members.name(index)}"
        except TimeoutError:
            if port == port_of_other:
                return port, taken, None
        except OtherClusterError as error:
            who = f"another store's: {error}"
        except SecretError:
            who = "that of a member with another secret"
        except (OSError, ValueError):
            pass
        taken.append(f"{port} at {own.address} is {who}")
    raise OSError(f"{', '.join(taken)}: name others with ports=..., or in the endpoint")


def look_at(members: Members, host: int, secret: bytes) -> tuple[int | None, str]:
    """The port at which this member answers, or None; and a text about it for people."""
    said = "runs none yet"
    for address, port in members.places(host):
        try:
            index = identify(address, port, members.greeting, secret, _ANSWER_SECONDS)
            if index == host:
                return port, "answers"
            said = f"takes itself for '{members.name(index)}': {ALIKE}"
        except socket.gaierror:
            return None, "is no name that this host knows"
        except TimeoutError:
            said = f"does not answer at {at(address, port)}"
        except SecretError:
            return None, "has another secret"
        except OtherClusterError as error:
            said = f"runs none yet ({error})"
        except (ConnectionRefusedError, ValueError):
            continue
        except OSError as error:
            said = f"cannot be reached at {at(address, port)} ({error})"
    return None, said
