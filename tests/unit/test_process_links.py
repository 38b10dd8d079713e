"""The links between processes: what tells that one has ended, and what does not."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from queue import Empty, SimpleQueue

import pytest

from rdzv_plugins.peers import links as module
from rdzv_plugins.peers.links import Links
from rdzv_plugins.peers.listener import Listener
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.proxy import Proxy

pytestmark = pytest.mark.rule("accusations")

RUN, PEER = "a-run", "the-peer"
PATIENCE = 30.0

# A node of its own, in a process without torch; it ends in good order when its standard input does.
# It does what lines of that tell: forks a process, which ends with it too; holds a link to a port;
# accepts nobody any more. It says when each is done.
CHILD = f"""
import os
import sys
from rdzv_plugins.peers.links import Links
from rdzv_plugins.peers.listener import Listener
from rdzv_plugins.protocol.contact import Standing

listener = Listener("127.0.0.1", "child", [int(sys.argv[1])])
links = Links(listener, {RUN!r}, {PEER!r}, "127.0.0.1", print, print, bool, print)


def refuse():
    listener._selector.unregister(listener._server)
    listener._server.close()
    print("refuses", flush=True)


print(listener.port, flush=True)
forked = False
for line in iter(sys.stdin.readline, ""):
    match line.split():
        case ["fork"]:
            forked = os.fork() == 0
            if forked:
                print("forked", flush=True)
        case ["link", port]:
            links.hold({{"this-node": f"127.0.0.1:{{port}}"}})
            print("links", flush=True)
        case ["refuse"]:
            listener.call(refuse)
        case ["say", standing]:
            links.hold({{}}, Standing[standing])
            print("says", flush=True)
