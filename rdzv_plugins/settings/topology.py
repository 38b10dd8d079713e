"""A node's domain, its place in the network: from the option, Slurm or NVML.

A domain has one or more levels with "/" between them, the widest first: ``spine1/leaf3/rack7``.
"""

from __future__ import annotations

import ctypes
import uuid
import warnings
from collections.abc import Mapping

# Short, because a leader of thousands of nodes reads the domain in each record.
_LONGEST = 200

_SLURM_ADDRESS, _SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


def levels(domain: str) -> list[str]:
    """The levels of the option ``domain``, without empty levels of labels that are not set.

    Raises `ValueError` if there are none, or the option is malformed.
    """
    found = [level for level in domain.split("/") if level]
    if not found or len(domain) > _LONGEST:
        raise ValueError(
            f"option 'domain': '{domain[:_LONGEST]}' must have 1 to {_LONGEST} characters, as in "
            "rack7 or spine1/rack7"
        )
    # Kubernetes does not replace a reference to a missing variable.
    if "$(" in domain or not domain.isprintable() or " " in domain:
        raise ValueError(
            f"option 'domain': {domain!r} must have neither spaces nor $(...); is a variable not "
            "set?"
        )
    return found


def find_domain(given: str | None, environ: Mapping[str, str]) -> str | None:
    """The domain of this node in its normal form, which nodes compare; None: unknown.

    ``given`` is the option ``domain``.
    """
    if given is not None:
        return "/".join(levels(given))
    return _of_slurm(environ) or _of_nvlink()


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    """The switches or blocks in an address such as ``root.leaf3.node5``, without the node.

    The pattern, such as ``switch.switch.node``, gives the number of parts, because the node's name
    may have dots.
    """
    address, pattern = environ.get(_SLURM_ADDRESS, ""), environ.get(_SLURM_PATTERN, "")
    parts = address.split(".", pattern.count(".")) if pattern else address.split(".")
    try:
        return "/".join(levels("/".join(parts[:-1])))
    except ValueError:
        return None  # Without a topology plugin, Slurm names only the node.


def _of_nvlink() -> str | None:
    """The NVLink domain of this host's GPUs, and their clique; None: NVML knows none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # An old package of this name warns of its end.
            import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # No driver on this host.
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            info = pynvml.c_nvmlGpuFabricInfoV_t()
            device = pynvml.nvmlDeviceGetHandleByIndex(number)
            pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
            # Read bytes: older versions declare the field as a string, which would end at a zero.
            field = type(info).clusterUuid
            cluster = bytes(info)[field.offset : field.offset + field.size][:16]
            completed = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
            if completed and info.status == pynvml.NVML_SUCCESS and any(cluster):
                return f"{uuid.UUID(bytes=cluster)}/{info.cliqueId}"
    except (pynvml.NVMLError, AttributeError):
        pass  # The driver or the package is older than NVLink domains.
    finally:
        pynvml.nvmlShutdown()
    return None
