"""Kill and stop parts of a small job on one GPU under `rdzv run`, and time its restarts.

    pip install "rdzv-plugins[quorum,gpu]"
    python gpu_check.py

Three agents train together, and their workers share the GPU. NCCL allows it, because each agent has
another NCCL_HOSTID: NCCL takes them for hosts, and connects them over TCP. Without a GPU the
workers use gloo. The result is a table in Markdown.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

# Addresses of this host that no other job on it has.
NET = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
HOSTS = tuple(f"{NET}.{number}" for number in (1, 2, 3))
# torch ends a worker whose collective hangs for this many seconds.
TIMEOUT = 30
PATIENCE = 240
# What is done to which process of the first host.
FAULTS = {
    "worker": ("kill -9 of a worker", signal.SIGKILL),
    "agent": ("kill -9 of an agent, and so of its worker", signal.SIGKILL),
    "stop": ("SIGSTOP of a worker", signal.SIGSTOP),
}


def train(folder: Path) -> None:
    """What a worker does; it notes the end of its first step in the file `steps`."""
    import torch
    import torch.distributed as dist

    import rdzv_plugins

    cuda, checkpoint = torch.cuda.is_available(), folder / "checkpoint.pt"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=TIMEOUT))
    saved = torch.load(checkpoint, map_location=device) if checkpoint.exists() else {"step": 0}
    model = torch.nn.Linear(256, 256).to(device)
    model.load_state_dict(saved.get("model", model.state_dict()))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001)
    first = saved["step"] + 1
    for step in range(first, 1_000_000):
        inputs = torch.randn(64, 256, device=device)
        (parallel(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        if step == first:
            note = time.monotonic(), os.environ["NCCL_HOSTID"], os.getpid(), dist.get_world_size()
            with (folder / "steps").open("a") as steps:
                steps.write(" ".join(map(str, note)) + "\n")
        asked = rdzv_plugins.step(step)
        if asked or step % 20 == 0:
            if dist.get_rank() == 0:
                part = checkpoint.with_suffix(".part")
                torch.save({"step": step, "model": model.state_dict()}, part)
                part.replace(checkpoint)
            rdzv_plugins.saved(step)
        time.sleep(0.05)  # stands for more work


class Job:
    """The agents on this host.

    Args:
        mode: "cold", "warm", or a variable of the environment, such as "NAME=value".
    """

    def __init__(self, folder: Path, mode: str, conf: str) -> None:
        self._folder = folder
        self._warm = mode == "warm"
        ours = ("PET_", "RDZV_", "TORCHELASTIC_")
        self._environ = {it: value for it, value in os.environ.items() if not it.startswith(ours)}
        # All that the agents leave behind is removed with the folder.
        self._environ |= {"RDZV_PLUGINS_SECRET": secrets.token_hex(16), "TMPDIR": str(folder)}
        for library in ("GLOO", "NCCL"):
            self._environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        if "=" in mode:
            self._environ.update([mode.split("=", 1)])
        self._command = [
            sys.executable, "-m", "rdzv_plugins.cli", "run", *["--warm"] * self._warm,
            "--rdzv-backend=quorum", f"--rdzv-endpoint={','.join(HOSTS)}", "--rdzv-id=gpu-check",
            f"--rdzv-conf=last_call_timeout=0.2,quarantine_after=0{conf}",
            "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=100",
        ]  # fmt: skip
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        # The workers that trained before the last fault.
        self._old: set[int] = set()

    def start(self, host: str) -> None:
        script = [f"--local-addr={host}", __file__, "--train", str(self._folder)]
        with (self._folder / f"{host}.log").open("ab") as log:
            self.agents[host] = subprocess.Popen(
                [*self._command, *script], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**self._environ, "NCCL_HOSTID": host},
            )  # fmt: skip

    def log(self, host: str) -> str:
        return (self._folder / f"{host}.log").read_text(errors="replace")

    def workers(self) -> dict[str, tuple[int, float, int]]:
        """The newest worker of each host: its process, when it took its first step, its world."""
        found: dict[str, tuple[int, float, int]] = {}
        file = self._folder / "steps"
        for line in file.read_text().splitlines() if file.exists() else []:
            at, host, pid, size = line.split()
            found[host] = int(pid), float(at), int(size)
        return found

    def await_steps(self) -> dict[str, tuple[int, float]]:
        """Wait for a step of all agents in one world, by none of the old workers."""
        deadline, size = time.monotonic() + PATIENCE, len(self.agents)
        while time.monotonic() < deadline and all(it.poll() is None for it in self.agents.values()):
            found = {host: it for host, it in self.workers().items() if host in self.agents}
            if [it[2] for it in found.values() if it[0] not in self._old] == [size] * size:
                return {host: (pid, at) for host, (pid, at, _) in found.items()}
            time.sleep(0.02)
        logs = "\n".join(f"--- {host}\n{self.log(host)[-3000:]}" for host in self.agents)
        raise SystemExit(f"{size} agents did not come to train together\n{logs}")

    def suffer(self, fault: str) -> str:
        """Do this to the first host, which has rank 0; returns the end of a row of the table."""
        for host in HOSTS:
            if host not in self.agents:
                self.start(host)
        before = self.await_steps()
        # In this time neighbours have their links, and standbys have imported torch.
        time.sleep(20 if self._warm else 3)
        label, number = FAULTS[fault]
        shown = {host: len(self.log(host)) for host in HOSTS}
        self._old = {pid for pid, _ in before.values()}
        began, victim = time.monotonic(), before[HOSTS[0]][0]
        if fault == "agent":
            agent = self.agents.pop(HOSTS[0])
            agent.kill()
            agent.wait()
        else:
            os.kill(victim, number)
        after = self.await_steps()
        taken = max(at for _, at in after.values()) - began
        hung = sum("get SIGKILL" in self.log(host)[shown[host] :] for host in HOSTS[1:])
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid, _ in after.values()]
        warm = sum(b"standby" in it for it in commands)
        return f"{label} | {taken:.1f} s | {hung} of 2 | {warm} of {len(after)}"

    def end(self) -> None:
        # Workers end with their agent under `rdzv run`, also one that is stopped.
        for agent in self.agents.values():
            with suppress(ProcessLookupError):
                agent.kill()
            agent.wait()


def check(modes: list[str], faults: list[str], conf: str) -> None:
    import torch

    if cuda := torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        what = f"{torch.cuda.get_device_name(0)}, NCCL {version}, checks=gpu passed"
        conf += ",checks=gpu"
    else:
        what = "no GPU, gloo"
    given = [f"{it}={os.environ[it]}" for it in sorted(os.environ) if it.startswith("TORCH_NCCL")]
    rows = []
    for mode in modes or ["cold", "warm", *["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"] * cuda]:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            job = Job(Path(folder), mode, conf)
            try:
                for fault in faults or FAULTS:
                    rows.append(f"| {mode} | {job.suffer(fault)} |")
                    print(rows[-1], file=sys.stderr, flush=True)
            finally:
                job.end()
    print(f"torch {torch.__version__}, {what}; set: {', '.join(given) or 'no TORCH_NCCL_...'}\n")
    print("| start | fault | next step of all | survivors that hung | warm workers |")
    print("| --- | --- | --- | --- | --- |", *rows, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", help="cold, warm, or a variable: NAME=value")
    parser.add_argument("--faults", nargs="+", choices=FAULTS)
    parser.add_argument("--rdzv-conf", default="", help="more options of the agents")
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.train)
    else:
        check(asked.modes, asked.faults, f",{asked.rdzv_conf}" if asked.rdzv_conf else "")
