"""The key-value contract (`contract`), in memory (`memory`), and as a base for stores (`base`)."""

from rdzv_plugins.kv.contract import (
    AccessDeniedError,
    Capabilities,
    ClientClosedError,
    Entry,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
    parse_counter,
)
from rdzv_plugins.kv.memory import MemoryClient, MemoryServer

__all__ = [
    "AccessDeniedError",
    "Capabilities",
    "ClientClosedError",
    "Entry",
    "KeyValueClient",
    "MemoryClient",
    "MemoryServer",
    "RendezvousConnectionError",
    "RendezvousStateError",
    "Version",
    "parse_counter",
]
