"""Clients that may read pages: by name at loopback, by token elsewhere."""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rdzv_plugins.observe.metrics_server import MetricsServer
from rdzv_plugins.observe.page_access import PageAccess
from rdzv_plugins.settings.options import Settings

TOKEN = "a-token-of-those-who-may-read"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "node1", "127.1", "0"])
def test_an_address_that_others_may_reach_needs_a_token(host: str) -> None:
    with pytest.raises(
        ValueError, match=r"^anyone who reaches .*: set \$RDZV_PLUGINS_PAGE_TOKEN, or"
    ):
        PageAccess(host, Settings())
    assert PageAccess(host, Settings(page_token=TOKEN)).refusal("/metrics", host, "") is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_none_and_is_asked_by_its_name(host: str) -> None:
    access = PageAccess(host, Settings())
    asked = f"[{host}]" if ":" in host else host
    assert access.refusal("/metrics", f"{asked}:80", "") is None
    refusal = access.refusal("/healthz", "evil.example", "")
    assert refusal is not None
    assert (refusal.status, refusal.headers) == (400, {})
    assert not access.is_token("")
    assert not access.is_cookie(access.cookie)


@pytest.mark.parametrize(
    ("sent", "path", "status"),
    [
        (f"Bearer {TOKEN}", "/metrics", 200), (f"bearer  {TOKEN}", "/why", 200),
        ("", "/metrics", 401), ("", "/why", 401), ("", "/none", 401), ("", "/healthz", 200),
        (f"Basic {TOKEN}", "/metrics", 401), (TOKEN, "/metrics", 401), ("Bearer", "/metrics", 401),
        (f"Bearer {TOKEN}x", "/metrics", 401), (f"Bearer {TOKEN[:-1]}", "/metrics", 401),
        ("Bearer \xe9\xff", "/metrics", 401), ("", "/healthz/../metrics", 401),
        ("", f"/metrics?token={TOKEN}", 401), ("Bearer x", "/healthz", 200),
    ],
)  # fmt: skip
def test_a_token_is_asked_for_at_loopback_too_where_it_is_set(
    sent: str, path: str, status: int
) -> None:
    server = MetricsServer(
        "127.0.0.1",
        0,
        PageAccess("127.0.0.1", Settings(page_token=TOKEN)),
        CollectorRegistry(),
        before_metrics=str,
        health=lambda: (True, "ok"),
        why=str,
        name="rdzv-test-metrics",
    )
    with closing(server):
        # A client that has the token may ask by any name, as a proxy does.
        headers = {"Host": "metrics.example"} | ({"Authorization": sent} if sent else {})
        request = urllib.request.Request(server.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found, challenge = answer.status, None
        except urllib.error.HTTPError as error:
            found, challenge = error.code, error.headers["www-authenticate"]
    assert (found, challenge) == (status, "Bearer" if status == 401 else None)


def test_a_token_in_a_file_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ValueError, match=r"^page_token_file '.*' cannot be read"):
        PageAccess("0.0.0.0", Settings(page_token_file=str(file)))
    file.write_text("one\n")
    access = PageAccess("0.0.0.0", Settings(page_token_file=str(file)))

    def is_let_in(token: str) -> bool:
        return access.refusal("/metrics", "host", f"Bearer {token}") is None

    assert is_let_in("one")
    first = access.cookie
    file.write_text("two\n")
    assert (is_let_in("one"), is_let_in("two")) == (False, True)
    assert not access.is_cookie(first)
    file.unlink()
    assert (is_let_in("one"), is_let_in("two")) == (False, True)
    with pytest.raises(ValueError, match="both set"):
        Settings(page_token=TOKEN, page_token_file=str(file))
