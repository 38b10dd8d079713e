"""A node's part in the store ``quorum``: it runs the member of its host, if that has one.

Another agent of the run on this host may run it already. Then this one looks whether it still does,
and takes its place where it has ended.
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
from rdzv_plugins.peers.addresses import (
    is_loopback,
    is_own_ip,
    listen,
    node_address,
    own_names,
    resolved,
)
from rdzv_plugins.settings.endpoint import at
from rdzv_plugins.stores.quorum.members import Members
from rdzv_plugins.stores.quorum.server import MemberThread
from rdzv_plugins.stores.quorum.wire import ALIKE, OtherClusterError, SecretError, identify

if TYPE_CHECKING:
    from rdzv_plugins.stores.quorum.client import Client

log = logging.getLogger(__name__)

# Between two looks at the member of this host, and at who still takes part.
_LOOK_SECONDS, _PRESENCE_SECONDS = 0.5, 0.05
# How long a member may take to prove itself; that of this host may be slow, or suspended.
_ANSWER_SECONDS, _OWN_ANSWER_SECONDS = 0.5, 2.0
# Between two lines that say who is waited for.
_TELL_SECONDS = 15.0
# Nodes that end together are not worth a line, nor are members that are away for as long.
_BRIEF_SECONDS = 2.0
# After a signal a member outlives its node for so long at most.
_HURRY_SECONDS = 5.0
# How long the end waits for the thread, which may hang in a look-up of a name.
_STOP_SECONDS = 7.0
_LONGEST_PAUSE = 10.0


@dataclass(frozen=True)
class Place:
    """Which member is this host's, and the address where it listens."""

    host: int
    address: str


