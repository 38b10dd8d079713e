"""Bare SSH: three hosts with a real sshd; one is killed, and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rdzv_plugins.testing.harness import until
from tests.integration.hosts import bring_up_loopback
from tests.integration.pages import seen
from tests.recipes.pages import Node, block, descendants, kill, shorten, take

_STEP = re.compile(r"step (\d+) in a world of (\d+), loss")

_SERVER = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
SetEnv PATH={path}
PidFile none
StrictModes no
UsePAM no
"""

_CLIENT = """
IdentityFile {folder}/key
StrictHostKeyChecking accept-new
UserKnownHostsFile {folder}/known
LogLevel ERROR
"""

HOSTS = {f"node{number}": f"127.0.0.{number}" for number in (1, 2, 3)}


@pytest.fixture
def hosts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The sshd of each host.

    Debian's packages lie unpacked in $RDZV_RECIPES/ssh. What sshd and ssh read elsewhere, they read
    in a mount namespace of our own.
    """
    bring_up_loopback()
    folder = tmp_path_factory.mktemp("ssh")
    root = Path(os.environ["RDZV_RECIPES"]) / "ssh"
    libraries = next((root / "usr" / "lib").glob("*-linux-gnu"), root)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    names = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    lines = {"/etc/hosts": names, "/etc/passwd": "sshd:x:65533:65534::/run/sshd:/bin/false\n"}
    for file, added in lines.items():
        ours = folder / Path(file).name
        ours.write_text(Path(file).read_text() + added)
        subprocess.run(["mount", "--bind", ours, file], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/sshd").mkdir(mode=0o755)
    keygen = f"{root}/usr/bin/ssh-keygen"
    subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "client").write_text(_CLIENT.format(folder=folder))
    # The script says ssh, as it does where ~/.ssh/config is the user's.
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {root}/usr/bin/ssh -F {folder}/client "$@"\n')
    ssh.chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    started = {}
    for name, address in HOSTS.items():
        config = folder / f"{name}.conf"
        config.write_text(_SERVER.format(folder=folder, address=address, path=path))
        command = [f"{root}/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
        with (folder / f"{name}.log").open("wb") as log:
            started[name] = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
    for name in HOSTS:
        assert until(partial(answers, ssh, name), 20), (folder / f"{name}.log").read_text()
    yield started
    for sshd in started.values():
        kill(sshd.pid)
        sshd.wait()
    for place in ("/run", *lines):
        subprocess.run(["umount", place], check=True)


def answers(ssh: Path, host: str) -> bool:
    return subprocess.run([ssh, host, "true"], check=False, timeout=20).returncode == 0


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
@pytest.mark.parametrize("store", ["node1,node2,node3", "redis://"])
def test_a_host_is_killed_and_started_again(
    hosts: dict[str, subprocess.Popen[bytes]], store: str
) -> None:
    take("ssh", "train.py", "ssh/launch", "ssh/hosts")
    shorten()
    if "," in store:
        # Each host is an address of this machine; else all would be the first one.
        script = Path("launch")
        own = "exec rdzv run --local-addr=$host"
        script.write_text(script.read_text().replace("exec rdzv run", own))
    line = block("ssh", f"./launch {store}")
    launched = Node(line)
    again: Node | None = None

    def reached(size: int, after: int = 0) -> bool:
        return any(step > after and its == size for step, its in steps())

    try:
        seen(lambda: reached(3), launched)
        for process in descendants(hosts["node2"].pid):
            kill(process)
        seen(lambda: reached(2), launched)
        alone = max(step for step, _ in steps())
        endpoint = line.split()[1]
        again = Node(block("ssh", "HOSTS=node2").replace("node1,node2,node3", endpoint))
        seen(lambda: reached(3, after=alone), launched)
        assert launched.process.wait(120) == 0
        assert again.process.wait(120) == 0
        assert max(step for step, _ in steps()) == 600
    finally:
        launched.end()
        if again:
            again.end()


def steps() -> list[tuple[int, int]]:
    """The lines of all hosts' logs: step and world size."""
    logs = [Path(f"{name}.log") for name in HOSTS]
    text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
    return [(int(step), int(size)) for step, size in _STEP.findall(text)]
