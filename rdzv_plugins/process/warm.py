"""Standbys of ``rdzv run --warm``: processes that have imported torch before they become workers.

Importing torch and a script's libraries takes most of the time from a loss to the next step. While
workers train, this node keeps one standby for each of them, a child process of the agent in a
session of its own, as torch starts workers. torch's `SubprocessHandler` then gets the standby's
`Popen` instead of a new process, so torch's logs, signals and exit codes work unchanged.

A standby takes over a worker only if its command and its environment are those of that worker, save
the variables that each round sets anew. Otherwise the worker starts cold, as without ``--warm``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import IO, Any, BinaryIO

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    get_subprocess_handler,
    subprocess_handler,
)
from torch.distributed.elastic.utils.api import macros

from rdzv_plugins.process import standby
from rdzv_plugins.process.worker import VARIABLE
from rdzv_plugins.settings.environment import inherited

log = logging.getLogger(__name__)

# New standbys start this much later than workers that tell no steps, whose imports are over then.
_SETTLE_SECONDS = 10.0
# How long a standby may take to start and to read its order, and to end after SIGKILL.
_ORDER_SECONDS = 5.0
_END_SECONDS = 1.0

_STDIN = "-", "/dev/stdin"

# torch has no parameter for the start of a worker's process. This name is private, and
# tests/handlers/test_warm.py fails when torch starts workers in another way.
_POPEN = subprocess_handler, "Popen"

# The variables that torch's agent and this package set for each worker and round. A script reads
# them when it makes its process groups. While modules are imported they are not set, because a
# standby does not know its rank.
_OF_A_ROUND = re.compile(
    rf"(GROUP_|ROLE_|LOCAL_)?RANK|(GROUP_|ROLE_|LOCAL_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    rf"|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|{VARIABLE}"
)


@dataclass(frozen=True)
class _Plan:
    """What a worker must have in common with its standby.

    Attributes:
        command: up to the interpreter's option -u; may begin with numactl.
        arguments: the script, or -m and a module, and what follows.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = field(compare=False)

    @staticmethod
    def of(command: Sequence[str], environment: Mapping[str, str]) -> _Plan | None:
        """The plan of a worker's command; None: no Python, or its script is stdin."""
        if "-u" not in command:
            return None
        cut = command.index("-u") + 1
        if command[cut] in _STDIN:
            return None
        lasting = {key: it for key, it in environment.items() if not _OF_A_ROUND.fullmatch(key)}
        return _Plan((*command[:cut],), lasting, (*command[cut:],))


class _Standby:
    """A process that waits to become a worker; raises `OSError` if it cannot start."""

    def __init__(self, plan: _Plan, modules: str, priority: str) -> None:
        self.plan = plan
        self._agent, theirs = socket.socketpair()
        self._agent.settimeout(_ORDER_SECONDS)
        channel = theirs.fileno()
        own = (standby.__file__, str(channel), priority, modules)
        try:
            with theirs, _memory() as output, _memory() as errors:
                self.process = subprocess.Popen(
                    [*plan.command, *own, *plan.arguments],
                    env=plan.environment,
                    # The worker's outputs are not known yet, and this agent may have none.
                    stdout=output,
                    stderr=errors,
                    pass_fds=[channel],
                    start_new_session=True,
                )
        except BaseException:
            self._agent.close()
            raise

    def become(self, arguments: Sequence[str], environment: Mapping[str, str], *files: Any) -> None:
        """Make the standby a worker; raises `OSError` if that fails."""
        outputs = [own if file is None else file.fileno() for own, file in enumerate(files, 1)]
        if any(it is None and not os.get_inheritable(own) for own, it in enumerate(files, 1)):
            # Another file of this agent may have the number of a closed output.
            raise BrokenPipeError("this agent has no outputs")
        new = {name: environment[name] for name in environment.keys() - self.plan.environment}
        order = json.dumps({"environment": new, "arguments": arguments}).encode()
        with self._agent:
            # A program other than this package's standby would not send READY.
            if self._agent.recv(1) != standby.READY:
                raise BrokenPipeError
            socket.send_fds(self._agent, [order[:1]], outputs)
            self._agent.sendall(order[1:])
            self._agent.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        self._agent.close()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)


def _memory() -> BinaryIO:
    return open(os.memfd_create("printed"), "wb")


