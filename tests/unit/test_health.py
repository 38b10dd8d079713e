"""A node's own checks: real processes, real files and sockets; only the GPUs are played."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv_plugins.cli.check import plan
from rdzv_plugins.cli.check.job import Job
from rdzv_plugins.cli.options import Access
from rdzv_plugins.health import Gate, disk, gate_of, network, refuse_unknown_checks
from rdzv_plugins.health.checks import CallCheck, CannotRunError, last_line
from rdzv_plugins.health.command import CommandCheck
from rdzv_plugins.health.gpu import GpuCheck
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until

SECONDS = 20.0


class Script:
    """Writes a script and makes a gate of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []

    def gate(self, text: str, seconds: float = SECONDS, fails_open: bool = False) -> Gate:
        path = self.folder / "check.sh"
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
        path.chmod(stat.S_IRWXU)
        return self.gate_of([str(path), "one", "two"], seconds, fails_open)

    def gate_of(self, arguments: list[str], seconds: float, fails_open: bool = False) -> Gate:
        return Gate([CommandCheck(arguments)], seconds, fails_open, self.warnings.append)

    def pid(self, name: str) -> int:
        """That a script has written into this file of the folder."""
        path = self.folder / name
        assert until(lambda: path.exists() and path.read_text().endswith("\n"), SECONDS)
        return int(path.read_text())


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a child of nobody's may stay as a zombie for a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class TestACommand:
    def test_status_0_is_fit_whatever_it_prints(self, script: Script) -> None:
        assert script.gate("echo all is lost; exit 0").check() is None

    def test_its_arguments_are_a_shells_words_without_a_shell(self, tmp_path: Path) -> None:
        code = "import sys; sys.exit(' '.join(sys.argv[1:]))"
        command = f"{sys.executable} -c {code!r} 'a b' $HOME ';' ls"
        gate = gate_of(Settings(check_command=command), lambda: None, print)
        assert gate is not None
        assert gate.check() == f"{Path(sys.executable).name}: a b $HOME ; ls"

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("echo first; echo ECC errors on GPU 3; exit 7", "ECC errors on GPU 3"),
            ("echo out; echo err >&2; exit 1", "err"),
            ("echo reason; echo; echo '   '; exit 1", "reason"),
            ("printf 'no line end'; exit 1", "no line end"),
            ("exit 3", "exited with 3, and printed nothing"),
            ("kill -9 $$", "was ended by SIGKILL, and printed nothing"),
            ("echo GPU 3 hangs; kill -15 $$", "GPU 3 hangs"),
            (r"printf 'a\033[31mb\033[0m\007\tc\0d\r\n'; exit 1", "ab c d"),
            (r"printf '\377\376 bad bytes\n'; exit 1", "\ufffd\ufffd bad bytes"),
            (r"printf 'gpu\342\200\256tab\n'; exit 1", "gpu tab"),
        ],
    )
    def test_else_the_last_line_is_the_reason(self, script: Script, text: str, reason: str) -> None:
        assert script.gate(text).check() == f"check.sh: {reason}"

    def test_a_long_line_is_cut(self, script: Script) -> None:
        reason = script.gate("head -c 100000 /dev/zero | tr '\\0' x; exit 1").check()
        assert reason is not None
        assert reason.endswith("xxx…")
        assert len(reason) == len("check.sh: ") + 200

    def test_much_output_neither_blocks_nor_fills_the_memory(self, script: Script) -> None:
        text = "head -c 30000000 /dev/zero; echo; echo the end; exit 1"
        assert script.gate(text).check() == "check.sh: the end"

    def test_it_reads_nothing(self, script: Script) -> None:
        assert script.gate("cat; exit 0").check() is None

    def test_it_leaves_no_zombie(self, script: Script) -> None:
        assert script.gate(f"echo $$ > {script.folder}/pid; exit 1").check()
        assert not is_there(script.pid("pid"))

    def test_a_process_that_it_leaves_behind_is_not_waited_for(self, script: Script) -> None:
        # It holds the pipe open.
        began = time.monotonic()
        gate = script.gate(f"sleep 30 & echo $! > {script.folder}/pid; echo gone; exit 1")
        try:
            assert gate.check() == "check.sh: gone"
            assert time.monotonic() - began < 15
        finally:
            os.kill(script.pid("pid"), signal.SIGKILL)


