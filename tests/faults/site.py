"""The place of an hour of faults: hosts, a store, agents on them and launchers that restart these.

For programs in namespaces of their own: what is made here is gone with them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import trustme

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.stores import open_client
from tests import servers
from tests.faults.checks import End, Note
from tests.faults.wire import send_plain_frames
from tests.fleet.agents import RDZV_RUN, Fleet
from tests.integration.hosts import PROGRAM, Host, Network
from tests.servers import LocalServer, Security

__all__ = ["HERE", "INTERVAL", "LEASE", "Site"]

HERE = f"10.1.0.{PROGRAM}"
STORE_NAME = "store.test"
INTERVAL, ATTEMPTS = 1.0, 8
LEASE = INTERVAL * ATTEMPTS

# The launcher's: a platform that starts a dead agent again takes as long at least.
_RELAUNCH_SECONDS = 1.0

_DISK_BYTES = 16 << 20

_NOTES = msgspec.json.Decoder(Note)


class Site:
    """A context manager: its agents run from the beginning.

    Attributes:
        ends: of all agents that ended.
        descriptors: of the agent that had the most when they were counted last.
    """

    def __init__(
        self, folder: Path, store: str, agents: int, seconds: float, *, seed: int = 0,
        torch: bool = False,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.store = store
        self.seed = seed
        self.began = time.monotonic()
        self.run_id = f"faults-{secrets.token_hex(4)}"
        self.notes: list[Note] = []
        self.descriptors: list[str] = []
        self.ends: list[End] = []
        self._torch = torch
        self._quit = threading.Event()
        self._stack = contextlib.ExitStack()
        self._offsets: dict[Path, int] = {}
        names = [f"node{number}" for number in range(1, agents + 1)]
        self.network = self._stack.enter_context(Network(names, seconds=seconds))
        self.hosts = {self.address(host): host for host in self.network.hosts}
        self.dns_answers = True
        asked = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asked.bind((HERE, 53))
        threading.Thread(target=self._answer_queries, args=(asked,), daemon=True).start()
        (folder / "resolv.conf").write_text(f"nameserver {HERE}\n")
        (folder / "nsswitch.conf").write_text("hosts: files dns\n")
        for address, host in self.hosts.items():
            send_plain_frames(host, "eth1")
            self.names(address, known=True)
            for file, place in (
                (f"hosts-{address}", "hosts"),
                ("resolv.conf", "resolv.conf"),
                ("nsswitch.conf", "nsswitch.conf"),
            ):
                host.run("mount", "--bind", str(folder / file), f"/etc/{place}")
        self.server: LocalServer | None = None
        self.password_file = folder / "password"
        self.disk = folder / "disk"
        self._config: dict[str, object] = {}
        self._environ: dict[str, str] = {}
        self.endpoint = self._start_store()
        self._fleet = Fleet(
            folder,
            backend=store,
            endpoint=self.endpoint,
            run_id=self.run_id,
            nodes=f"2:{agents}",
            config={
                "keep_alive_interval": INTERVAL,
                "keep_alive_max_attempt": ATTEMPTS,
                # By default a third of the lease.
                "heartbeat_timeout": round(LEASE / 3, 1),
                # Any host may be lost many times.
                "quarantine_after": 0,
                "last_call_timeout": 2,
                "join_timeout": 300,
                **self._config,
            },
            environ={"GLOO_SOCKET_IFNAME": "eth1", **self._environ},
            max_restarts=1000,
            script=("-m", "tests.faults.training"),
            training={"torch": 1} if torch else None,
            launcher=RDZV_RUN,
        )
        self._launchers: list[threading.Thread] = []

    @staticmethod
    def address(host: Host) -> str:
        """By which the others know it."""
        return f"10.1.0.{host.number}"

    @property
    def addresses(self) -> list[str]:
        """The addresses of all agents' hosts."""
        return [*self.hosts]

    def _answer_queries(self, asked: socket.socket) -> None:
        """DNS of a network where no address has a name, as long as it answers at all."""
        while not self._quit.is_set():
            try:
                query, sender = asked.recvfrom(512)
            except OSError:  # It is closed at the end.
                return
            if self.dns_answers:
                # The question, and that there is no such name.
                asked.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:], sender)

    def _start_store(self) -> str:
        if self.store == "quorum":
            secret = self.folder / "secret"
            secret.write_text(secrets.token_hex(8))
            self._config = {"secret_file": secret}
            return ",".join(self.addresses[:3])
        password = secrets.token_hex(8)
        self.password_file.write_text(password)
        self.disk.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "faults", str(self.disk)],
            check=True,
        )
        authority = trustme.CA()
        self._authority = authority
        ca_file = self.folder / "ca.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        cert_file, key_file = self.certificate("first", days=30)
        security = Security(
            password=password, ca_file=str(ca_file), cert_file=cert_file, key_file=key_file
        )
        before, tempfile.tempdir = tempfile.tempdir, str(self.disk)
        self.server = self._stack.enter_context(
            servers.start("redis", host=HERE, security=security)
        )
        tempfile.tempdir = before
        self._config = {"password_file": self.password_file, "ca_file": ca_file}
        return self.server.endpoint.replace(HERE, STORE_NAME)

    def certificate(self, name: str, days: float) -> tuple[str, str]:
        """Paths of a certificate of the server's, good for so many days, and of its key."""
        expires = datetime.now(UTC) + timedelta(days=days)
        leaf = self._authority.issue_cert(
            HERE, STORE_NAME, "127.0.0.1", not_after=expires,
            not_before=expires - timedelta(days=60),
        )  # fmt: skip
        cert_file, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert_file.unlink(missing_ok=True)
        for blob in leaf.cert_chain_pems:
            blob.write_to_path(str(cert_file), append=True)
        leaf.private_key_pem.write_to_path(str(key_file))
        return str(cert_file), str(key_file)

    def names(self, address: str, *, known: bool) -> None:
        """Whether the host's own file has the store's name, or it asks DNS for that."""
        line = f"{HERE} {STORE_NAME}\n" if known else ""
        file = self.folder / f"hosts-{address}"
        name = self.hosts[address].name
        file.write_text(f"127.0.0.1 localhost\n{address} {name}\n{line}")

    def open(self, run_id: str | None = None, request_timeout: float = 5.0) -> KeyValueClient:
        """Connect to the store as an observer on the program's own host."""
        options = {name: str(value) for name, value in self._config.items()}
        if self.store == "quorum":
            options["cluster"] = self.run_id
        return open_client(
            self.store,
            self.endpoint.replace(STORE_NAME, HERE),
            run_id or self.run_id,
            options,
            request_timeout=request_timeout,
        )

    def start_neighbours(self, runs: int) -> subprocess.Popen[str]:
        """Start this many other runs on the program's own host; returns when each has its round."""
        options = {"keep_alive_interval": 5 * INTERVAL, **self._config}
        command = [sys.executable, "-m", "tests.faults.neighbours", self.store]
        command += [self.endpoint.replace(STORE_NAME, HERE), str(runs)]
        command += [f"{name}={value}" for name, value in options.items()]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the neighbours have not begun")
        return process

    def archive(self) -> Archive:
        """The run's history."""
        return Archive(self.open, self.run_id, history_ttl=0)

    def __enter__(self) -> Site:
        for address in self.addresses:
            thread = threading.Thread(target=self._launch, args=(address,), daemon=True)
            self._launchers.append(thread)
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._quit.set()
        for thread in self._launchers:
            thread.join()
        for pid in self.processes():
            self.kill(pid)
        for agent in self._fleet.agents.values():
            agent.process.wait()
        self._stack.close()

    def _launch(self, address: str) -> None:
        """Keep an agent on this host, as a platform's launcher does."""
        while not self._quit.is_set():
            agent = self._fleet.start(address, address, within=self.hosts[address].within)
            while (status := agent.process.poll()) is None:
                if self._quit.wait(0.1):
                    return
            lines = agent.log.read_text(errors="replace").splitlines()
            told = [line for line in lines if "rdzv" in line]
            self.ends.append(
                End(
                    at=time.monotonic(),
                    address=address,
                    status=status,
                    line=(told or [""])[-1],
                )
            )
            self._quit.wait(_RELAUNCH_SECONDS)

    def pid(self, address: str) -> int:
        """The pid of the agent on this host."""
        return self._fleet.agents[address].pid

    def signal(self, address: str, number: int) -> None:
        """Send the agent alone a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(address), number)

    def workers(self, address: str) -> list[int]:
        """Process ids of the agent's workers."""
        found = [it for it in self.processes(address) if "tests.faults.training" in _command(it)]
        return [it for it in found if it != self.pid(address)]

    def processes(self, address: str | None = None) -> list[int]:
        """All that run on this host, or on all, but for what holds its namespaces."""
        spaces = {}
        for one, host in self.hosts.items():
            with contextlib.suppress(OSError):
                spaces[os.readlink(f"/proc/{host.process.pid}/ns/net")] = one
        holders = {host.process.pid for host in self.hosts.values()}
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in holders:
                with contextlib.suppress(OSError):
                    where = spaces.get(os.readlink(f"/proc/{name}/ns/net"))
                    if where is not None and address in (None, where):
                        found.append(int(name))
        return found

    def read_notes(self) -> list[Note]:
        """What the workers have noted so far; `notes` has it too."""
        for path in (self.folder / "events").glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self.notes += [_NOTES.decode(line) for line in whole.splitlines()]
        return self.notes

    def await_step(self, since: float, size: int, timeout: float) -> float | None:
        """Wait for a step since then in a world of so many at least; when it was, None: none."""
        deadline = time.monotonic() + timeout
        looked = 0
        while True:
            notes = self.read_notes()
            for note in notes[looked:]:
                if note.event == "step" and note.at > since and note.world_size >= size:
                    return note.at
            looked = len(notes)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)

    def await_whole(self, since: float, size: int, timeout: float) -> float | None:
        """Wait until a world of so many is the last one, and takes steps, and no agent is missing.

        Returns when it took its first step since then; None: there was none in time.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            notes = self.read_notes()
            last = max(notes, key=lambda it: it.token)
            living = {self.pid(address) for address in self.addresses}
            took = [
                it for it in notes
                if it.token == last.token and it.event == "step" and it.at > since
            ]  # fmt: skip
            if last.world_size == size and {it.agent for it in took} == living:
                return min(it.at for it in took)
            time.sleep(0.2)
        return None

    def await_that(self, seconds: float) -> None:
        """Wait for as long as a fault, or the calm between two, lasts."""
        self._quit.wait(seconds)

    def kill(self, pid: int) -> None:
        """SIGKILL of any process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def counts(self) -> dict[str, float]:
        """What there is of threads, descriptors, sockets, processes and keys, all agents together.

        Each agent's own are counted as the most of any agent, whichever agents have died.
        """
        agents = [self.pid(address) for address in self.addresses]
        threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in agents]
        held = [
            [_target(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            for pid in agents
        ]
        self.descriptors = max(held, key=len)
        kinds = [Counter(it.partition(":")[0] for it in them) for them in held]
        found: dict[str, float] = {
            "threads of an agent": max(threads),
            "threads of all agents": sum(threads),
            "descriptors of an agent": max(map(len, held)),
            "sockets of an agent": max(it["socket"] for it in kinds),
            "sockets of all agents": sum(it["socket"] for it in kinds),
            "processes": len(self.processes()),
        }
        with closing(self.open()) as client:
            found["keys of the run"] = len(client.list(""))
        if self.server is not None:
            told = self.redis("INFO", "clients")
            found["connections to the server"] = int(told["connected_clients"])
        return found

    def megabytes(self) -> float:
        """Resident memory of the largest agent."""
        sizes = []
        for address in self.addresses:
            text = Path(f"/proc/{self.pid(address)}/status").read_text()
            sizes.append(int(text.partition("VmRSS:")[2].split()[0]) / 1024)
        return max(sizes)

    def redis(self, *command: str) -> Any:
        """The answer to a command of an administrator's."""
        import redis

        assert self.server is not None
        password = self.password_file.read_text()
        with redis.Redis(
            "127.0.0.1", self.server.nodes[0].port, password=password, ssl=True,
            ssl_cert_reqs="none",
        ) as client:  # fmt: skip
            return client.execute_command(*command)

    @property
    def node(self) -> servers.ServerProcess:
        """The server's process."""
        assert self.server is not None
        return self.server.nodes[0]

    def save_in_background(self) -> None:
        """As Redis does from time to time; waits until it is done, or has failed."""
        self.redis("BGSAVE")
        while int(self.redis("INFO", "persistence")["rdb_bgsave_in_progress"]):
            time.sleep(0.05)

    def log(self, address: str) -> Path:
        """The log of all agents that ran on this host."""
        return self.folder / f"{address}.log"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