class Standbys:
    """The standbys of one agent; for one thread.

    Args:
        modules: the names of modules that standbys import.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = ",".join(modules)
        self._plans: list[_Plan] = []
        self._waiting: list[_Standby] = []
        self._why_cold: list[str] = []
        self._due = math.inf

    @property
    def pids(self) -> list[int]:
        return [it.process.pid for it in self._waiting]

    def attend(self, spec: WorkerSpec) -> None:
        """Keep standbys from the next rendezvous on, also while this node waits for a place.

        A standby whose imports are not over when it is needed is still ahead of a new process.
        """
        if not isinstance(spec.entrypoint, str):
            return
        self._plans = []
        options = {"numa_options": spec.numa_options} if hasattr(spec, "numa_options") else {}
        # torch may put numactl before the command. If that fails, it fails again in
        # `_start_workers`, where torch's launcher closes the run.
        with suppress(Exception), in_the_place_of(*_POPEN, self._foresee):
            for rank in range(spec.local_world_size):
                arguments = (*macros.substitute([*spec.args], str(rank)),)
                get_subprocess_handler(spec.entrypoint, arguments, {}, "", "", rank, **options)
        join = spec.rdzv_handler.next_rendezvous

        def fill_and_join() -> Any:
            self._fill("normal")
            return join()

        spec.rdzv_handler.next_rendezvous = fill_and_join  # type: ignore[method-assign]

    def _foresee(self, args: Sequence[str], **_: object) -> None:
        if (plan := _Plan.of(args, inherited())) is not None:
            self._plans.append(plan)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While this context is open, let workers that torch starts take standbys."""
        self._plans, self._why_cold = [], []
        with in_the_place_of(*_POPEN, self._start):
            yield
        if why := self._why_cold:
            log.warning(
                "%s of %s workers start cold: %s", len(why), len(self._plans), "; ".join({*why})
            )
        self._due = time.monotonic() + _SETTLE_SECONDS

    def renew(self, trains: bool = False) -> None:
        """Start standbys for the next round, at low priority, once the workers have settled.

        Args:
            trains: whether every worker of this node has finished a step.
        """
        if time.monotonic() >= self._due or (trains and self._due < math.inf):
            self._due = math.inf
            self._fill("low")

    def close(self) -> None:
        self._plans = []
        self._fill("normal")

    def _start(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        plan = _Plan.of(args, env)
        if plan is not None and options == {"start_new_session": True}:
            self._plans.append(plan)
            if (found := self._find(plan)) is not None:
                try:
                    found.become(plan.arguments, env, stdout, stderr)
                    return found.process
                except OSError as error:
                    found.end()
                    self._why_cold.append(f"a standby could not take over ({error!r})")
        return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, **options)

    def _find(self, plan: _Plan) -> _Standby | None:
        for it in self._waiting:
            if it.plan == plan and it.process.poll() is None:
                self._waiting.remove(it)
                return it
        self._why_cold.append(self._explain(plan))
        return None

    def _explain(self, plan: _Plan) -> str:
        """Why no standby can become this worker."""
        for it in self._waiting:
            if it.plan == plan:
                if it.process.returncode == standby.USES_GPU:
                    return "a module of --preload initializes CUDA, which is for workers"
                return f"the standby ended with {it.process.returncode}"
        for it in self._waiting:
            if it.plan.command == plan.command:
                return f"since the standbys started, {_differing(it.plan, plan)} changed"
        return "no standby was started"

    def _fill(self, priority: str) -> None:
        """End standbys that no plan needs, and start a standby for each plan without one."""
        missing, kept = [*self._plans], []
        for it in self._waiting:
            if it.process.poll() is None and it.plan in missing:
                missing.remove(it.plan)
                kept.append(it)
            else:
                it.end()
        self._waiting = kept
        try:
            for plan in missing:
                self._waiting.append(_Standby(plan, self._modules, priority))
        except (OSError, AttributeError) as error:  # Some builds of Python lack os.memfd_create.
            log.warning("the next workers start cold, because no standby can start: %s", error)


def _differing(one: _Plan, other: _Plan) -> str:
    """The names of the variables in which two plans differ; values may be secret."""
    before, now = one.environment.items(), other.environment.items()
    return ", ".join(sorted({name for name, _ in before ^ now})[:3])


@contextmanager
def in_the_place_of(module: ModuleType, name: str, ours: Any) -> Iterator[None]:
    """While the context is open, ``name`` in the module means ``ours``."""
    names = vars(module)
    before, names[name] = names[name], ours
    try:
        yield
    finally:
        names[name] = before
