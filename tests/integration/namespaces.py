"""Namespaces of a test's own: a network in which every port is free, files that only it sees."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.forked import Forked, is_forkable
from tests.integration.stores import absent

__all__ = ["as_pid_1", "bring_up_loopback", "in_namespaces", "play"]

_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def in_namespaces(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in a mount and a network namespace; skips where it may not."""
    return [*_unshare("--mount", "--net"), sys.executable, "-m", module, *arguments]


def play(module: str, *arguments: str, seconds: float = 120) -> Any:
    """Run a module in a mount and a network namespace; it prints what it saw as JSON."""
    command = in_namespaces(module, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process: Forked | subprocess.Popen[bytes]
        if is_forkable(command, os.environ):
            process = Forked(command, os.environ, log)
        else:
            with log.open("w") as file:
                process = subprocess.Popen(command, stdout=file)
        try:
            status = process.wait(seconds)
        finally:
            process.send_signal(signal.SIGKILL)
        shown = log.read_text()
    assert status == 0, shown
    # C++ may have written a line after it.
    return json.loads(next(it for it in reversed(shown.splitlines()) if it.startswith("{")))


def as_pid_1(*command: str) -> list[str]:
    """The command that runs this one as PID 1, as a container does; skips where it may not."""
    return [*_unshare("--pid", "--fork", "--kill-child", "--mount-proc"), *command]


def _unshare(*namespaces: str) -> list[str]:
    unshare = ["unshare", *namespaces]
    if os.geteuid() != 0:
        unshare.insert(1, "--map-root-user")
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        absent(f"no namespaces of our own: {error}")
    return unshare


def bring_up_loopback() -> None:
    """The loopback of a new network namespace is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        up = struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(line, _SIOCSIFFLAGS, up)
