"""A request to a local server's HTTP interface."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from tests.servers.process import HOST, Security


def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    *,
    security: Security,
    headers: Mapping[str, str] | None = None,
    timeout: float = 2.0,
) -> tuple[int, Any]:
    """The answer's status and JSON (else its text); `OSError` without an answer."""
    context = security.context()
    connection: http.client.HTTPConnection
    if context:
        connection = http.client.HTTPSConnection(HOST, port, timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, dict(headers or {}))
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"no answer on port {port}: {error}") from error
    finally:
        connection.close()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text
