"""Members as threads under the conformance suite, and as processes that are killed and stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from rdzv_plugins.kv import AccessDeniedError, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.stores._members.client import MembersClient
from rdzv_plugins.stores._members.server import MemberThread
from rdzv_plugins.testing import KeyValueConformance, Store, TorchConformance
from rdzv_plugins.testing.harness import present
from rdzv_plugins.testing.threads import Background
from tests import Measure

Places = list[list[tuple[str, int]]]


def connect(places: Places, namespace: str, seconds: float = 5.0, **other: str) -> KeyValueClient:
    secret, cluster = other.get("secret", "secret").encode(), other.get("cluster", "cluster")
    return MembersClient("quorum at here", places, cluster, secret, namespace, seconds)


@pytest.fixture(scope="module")
def members() -> Iterator[Places]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    places = [[it.getsockname()] for it in listeners]
    threads = [
        MemberThread(listener, places, index, "cluster", b"secret")
        for index, listener in enumerate(listeners)
    ]
    for thread in threads:
        thread.start()
    yield places
    for thread in threads:
        thread.stop()


class TestMembers(KeyValueConformance, TorchConformance):
    @pytest.fixture
    def store(self, members: Places) -> Store:
        def opened(
            namespace: str, *, address: object = None, request_timeout: float = 5.0
        ) -> KeyValueClient:
            return connect(members, namespace, request_timeout)

        return Store(open=opened, forks=False)


def test_nobody_is_let_in_with_another_secret_or_from_another_cluster(members: Places) -> None:
    with pytest.raises(AccessDeniedError, match="the same secret"):
        connect(members, "job", secret="other")
    with pytest.raises(RendezvousConnectionError, match="has no member of 'other' there"):
        connect(members, "job", 1.0, cluster="other")


def test_strangers_and_nonsense_do_a_member_no_harm(members: Places) -> None:
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0\0\0\1\xc1"):
        with socket.create_connection(members[0][0]) as stranger:
            stranger.sendall(said)
            stranger.settimeout(10)
            if said:
                stranger.recv(4096)  # Its greeting.
                assert stranger.recv(1) == b"", f"it went on after {said[:8]!r}"
    with closing(connect(members, "job")) as client:
        client.put("key", b"value")


class Processes:
    def __init__(self) -> None:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.places: Places = [[it.getsockname()] for it in listeners]
        for listener in listeners:
            listener.close()
        self.running = [self.start(index) for index in range(3)]

    def start(self, index: int) -> subprocess.Popen[bytes]:
        ports = [str(port) for ((_, port),) in self.places]
        return subprocess.Popen([sys.executable, "-m", "tests.register.member", str(index), *ports])

    def kill(self, index: int) -> None:
        self.running[index].kill()
        self.running[index].wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    for process in found.running:
        process.kill()
        process.wait()


def longest(client: KeyValueClient, seconds: float) -> float:
    """The longest of the compare-and-sets that a client makes for so long, in seconds."""
    found, until = 0.0, time.monotonic() + seconds
    client.put("key", b"0")
    version = present(client.get("key")).version
    while time.monotonic() < until:
        began = time.monotonic()
        entry, won = client.compare_and_set("key", b"value", version)
        assert won
        found, version = max(found, time.monotonic() - began), present(entry).version
    return found


def test_nobody_waits_for_a_member_that_is_killed_or_stopped(
    processes: Processes, record_property: Measure
) -> None:
    with closing(connect(processes.places, "job", 30.0)) as client:
        client.put("before", b"kept")
        for index, process in enumerate(processes.running):
            busy = Background(lambda: longest(client, 2))
            assert not busy.done(0.5)
            process.send_signal(signal.SIGSTOP)
            assert not busy.done(0.5)
            process.send_signal(signal.SIGCONT)
            record_property(f"{index} stopped, s", round(busy.result(30), 3))
            busy = Background(lambda: longest(client, 2))
            assert not busy.done(0.5)
            processes.kill(index)
            processes.running[index] = processes.start(index)
            worst = busy.result(30)
            record_property(f"{index} killed, s", round(worst, 3))
            assert worst < 2
            # The next one is killed only once this one has recovered.
            other = (index + 1) % 3
            processes.running[other].send_signal(signal.SIGSTOP)
            client.put("after", b"there")
            processes.running[other].send_signal(signal.SIGCONT)
        assert present(client.get("before")).value == b"kept"


def test_a_majority_that_came_back_without_memory_begins_anew(processes: Processes) -> None:
    with closing(connect(processes.places, "job", 30.0)) as client:
        # The member that lives on has to be one of those that accept the value.
        processes.running[0].send_signal(signal.SIGSTOP)
        client.put("key", b"value")
        processes.running[0].send_signal(signal.SIGCONT)
        for index in (0, 1):
            processes.kill(index)
        processes.running[0] = processes.start(0)
        client.put("other", b"value")
        # The member that lives remembers.
        assert present(client.get("key")).value == b"value"
        for index in (0, 2):
            processes.kill(index)
            processes.running[index] = processes.start(index)
        assert client.list("") == {}
