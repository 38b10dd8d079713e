"""Links between real handlers, and what stands between them."""

from __future__ import annotations

import threading
import time

import pytest

from rdzv_plugins.peers.exchange import open_listener
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.testing.proxy import Proxy
from tests.handlers.site import Site

pytestmark = pytest.mark.rule("accusations")


def has_link(of: StoreRendezvousHandler, to: StoreRendezvousHandler) -> bool:
    assert of._links is not None
    peer = of._links._peers.get(to._node.id)
    return peer is not None and peer._line is not None and peer._line.held


def test_a_sidecar_that_restarts_has_nobody_lost(site: Site) -> None:
    """It refuses the links of its node, and keeps it from the store, at once."""
    cut = site.client()
    behind, *others = (
        site.handler(3, 3, client, links=True, keep_alive_interval=5.0)
        for client in (cut, None, None)
    )
    with Proxy(("127.0.0.1", behind._node.record.link)) as sidecar:
        behind._node._heartbeat.amend(link=sidecar.address[1])
        site.join(behind, *others)
        assert site.document is not None
        number = site.document.round
        for _ in range(2):
            site.await_that(lambda: all(has_link(other, behind) for other in others))
            cut.cut()
            sidecar.refuse()
            time.sleep(1.5)
            sidecar.accept()
            cut.down = False
        site.await_that(lambda: all(has_link(other, behind) for other in others))
        assert site.document.round == number
        assert not any(handler._node.record.accuses for handler in (behind, *others))


def test_a_node_whose_host_lets_it_start_no_thread_has_no_links(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        made = site.handler(1, 2, links=True)
        rules, settings = made._node.rules, made._settings
        listened = open_listener("a-node", "127.0.0.1", "run", rules, settings)
    assert listened is None