forked or listener.close()
"""


class Peer:
    """Another node."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-c", CHILD, str(port)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def fork(self) -> None:
        """Returns once it has forked a process, which outlives it."""
        self._does("fork", "forked")

    def link(self, watcher: Watcher) -> None:
        """Returns once it has a link to the watcher."""
        self._does(f"link {watcher.listener.port}", "links")
        assert until(lambda: watcher.is_linked, PATIENCE)

    def refuse(self) -> None:
        """Accept nobody any more, as where its listener has died."""
        self._does("refuse", "refuses")

    def say(self, standing: Standing) -> None:
        self._does(f"say {standing.name}", "says")

    def _does(self, what: str, answer: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{answer}\n".encode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stand_still(self) -> None:
        """Returns once all its threads do: a signal reaches them one after the other."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self) -> None:
        """In good order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Watcher:
    """This node, which has links to others."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.told: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.listener = Listener("127.0.0.1", "watcher")
        self.links = Links(
            self.listener,
            RUN,
            "this-node",
            host,
            lambda node: self.told.put(("gone", node)),
            lambda node: self.told.put(("back", node)),
            self.hears_of_others,
            lambda line: self.told.put(("warn", line)),
        )
        self.others: frozenset[Standing] = frozenset()

    def hears_of_others(self, others: frozenset[Standing]) -> None:
        self.others = others

    def hold(self, **ports: int) -> None:
        self.links.hold({node.replace("_", "-"): f"127.0.0.1:{it}" for node, it in ports.items()})

    def has_link(self, node: str = PEER) -> bool:
        peer = self.links._peers.get(node)
        return peer is not None and peer._line is not None and peer._line.held

    @property
    def is_linked(self) -> bool:
        """Whether the peer has a link to it."""
        return any(it.is_open and it.is_from(PEER) for it in self.links._accepted)

    @property
    def dials(self) -> int:
        """How many times it was refused since it was told of that."""
        return self.links._peers[PEER]._since_report or 0

    def breaks(self) -> None:
        """Its link, at its own end."""
        line = self.links._peers[PEER]._line
        assert line is not None
        line.socket.shutdown(socket.SHUT_RDWR)

    def loses(self, proxy: Proxy) -> None:
        """Its link, which the proxy cuts."""
        peer = self.links._peers[PEER]
        line = peer._line
        proxy.cut()
        assert until(lambda: peer._line is not line, PATIENCE)

    def renews(self, proxy: Proxy) -> None:
        self.loses(proxy)
        assert until(self.has_link, PATIENCE)

    def hears(self) -> tuple[str, str]:
        return self.told.get(timeout=PATIENCE)

    @property
    def heard_nothing(self) -> bool:
        try:
            self.told.get_nowait()
        except Empty:
            return True
        return False


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.listener.close()


@pytest.fixture
def proxy(peer: Peer) -> Iterator[Proxy]:
    with Proxy(peer.address) as proxy:
        yield proxy


def linked(watcher: Watcher, port: int) -> None:
    watcher.hold(the_peer=port)
    assert until(watcher.has_link, PATIENCE)


def test_a_killed_process_is_gone(watcher: Watcher, peer: Peer) -> None:
    linked(watcher, peer.port)
    peer.kill()
    assert watcher.hears() == ("gone", PEER)


def test_a_killed_process_is_gone_though_one_that_it_forked_lives(
    watcher: Watcher, peer: Peer
) -> None:
    """As a worker that waits in a collective, and hears no signal there."""
    linked(watcher, peer.port)
    peer.fork()
    peer.kill()
    assert watcher.hears() == ("gone", PEER)


# A listener that is slow to take up whom it has accepted. Its process forks meanwhile, and ends;
# the other one ends with its standard input.
FORKS = """
import os
import socket
import sys
import threading
import time
from rdzv_plugins.peers import listener as module

accepted = threading.Event()


class Slow(socket.socket):
    def accept(self):
        line = super().accept()
        accepted.set()
        time.sleep(0.5)
        return line


def listen(address, ports):
    server = Slow()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


module.listen = listen
print(module.Listener("127.0.0.1", "slow").port, flush=True)
accepted.wait()
if os.fork() == 0:
    sys.stdin.read()
os._exit(0)
"""


def test_a_process_forked_while_a_link_is_made_does_not_keep_it() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        with socket.create_connection(address, PATIENCE) as line, process.stdin:
            process.wait(PATIENCE)
            line.settimeout(5.0)
            with suppress(ConnectionResetError):
                assert line.recv(1) == b""


def test_a_peer_that_refuses_is_not_gone_while_its_own_link_stands(
    watcher: Watcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall, or after its listener has died. Its death shows by that link."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    linked(watcher, peer.port)
    peer.link(watcher)
    peer.refuse()
    watcher.breaks()
    assert until(lambda: watcher.links._peers[PEER]._pause > 100 * module._FIRST_PAUSE, PATIENCE)
    assert watcher.heard_nothing
    peer.kill()
    assert watcher.hears() == ("gone", PEER)


def test_a_peer_that_was_gone_and_has_a_link_again_is_gone_once_that_ends(
    watcher: Watcher, peer: Peer
) -> None:
    """It has answered that accusation; nothing else would tell of its death."""
    linked(watcher, peer.port)
    peer.refuse()
    watcher.breaks()
    assert watcher.hears() == ("gone", PEER)
    peer.link(watcher)
    peer.kill()
    assert watcher.hears() == ("gone", PEER)


def test_the_first_links_of_strangers_end_where_there_are_too_many(
    watcher: Watcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of neighbours stay: what they tell is heard by nobody else."""
    monkeypatch.setattr(module, "_MOST_LINKS", 3)
    linked(watcher, peer.port)
    peer.link(watcher)
    lines = [greeted(watcher) for _ in range(4)]
    # The first ones have ended, without a farewell: this node goes on.
    assert [line.recv(64) for line in lines[:2]] == [b"", b""]
    assert watcher.is_linked
    for line in lines:
        line.close()


NONCE = "0" * module._NONCE
NOBODY = b"0" * 2 * module._DIGEST


def greeted(watcher: Watcher, by: bytes = NOBODY) -> socket.socket:
    """A link of somebody to the watcher, which has answered; ``by``: who that says to be."""
    line = socket.create_connection(("127.0.0.1", watcher.listener.port), PATIENCE)
    to = module._digest("this-node", RUN)
    line.sendall(b"%s%s %s %s\n" % (module._OPENING, to, NONCE.encode(), by))
    assert len(line.recv(4 * module._DIGEST + 1)) == 4 * module._DIGEST + 1
    return line


def test_both_links_of_a_killed_process_end(
    watcher: Watcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_FIRST_PAUSE": PATIENCE, "_TOLD_PAUSE": math.inf}.items():
        monkeypatch.setattr(module, name, value)
    linked(watcher, peer.port)
    peer.link(watcher)
    began = time.monotonic()
    peer.kill()
    assert watcher.hears() == ("gone", PEER)
    # It does not wait for the next dial, whichever end it reads first.
    assert time.monotonic() - began < module._FIRST_PAUSE


def test_a_stranger_speaks_for_nobody(watcher: Watcher, peer: Peer) -> None:
    """One that has heard a greeting says it again."""
    linked(watcher, peer.port)
    ends = f"127.0.0.1,1,127.0.0.1,{watcher.listener.port}"
    with greeted(watcher, module._digest("from", NONCE, PEER, ends, RUN)):
        assert not watcher.is_linked
        peer.kill()
        assert watcher.hears() == ("gone", PEER)


def test_a_peer_that_ends_in_good_order_says_so(watcher: Watcher, peer: Peer) -> None:
    linked(watcher, peer.port)
    peer.end()
    assert until(lambda: watcher.links._peers[PEER]._ended, PATIENCE)
    assert watcher.heard_nothing


def test_a_connection_that_breaks_is_made_again(
    watcher: Watcher, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHORT_SECONDS", 0.0)
    linked(watcher, proxy.address[1])
    for _ in range(10):
        watcher.renews(proxy)
    assert watcher.heard_nothing


def test_a_link_that_keeps_breaking_is_made_again_after_pauses(
    watcher: Watcher, proxy: Proxy
) -> None:
    linked(watcher, proxy.address[1])
    peer = watcher.links._peers[PEER]
    for _ in range(module._MOST_SHORT):
        assert until(watcher.has_link, PATIENCE)
        watcher.loses(proxy)
    assert until(lambda: peer._pause > module._FIRST_PAUSE, PATIENCE)
    assert watcher.heard_nothing


def test_a_peer_that_is_gone_and_answers_again_is_back(watcher: Watcher, peer: Peer) -> None:
    linked(watcher, peer.port)
    peer.kill()
    assert watcher.hears() == ("gone", PEER)
    with closing(Peer(peer.port)):
        while (heard := watcher.hears()) == ("gone", PEER):
            pass  # Told again, where the other one takes long to begin.
        assert heard == ("back", PEER)
        assert until(watcher.has_link, PATIENCE)


def test_a_peer_that_is_gone_is_told_of_once_more(
    watcher: Watcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last heartbeat may have been on its way to the store."""
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)
    linked(watcher, peer.port)
    peer.kill()
    assert [watcher.hears(), watcher.hears()] == 2 * [("gone", PEER)]
    assert until(lambda: watcher.dials > module._OFTEN, PATIENCE)
    assert watcher.heard_nothing


def test_a_peer_whose_link_was_refused_for_long_is_dialled_again(
    watcher: Watcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a firewall: without its link, nobody would see it die after that."""
    for name, value in {"_AGAIN_SECONDS": 0.01, "_OFTEN": 3, "_FIRST_PAUSE": 0.01}.items():
        monkeypatch.setattr(module, name, value)
    linked(watcher, peer.port)
    peer.kill()
    assert watcher.hears() == ("gone", PEER)
    assert until(lambda: watcher.links._peers[PEER]._pause > 4 * module._FIRST_PAUSE, PATIENCE)
    assert watcher.heard_nothing
    with closing(Peer(peer.port)) as again:
        assert watcher.hears() == ("back", PEER)
        linked(watcher, peer.port)
        again.kill()
        assert watcher.hears() == ("gone", PEER)


def test_a_proxy_between_that_refuses_tells_nothing_of_the_node(
    watcher: Watcher, peer: Peer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what keeps the node from the store too, as a sidecar that restarts does."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.1)
    linked(watcher, proxy.address[1])
    it = watcher.links._peers[PEER]
    proxy.refuse()
    assert until(lambda: it._pause > 4 * module._FIRST_PAUSE, PATIENCE)
    proxy.accept()
    assert until(watcher.has_link, PATIENCE)
    # A proxy that answers, and reaches nobody, tells nothing either.
    peer.kill()
    assert until(lambda: it._pause > 4 * module._FIRST_PAUSE, PATIENCE)
    assert watcher.heard_nothing


def test_a_process_that_stands_still_is_not_gone(
    watcher: Watcher, peer: Peer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DIAL_SECONDS", 0.3)
    linked(watcher, proxy.address[1])
    peer.stand_still()
    proxy.cut()
    # The kernel accepts connections for it; nobody answers.
    assert until(lambda: watcher.links._peers[PEER]._pause > module._FIRST_PAUSE, PATIENCE)
    assert watcher.heard_nothing
    os.kill(peer.process.pid, signal.SIGCONT)
    assert until(watcher.has_link, PATIENCE)
    assert watcher.heard_nothing


def test_somebody_else_at_its_port_is_not_it(watcher: Watcher) -> None:
    listener = Listener("127.0.0.1", "another")
    Links(listener, RUN, PEER, "127.0.0.1", print, print, print, print)
    linked(watcher, listener.port)
    listener._greetings = ()
    Links(listener, RUN, "another-node", "127.0.0.1", print, print, print, print)
    watcher.breaks()
    assert watcher.hears() == ("gone", PEER)
    listener.close()


def test_a_peer_that_was_never_reached_is_not_gone(watcher: Watcher, peer: Peer) -> None:
    """A firewall may refuse all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    watcher.hold(the_peer=port)
    assert until(
        lambda: (
            PEER in watcher.links._peers and watcher.links._peers[PEER]._pause > module._FIRST_PAUSE
        ),
        PATIENCE,
    )
    assert watcher.heard_nothing
    # One that is reached shows that the others could be.
    watcher.links.hold({PEER: f"127.0.0.1:{peer.port}", "gone": f"127.0.0.1:{port}"})
    # It keeps the endpoint that it knows of a node: it is one process.
    assert watcher.links._peers[PEER]._line is None


def test_the_next_that_is_dialled_in_vain_is_gone_where_others_are_reached(
    watcher: Watcher, peer: Peer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    linked(watcher, peer.port)
    watcher.hold(the_peer=peer.port, another=port)
    assert watcher.hears() == ("gone", "another")


def test_where_only_this_host_answers_that_another_refuses_tells_nothing(
    watcher: Watcher, peer: Peer
) -> None:
    """Its firewall may."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
    linked(watcher, peer.port)
    watcher.links.hold({PEER: f"127.0.0.1:{peer.port}", "another": f"127.0.0.2:{port}"})
    assert until(lambda: "another" in watcher.links._peers, PATIENCE)
    another = watcher.links._peers["another"]
    assert until(lambda: another._pause > module._FIRST_PAUSE, PATIENCE)
    assert watcher.heard_nothing


def test_people_are_told_once_of_neighbours_without_a_link(
    watcher: Watcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a firewall drops what is no port of ``master_port``."""
    for name, seconds in {"_DIAL_SECONDS": 0.1, "_FIRST_PAUSE": 0.01, "_TOLD_PAUSE": 0.04}.items():
        monkeypatch.setattr(module, name, seconds)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        linked(watcher, peer.port)
        watcher.hold(the_peer=peer.port, mute=port)
        what, line = watcher.hears()
        assert what == "warn"
        assert line.startswith(f"no links to 1 of 2 neighbours (127.0.0.1:{port}): the end of a")
        silent = watcher.links._peers["mute"]
        assert until(lambda: silent._pause > 0.3, PATIENCE)
        assert watcher.heard_nothing


def test_a_link_that_is_not_held_any_more_tells_nothing(watcher: Watcher, peer: Peer) -> None:
    linked(watcher, peer.port)
    watcher.hold()
    assert until(lambda: not watcher.links._peers, PATIENCE)
    peer.kill()
    assert watcher.heard_nothing


def test_a_name_is_looked_up(watcher: Watcher, peer: Peer) -> None:
    watcher.links.hold({PEER: f"localhost:{peer.port}"})
    assert until(watcher.has_link, PATIENCE)
    peer.kill()
    assert watcher.hears() == ("gone", PEER)


def test_nobody_who_does_not_know_the_node_is_told_anything(watcher: Watcher) -> None:
    strangers = [
        b"rdzv-plugins link " + b"0" * 32 + b" " + b"0" * 16 + b"\n",
        b"rdzv-plugins link " + b"0" * 32 + b" " + b"0" * 16 + b" " + b"0" * 32 + b"\n",
        b"rdzv-plugins link this-node ",
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for greeting in strangers:
        with socket.create_connection(("127.0.0.1", watcher.listener.port), 5) as line:
            line.settimeout(PATIENCE)
            line.sendall(greeting)
            with suppress(ConnectionResetError):
                assert line.recv(1) == b""


def test_at_rest_the_thread_sleeps(watcher: Watcher, peer: Peer) -> None:
    linked(watcher, peer.port)
    assert until(lambda: watcher.listener._patience() is None, PATIENCE)


def test_a_thread_whose_socket_was_destroyed_sleeps(watcher: Watcher, peer: Peer) -> None:
    linked(watcher, peer.port)
    listener = watcher.listener
    # As `ss --kill` does: it accepts nobody, for ever.
    listener._server.shutdown(socket.SHUT_RDWR)
    assert until(lambda: listener._server not in listener._selector.get_map(), PATIENCE)
    assert until(lambda: listener._patience() is None, PATIENCE)
    assert watcher.has_link()


def test_each_end_hears_what_the_other_one_says_of_itself(
    watcher: Watcher, peer: Peer, proxy: Proxy
) -> None:
    def hears(*standings: Standing) -> bool:
        return until(lambda: watcher.others == {*standings}, PATIENCE)

    linked(watcher, proxy.address[1])
    assert hears(Standing.ACCEPTED)
    peer.say(Standing.FAILING)
    assert hears(Standing.FAILING)
    # A peer that says nothing may be accepted: a stranger, and one to whom no link stands.
    stranger = greeted(watcher)
    assert hears(Standing.FAILING, Standing.ACCEPTED)
    stranger.sendall(Standing.LOST.encode())
    assert hears(Standing.FAILING, Standing.LOST)
    stranger.close()
    assert hears(Standing.FAILING)
    proxy.close()
    assert hears(Standing.ACCEPTED)


def test_what_a_node_says_of_itself_is_said_over_links_made_later_by_others(
    watcher: Watcher,
) -> None:
    watcher.links.hold({}, Standing.FAILING)
    with greeted(watcher) as line:
        assert line.recv(1) == Standing.FAILING.encode()
        watcher.links.hold({}, Standing.ACCEPTED)
        assert line.recv(1) == Standing.ACCEPTED.encode()
