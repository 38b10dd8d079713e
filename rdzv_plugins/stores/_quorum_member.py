"""The work of a node for the store ``quorum``: it sees to the member of its host, if that has one.

A thread starts nats-server beside the agent, starts it again where it has ended, and leaves it to
another agent of the run on this host that was faster. The member ends with its agent, also where
that is killed: `rdzv_plugins.servers.process.ServerProcess` has a process beside it for that, which
deletes the member's folder as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
from nats.js.errors import APIError

from rdzv_plugins.addresses import is_loopback, is_own_ip, node_address, own_names, resolved
from rdzv_plugins.endpoint import Endpoint
from rdzv_plugins.kv import Attempts
from rdzv_plugins.kv.base import Limit
from rdzv_plugins.kv.contract import (
    AccessDeniedError,
    Attendance,
    KeyValueClient,
    RendezvousConnectionError,
)
from rdzv_plugins.kv.sealed import SealedClient
from rdzv_plugins.servers.process import (
    Kind,
    NotInstalledError,
    Security,
    ServerError,
    ServerProcess,
)
from rdzv_plugins.servers.quorum import USER, at, find_binary, probe, route, settings_of, write
from rdzv_plugins.stores import nats as store
from rdzv_plugins.stores.quorum import PRESENCE, Client, Members, refuse_others

__all__ = ["Place", "QuorumAttendance", "delete_left_folders", "own_place"]

log = logging.getLogger(__name__)

# How long a server may take to greet, or to answer a request that no leader has to see to.
_GREETING_SECONDS = 0.5
# How long this host's own may take to greet, until it counts as another program.
_OWN_GREETING_SECONDS = 2.0
# A member answers whether there is a leader, or it is lost on the way to one.
_ASKED_SECONDS = 0.25
# How long a member may take until it listens.
_START_SECONDS = 10.0
# How long a member that has ended must have run to be started at once; else after pauses that grow.
_STEADY_SECONDS, _LONGEST_PAUSE = 60.0, 10.0
# Between two looks at the member of this host, at the others, and at who still takes part.
_LOOK_SECONDS, _PEERS_SECONDS, _PRESENCE_SECONDS = 0.5, 3.0, 0.1
# Between two lines that say who is waited for.
_TELL_SECONDS = 15.0
# Nodes that end together are not worth a line.
_TELL_LINGER_SECONDS = 2.0
# After a signal a member outlives its node for so long at most.
_HURRY_SECONDS = 5.0
# How long the end waits for the thread, which may hang in a look-up of a name.
_STOP_SECONDS = 7.0
# The name of a member's folder begins so; one that old, of which nobody holds the lock, was left.
_FOLDER, _LEFT_SECONDS = "rdzv-quorum-", 60.0

_BUCKET = store.Options().bucket
# JetStream's errors that only a leader gives: there is no such message, or no bucket.
_OF_A_LEADER = (10037, 10059)
# For how long a majority may run without a leader: twice NATS' longest election, and more.
_STUCK_SECONDS = 20.0, 25.0
# So many times as long where this host's member has nothing to forget, as far as is known.
_UNLED_PATIENCE = 3.0
# So many looks in a row must find no majority until it counts as gone: a busy member answers late.
_LOOKS_WITHOUT_MAJORITY = 2


class _Member(Kind):
    """The member of this host; it is configured anew where another member has another port."""

    name = "quorum"
    # A leader hands over; after a SIGKILL the others take no write until they have elected one.
    end_signal = signal.SIGTERM

    def __init__(self, members: Members, host: int, address: str) -> None:
        super().__init__(Security())
        self._binary = find_binary()
        self._members, self._host, self._address = members, host, address
        # The client's port of each of the others.
        self.peers = {
            peer: members.ports(peer)[0] for peer in range(len(members.hosts)) if peer != host
        }

    def configure(self, node: ServerProcess) -> Path:
        members, password = self._members, self._members.options.password()
        cluster = None
        if self.peers:
            # As many as there are others: from their number a new cluster knows its majority.
            routes = [
                route(members.hosts[peer][0], port + 1, password)
                for peer, port in self.peers.items()
            ]
            listens = at(self._address, node.ports[1])
            # One without a secret would let those in that dial it: the name keeps them out.
            name = members.network + ("" if password is None else "+secret")
            cluster = {"name": name, "listen": listens, "routes": routes}
        file = node.directory / "nats.conf"
        listen = self._address, node.port
        name = members.name(self._host)
        write(settings_of(name, listen, node.directory, password, cluster), file)
        return file

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        return [str(self._binary), "--config", str(self.configure(node))]

    def ready(self, node: ServerProcess) -> bool:
        name = probe(self._address, node.port, _GREETING_SECONDS)
        return name == self._members.name(self._host)


@dataclass(frozen=True)
class Place:
    """Which member is this host's, and the address where it listens."""

    host: int
    address: str