class Attending(Attendance):
    """A node of a run whose nodes keep up the store."""

    def __init__(self, members: Members, local_addr: str | None, run_id: str) -> None:
        self._members, self._local_addr, self._run = members, local_addr, run_id
        self._secret = members.options.secret_bytes()
        self._member: MemberThread | None = None
        self._place: Place | None = None
        # Where another agent of this host was seen to run the member.
        self._seen_at: int | None = None
        self._attempts = Attempts(longest=_LONGEST_PAUSE)
        self._told: set[str] = set()
        # How many members were up when that was told last, and how many looks have found another
        # number: a clock would count the time for which this host was suspended.
        self._up_told, self._up_looks = len(members.hosts), 0
        self._ending, self._ends_by = threading.Event(), float("inf")
        self._stays = self._closed = False
        self._thread = threading.Thread(
            target=self._see_to_it, name=f"rdzv-{run_id}-member", daemon=True
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
                cast("Client", client).take_part()
                return opened
            except AccessDeniedError:
                raise
            except RendezvousConnectionError:
                now = time.monotonic()
            if now >= deadline:
                raise RendezvousConnectionError(
                    f"quorum at {self._members} had no majority of its members within "
                    f"{patience:g} s: {self._who_answers()}"
                )
            if now >= tell_at:
                tell_at = now + _TELL_SECONDS
                log.info(
                    "run '%s': waiting for a majority of the store's members: %s",
                    self._run, self._who_answers(),
                )  # fmt: skip

    def member_runs(self) -> bool:
        self._begin()
        runs = self._member is not None or self._seen_at is not None
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
        """Have this host's member seen to; raises `RuntimeError` where no thread can start yet."""
        if self._thread.ident is None:
            self._thread.start()

    def _see_to_it(self) -> None:
        while not self._ending.is_set():
            try:
                if self._place is None:
                    self._place, unknown = own_place(self._members, self._local_addr)
                    if self._place is None and not unknown:
                        return
                if self._place is not None and not self._has_member:
                    self._start(self._place)
                self._tell_who_is_up()
                pause = _LOOK_SECONDS
            # Also what a host has run out of, such as threads.
            except (OSError, RuntimeError, MemoryError, ValueError) as error:
                self._attempts.fail()
                pause = max(_LOOK_SECONDS, self._attempts.seconds_left)
                self._tell(f"the member of the store on this host cannot start: {error}")
            self._ending.wait(pause)

    @property
    def _has_member(self) -> bool:
        return self._member is not None and self._member.is_alive()

    def _start(self, place: Place) -> None:
        port, taken, listener = free_port(self._members, place, self._secret, self._seen_at)
        self._seen_at = None if listener else port
        if listener is None:
            return
        for line in taken:
            self._tell(f"{line}, so this host's member of the store listens on {port}")
        peers = [[] if it == place.host else self._members.places(it) for it in self._every]
        cluster, name = self._members.greeting, f"rdzv-{self._run}-register"
        try:
            member = MemberThread(listener, peers, place.host, cluster, self._secret, name)
            member.start()
        except BaseException:
            listener.close()
            raise
        self._member = member
        self._attempts.succeed()
        log.info(
            "run '%s': this host runs a member of the store, at %s",
            self._run, at(place.address, port),
        )  # fmt: skip

    @property
    def _every(self) -> range:
        return range(len(self._members.hosts))

    def _tell(self, text: str) -> None:
        """Warn, once for each text."""
        if text not in self._told:
            self._told.add(text)
            log.warning("run '%s': %s", self._run, text)

    def _tell_who_is_up(self) -> None:
        """Say it once another number of members is up for a time, except at the end of a run."""
        if self._member is None:
            return
        up = self._member.up
        same = len(up) == self._up_told or self._closed
        self._up_looks = 0 if same else self._up_looks + 1
        if self._up_looks * _LOOK_SECONDS > _BRIEF_SECONDS:
            self._up_told, size = len(up), len(self._members.hosts)
            away = [name for it, (name, _) in enumerate(self._members.hosts) if it not in up]
            told = MembersUp(len(up), size)
            if away:
                log.warning("run '%s': %s; away: %s", self._run, told, ", ".join(away))
            else:
                log.info("run '%s': %s", self._run, told)

    def _who_answers(self) -> str:
        found = [look_at(self._members, host, self._secret) for host in self._every]
        names = [name for name, _ in self._members.hosts]
        return ", ".join(f"{name} {said}" for name, (_, said) in zip(names, found, strict=True))


def own_place(members: Members, local_addr: str | None) -> tuple[Place | None, bool]:
    """The place of this host among the members; and whether some host's name is unknown yet.

    Raises:
        ValueError: ``local_addr`` stands for a member's address which is not this host's.
    """
    found = [resolved(host) for host, _ in members.hosts]
    names = [host for host, _ in members.hosts]
    own_name = own_names() if local_addr is None else {*own_names(), local_addr.lower()}
    own_name -= {"localhost"}
    # Only a test or a trial has all members at loopback.
    all_here = all(found) and all(is_loopback(it) for addresses in found for it in addresses)
    all_here = all_here and not own_name.intersection(name for name in names if name[0].isalpha())

    def place(is_own: Callable[[str], bool]) -> Place | None:
        for host, addresses in enumerate(found):
            for address in addresses:
                if is_own(address) and (all_here or not is_loopback(address)):
                    return Place(host, address)
        return None

    if local_addr is not None:
        own = {local_addr, *resolved(local_addr)}
        if (at_own := place(own.__contains__)) is not None:
            if not is_own_ip(at_own.address):
                stands = "is" if at_own.address == local_addr else f"stands for {at_own.address},"
                raise ValueError(
                    f"--local-addr={local_addr} {stands} no address of this host: name one of its "
                    "own, or mend the name in the DNS or /etc/hosts"
                )
            return at_own, False
        if is_loopback(local_addr):
            return None, not all(found)
    if (at_any := place(is_own_ip)) is not None:
        return at_any, False
    for host, addresses in enumerate(found):
        if names[host] in own_name or any(map(is_own_ip, addresses)):
            # Debian calls the own name 127.0.1.1: what the others call it, is not known here.
            return Place(host, _address_among(members, host, local_addr)), False
    return None, not all(found)


def _address_among(members: Members, host: int, local_addr: str | None) -> str:
    """The address of this host whose own name does not tell it."""
    if local_addr is not None and is_own_ip(local_addr):
        return local_addr
    others = [(name, port or 9) for name, port in members.hosts if name != members.hosts[host][0]]
    return node_address(None, others).address


def free_port(
    members: Members, place: Place, secret: bytes, seen_at: int | None = None
) -> tuple[int, list[str], socket.socket | None]:
    """Where the member of this host is to listen, or does.

    Args:
        seen_at: where another agent was seen to run it.

    Returns:
        The port; who has the likelier ones; and a socket that listens there, or None where another
        agent of this host runs the member there.

    Raises:
        OSError: others have all its ports.
    """
    taken: list[str] = []
    for port in members.ports(place.host):
        try:
            return port, taken, listen(place.address, [port])
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        who = "another program's"
        try:
            index = identify(place.address, port, members.greeting, secret, _OWN_ANSWER_SECONDS)
            if index == place.host:
                return port, taken, None
            who = f"that of the member on {members.name(index)}"
        except TimeoutError:
            if port == seen_at:
                return port, taken, None
        except OtherClusterError as error:
            who = f"another store's: {error}"
        except SecretError:
            who = "that of a member with another secret"
        except (OSError, ValueError):
            pass
        taken.append(f"{port} at {place.address} is {who}")
    raise OSError(f"{', '.join(taken)}: name others with ports=..., or in the endpoint")


def look_at(members: Members, host: int, secret: bytes) -> tuple[int | None, str]:
    """On which port this member answers, if it does; and what can be said of it, for people."""
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
