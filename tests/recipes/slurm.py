"""A real Slurm cluster on this host: munged, slurmctld and a slurmd a node."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rdzv_plugins.testing.harness import until
from tests.recipes.pages import descendants, parent

_SIOCSIFADDR = 0x8916

_CONF = """
ClusterName=recipes
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmdTimeout=10
SchedulerParameters=bf_interval=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[7001-{last_port}] CPUs=1
PartitionName=train Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Starts the cluster and waits until all its nodes are idle.

    Debian's packages lie unpacked in $RDZV_RECIPES/slurm.
    """

    def __init__(self, folder: Path, host: str, *, nodes: int) -> None:
        root = Path(os.environ["RDZV_RECIPES"]) / "slurm" / "usr"
        libraries = next(root.glob("lib/*/slurm-wlm")).parent
        plugins = libraries / "slurm-wlm"
        self._folder = folder
        self._root = root
        self._processes: list[subprocess.Popen[bytes]] = []
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = {
            **os.environ,
            "LD_LIBRARY_PATH": f"{libraries}:{plugins}",
            "PATH": f"{Path(sys.executable).parent}:{root}/bin:{root}/sbin:{os.environ['PATH']}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            _CONF.format(
                folder=folder, host=host, plugins=plugins,
                nodes=nodes, last_port=7000 + nodes,
            )
        )  # fmt: skip
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        # Slurm asks with AI_ADDRCONFIG, which finds no address where there is 127.0.0.1 only.
        add_address("127.0.0.2", 1)
        # --force: also as root, and in a folder that others may write to.
        files = ("socket", "key", "log", "pid", "seed")
        names = [f"--{it}-file={folder}/munge.{it}" for it in files if it != "socket"]
        self._start("munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *names)
        self._await((folder / "munge.socket").exists)
        self._start("slurmctld-wlm", "-D", "-i")
        for number in range(1, nodes + 1):
            self.start_node(f"node{number}")
        self._await(lambda: self.ask("sinfo", "--noheader", "--format=%D %t") == f"{nodes} idle")

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        asked = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return (asked.stdout + asked.stderr).strip()

    def start_node(self, name: str) -> None:
        stepd = self._root / "sbin" / "slurmstepd-wlm"
        self._slurmd[name] = self._start("slurmd-wlm", "-D", "-N", name, "-d", str(stepd))

    def kill_node(self, name: str) -> None:
        """As its host dies: slurmd, and all that it has started, at once."""
        slurmd = self._slurmd[name].pid
        dying = {slurmd, *descendants(slurmd)}
        # What slurmd starts leaves its process tree: a slurmstepd, the parent of a step's tasks.
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"SLURMD_NODENAME={name}\0".encode() in (folder / "environ").read_bytes():
                    dying.add(int(folder.name))
                    step = parent(int(folder.name))
                    if Path(f"/proc/{step}/comm").read_text().startswith("slurmstepd"):
                        dying.add(step)
        # Stopped first, none reacts to another's death: srun's child ends all tasks when srun dies.
        # The kernel wakes stopped children of the dead, so that children die first.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in sorted(dying, reverse=True):
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    def close(self) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        log = self._folder / f"{command[0]}-{len(self._processes)}.out"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=self.environ, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _await(self, condition: object) -> None:
        assert callable(condition)
        if not until(condition, 30):
            logs = [
                f"--- {it.name} ---\n{it.read_text()[-2000:]}" for it in self._folder.glob("*.out")
            ]
            self.close()
            raise TimeoutError("no Slurm cluster\n" + "\n".join(logs))


def add_address(address: str, number: int) -> None:
    """Give this host one more address, on the interface lo:``number``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        request = struct.pack(
            "16sHH4s8x", b"lo:%d" % number, socket.AF_INET, 0, socket.inet_aton(address)
        )
        fcntl.ioctl(line, _SIOCSIFADDR, request)
