"""A check that is a command: its status tells whether the node is fit, its last line why not."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from rdzv_plugins.health.checks import CannotRunError, last_line
from rdzv_plugins.kv import ExhaustedError
from rdzv_plugins.settings.environment import inherited

# How often to look whether the command was given up.
_LOOK_SECONDS = 0.05
# How many bytes of its output are kept: the last ones, because the reason is at the end.
_KEPT = 16384
# Stop reading then: a process that the command left behind may write forever.
_MOST_READS_AFTER_THE_END = 64


def arguments_of(command: str) -> list[str]:
    """The words of ``command`` as a shell would split it; raises `ValueError`."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"option 'check_command': '{command}' is no command ({error})") from None
    if not arguments:
        raise ValueError(f"option 'check_command': '{command}' names no program")
    return arguments


class CommandCheck:
    """Starts a program, without a shell, in a process group of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.name = Path(arguments[0]).name
        self._arguments = arguments

    def run(self, given_up: threading.Event) -> str | None:
        try:
            process = subprocess.Popen(
                self._arguments,
                env=inherited(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BlockingIOError as error:
            # A limit on processes or threads, perhaps the container's, lets no process start.
            raise CannotRunError(f"it cannot be started ({error})") from ExhaustedError(str(error))
        except (OSError, ValueError) as error:
            raise CannotRunError(f"it cannot be started ({error})") from error
        with process:  # Closes the pipe and, in the end, waits for the process.
            output = _read(process, given_up)
            if process.returncode is None:
                # Kill its children too. No other process has the pid, which is not reaped yet.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return None
        return last_line(output.decode(errors="replace")) or _what_became_of(process.returncode)


def _read(process: subprocess.Popen[bytes], given_up: threading.Event) -> bytes:
    """The last `_KEPT` bytes that the process printed before it ended or was given up."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    output, is_open = b"", True
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while process.poll() is None and not given_up.is_set():
        if not is_open:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
        elif poll.poll(_LOOK_SECONDS * 1000):
            chunk = os.read(pipe, _KEPT)
            is_open, output = bool(chunk), (output + chunk)[-_KEPT:]
    with suppress(BlockingIOError):
        for _ in range(_MOST_READS_AFTER_THE_END):
            if not (chunk := os.read(pipe, _KEPT)):
                break
            output = (output + chunk)[-_KEPT:]
    return output


def _what_became_of(status: int) -> str:
    if status > 0:
        return f"exited with {status}, and printed nothing"
    names = {it.value: it.name for it in signal.Signals}
    return f"was ended by {names.get(-status, f'signal {-status}')}, and printed nothing"