def own_place(members: Members, local_addr: str | None) -> tuple[Place | None, bool]:
    """The place of this host among the members; and whether some host's name is unknown yet.

    Raises:
        ValueError: ``local_addr`` stands for a member's address which is not this host's.
    """
    found = [resolved(host) for host, _ in members.hosts]
    names = [host.lower() for host, _ in members.hosts]
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


class _Keeper(threading.Thread):
    """Sees to the member of this host, if it is to have one."""

    def __init__(self, members: Members, local_addr: str | None, run_id: str) -> None:
        super().__init__(name=f"rdzv-{run_id}-member", daemon=True)
        self._members, self._local_addr, self._run = members, local_addr, run_id
        self._ending = threading.Event()
        self._place: Place | None = None
        # The port where another agent's member was seen.
        self._seen_at = 0
        self._kind: _Member | None = None
        self._node: ServerProcess | None = None
        self._folder: Path | None = None
        self._lock: int | None = None
        self._taken: set[int] = set()
        self._told: set[str] = set()
        self._attempts, self._steady_at = Attempts(longest=_LONGEST_PAUSE), 0.0
        self._is_seen = self._runs = False
        self._peers_at = 0.0
        self._stuck_until: float | None = None
        self._looks_without_majority = 0
        # Whether the member has been led since it was empty.
        self._remembers = False
        self._link: store.Transport | None = None

    @property
    def has_member(self) -> bool:
        """Whether a member runs as this process' own."""
        return self._node is not None and self._node.running

    @property
    def sees_to_one(self) -> bool:
        """Whether a member runs on this host, also as another process' own."""
        return self._is_seen

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                try:
                    self._look()
                # Also what a host has run out of, such as threads.
                except (OSError, RuntimeError, MemoryError, ValueError) as error:
                    if not self.has_member:
                        self._attempts.fail()
                    self._tell(f"the member of the store on this host cannot start: {error}")
                pause = 0.0 if self.has_member else self._attempts.seconds_left
                self._ending.wait(max(_LOOK_SECONDS, pause))
        finally:
            self._end()

    def was_led(self) -> None:
        """Note that the store has answered: where this host's member runs, it has a leader."""
        self._remembers = self.has_member
        # What the first nodes stored may stand on one host yet, whose loss would be that of all.
        self._peers_at = 0.0

    def stop(self) -> None:
        """End the member; idempotent."""
        self._ending.set()
        if self.ident is None:
            return
        self.join(_STOP_SECONDS)
        if self.is_alive():
            self._end()

    def _end(self) -> None:
        """End the member, and delete its folder."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._node is not None:
            self._node.end()
            self._node, self._runs, self._remembers = None, False, False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _tell(self, text: str) -> None:
        """Warn, once for each text until a member runs steadily."""
        if text not in self._told:
            self._told.add(text)
            log.warning("run '%s': %s", self._run, text)

    def _look(self) -> None:
        if self._place is None:
            self._place, unknown = own_place(self._members, self._local_addr)
            if self._place is None:
                if not unknown:
                    self._ending.set()
                return
            self._kind = _Member(self._members, self._place.host, self._place.address)
        is_due = self._attempts.seconds_left == 0
        if self._node is not None and not self._node.directory.exists():
            self._attempts.fail()
            self._tell(
                f"somebody has deleted {self._node.directory}, the folder of the member of the "
                "store on this host, which is started again"
            )
            self._end()
        if not self.has_member:
            if self._runs:
                self._runs = False
                self._attempts.fail()
                self._tell(
                    "the member of the store on this host has ended and is started again; its log "
                    f"ends with: {self._last_words()}"
                )
            if is_due:
                self._start_member()
        elif self._node is not None and not self._runs:
            self._await_start(self._node)
        elif self._told and time.monotonic() >= self._steady_at:
            self._told.clear()
            self._attempts.succeed()
        elif len(self._members.hosts) > 1 and time.monotonic() >= self._peers_at:
            self._see_to_the_others()
            self._peers_at = time.monotonic() + _PEERS_SECONDS

    def _start_member(self) -> None:
        assert self._place is not None
        assert self._kind is not None
        if self._link is not None:
            self._link.close()
            self._link = None
        port = self._free_port()
        if port is None:
            return
        if self._folder is None:
            delete_left_folders()
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
            # systemd-tmpfiles leaves a locked folder alone, however old.
            self._lock = os.open(self._folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        if self._node is None:
            self._node = ServerProcess(self._kind, 0, (), self._folder / "member")
        node = self._node
        # One that has ended keeps what watches it: this process may end here.
        node.ports = port, port + 1
        node.launch()
        self._await_start(node)

    def _await_start(self, node: ServerProcess) -> None:
        assert self._place is not None
        try:
            node.await_ready(_START_SECONDS)
        except ServerError:
            words = self._last_words()
            if "already in use" not in words:
                raise ServerError(f"its log ends with: {words}") from None
            # Somebody was faster, maybe another agent of this run.
            self._taken.add(node.port)
            self._end()
            return
        self._is_seen = self._runs = True
        self._steady_at = time.monotonic() + _STEADY_SECONDS
        log.info(
            "run '%s': this host runs a member of the store, at %s; its log is %s",
            self._run, at(self._place.address, node.port), node.directory / "log",
        )  # fmt: skip
        self._peers_at = time.monotonic() + _LOOK_SECONDS

    def _free_port(self) -> int | None:
        """Where the member is to listen; None: it runs already, as another agent's."""
        assert self._place is not None
        ports = self._members.ports(self._place.host)
        for port in ports:
            try:
                name = probe(self._place.address, port, _OWN_GREETING_SECONDS)
            except ConnectionRefusedError:
                if port not in self._taken:
                    return port
            except TimeoutError:
                if port == self._seen_at:
                    return None  # It is slow, or suspended.
            except (OSError, ValueError):
                continue  # Some other program's.
            else:
                if name == self._members.name(self._place.host):
                    self._is_seen = True
                    self._seen_at = port
                    return None
        self._taken.clear()
        raise ServerError(
            f"none of the ports {', '.join(map(str, ports))} is free at {self._place.address}, "
            "each with the next one: name others with ports=..., or in the endpoint"
        )

    def _last_words(self) -> str:
        """The last line of the member's log that tells something."""
        assert self._node is not None
        with contextlib.suppress(OSError):
            lines = (self._node.directory / "log").read_text(errors="replace").splitlines()
            told = [line for line in lines if "[FTL]" in line] or lines
            if told:
                return re.sub(r"^\[\d+\] [\d/]+ [\d:.]+ \[\w+\] ", "", told[-1])
        return "it has left no log"

    def _see_to_the_others(self) -> None:
        """Find members on other ports than the likeliest, and have them all keep the data."""
        assert self._kind is not None
        assert self._node is not None
        moved, running = False, 1
        for peer in self._kind.peers:
            for port in self._members.ports(peer):
                with contextlib.suppress(OSError, ValueError):
                    name = probe(self._members.hosts[peer][0], port, _GREETING_SECONDS)
                    if name == self._members.name(peer):
                        running += 1
                        moved = moved or self._kind.peers[peer] != port
                        self._kind.peers[peer] = port
                        break
        if moved:
            self._kind.configure(self._node)
            os.kill(self._node.pid, signal.SIGHUP)
        few = 2 * running <= len(self._members.hosts)
        self._looks_without_majority = self._looks_without_majority + 1 if few else 0
        if self._is_led():
            self._stuck_until, self._remembers = None, True
        elif few:
            if self._looks_without_majority >= _LOOKS_WITHOUT_MAJORITY:
                self._stuck_until = None
        elif self._stuck_until is None:
            # They differ: one that forgets may be enough.
            patience = random.uniform(*_STUCK_SECONDS)
            patience *= 1.0 if self._remembers else _UNLED_PATIENCE
            self._stuck_until = time.monotonic() + patience
        elif time.monotonic() >= self._stuck_until:
            self._forget()
            return
        with contextlib.suppress(OSError, nats.errors.Error, APIError, store.UnfitServerError):
            self.ask(self._grow(), 1.0)

    def _is_led(self) -> bool:
        """Whether a leader answers for the data, be it that there is none yet."""
        asked = {"last_by_subj": f"$KV.{_BUCKET}.none"}

        async def ask() -> None:
            link = await self.transport.link()
            await link.ask(f"STREAM.MSG.GET.KV_{_BUCKET}", asked, _GREETING_SECONDS)

        try:
            self.ask(ask(), 2 * _GREETING_SECONDS)
        except APIError as error:
            return error.err_code in _OF_A_LEADER
        except (OSError, nats.errors.Error, store.UnfitServerError):
            return False
        return True

    def _forget(self) -> None:
        """Start the member of this host again without its data.

        NATS counts the vote of a member that has forgotten all only where all others have, too:
        after the loss of a majority, one that remembers and one that came back elect no leader.
        """
        assert self._node is not None
        log.warning(
            "run '%s': a majority of the store's members runs and elects no leader, for those that "
            "came back have forgotten all: that of this host forgets too, and the nodes that live "
            "write the run again",
            self._run,
        )
        self._stuck_until = None
        self._end()
        self._start_member()

    async def _grow(self) -> None:
        """Where the data was first stored while some members were away, let all have it."""
        bucket, link = f"KV_{_BUCKET}", await self.transport.link()
        config = (await link.ask(f"STREAM.INFO.{bucket}", {}, _GREETING_SECONDS))["config"]
        size = len(self._members.hosts)
        if config["num_replicas"] < size:
            asked = {**config, "num_replicas": size}
            await link.ask(f"STREAM.UPDATE.{bucket}", asked, _GREETING_SECONDS)

    @property
    def transport(self) -> store.Transport:
        """Connects to the member of this host."""
        if self._link is None:
            assert self._place is not None
            assert self._node is not None
            place = Endpoint("nats", ((self._place.address, self._node.port),))
            self._link = _transport(place, self._members)
        return self._link

    def ask(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Have it done in NATS' loop."""
        try:
            transport = self.transport
        except BaseException:
            work.close()
            raise
        return transport.run(work, Limit(time.monotonic() + seconds))

    def is_alone(self) -> bool:
        """Whether no node of the run takes part any more, as far as this member knows."""

        async def who_is_there() -> bool:
            link = await self.transport.link()
            try:
                await link.connection.request(PRESENCE, b"", _GREETING_SECONDS)
            except nats.errors.NoRespondersError:
                return True
            except nats.errors.TimeoutError:
                pass
            return False

        try:
            return bool(self.ask(who_is_there(), 2 * _GREETING_SECONDS))
        except TimeoutError:
            return False
        except (OSError, nats.errors.Error, store.UnfitServerError):
            return True


def delete_left_folders() -> None:
    """Delete the folders of members whose agent and watchdog were killed together.

    A container's end does that, or the end of a Slurm job's step. The agent of a member that runs
    holds the lock of its folder.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            # A young one may have no lock yet.
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _LEFT_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _transport(target: Endpoint, members: Members) -> store.Transport:
    def vet(info: Mapping[str, Any]) -> None:
        refuse_others(info, members, password)

    password = members.options.password()
    options = store.Options(user=USER if password is not None else None, password=password)
    return store.Transport(target, options, _GREETING_SECONDS, None, vet)


class QuorumAttendance(Attendance):
    """A node of a run whose nodes keep up the store."""

    def __init__(self, members: Members, local_addr: str | None, run_id: str) -> None:
        try:
            find_binary()
        except NotInstalledError as error:
            raise ValueError(str(error)) from None
        self._members, self._run = members, run_id
        self._keeper = _Keeper(members, local_addr, run_id)
        self._deadline = float("inf")
        self._refusing: list[str] = []
        self._closed = False
        if len(members.hosts) == 1:
            log.warning(
                "run '%s': the store has one member, on %s, whose death costs the run a restart: "
                "name three hosts to survive that of any",
                run_id, members,
            )  # fmt: skip
        if members.options.password() is None:
            log.info(
                "run '%s': whoever reaches the ports of the store's members may join, as with "
                "c10d; a secret, in $RDZV_PLUGINS_SECRET on all nodes, keeps strangers out",
                run_id,
            )

    def _begin(self) -> None:
        """Have this host's member seen to; raises `RuntimeError` where no thread can start yet."""
        if self._keeper.ident is None:
            self._keeper.start()

    def open(self, connect: Callable[[], KeyValueClient], patience: float) -> KeyValueClient:
        self._begin()
        deadline, tell_at = time.monotonic() + patience, time.monotonic() + _LOOK_SECONDS
        ask_at = tell_at
        transport = _transport(self._members.dialled, self._members)
        try:
            while True:
                why = self._why_not_usable(transport)
                if not why:
                    try:
                        opened = connect()
                        client = opened.client if isinstance(opened, SealedClient) else opened
                        assert isinstance(client, Client)
                        client.take_part()
                        # A loss within the next seconds must find that it has data to forget.
                        self._keeper.was_led()
                        return opened
                    except AccessDeniedError:
                        raise
                    except RendezvousConnectionError as error:
                        why = str(error)
                now = time.monotonic()
                if now >= ask_at:
                    self._refuse_another_secret()
                    ask_at = time.monotonic() + _LOOK_SECONDS
                if now >= deadline:
                    raise RendezvousConnectionError(
                        f"quorum at {self._members} had no majority of its members within "
                        f"{patience:g} s: {self._who_answers()}"
                    )
                if now >= tell_at:
                    log.info(
                        "run '%s': waiting for a majority of the store's members: %s",
                        self._run, self._who_answers(),
                    )  # fmt: skip
                    tell_at = time.monotonic() + _TELL_SECONDS
                time.sleep(_PRESENCE_SECONDS / 2)
        finally:
            transport.close()

    def _why_not_usable(self, transport: store.Transport) -> str:
        """Why the members do not answer as a cluster; "": they do, or refuse this node."""

        async def ask() -> None:
            await (await transport.link()).ask("INFO", {}, _ASKED_SECONDS)

        try:
            transport.run(ask(), Limit(time.monotonic() + 2 * _GREETING_SECONDS))
        except (OSError, APIError, nats.errors.Error, store.UnfitServerError) as error:
            return "" if store.is_refusal(error) else str(error) or type(error).__name__
        return ""

    def _refuse_another_secret(self) -> None:
        """Raise `AccessDeniedError` where so many members have another secret than this node that
        the others are no majority. This host's own, or one that has just come, may take it."""
        names = [name for name, _ in self._members.hosts]
        refusing = [name for host, name in enumerate(names) if self._is_refused_by(host)]
        if len(refusing) > len(names) // 2:
            raise AccessDeniedError(
                f"quorum at {self._members} refused this node, whose secret is not that of "
                f"{', '.join(refusing)}: give all nodes and commands the same one, in "
                "$RDZV_PLUGINS_SECRET or secret_file"
            )
        if refusing and refusing != self._refusing:
            self._refusing = refusing
            log.warning(
                "run '%s': the members of the store on %s have another secret than this node: give "
                "all nodes the same one, in $RDZV_PLUGINS_SECRET or secret_file",
                self._run, ", ".join(refusing),
            )  # fmt: skip

    def _is_refused_by(self, host: int) -> bool:
        for place in self._members.places(host):
            transport = _transport(Endpoint("nats", (place,)), self._members)
            try:
                transport.run(transport.link(), Limit(time.monotonic() + _GREETING_SECONDS))
                return False
            except (OSError, nats.errors.Error, store.UnfitServerError) as error:
                if store.is_refusal(error):
                    return True
            finally:
                transport.close()
        return False

    def _who_answers(self) -> str:
        found = []
        for host, (name, _) in enumerate(self._members.hosts):
            found.append(f"{name} {self._answer_of(host)}")
        return ", ".join(found)

    def _answer_of(self, host: int) -> str:
        said = "does not answer"
        for address, port in self._members.places(host):
            try:
                if self._members.is_of(probe(address, port, 1.0)):
                    return "answers"
            except socket.gaierror:
                return "is no name that this host knows"
            except ConnectionRefusedError:
                said = "runs none yet"
            except (OSError, ValueError):
                continue
        return said

    def member_runs(self) -> bool:
        self._begin()
        if not (runs := self._keeper.sees_to_one) and not self._keeper.is_alive():
            raise ValueError(
                f"this host is none of {self._members}: run it on one of them, or name the "
                "address that this host has among them"
            )
        return runs

    def hurry(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + _HURRY_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        linger = time.monotonic() + self._members.options.linger
        self._deadline = min(self._deadline, linger)
        tell_at = time.monotonic() + _TELL_LINGER_SECONDS
        while self._keeper.has_member and not self._keeper.is_alone():
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            if time.monotonic() >= tell_at:
                tell_at = self._deadline
                log.info(
                    "run '%s': the member of the store on this host stays for the other nodes, "
                    "for up to %.0f s (linger)",
                    self._run, left,
                )  # fmt: skip
            time.sleep(min(left, _PRESENCE_SECONDS))
        self._keeper.stop()
