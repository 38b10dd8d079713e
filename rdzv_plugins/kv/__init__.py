"""The key-value contract (`contract`), a store in memory (`memory`), the stores' base (`base`)."""

from rdzv_plugins.kv.contract import (
    AccessDeniedError,
    Attendance,
    Capabilities,
    ClientClosedError,
    Entry,
    KeyValueClient,
    LateCredentialsError,
    MembersUp,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    Version,
    parse_counter,
)
from rdzv_plugins.kv.exhaustion import (
    Attempts,
    ExhaustedError,
    exhausted,
    is_signal,
    missing_for_workers,
    require_descriptors,
)
from rdzv_plugins.kv.memory import MemoryClient, MemoryServer

__all__ = [
    "AccessDeniedError",
    "Attempts",
    "Attendance",
    "Capabilities",
    "ClientClosedError",
    "Entry",
    "ExhaustedError",
    "KeyValueClient",
    "LateCredentialsError",
    "MembersUp",
    "MemoryClient",
    "MemoryServer",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousStateError",
    "Version",
    "exhausted",
    "is_signal",
    "missing_for_workers",
    "parse_counter",
    "require_descriptors",
]
