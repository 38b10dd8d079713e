"""The check ``gpu``: what NVML, NVIDIA's library, reports about this host's GPUs.

It needs the package ``nvidia-ml-py`` (extra ``gpu``) and the driver's library. It opens no CUDA
context. It keeps NVML open only after a check that passes: an open NVML would prevent a reset of
the GPU, for which an unfit node waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rdzv_plugins.health.checks import CannotRunError

# XID errors that need a reset of the GPU or a technician. Others may be the job's own, or the
# driver repairs them. See NVIDIA's "XID Errors".
_BROKEN = {
    48: "double bit ECC error",
    62: "the internal micro-controller halted",
    64: "a row of memory could not be remapped",
    74: "NVLink error",
    79: "it has fallen off the bus",
    95: "uncontained ECC error",
    119: "the GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
_MOST_EVENTS = 1000


class GpuCheck:
    """A callable without arguments; it remembers XID errors that came between two calls.

    After an XID error of a broken GPU the check fails until this process ends. The first call
    imports ``pynvml``, unless ``nvml`` replaces it.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._xid = ""

    def __call__(self) -> str | None:
        """Why a GPU is unusable; None: all are usable. Raises `CannotRunError` without pynvml."""
        nvml = self._nvml = self._nvml or _import_nvml()
        self._hear(nvml)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return f"NVML: {error}"
        try:
            reason = self._xid or next(_faults(nvml), None)
            if reason is None:
                self._listen(nvml)
        finally:
            nvml.nvmlShutdown()
        return reason

    def _listen(self, nvml: Any) -> None:
        """Have the driver keep XID errors for `_hear`; this needs NVML to stay open."""
        nvml.nvmlInit()
        try:
            self._events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )
        except nvml.NVMLError:
            self._close(nvml)  # Not every GPU and driver reports XID errors.

    def _hear(self, nvml: Any) -> None:
        """Read the XID errors since the last check that passed."""
        if self._events is None:
            return
        try:
            for _ in range(_MOST_EVENTS):
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if (number := int(event.eventData)) in _BROKEN:
                    which = f"GPU {nvml.nvmlDeviceGetIndex(event.device)}"
                    self._xid = f"{which}: XID {number}, {_BROKEN[number]}"
        except nvml.NVMLError:
            pass  # No more events; or the GPU is gone, which the check reports.
        finally:
            self._close(nvml)

    def _close(self, nvml: Any) -> None:
        try:
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
        except nvml.NVMLError:
            pass
        finally:
            self._events = None
            nvml.nvmlShutdown()


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise CannotRunError(
            f"the package 'nvidia-ml-py' cannot be imported ({error}). Install it with: "
            "pip install 'rdzv-plugins[gpu]'"
        ) from error
    return pynvml


def _faults(nvml: Any) -> Iterator[str]:
    """All faults, the worst first."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        yield f"NVML: {error}"
        return
    if count == 0:
        yield "there is no GPU"
    handles = {}
    for index in range(count):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handles[index])
        except nvml.NVMLError as error:
            yield f"GPU {index} does not answer: {error}"
            continue
        if memory.total == 0:
            yield f"GPU {index} has no memory"
        errors = _uncorrected(nvml, handles[index])
        if errors:
            yield f"GPU {index}: {errors} uncorrected ECC error{'s' if errors > 1 else ''}"
    links = {index: _active_links(nvml, handle) for index, handle in handles.items()}
    # The right number of links differs between machines, but not between one machine's GPUs.
    most = max(links.values(), default=0)
    for index, active in links.items():
        if active < most:
            yield f"GPU {index}: {active} NVLinks are active, others have {most}"


def _uncorrected(nvml: Any, handle: Any) -> int:
    """Uncorrected ECC errors since the driver was loaded or the GPU was reset."""
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    try:
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
    except nvml.NVMLError:
        return 0  # The GPU has no ECC, or ECC is off.


def _active_links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            break  # The GPU has no more links.
    return active