class TestACommandThatCannotRun:
    def test_a_missing_program(self, script: Script) -> None:
        reason = script.gate_of(["/no/such/program"], SECONDS).check()
        assert reason is not None
        assert reason.startswith("program: it cannot be started ([Errno 2] No such file")

    def test_a_file_that_is_no_program(self, script: Script) -> None:
        path = script.folder / "text"
        path.write_text("no program")
        reason = script.gate_of([str(path)], SECONDS).check()
        assert reason is not None
        assert "Permission denied" in reason

    def test_a_command_that_hangs_is_ended_with_all_its_children(self, script: Script) -> None:
        gate = script.gate(
            f"""
            trap '' TERM
            sleep 1000 & echo $! > {script.folder}/child
            (sleep 1000 & echo $! > {script.folder}/grandchild; wait) &
            echo $$ > {script.folder}/pid
            echo busy
            wait; sleep 1000
            """,
            seconds=5.0,
        )
        assert gate.check() == "check.sh: it gave no answer within 5 s"
        assert until(lambda: not is_there(script.pid("pid")), SECONDS)
        for name in ("child", "grandchild"):
            pid = script.pid(name)
            assert until(partial(is_gone, pid), SECONDS), name

    def test_it_counts_as_passed_where_the_gate_fails_open(self, script: Script) -> None:
        gate = script.gate("sleep 1000", seconds=0.2, fails_open=True)
        assert gate.check() is None
        assert script.warnings == [
            "the check 'check.sh' cannot run, and counts as passed (check_fails_open): it gave no "
            "answer within 0.2 s"
        ]

    def test_a_failing_check_does_not_pass_where_the_gate_fails_open(self, script: Script) -> None:
        assert script.gate("echo bad; exit 1", fails_open=True).check() == "check.sh: bad"

    @pytest.mark.parametrize("ends_the_wait", [True, False])
    def test_a_signal_in_the_caller_ends_it(self, script: Script, ends_the_wait: bool) -> None:
        """Also one that another thread gets: like one that comes just before, it ends no wait."""

        class Signal(BaseException):
            pass

        def handle(*_: object) -> None:
            raise Signal

        gate = script.gate(
            f"trap '' TERM; echo $$ > {script.folder}/pid; while :; do sleep 1; done"
        )
        pids: list[int] = []

        def interrupt() -> None:
            pids.append(script.pid("pid"))
            got_by = threading.main_thread() if ends_the_wait else threading.current_thread()
            assert got_by.ident is not None
            signal.pthread_kill(got_by.ident, signal.SIGUSR1)

        was = signal.signal(signal.SIGUSR1, handle)
        thread = threading.Thread(target=interrupt)
        began = time.monotonic()
        try:
            thread.start()
            with pytest.raises(Signal):
                gate.check()
        finally:
            signal.signal(signal.SIGUSR1, was)
            thread.join()
        assert time.monotonic() - began < SECONDS / 2
        # On a busy machine the dead take a moment to be gone.
        assert until(lambda: not is_there(pids[0]), SECONDS)
        assert not [it.name for it in threading.enumerate() if it.name.startswith("rdzv-check")]

    def test_another_thread_can_end_it_for_good(self, script: Script) -> None:
        gate = script.gate(f"echo $$ > {script.folder}/pid; sleep 1000")
        answers: list[str | None] = []
        thread = threading.Thread(target=lambda: answers.append(gate.check()))
        thread.start()
        pid = script.pid("pid")
        gate.close()
        assert not is_there(pid)
        thread.join(SECONDS)
        assert answers == ["check.sh: was ended by SIGKILL, and printed nothing"]
        (script.folder / "pid").unlink()
        assert gate.check() is None
        assert not (script.folder / "pid").exists()


def _itself(call: Callable[[], object]) -> Callable[[], object]:
    return call


def of_calls(seconds: float, *calls: Callable[[], object]) -> Gate:
    checks = [CallCheck(it.__name__, partial(_itself, it)) for it in calls]
    return Gate(checks, seconds, False, print)


