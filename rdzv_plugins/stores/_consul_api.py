"""What a store needs of Consul: transactions, and blocking queries of a key."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from rdzv_plugins.stores._consul_http import Answer, Http

__all__ = ["Api", "Item", "RefusedError"]


class RefusedError(Exception):
    """Consul answered with an error; ``status`` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class Item(NamedTuple):
    """A key as Consul holds it; ``modified`` is its ModifyIndex."""

    path: str
    stored: bytes
    modified: int


class Api:
    """Consul through ``http``; deadlines are on the monotonic clock, in seconds.

    Raises `RefusedError`, and what `Http` raises.

    Args:
        query: parameters of every request: datacenter, and the namespace and partition.
        scope: the same namespace and partition as fields of an operation.
    """

    def __init__(self, http: Http, query: Mapping[str, str], scope: Mapping[str, str]) -> None:
        self._http = http
        self._query = query
        self._scope = scope

    def operation(
        self, verb: str, path: str, stored: bytes = b"", index: int = 0
    ) -> dict[str, Any]:
        """An operation of a transaction; ``index`` is for "cas" and "check-index"."""
        operation: dict[str, Any] = {"Verb": verb, "Key": path, **self._scope}
        if stored:
            operation["Value"] = base64.b64encode(stored).decode()
        if verb in ("cas", "check-index"):
            operation["Index"] = index
        return {"KV": operation}

    def query(
        self,
        path: str,
        parameters: Mapping[str, str],
        deadline: float,
        wanted: Callable[[], bool] | None = None,
    ) -> tuple[bytes | None, int]:
        """What is stored at a path and the index to wait from, by Consul's other interface."""
        options = urlencode({**self._query, **parameters, "consistent": ""})
        target = f"/v1/kv/{quote(path, safe='/!=')}?{options}"
        answer = self._ask("GET", target, None, deadline, wanted)
        if answer.status not in (200, 404):
            raise RefusedError(answer.status, _text(answer))
        index = answer.headers.get("X-Consul-Index", "")
        if not index.isdecimal():
            raise RefusedError(answer.status, "this is not Consul")
        if answer.status == 404:
            return None, int(index)
        (item,) = json.loads(answer.body)
        return base64.b64decode(item["Value"] or ""), int(index)

    def commit(
        self,
        operations: Sequence[dict[str, Any]],
        deadline: float,
        wanted: Callable[[], bool] | None = None,
    ) -> tuple[Sequence[Item], float]:
        """Do all of it or nothing; returns what it read and wrote, and the agent's time."""
        target = "/v1/txn?" + urlencode({**self._query, "consistent": ""})
        body = json.dumps(operations).encode()
        answer = self._ask("PUT", target, body, deadline, wanted)
        if answer.status != 200:
            refused = answer.status == 409 and b"Permission denied" in answer.body
            raise RefusedError(403 if refused else answer.status, _text(answer))
        results = json.loads(answer.body)["Results"] or ()
        return [_item(result["KV"]) for result in results], _time_of(answer)

    def attempt(self, operations: Sequence[dict[str, Any]], deadline: float) -> bool:
        """A transaction; False: one of its conditions did not hold and nothing was done."""
        try:
            self.commit(operations, deadline)
        except RefusedError as error:
            if error.status != 409:
                raise
            return False
        return True

    def _ask(
        self,
        method: str,
        target: str,
        body: bytes | None,
        deadline: float,
        wanted: Callable[[], bool] | None = None,
    ) -> Answer:
        answer = self._http.ask(method, target, body, deadline, wanted=wanted)
        if answer.status >= 500:
            # Cut off from the leader; another agent may not be.
            self._http.turn()
        return answer


def _item(entry: Mapping[str, Any]) -> Item:
    return Item(entry["Key"], base64.b64decode(entry["Value"] or ""), entry["ModifyIndex"])


def _text(answer: Answer) -> str:
    return answer.body[:300].decode("utf-8", "replace").strip()


def _time_of(answer: Answer) -> float:
    """The agent's time in seconds: our own clock, held within the second that its answer names."""
    now = time.time()
    date = answer.headers.get("Date")
    if date is None:
        return now
    second = parsedate_to_datetime(date).timestamp()
    return min(max(now, second), second + 0.999)
