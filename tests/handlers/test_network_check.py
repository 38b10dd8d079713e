"""The network check in real handlers, with their threads and sockets."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import Site


def test_a_round_runs_and_its_threads_end(site: Site) -> None:
    handlers = [site.handler(3, 3, network_check=True) for _ in range(3)]
    assert [info.world_size for info in site.join(*handlers)] == [3, 3, 3]
    for handler in handlers:
        found = handler._node.record.dials
        assert found is not None
        assert (found.why, found.unreached, bool(found.partner)) == ("", "", True)
        assert found.seconds < 3.0
    for handler in handlers:
        site.kill(handler)
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.endswith(("-answers", "-network"))}


def test_without_the_option_nobody_listens(site: Site) -> None:
    handler = site.handler(1, 1)
    assert (handler._listener, handler._node.record.port) == (None, 0)


def test_without_a_shared_store_a_port_that_nobody_has_opened_yet_counts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handlers = [site.handler(2, 2, network_check=True) for _ in range(2)]
    assert len(site.join(*handlers)) == 2


def cut_off(site: Site, **options: Any) -> tuple[list[Background[object]], Node]:
    """Three of which one answers nobody, and dials in vain; the joins, and its node."""
    handlers = [site.handler(2, 3, network_check=True, **options) for _ in range(3)]
    out = handlers[-1]
    assert out._listener is not None
    out._listener.close()

    def in_vain(request: effects.DialPeer) -> float:
        raise TimeoutError("timed out")

    out._driver._dial = in_vain
    return [Background(handler.next_rendezvous) for handler in handlers], out._node


def test_a_node_that_is_cut_off_waits_and_says_why(site: Site) -> None:
    (a, b, out), node = cut_off(site)
    a.result(20)
    b.result(20)
    site.await_that(lambda: node.record.was_at_fault)
    assert not out.done()


def test_a_node_that_is_cut_off_gives_up_when_its_time_is_over(site: Site) -> None:
    (_, _, out), _ = cut_off(site, join_timeout=0.5, last_call_timeout=0.1)
    with pytest.raises(RendezvousTimeoutError, match="unfit for join_timeout"):
        out.result(20)


def test_a_node_that_is_cut_off_exits_where_it_is_to(site: Site) -> None:
    (a, b, out), _ = cut_off(site, on_unhealthy="exit")
    with pytest.raises(RendezvousError, match="unfit, and exits: network: no data passed"):
        out.result(20)
    a.result(20)
    b.result(20)