def fit() -> None:
    return None


class TestACallable:
    def test_none_is_fit(self) -> None:
        assert of_calls(SECONDS, fit, fit).check() is None

    def test_the_first_reason_counts_and_the_rest_does_not_run(self) -> None:
        def bad() -> str:
            return "first line\nGPU 3 is \x1b[31mhot\x1b[0m\n"

        def never() -> str:
            raise AssertionError

        assert of_calls(SECONDS, fit, bad, never).check() == "bad: GPU 3 is hot"

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [("", "it fails, and gives no reason"), (" \n", "it fails, and gives no reason"),
         (True, "it returned bool, which is neither None nor a reason"),
         (0, "it returned int, which is neither None nor a reason")],
    )  # fmt: skip
    def test_anything_else_is_no_pass(self, answer: object, reason: str) -> None:
        def odd() -> object:
            return answer

        assert of_calls(SECONDS, odd).check() == f"odd: {reason}"

    @pytest.mark.parametrize("error", [ValueError("bad\nworse"), SystemExit("worse")])
    def test_an_exception_is_no_pass(self, error: BaseException) -> None:
        def broken() -> None:
            raise error

        said = f"broken: it raised {type(error).__name__}: worse"
        assert of_calls(SECONDS, broken).check() == said

    def test_a_callable_that_hangs_is_not_started_once_more(self) -> None:
        released, calls = threading.Event(), []

        def hangs() -> None:
            calls.append(1)
            released.wait()

        gate = of_calls(0.1, hangs)
        assert gate.check() == "hangs: it gave no answer within 0.1 s"
        assert gate.check() == "hangs: it still hangs, and is not started once more"
        assert len(calls) == 1
        released.set()
        assert until(lambda: gate.check() is None, SECONDS)


class TestTheOptions:
    def test_without_them_there_is_no_gate(self) -> None:
        assert gate_of(Settings(), lambda: None, print) is None

    def test_the_command_comes_after_the_named_checks(self, tmp_path: Path) -> None:
        settings = Settings(checks="network+disk", check_command="false", check_disk=str(tmp_path))
        gate = gate_of(settings, lambda: None, print)
        assert gate is not None
        assert [it.name for it in gate._checks] == ["network", "disk", "false"]

    @pytest.mark.parametrize("text", ["gpu,disk", "gpu+disk", " gpu, disk "])
    def test_a_comma_or_a_plus_separates(self, text: str) -> None:
        assert Settings(checks=text).check_names == ["gpu", "disk"]

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (
                {"checks": "disc"},
                r"option 'checks': there is no check 'disc'; did you mean 'disk'\?",
            ),
            ({"check_command": "a 'b"}, r"'check_command': 'a 'b' is no command \(No closing"),
            ({"check_command": "  "}, r"'check_command': '  ' names no program"),
        ],
    )
    def test_what_can_never_pass_is_refused(self, options: dict[str, Any], why: str) -> None:
        with pytest.raises(ValueError, match=why):
            refuse_unknown_checks(Settings(**options))

    def test_an_unknown_check_cannot_run_where_the_gate_fails_open(self) -> None:
        warnings: list[str] = []
        settings = Settings(checks="disc", check_fails_open=True)
        refuse_unknown_checks(settings)
        gate = gate_of(settings, lambda: None, warnings.append)
        assert gate is not None
        assert gate.check() is None
        assert "there is no check 'disc'" in warnings[0]

    def test_an_entry_point_of_another_package_is_a_check(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "rack_door.py").write_text("def is_open(): return 'the door is open'\n")
        info = tmp_path / "rack_door-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rack-door\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[rdzv_plugins.health]\ndoor = rack_door:is_open\nnone = rack_door:missing\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        settings = Settings(checks="door")
        refuse_unknown_checks(settings)
        gate = gate_of(settings, lambda: None, print)
        assert gate is not None
        assert gate.check() == "door: the door is open"
        gate = gate_of(Settings(checks="none"), lambda: None, print)
        assert gate is not None
        reason = gate.check()
        assert reason is not None
        assert reason.startswith("none: it raised AttributeError: ")


