"""The conformance suite for backends, in this package or elsewhere; it needs ``pytest``.

A backend elsewhere is held to the whole contract of `rdzv_plugins.kv` in these lines::

    from rdzv_plugins.testing import NetworkConformance, Store, TorchConformance

    def open_client(namespace, *, address, request_timeout):
        host, port = address or ("127.0.0.1", 7000)
        return Client(f"{host}:{port}", namespace, Options(), request_timeout)

    class TestMyStore(NetworkConformance, TorchConformance):
        @pytest.fixture
        def store(self):
            return Store(open=open_client, address=("127.0.0.1", 7000))

`KeyValueConformance` has the promises that need nothing but clients: reads and writes, waiting, and
many clients at once. `NetworkConformance` adds what happens when connections break, through a
`Proxy` of the suite's, and checks the declared `Capabilities` against round trips counted there. It
status `Store.address`, and more where more is given: ``restart`` for what a restart of the server
keeps and forgets, ``stored`` for whether the server itself deletes what has expired. Tests that
lack those are skipped and say so. `TorchConformance` has the contract of torch's
``RendezvousBackend`` over the same clients.

Every test has a namespace of its own. Times in the suite are generous: they tell a promise from its
breach on a busy machine with two cores, and are no benchmark.
"""

import pytest

# Before the modules are imported: their assertions are to explain themselves.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in ("capabilities", "concurrency", "harness", "network", "reads_writes")
    ),
    *(f"{__name__}.{module}" for module in ("threads", "torch_backend", "waiting")),
)

from rdzv_plugins.testing.capabilities import CapabilityTests  # noqa: E402
from rdzv_plugins.testing.concurrency import ConcurrencyTests  # noqa: E402
from rdzv_plugins.testing.harness import Store  # noqa: E402
from rdzv_plugins.testing.network import NetworkTests  # noqa: E402
from rdzv_plugins.testing.proxy import Proxy  # noqa: E402
from rdzv_plugins.testing.reads_writes import ReadWriteTests  # noqa: E402
from rdzv_plugins.testing.torch_backend import TorchConformance  # noqa: E402
from rdzv_plugins.testing.waiting import WaitingTests  # noqa: E402

__all__ = ["KeyValueConformance", "NetworkConformance", "Proxy", "Store", "TorchConformance"]


class KeyValueConformance(ReadWriteTests, WaitingTests, ConcurrencyTests):
    """What every client promises; subclasses define the fixture ``store``, a `Store`."""


class NetworkConformance(KeyValueConformance, NetworkTests, CapabilityTests):
    """That, and what a client of a server promises besides; needs `Store.address`."""
