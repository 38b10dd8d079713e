"""Amazon DynamoDB, and DynamoDB Local.

One table holds every run: the partition key ``pk`` is ``<prefix>/<run id>``, the sort key ``sk``
the key. Each write carries a random version, so a version never comes back after a delete, and a
write whose answer was lost recognises itself when it is refused at the next attempt.

DynamoDB cannot push. `Client.wait` reads, sleeps a fifth of the time it has waited so far, within
the bounds of ``poll_interval_min`` and ``poll_interval_max``, and with jitter. A read costs a unit
for each 4 KB, so the version of a larger value stands in a local secondary index too and a waiter
reads that: one unit a poll, however large the value. The index is sparse: a beat costs one write
unit, a large value two more than its size in KB. (A companion item kept by a transaction would
double the price of each write; a filter expression would save no read unit.) A thousand parked
nodes read some 670 units a second, 2.4 million an hour.

Limits: linearizable (strongly consistent reads of one region; on a global table all nodes must
name the same region, for replication is asynchronous). Values up to 400,000 bytes, which is some
40,000 nodes in the round document, but DynamoDB's 1,000 writes a second to one partition come
first: with a beat every 5 seconds about 4,000 nodes, more with a longer ``keep_alive_interval``.
`Client.put_many` is atomic from 3 to 100 keys; two are put one after the other. Highly available by
itself, needs no version of its own. Time is read off the server's answers; expired items read as
absent at once and DynamoDB deletes them within days. Each item has its own deadline, and says when
that was set: a client gives what it writes the latest that it has read or set itself.
The role needs ``dynamodb:GetItem, PutItem, UpdateItem, DeleteItem, Query, BatchGetItem,
BatchWriteItem, PartiQLUpdate`` on the table and its index, and with create_table=true
``CreateTable, DescribeTable, UpdateTimeToLive``.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rdzv_plugins.config import StoreOptions, option
from rdzv_plugins.kv import (
    Capabilities,
    Entry,
    KeyValueClient,
    RendezvousConnectionError,
    Version,
    parse_counter,
)
from rdzv_plugins.stores._aside import aside
from rdzv_plugins.stores._batches import batches
from rdzv_plugins.stores._dynamodb_table import INDEX, RefusedError, Table, not_done

__all__ = ["Client", "Options"]

# Up to this size an item takes one read unit (4 KB, keys and names included).
_SMALL_BYTES = 2_500
_TRANSACTION_BYTES = 3_500_000

_LIVE = "(attribute_not_exists(expires_at) OR expires_at > :now)"
_ABSENT = "attribute_not_exists(pk) OR expires_at <= :now"


@dataclass(frozen=True, kw_only=True)
class Options(StoreOptions):
    """Options of the dynamodb backend, for endpoints that are a region (``us-east-1``), a URL
    (``http://127.0.0.1:8000``) or empty (AWS's own configuration).

    Credentials come from AWS's usual places: environment, profile, container, instance.

    ======================= ============ ==========================================================
    option                  default      meaning
    ======================= ============ ==========================================================
    table                   rdzv-plugins name of the table
    create_table            false        create the table, billed on demand, if there is none
    region                  none         region; one in the endpoint takes precedence; none:
                                         AWS's own configuration
    profile                 none         profile of AWS's configuration files
    role_arn                none         role to assume with those credentials
    poll_interval_min       0.1          seconds between two polls of a waiter, at first
    poll_interval_max       2            the longest it becomes, and so the longest that a change
                                         waits to be noticed
    ======================= ============ ==========================================================
    """

    table: str = option("rdzv-plugins")
    create_table: bool = option(False)
    region: str | None = option(None)
    profile: str | None = option(None)
    role_arn: str | None = option(None)
    poll_interval_min: float = option(0.1, least=0.001)
    poll_interval_max: float = option(2.0, least=0.001)


class Client(KeyValueClient):
    """One run in a DynamoDB table."""

    name = "dynamodb"
    options = Options
    capabilities = Capabilities(
        push=False, linearizable=True, batch=True, ttl=True, max_value_bytes=400_000
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        if options.poll_interval_max < options.poll_interval_min:
            raise ValueError("option 'poll_interval_max' is less than 'poll_interval_min'")
        self._namespace = namespace
        self._shortest, self._longest = options.poll_interval_min, options.poll_interval_max
        # The latest call of `expire` that we know of: when it was made, and the time that it set.
        self._expiry: tuple[float, int] = (0.0, 0)
        self._waits: dict[str, tuple[str | None, float]] = {}
        self._woken = threading.Condition()
        self._interrupts = 0
        probe = self._large_query(options.table, "probe")
        self._table = Table(endpoint, options, request_timeout, probe)

    def get(self, key: str) -> Entry | None:
        answer = self._call("get_item", Key=self._key(key), ConsistentRead=True)
        return self._entry(answer.get("Item"))

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        if expected is not None and not (isinstance(expected, str) and expected):
            return self.get(key), False
        return self._swap(self._item(key, value), expected)

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        item = self._item(key, value)
        self._call("put_item", Item=item)
        return cast(str, item["version_id"]["S"])

    def delete(self, key: str) -> None:
        self._call("delete_item", Key=self._key(key))

    def list(self, prefix: str) -> dict[str, Entry]:
        entries = ((item["sk"]["S"], self._entry(item)) for item in self._query(prefix))
        return {key: entry for key, entry in entries if entry is not None}

    def add(self, key: str, delta: int) -> int:
        # A counter is a number in an attribute of its own, so that a thousand adders need one
        # write each; one that was written as bytes becomes such a number once.
        while True:
            try:
                expiry = self._marks()
                more = "".join(f", {name} = :{name}" for name in expiry)
                answer = self._call(
                    "update_item",
                    passing=not_done,
                    Key=self._key(key),
                    UpdateExpression=f"SET version_id = :version{more} ADD tally :delta",
                    ConditionExpression=f"attribute_not_exists(payload) AND {_LIVE}",
                    ExpressionAttributeValues={
                        ":version": {"S": _new_version(b"")},
                        ":delta": {"N": str(delta)},
                        ":now": self._now(),
                        **{f":{name}": value for name, value in expiry.items()},
                    },
                    ReturnValues="UPDATED_NEW",
                )
                return int(answer["Attributes"]["tally"]["N"])
            except RefusedError:
                current = self.get(key)
                total = parse_counter(key, current.value if current else b"0") + delta
                item = {**self._key(key), "tally": {"N": str(total)}, **self._marks()}
                item["version_id"] = {"S": _new_version(b"")}
                expected = cast("str | None", current.version) if current else None
                if self._swap(item, expected, passing=not_done)[1]:
                    return total

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline = time.monotonic() + timeout
        known = version if isinstance(version, str) else None
        interrupts = self._interrupts

        def wanted() -> bool:
            return not self._table.closed and self._interrupts == interrupts

        while wanted():
            try:
                entry = aside(lambda: self._look(key, known), wanted)
            except RendezvousConnectionError:
                if not wanted():
                    break
                raise
            if entry is not None and entry.version != known:
                return entry
            until = min(time.monotonic() + self._pause(key, known), deadline)
            with self._woken:
                while wanted() and (remaining := until - time.monotonic()) > 0:
                    self._woken.wait(remaining)
            if time.monotonic() >= deadline:
                break
        return None

    def interrupt(self) -> None:
        with self._woken:
            self._interrupts += 1
            self._woken.notify_all()

    def expire(self, seconds: float) -> None:
        now = self._table.now()
        made, ends = max(now, self._expiry[0] + 0.001), math.ceil(now + seconds)
        # Known before the keys are listed: what other threads of ours write then has it.
        self._expiry = made, ends if seconds > 0 else 0
        pending = [item["sk"]["S"] for item in self._query("", ProjectionExpression="sk")]
        if seconds <= 0:
            self.delete_many(pending)
            return
        # What has expired meanwhile stays so.
        statement = (
            f'UPDATE "{self._table.name}" SET expires_at={ends} SET expiry_set={made:.3f} '
            f"WHERE pk=? AND sk=? AND (expires_at IS MISSING OR expires_at > {int(now)})"
        )
        deadline = time.monotonic() + self._table.timeout
        while pending:
            batch, pending = pending[:25], pending[25:]
            partition = {"S": self._namespace}
            statements = [
                {"Statement": statement, "Parameters": [partition, {"S": key}]} for key in batch
            ]
            answer = self._table.call("batch_execute_statement", Statements=statements)
            for key, outcome in zip(batch, answer["Responses"], strict=True):
                # An item that was deleted meanwhile fails the condition: nothing is left to do.
                code = outcome.get("Error", {}).get("Code")
                if code not in (None, "ConditionalCheckFailed"):
                    self._table.pace(f"letting '{key}' expire ({code})", deadline)
                    pending.append(key)

    def close(self) -> None:
        self._table.close()
        with self._woken:
            self._woken.notify_all()

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for batch in batches(keys, 100):
            request: Any = {
                self._table.name: {"Keys": [self._key(k) for k in batch], "ConsistentRead": True}
            }
            deadline = time.monotonic() + self._table.timeout
            while request:
                answer = self._table.call("batch_get_item", RequestItems=request)
                items = answer["Responses"].get(self._table.name, [])
                entries = ((item["sk"]["S"], self._entry(item)) for item in items)
                found.update((key, entry) for key, entry in entries if entry is not None)
                request = answer.get("UnprocessedKeys")
                # Some of it at each time is the 16 MB limit of an answer, none of it a throttle.
                if request and not items:
                    self._table.pace("reading many keys", deadline)
        return found

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        if len(values) <= 2:
            # A record and the bell that everybody rings: transactions on that would collide.
            super().put_many(values)
            return
        batch: list[dict[str, Any]] = []
        size = 0
        for key, value in values.items():
            if len(batch) == 100 or size + len(value) > _TRANSACTION_BYTES:
                self._put_all(batch)
                batch, size = [], 0
            batch.append({"Put": {"TableName": self._table.name, "Item": self._item(key, value)}})
            size += len(value)
        if batch:
            self._put_all(batch)

    def delete_many(self, keys: Iterable[str]) -> None:
        for batch in batches(keys, 25):
            request: Any = {
                self._table.name: [{"DeleteRequest": {"Key": self._key(key)}} for key in batch]
            }
            deadline = time.monotonic() + self._table.timeout
            while request:
                answer = self._table.call("batch_write_item", RequestItems=request)
                request = answer.get("UnprocessedItems")
                if request:
                    self._table.pace("deleting many keys", deadline)

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return self._table.call(operation, TableName=self._table.name, **arguments)

    def _key(self, key: str) -> dict[str, Any]:
        return {"pk": {"S": self._namespace}, "sk": {"S": key}}

    def _item(self, key: str, value: bytes) -> dict[str, Any]:
        version = _new_version(value)
        item = {**self._key(key), "version_id": {"S": version}, "payload": {"B": bytes(value)}}
        item |= self._marks()
        if _is_large(version):
            item[INDEX] = {"S": f"{key} {version}"}
        return item

    def _marks(self) -> dict[str, Any]:
        """What an item needs to end with the others; nothing once they have ended."""
        made, ends = self._expiry
        marks = {"expiry_set": {"N": f"{made:.3f}"}, "expires_at": {"N": str(ends)}}
        if ends > self._table.now():
            return marks
        # That a deadline was taken back is told to others too.
        return {"expiry_set": marks["expiry_set"]} if made and not ends else {}

    def _learn(self, item: Mapping[str, Any]) -> None:
        """Other clients' deadlines stand in what they left."""
        if "expiry_set" in item:
            ends = int(item["expires_at"]["N"]) if "expires_at" in item else 0
            self._expiry = max(self._expiry, (float(item["expiry_set"]["N"]), ends))

    def _now(self) -> dict[str, str]:
        return {"N": str(int(self._table.now()))}

    def _entry(self, item: Mapping[str, Any] | None) -> Entry | None:
        if item is None:
            return None
        if "expires_at" in item and int(item["expires_at"]["N"]) <= int(self._table.now()):
            return None
        self._learn(item)
        counter = item.get("tally")
        value = counter["N"].encode() if counter else bytes(item["payload"]["B"])
        return Entry(value, item["version_id"]["S"])

    def _swap(
        self,
        item: dict[str, Any],
        expected: str | None,
        passing: Callable[[Exception], bool] | None = None,
    ) -> tuple[Entry | None, bool]:
        condition, values = _ABSENT, {":now": self._now()}
        if expected is not None:
            condition = f"version_id = :expected AND {_LIVE}"
            values[":expected"] = {"S": expected}
        try:
            self._call(
                "put_item",
                passing=passing,
                Item=item,
                ConditionExpression=condition,
                ExpressionAttributeValues=values,
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except RefusedError as refusal:
            current = self._entry(refusal.item)
            # An earlier attempt whose answer was lost may be what stands there now.
            return current, current is not None and current.version == item["version_id"]["S"]
        return self._entry(item), True

    def _put_all(self, batch: Sequence[Mapping[str, Any]]) -> None:
        # The token makes a second attempt after a lost answer do nothing.
        token = secrets.token_hex(16)
        self._table.call("transact_write_items", TransactItems=batch, ClientRequestToken=token)

    def _query(self, prefix: str, **more: Any) -> Iterator[dict[str, Any]]:
        """The items that have not expired; the others lie about for days."""
        condition, values = "pk = :pk", {":pk": {"S": self._namespace}, ":now": self._now()}
        if prefix:
            condition += " AND begins_with(sk, :prefix)"
            values[":prefix"] = {"S": prefix}
        while True:
            page = self._call(
                "query",
                KeyConditionExpression=condition,
                FilterExpression=_LIVE,
                ExpressionAttributeValues=values,
                ConsistentRead=True,
                **more,
            )
            yield from page["Items"]
            if not page.get("LastEvaluatedKey"):
                return
            more["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    def _look(self, key: str, known: str | None) -> Entry | None:
        return None if self._is_unchanged(key, known) else self.get(key)

    def _is_unchanged(self, key: str, known: str | None) -> bool:
        """Whether a large value is still the known one, for one read unit."""
        if not known or not _is_large(known):
            return False
        query = self._large_query(self._table.name, f"{key} {known}")
        return bool(self._table.call("query", **query)["Count"])

    def _large_query(self, table: str, large: str) -> dict[str, Any]:
        return {
            "TableName": table,
            "IndexName": INDEX,
            "KeyConditionExpression": f"pk = :pk AND {INDEX} = :large",
            "ExpressionAttributeValues": {":pk": {"S": self._namespace}, ":large": {"S": large}},
            "ConsistentRead": True,
            "Select": "COUNT",
        }

    def _pause(self, key: str, known: str | None) -> float:
        """Seconds to the next poll, the longer the longer nothing has changed."""
        now = time.monotonic()
        version, since = self._waits.get(key, (known, None))
        if version != known or since is None:
            if len(self._waits) > 100:
                self._waits.clear()
            since = now
            # Kept over calls: a caller that waits in short pieces must not poll fast for ever.
            self._waits[key] = known, since
        longest = min(max((now - since) / 5, self._shortest), self._longest)
        return random.uniform(longest / 2, longest)


def _new_version(value: bytes) -> str:
    return ("L" if len(value) > _SMALL_BYTES else "S") + secrets.token_urlsafe(12)


def _is_large(version: str) -> bool:
    return version.startswith("L")