class TestDisk:
    def test_a_directory_with_space_is_fit_and_nothing_stays(self, tmp_path: Path) -> None:
        assert disk.check(str(tmp_path), 0.0) is None
        assert [*tmp_path.iterdir()] == []

    def test_too_little_space(self, tmp_path: Path) -> None:
        reason = disk.check(str(tmp_path), 1e8)
        assert reason is not None
        assert reason.startswith(f"{tmp_path} has ")
        assert reason.endswith(" GiB free of the 1e+08 GiB that it needs")

    def test_a_missing_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
        reason = f"{tmp_path}/none cannot be written: No such file or directory"
        assert disk.check(None, 0.0) == reason

    def test_a_directory_that_cannot_be_written(self) -> None:
        # Also for root; that a file system is read-only shows in the same way.
        reason = disk.check("/proc", 0.0)
        assert reason is not None
        assert reason.startswith("/proc ")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


class TestNetwork:
    def test_a_node_that_knows_no_other_node_passes(self) -> None:
        assert network.check(lambda: None, SECONDS) is None

    def test_a_node_that_is_answered_passes(self, listener: socket.socket) -> None:
        assert network.check(lambda: listener.getsockname(), SECONDS) is None

    def test_a_node_that_is_refused_passes(self, listener: socket.socket) -> None:
        """The host is there; its TCPStore may have gone with the round."""
        place = listener.getsockname()
        listener.close()
        assert network.check(lambda: place, SECONDS) is None

    def test_a_node_that_reaches_nobody_fails(self) -> None:
        place = ("no-such-host.invalid", 1)
        reason = network.check(lambda: place, 0.2)
        assert reason is not None
        assert reason.startswith(
            "rank 0 of the last round, no-such-host.invalid:1, does not answer: "
        )

    def test_a_rank_0_that_is_gone_from_the_run_is_not_held_against_it(self) -> None:
        places = [("no-such-host.invalid", 1), None]
        assert network.check(lambda: places.pop(0), SECONDS) is None


class Nvml:
    """As much of pynvml as the check uses, with GPUs that can be broken.

    Attributes:
        gpus: what each GPU answers; an exception is raised.
        open: how many users hold it open.
    """

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, gpus: int) -> None:
        self.gpus: list[dict[str, Any]] = [
            {"memory": 80, "ecc": 0, "links": [1] * 4} for _ in range(gpus)
        ]
        self.driver: Exception | None = None
        self.xids: list[tuple[int, int]] = []
        self.hears = False
        self.without_events = False
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.driver is not None:
            raise self.driver
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1
        assert self.open >= 0

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._answer(index, "memory")
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=self._answer(handle, "memory"))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0)
        answer = self._answer(handle, "ecc")
        assert isinstance(answer, int)
        return answer

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        links = self.gpus[handle]["links"]
        if link >= len(links):
            raise self.NVMLError("Not Supported")
        state = links[link]
        assert isinstance(state, int)
        return state

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        if self.without_events:
            raise self.NVMLError("Not Supported")
        return object()

    def nvmlEventSetFree(self, events: object) -> None:  # noqa: N802
        assert events is not None
        self.hears = False

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:  # noqa: N802
        assert self.open
        self.hears = True

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> Any:  # noqa: N802
        assert self.hears
        if not self.xids:
            raise self.NVMLError("Timeout")
        device, number = self.xids.pop(0)
        return SimpleNamespace(device=device, eventData=number)

    def _answer(self, index: int, what: str) -> object:
        answer = self.gpus[index][what]
        if isinstance(answer, Exception):
            raise answer
        return answer


