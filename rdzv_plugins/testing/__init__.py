"""The conformance suite for backends, in this package or elsewhere; it needs ``pytest``.

These lines test a backend elsewhere against the whole contract of `rdzv_plugins.kv`::

    from rdzv_plugins.testing import NetworkConformance, Store, TorchConformance

    def open_client(namespace, *, address, request_timeout):
        host, port = address or ("127.0.0.1", 7000)
        return Client(f"{host}:{port}", namespace, Options(), request_timeout)

    class TestMyStore(NetworkConformance, TorchConformance):
        @pytest.fixture
        def store(self):
            return Store(open=open_client, address=("127.0.0.1", 7000))

`KeyValueConformance` needs only clients. It tests reads and writes, waiting, concurrent clients,
and processes that are killed during a write. `NetworkConformance` adds broken connections, through
the suite's `Proxy`, and compares the declared `Capabilities` with the round trips of the proxy. It
needs `Store.address`; with ``restart`` it also tests restarts of the server, and with ``stored``
whether the server itself deletes expired keys. Tests without what they need are skipped with a
message. `TorchConformance` tests the contract of torch's ``RendezvousBackend`` with the same
clients.

Every test has its own namespace. The time limits hold on a busy machine with two cores, and are no
benchmark.
"""

import pytest

# Before the modules are imported, so that pytest explains their failed assertions.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in ("capabilities", "concurrency", "harness", "killed_writers")
    ),
    *(f"{__name__}.{module}" for module in ("network", "reads_writes", "threads")),
    *(f"{__name__}.{module}" for module in ("torch_backend", "waiting")),
)

from rdzv_plugins.testing.capabilities import CapabilityTests  # noqa: E402
from rdzv_plugins.testing.concurrency import ConcurrencyTests  # noqa: E402
from rdzv_plugins.testing.harness import Store  # noqa: E402
from rdzv_plugins.testing.killed_writers import KilledWriterTests  # noqa: E402
from rdzv_plugins.testing.network import NetworkTests  # noqa: E402
from rdzv_plugins.testing.proxy import Proxy  # noqa: E402
from rdzv_plugins.testing.reads_writes import ReadWriteTests  # noqa: E402
from rdzv_plugins.testing.torch_backend import TorchConformance  # noqa: E402
from rdzv_plugins.testing.waiting import WaitingTests  # noqa: E402

__all__ = ["KeyValueConformance", "NetworkConformance", "Proxy", "Store", "TorchConformance"]


class KeyValueConformance(ReadWriteTests, WaitingTests, ConcurrencyTests, KilledWriterTests):
    """Tests of every client; subclasses define the fixture ``store``, a `Store`."""


class NetworkConformance(KeyValueConformance, NetworkTests, CapabilityTests):
    """All tests of a client of a server; needs `Store.address`."""
