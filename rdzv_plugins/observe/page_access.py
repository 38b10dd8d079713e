"""Which clients may read what the dashboard, the exporter and the metrics show: one rule.

Without a token a server listens only at loopback, and answers only requests for a loopback name:
a foreign page whose name resolves to this host must not read the data. With a token, which any
address other than loopback needs, it answers requests that send the token, for any host name.
``/healthz`` needs no token, because probes have none.
"""

from __future__ import annotations

import hmac
import re
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

from rdzv_plugins.settings.endpoint import is_loopback
from rdzv_plugins.settings.options import Settings, UnreadableFileError

LOOPBACK = "127.0.0.1"
"""The default address at which a server listens."""

HEALTH = "/healthz"
"""The path that needs no token."""


class Refusal(NamedTuple):
    """The answer to a client that may not read a page; its headers say what to send."""

    status: HTTPStatus
    text: str
    headers: dict[str, str]


class PageAccess:
    """Decides which clients may read a server at ``host``; reads ``page_token_file`` each time.

    Raises `ValueError` if other hosts reach the server and there is no token.
    """

    def __init__(self, host: str, settings: Settings) -> None:
        self._settings = settings
        self._token = settings.current_page_token()
        if self._token is None and not is_loopback(host):
            raise ValueError(
                f"anyone who reaches {host or 'this host'} would read the pages without a token: "
                "set $RDZV_PLUGINS_PAGE_TOKEN, or name a file with page_token_file=..., or listen "
                "at 127.0.0.1"
            )
        self._names = {"localhost", "127.0.0.1", "[::1]", host}

    def refusal(self, path: str, host: str, authorization: str) -> Refusal | None:
        """Why a request with these headers gets no page; None: it gets the page."""
        with suppress(UnreadableFileError):  # The file is being replaced: keep the last token.
            self._token = self._settings.current_page_token()
        if self._token is None:
            # An IPv6 address has brackets.
            if not host or re.sub(r":[0-9]*\Z", "", host.strip().lower()) in self._names:
                return None
            text = "this server is asked by its address at loopback"
            return Refusal(HTTPStatus.BAD_REQUEST, text, {})
        scheme, _, given = authorization.partition(" ")
        if path == HEALTH or (scheme.lower() == "bearer" and self.is_token(given.strip())):
            return None
        text = "this page needs its token, as the header Authorization: Bearer"
        return Refusal(HTTPStatus.UNAUTHORIZED, text, {"www-authenticate": "Bearer"})

    def is_token(self, given: str) -> bool:
        """Whether ``given`` is the token, in constant time."""
        return self._token is not None and hmac.compare_digest(_bytes(given), _bytes(self._token))

    @property
    def cookie(self) -> str:
        """The cookie of a browser that has sent the token; it does not contain the token."""
        return hmac.new(_bytes(self._token or ""), b"rdzv page", "sha256").hexdigest()

    def is_cookie(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(_bytes(given), _bytes(self.cookie))


def refuse_open_metrics(settings: Settings) -> None:
    """Raise `ValueError` if an agent would serve its metrics to other hosts without a token."""
    if settings.metrics_port is not None:
        PageAccess(settings.metrics_host or LOOPBACK, settings)


def _bytes(text: str) -> bytes:
    # Variables of the environment may not be UTF-8.
    return text.encode(errors="surrogateescape")