class TestGpu:
    def test_gpus_that_answer_are_fit(self) -> None:
        nvml = Nvml(8)
        check = GpuCheck(nvml)
        assert [check(), check()] == [None, None]
        assert nvml.open == 1, "for the XID errors until the next check"

    def test_gpus_without_ecc_or_nvlink_are_fit(self) -> None:
        nvml = Nvml(2)
        for gpu in nvml.gpus:
            gpu.update(ecc=nvml.NVMLError("Not Supported"), links=[])
        assert GpuCheck(nvml)() is None

    def test_gpus_whose_driver_tells_no_errors_are_fit(self) -> None:
        nvml = Nvml(2)
        nvml.without_events = True
        check = GpuCheck(nvml)
        assert [check(), check()] == [None, None]
        assert nvml.open == 0

    @pytest.mark.parametrize(
        ("broken", "reason"),
        [
            ({"memory": Nvml.NVMLError("GPU is lost")}, "GPU 1 does not answer: GPU is lost"),
            ({"memory": 0}, "GPU 1 has no memory"),
            ({"ecc": 1}, "GPU 1: 1 uncorrected ECC error"),
            ({"ecc": 2}, "GPU 1: 2 uncorrected ECC errors"),
            ({"links": [1, 1, 0, 1]}, "GPU 1: 3 NVLinks are active, others have 4"),
            ({"links": []}, "GPU 1: 0 NVLinks are active, others have 4"),
        ],
    )
    def test_a_broken_gpu(self, broken: dict[str, Any], reason: str) -> None:
        nvml = Nvml(4)
        nvml.gpus[1].update(broken)
        assert GpuCheck(nvml)() == reason
        assert nvml.open == 0, "a GPU that is held open cannot be reset"

    def test_no_gpu(self) -> None:
        assert GpuCheck(Nvml(0))() == "there is no GPU"

    def test_no_driver(self) -> None:
        nvml = Nvml(1)
        nvml.driver = nvml.NVMLError("Driver Not Loaded")
        assert GpuCheck(nvml)() == "NVML: Driver Not Loaded"

    def test_an_error_of_the_hardware_since_the_last_check_stays(self) -> None:
        nvml = Nvml(2)
        check = GpuCheck(nvml)
        assert check() is None
        nvml.xids = [(0, 13), (1, 79), (0, 45)]
        reason = "GPU 1: XID 79, it has fallen off the bus"
        assert [check(), check()] == [reason, reason]
        assert nvml.open == 0

    def test_an_error_of_the_job_is_none(self) -> None:
        nvml = Nvml(2)
        check = GpuCheck(nvml)
        assert check() is None
        nvml.xids = [(0, 13), (1, 31), (0, 45)]
        assert check() is None

    def test_without_its_package_the_check_cannot_run(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(CannotRunError, match=r"pip install 'rdzv-plugins\[gpu\]'"):
            GpuCheck()()


class TestRdzvCheck:
    """What `rdzv check` says of this node."""

    def findings(self, **conf: str) -> list[Finding]:
        conf["heartbeat_timeout"] = "0.2"
        made = plan.carry_out(Job.of(Access("redis", "", conf_of(conf)), None, "", "", ""))
        found = []
        for finding in made:
            found.append(finding)
            if finding.what == "store":
                break  # There is none.
        return [it for it in found if it.what in ("health", "options")]

    def test_without_checks_there_is_no_line(self) -> None:
        assert [it.what for it in self.findings()] == ["options"]

    def test_a_fit_node(self, tmp_path: Path) -> None:
        _, found = self.findings(checks="disk+network", check_disk=str(tmp_path))
        assert (found.mark, found.found) == (Mark.OK, "this node is fit: disk, network")

    def test_an_unfit_node(self) -> None:
        _, found = self.findings(check_command="false")
        assert found.mark is Mark.FAILED
        assert found.found == "this node is unfit: false: exited with 1, and printed nothing"

    def test_a_check_that_cannot_run(self) -> None:
        _, found = self.findings(check_command="/no/such/program", check_fails_open="true")
        assert found.mark is Mark.WARNING
        assert "the check 'program' cannot run" in found.found

    def test_a_check_that_nobody_has(self) -> None:
        found = self.findings(checks="disc")[0]
        assert found.mark is Mark.FAILED
        assert "did you mean 'disk'?" in found.found


def conf_of(options: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items())


def test_a_reason_is_one_line_of_text() -> None:
    assert last_line("") == ""
    assert last_line("a\n\x1b[2J\n") == "a"
    assert last_line("Grüße, 世界\u2028") == "Grüße, 世界"
