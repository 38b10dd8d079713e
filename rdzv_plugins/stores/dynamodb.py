"""Amazon DynamoDB, and DynamoDB Local.

One table holds every run: the partition key ``pk`` is ``<prefix>/<run id>``, the sort key ``sk``
the key. A whole number is stored as one, so that `Client.add` is one write however many add.

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
The role needs ``dynamodb:GetItem, PutItem, UpdateItem, Query, BatchGetItem, BatchWriteItem,
PartiQLUpdate`` on the table and its index, and with create_table=true
``CreateTable, UpdateTimeToLive``.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from rdzv_plugins.config import StoreOptions, option
from rdzv_plugins.endpoint import redact
from rdzv_plugins.kv import Capabilities, Entry, RendezvousConnectionError, Version
from rdzv_plugins.kv.base import Limit, Problem, StoreClient, Stored, stamped
from rdzv_plugins.stores._dynamodb_table import INDEX, Table, code_of, problem_of

__all__ = ["Client", "Options"]

# Up to this size an item takes one read unit (4 KB, keys and names included).
_SMALL_BYTES = 2_500
# What DynamoDB gives back as it was written; it keeps more digits than these.
_NUMBER = re.compile(rb"0|-?[1-9][0-9]{0,17}")
# What one BatchWriteItem or BatchExecuteStatement takes.
_BATCH = 25

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


class Client(StoreClient):
    """One run in a DynamoDB table."""

    name = "dynamodb"
    options = Options
    capabilities = Capabilities(
        push=False, linearizable=True, batch=True, ttl=True, max_value_bytes=400_000
    )
    batch = (100, 3_500_000)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        if options.poll_interval_max < options.poll_interval_min:
            raise ValueError("option 'poll_interval_max' is less than 'poll_interval_min'")
        where = f"dynamodb, table '{options.table}' at {redact(endpoint) or 'AWS'}"
        super().__init__(where, request_timeout)
        self._namespace = namespace
        self._shortest, self._longest = options.poll_interval_min, options.poll_interval_max
        # The latest call of `expire` that we know of: when it was made, and the time that it set.
        self._expiry: tuple[float, int] = (0.0, 0)
        # By key: the latest large version that we know of; the version last waited on, since when.
        self._large: dict[str, str] = {}
        self._waits: dict[str, tuple[str | None, float]] = {}
        self._table = Table(endpoint, options, where, request_timeout)
        # The probe needs no right that later requests do not need.
        probe = self._large_query("probe")
        self._connect(lambda limit: self._table.open(limit, probe))

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        # In one request, where the base would read the whole value first.
        self.check_size(key, value)
        if expected is not None and not (isinstance(expected, str) and expected):
            return self.get(key), False
        data = stamped(value)
        ours = Stored.parse(data).entry

        def request(limit: Limit) -> tuple[Entry | None, bool]:
            seen = self._swap(key, data, expected, limit)
            current = seen.entry if seen is not None else None
            # Also where an earlier attempt was done, and its answer lost.
            return current, current == ours

        return self._call(request)

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        pending: dict[str, Any]
        pending = {"Keys": [self._key(key) for key in keys], "ConsistentRead": True}
        if len(pending["Keys"]) == 1:
            # A tenth less time than a batch of one: 2.9 ms in place of 3.2.
            request = {"TableName": self._table.name, "ConsistentRead": True}
            answer = self._table.ask(limit, "get_item", Key=pending["Keys"][0], **request)
            return self._found([answer["Item"]] if "Item" in answer else [])
        found: dict[str, Stored] = {}
        while pending["Keys"]:
            answer = self._table.ask(
                limit, "batch_get_item", RequestItems={self._table.name: pending}
            )
            items = answer["Responses"].get(self._table.name, [])
            found |= self._found(items)
            pending = answer.get("UnprocessedKeys", {}).get(self._table.name, {"Keys": []})
            # Some of it at each time is the 16 MB limit of an answer, none of it a throttle.
            if pending["Keys"] and not items:
                self._pace("reading", limit)
        return found

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return self._found(self._query(prefix, limit))

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        expected = seen.version if seen is not None else None
        return self._swap(key, data, expected, limit) == Stored.parse(data)

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        items = [self._item(key, data) for key, data in values.items()]
        if len(items) > 2:
            puts = [{"Put": {"TableName": self._table.name, "Item": item}} for item in items]
            self._table.ask(limit, "transact_write_items", TransactItems=puts)
            return
        # A record and the bell that everybody rings: transactions on that would collide.
        for item in items:
            self._table.ask(limit, "put_item", TableName=self._table.name, Item=item)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        requests = [{"DeleteRequest": {"Key": self._key(key)}} for key in keys]
        while requests:
            batch, requests = requests[:_BATCH], requests[_BATCH:]
            answer = self._table.ask(
                limit, "batch_write_item", RequestItems={self._table.name: batch}
            )
            if left := answer.get("UnprocessedItems", {}).get(self._table.name):
                self._pace("deleting", limit)
                requests += left

    def _expire(self, seconds: float, limit: Limit) -> None:
        now = self._table.now()
        made, ends = max(now, self._expiry[0] + 0.001), math.ceil(now + seconds)
        # Known before the keys are listed: what other threads of ours write then has it.
        self._expiry = made, ends if seconds > 0 else 0
        pending = [item["sk"]["S"] for item in self._query("", limit, ProjectionExpression="sk")]
        if seconds <= 0:
            self._delete(pending, limit)
            return
        # What has expired meanwhile stays so.
        statement = (
            f'UPDATE "{self._table.name}" SET expires_at={ends} SET expiry_set={made:.3f} '
            f"WHERE pk=? AND sk=? AND (expires_at IS MISSING OR expires_at > {int(now)})"
        )
        while pending:
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            partition = {"S": self._namespace}
            statements = [
                {"Statement": statement, "Parameters": [partition, {"S": key}]} for key in batch
            ]
            answer = self._table.ask(limit, "batch_execute_statement", Statements=statements)
            for key, outcome in zip(batch, answer["Responses"], strict=True):
                # An item that was deleted meanwhile fails the condition: nothing is left to do.
                code = outcome.get("Error", {}).get("Code")
                if code not in (None, "ConditionalCheckFailed"):
                    self._pace(f"letting '{key}' expire ({code})", limit)
                    pending.append(key)

    def _add_once(self, key: str, delta: int) -> int | None:
        # One write for each of a thousand adders, where compare-and-set would be refused to most.
        total = self._call(partial(self._count, key, delta))
        return super()._add_once(key, delta) if total is None else total

    def _count(self, key: str, delta: int, limit: Limit) -> int | None:
        """Add to a number or to nothing; None: what stands there has expired or is no number."""
        marks = self._marks()
        more = "".join(f", {name} = :{name}" for name in marks)
        try:
            answer = self._table.ask(
                limit,
                "update_item",
                TableName=self._table.name,
                Key=self._key(key),
                UpdateExpression=f"SET version_id = :version{more} ADD tally :delta",
                ConditionExpression=f"attribute_not_exists(payload) AND {_LIVE}",
                ExpressionAttributeValues={
                    ":version": {"S": Stored.parse(stamped(b"")).version},
                    ":delta": {"N": str(delta)},
                    ":now": self._seconds(),
                    **{f":{name}": value for name, value in marks.items()},
                },
                ReturnValues="UPDATED_NEW",
            )
        except Exception as error:
            if _refused(error):
                return None
            problem = self._problem(error)
            if problem is not None and problem.retryable and not problem.undone:
                raise self._uncounted(key) from error
            raise
        return int(answer["Attributes"]["tally"]["N"])

    def _look(self, key: str, version: Version | None, limit: Limit) -> Stored | None:
        large = self._large.get(key)
        if large is not None and large == version:
            # One read unit, however large the value.
            query = self._large_query(f"{key} {large}")
            if self._table.ask(limit, "query", **query)["Count"]:
                return Stored(b"", large)
        return self._read([key], limit).get(key)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        """Sleep, the longer the longer nothing has changed."""
        known = seen.version if seen is not None else None
        left, now = limit.seconds, time.monotonic()
        version, since = self._waits.get(key, ("", now))
        if version != known:
            if len(self._waits) > 100:
                self._waits.clear()
            # Kept over calls: a caller that waits in short pieces must not poll fast for ever.
            self._waits[key] = known, (since := now)
        longest = min(max((now - since) / 5, self._shortest), self._longest)
        pause = random.uniform(longest / 2, longest)
        limit.sleep(min(pause, left))
        return None

    def _disconnect(self) -> None:
        self._table.close()

    def _problem(self, error: Exception) -> Problem | None:
        return problem_of(error, self.timeout)

    def _pace(self, doing: str, limit: Limit) -> None:
        """Pause a little before what a batch left over is asked again."""
        try:
            limit.sleep(min(limit.seconds, random.uniform(0.02, 0.1)))
        except TimeoutError as error:
            raise RendezvousConnectionError(
                f"{self.where} did not finish {doing} within {self.timeout:g} s; raise the "
                "table's capacity"
            ) from error

    def _swap(self, key: str, data: bytes, expected: str | None, limit: Limit) -> Stored | None:
        """Write if ``expected`` still stands (None: nothing does); what stands there now."""
        condition, values = _ABSENT, {":now": self._seconds()}
        if expected is not None:
            condition = f"version_id = :expected AND {_LIVE}"
            values[":expected"] = {"S": expected}
        try:
            self._table.ask(
                limit,
                "put_item",
                TableName=self._table.name,
                Item=self._item(key, data),
                ConditionExpression=condition,
                ExpressionAttributeValues=values,
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except ClientError as error:
            if not _refused(error):
                raise
            item: Any = error.response.get("Item")
            return self._found([item] if item else []).get(key)
        return Stored.parse(data)

    def _query(self, prefix: str, limit: Limit, **more: Any) -> Iterator[dict[str, Any]]:
        """The items that have not expired; the others lie about for days."""
        condition, values = "pk = :pk", {":pk": {"S": self._namespace}, ":now": self._seconds()}
        if prefix:
            condition += " AND begins_with(sk, :prefix)"
            values[":prefix"] = {"S": prefix}
        while True:
            page = self._table.ask(
                limit,
                "query",
                TableName=self._table.name,
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

    def _large_query(self, large: str) -> dict[str, Any]:
        return {
            "TableName": self._table.name,
            "IndexName": INDEX,
            "KeyConditionExpression": f"pk = :pk AND {INDEX} = :large",
            "ExpressionAttributeValues": {":pk": {"S": self._namespace}, ":large": {"S": large}},
            "ConsistentRead": True,
            "Select": "COUNT",
        }

    def _key(self, key: str) -> dict[str, Any]:
        return {"pk": {"S": self._namespace}, "sk": {"S": key}}

    def _item(self, key: str, data: bytes) -> dict[str, Any]:
        stored = Stored.parse(data)
        value, version = stored.value, stored.version
        item: dict[str, Any] = {**self._key(key), "version_id": {"S": version}, **self._marks()}
        if _NUMBER.fullmatch(value):
            item["tally"] = {"N": value.decode()}
        else:
            item["payload"] = {"B": value}
        if len(value) > _SMALL_BYTES:
            item[INDEX] = {"S": f"{key} {version}"}
            self._large[key] = version
        return item

    def _found(self, items: Iterable[Mapping[str, Any]]) -> dict[str, Stored]:
        """The values of the items that have not expired, by key."""
        found: dict[str, Stored] = {}
        for item in items:
            ends = int(item["expires_at"]["N"]) if "expires_at" in item else 0
            if ends and ends <= int(self._table.now()):
                continue
            key, version = item["sk"]["S"], item["version_id"]["S"]
            number = item.get("tally")
            value = number["N"].encode() if number else bytes(item["payload"]["B"])
            found[key] = Stored(value, version)
            if INDEX in item:
                self._large[key] = version
            if "expiry_set" in item:
                # Other clients' deadlines stand in what they left.
                self._expiry = max(self._expiry, (float(item["expiry_set"]["N"]), ends))
        return found

    def _marks(self) -> dict[str, Any]:
        """What an item needs to end with the others; nothing once they have ended."""
        made, ends = self._expiry
        marks = {"expiry_set": {"N": f"{made:.3f}"}, "expires_at": {"N": str(ends)}}
        if ends > self._table.now():
            return marks
        # That a deadline was taken back is told to others too.
        return {"expiry_set": marks["expiry_set"]} if made and not ends else {}

    def _seconds(self) -> dict[str, str]:
        return {"N": str(int(self._table.now()))}


def _refused(error: Exception) -> bool:
    """Whether a write's condition did not hold."""
    return code_of(error) == "ConditionalCheckFailedException"
