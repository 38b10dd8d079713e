"""Amazon DynamoDB, and DynamoDB Local.

One table holds all runs: the partition key ``pk`` is ``<prefix>/<run id>``, the sort key ``sk`` is
the key. Waiters poll, and [each poll is billed](choosing.md#know-what-dynamodb-costs).

On a global table all nodes must name the same region. Values up to 400,000 bytes. DynamoDB takes
1,000 writes per second to a run: about 5,000 nodes with a heartbeat every 5 s. Items that have
expired read as absent at once; DynamoDB deletes them within days.

The role needs ``dynamodb:GetItem, PutItem, UpdateItem, Query, BatchGetItem, BatchWriteItem,
PartiQLUpdate`` on the table and its index, and with create_table=true
``CreateTable, UpdateTimeToLive``.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from rdzv_plugins.kv import Capabilities, RendezvousConnectionError, Version
from rdzv_plugins.kv.base import Limit, Problem, StoreClient, Stored, stamped
from rdzv_plugins.kv.findings import Finding, Mark, of_connection
from rdzv_plugins.settings.endpoint import Place, redact
from rdzv_plugins.stores._dynamodb_table import INDEX, Options, Table, code_of, problem_of

# A value of up to this size takes one read unit (4 KB, keys and attribute names included).
_SMALL_BYTES = 2_500
# Integers that DynamoDB returns as they were written; it stores more digits than these.
_NUMBER = re.compile(rb"0|-?[1-9][0-9]{0,17}")
# The most items of one BatchWriteItem or BatchExecuteStatement.
_BATCH = 25

_LIVE = "(attribute_not_exists(expires_at) OR expires_at > :now)"
_ABSENT = "attribute_not_exists(pk) OR expires_at <= :now"
# The attributes that hold a value and its version.
_PARTS = ("version_id", "payload", "tally")
# The code of a write whose condition did not hold.
_REFUSED = "ConditionalCheckFailedException"
# A stored deadline further ahead than this many seconds is invalid: clocks of clients differ by a
# second or two.
_LATEST = 60.0


class Client(StoreClient):
    """One run in a DynamoDB table."""

    name = "dynamodb"
    options = Options
    capabilities = Capabilities(
        push=False,
        linearizable=True,
        batch=True,
        ttl=True,
        max_value_bytes=400_000,
        atomic=range(3, 101),
    )
    # Not measured: a partition takes 1,000 writes a second, twice what half a core does here.
    heartbeat_ms = 0.5
    batch = (100, 3_500_000)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        where = f"dynamodb, table '{options.table}' at {redact(endpoint) or 'AWS'}"
        super().__init__(where, request_timeout)
        self._namespace = namespace
        self.shortest_poll = options.poll_interval_min
        self.longest_poll = options.poll_interval_max
        # The latest known call of `expire`: the time of the call, and the deadline that it set.
        self._expiry: tuple[float, int] = (0.0, 0)
        # By key: the last known version of a large value.
        self._large: dict[str, str] = {}
        self._table = Table(endpoint, options, where, request_timeout)
        # The probe is a query like the later ones, so it needs no further right.
        probe = self._large_query("probe")
        self._connect(lambda limit: self._table.open(limit, probe))

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        names = [self._key(key) for key in keys]
        if len(names) == 1:
            # get_item takes 2.9 ms, a batch of one key 3.2 ms.
            answer = self._table.ask(limit, "get_item", Key=names[0], ConsistentRead=True)
            return self._found([answer["Item"]] if "Item" in answer else [])
        found: dict[str, Stored] = {}
        pending: dict[str, Any] = {"Keys": names, "ConsistentRead": True}
        while pending["Keys"]:
            answer = self._table.ask(
                limit, "batch_get_item", RequestItems={self._table.name: pending}
            )
            items = answer["Responses"].get(self._table.name, [])
            found |= self._found(items)
            pending = answer.get("UnprocessedKeys", {}).get(self._table.name, {"Keys": []})
            # A partial answer is the 16 MB limit; an empty one is throttling, so pause.
            if pending["Keys"] and not items:
                self._pace("reading", limit)
        return found

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return self._found(self._query(prefix, limit))

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        values = {":now": self._seconds()}
        if seen is None:
            condition = _ABSENT
        elif seen.version:
            condition = f"version_id = :version_id AND {_LIVE}"
            values[":version_id"] = {"S": seen.version}
        else:
            # Another program's item counts as absent: replace exactly this one.
            parts = {name: seen.guard[name] for name in _PARTS if name in seen.guard}
            values = {f":{name}": it for name, it in parts.items()}
            condition = " AND ".join(
                f"{it} = :{it}" if it in parts else f"attribute_not_exists({it})" for it in _PARTS
            )
        try:
            self._table.ask(
                limit,
                "put_item",
                Item=self._item(key, data),
                ConditionExpression=condition,
                **({"ExpressionAttributeValues": values} if values else {}),
            )
        except ClientError as error:
            if code_of(error) != _REFUSED:
                raise
            return False
        return True

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        items = [self._item(key, data) for key, data in values.items()]
        if len(items) > 2:
            puts = [{"Put": {"TableName": self._table.name, "Item": item}} for item in items]
            self._table.ask(limit, "transact_write_items", TransactItems=puts)
            return
        # Not a transaction: all nodes write the bell, so their transactions would conflict.
        for item in items:
            self._table.ask(limit, "put_item", Item=item)

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
        # Set the deadline before listing keys, so that other threads' writes get it too.
        self._expiry = made, ends if seconds > 0 else 0
        pending = [item["sk"]["S"] for item in self._query("", limit, ProjectionExpression="sk")]
        if seconds <= 0:
            self._delete(pending, limit)
            return
        # The condition keeps expired items expired.
        statement = (
            f'UPDATE "{self._table.name}" SET expires_at={ends} SET expiry_set={made:.3f} '
            f"WHERE pk=? AND sk=? AND (expires_at IS MISSING OR expires_at > {int(now)})"
        )
        while pending:
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            statements = [
                {"Statement": statement, "Parameters": [*self._key(key).values()]} for key in batch
            ]
            answer = self._table.ask(limit, "batch_execute_statement", Statements=statements)
            for key, outcome in zip(batch, answer["Responses"], strict=True):
                # An item that was deleted meanwhile fails the condition: nothing to do.
                code = outcome.get("Error", {}).get("Code")
                if code not in (None, "ConditionalCheckFailed"):
                    self._pace(f"setting the deadline of '{key}' ({code})", limit)
                    pending.append(key)

    def _add_once(self, key: str, delta: int) -> int | None:
        # One write per adder: most of a thousand concurrent compare-and-sets would be refused.
        total = self._call(partial(self._count, key, delta))
        return super()._add_once(key, delta) if total is None else total

    def _count(self, key: str, delta: int, limit: Limit) -> int | None:
        """Add to a number or an absent item; None: the item has expired or is no number."""
        marks = self._marks()
        more = "".join(f", {name} = :{name}" for name in marks)
        try:
            answer = self._table.ask(
                limit,
                "update_item",
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
            # DynamoDB reports ValidationException for a tally that is no number.
            if code_of(error) in (_REFUSED, "ValidationException"):
                return None
            problem = self._meaning(error)
            if problem is not None and problem.retryable and not problem.undone:
                raise self._uncounted(key) from error
            raise
        return int(answer["Attributes"]["tally"]["N"])

    def _look(self, key: str, version: Version | None, limit: Limit) -> Stored | None:
        large = self._large.get(key)
        if large is not None and large == version:
            # This query costs one read unit for a value of any size.
            query = self._large_query(f"{key} {large}")
            if self._table.ask(limit, "query", **query)["Count"]:
                return Stored(b"", large)
        return self._read([key], limit).get(key)

    def _problem(self, error: Exception) -> Problem | None:
        return problem_of(error, self.timeout)

    def _disconnect(self) -> None:
        self._table.close()

    @classmethod
    def locate(cls, endpoint: str) -> Place:
        # An endpoint that is no URL is a region of AWS.
        return super().locate(endpoint) if "://" in endpoint else Place()

    def inspect(self) -> Iterable[Finding]:
        url = self._table.url
        # AWS's signatures send no secret.
        yield of_connection(url.startswith("https://"), False, [])
        yield Finding(Mark.OK, "endpoint", f"table '{self._table.name}' at {url}")
        answer, why = self._learn(lambda limit: self._table.ask(limit, "describe_table"))
        if answer is None:
            found = f"not known: the role has no dynamodb:DescribeTable ({why})"
            yield Finding(Mark.UNKNOWN, "table", found)
        else:
            table = answer["Table"]
            billing = table.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
            status = str(table.get("TableStatus"))
            values = {"status": status, "billing": billing}
            found = f"{status}, billed {billing}"
            if status in ("ACTIVE", "UPDATING"):
                yield Finding(Mark.OK, "table", found, values=values)
            else:
                yield Finding(Mark.FAILED, "table", found, "wait until it is ACTIVE", values)
        about, why = self._learn(lambda limit: self._table.ask(limit, "describe_time_to_live"))
        if about is None:
            found = f"not known: the role has no dynamodb:DescribeTimeToLive ({why})"
            yield Finding(Mark.UNKNOWN, "expiry", found)
            return
        expiry = about["TimeToLiveDescription"]
        on = expiry.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
        if on and expiry.get("AttributeName") == "expires_at":
            yield Finding(Mark.OK, "expiry", "time to live is on: expired runs are deleted")
            return
        advice = (
            f"aws dynamodb update-time-to-live --table-name {self._table.name} "
            "--time-to-live-specification Enabled=true,AttributeName=expires_at"
        )
        found = "time to live is off for expires_at: the items of ended runs are never deleted"
        yield Finding(Mark.WARNING, "expiry", found, advice)

    def _pace(self, doing: str, limit: Limit) -> None:
        """Pause before the rest of a batch is requested again."""
        try:
            limit.sleep(min(limit.seconds, random.uniform(0.02, 0.1)))
        except TimeoutError as error:
            raise RendezvousConnectionError(
                f"{self.where} did not finish {doing} within {self.timeout:g} s; raise the "
                "table's capacity"
            ) from error

    def _query(self, prefix: str, limit: Limit, **more: Any) -> Iterator[dict[str, Any]]:
        """The items that have not expired; DynamoDB keeps expired items for days."""
        condition, values = "pk = :pk", {":pk": {"S": self._namespace}, ":now": self._seconds()}
        if prefix:
            condition += " AND begins_with(sk, :prefix)"
            values[":prefix"] = {"S": prefix}
        while True:
            page = self._table.ask(
                limit,
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

    def _large_query(self, large: str) -> dict[str, Any]:
        return {
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
            key = item["sk"]["S"]
            try:
                version, value, ends, made = _parts(item, self._table.now() + _LATEST)
            except (LookupError, TypeError, ValueError):
                # Another program's item counts as absent.
                found[key] = Stored(b"", "", item)
                continue
            if ends and ends <= int(self._table.now()):
                continue
            found[key] = Stored(value, version)
            if INDEX in item:
                self._large[key] = version
            if made:
                # Learn the deadlines that other clients set.
                self._expiry = max(self._expiry, (made, ends))
        return found

    def _marks(self) -> dict[str, Any]:
        """The attributes that let an item expire with the run; none once the run has expired."""
        made, ends = self._expiry
        marks = {"expiry_set": {"N": f"{made:.3f}"}, "expires_at": {"N": str(ends)}}
        if ends > self._table.now():
            return marks
        # Tell other clients that the deadline was cancelled.
        return {"expiry_set": marks["expiry_set"]} if made and not ends else {}

    def _seconds(self) -> dict[str, str]:
        return {"N": str(int(self._table.now()))}


def _parts(item: Mapping[str, Any], latest: float) -> tuple[str, bytes, int, float]:
    """Version, value, deadline (0: none) and when that was set (0: never).

    Raises LookupError, TypeError or ValueError for an item of another program.
    """
    version: str = item["version_id"]["S"]
    int(version, 16)
    number = item.get("tally")
    value = number["N"].encode() if number else bytes(item["payload"]["B"])
    ends = int(item["expires_at"]["N"]) if "expires_at" in item else 0
    made = float(item["expiry_set"]["N"]) if "expiry_set" in item else 0.0
    if not 0 <= made <= latest:
        raise ValueError
    return version, value, ends, made
