"""The boto3 client of one table: connecting, creating, and errors in the contract's terms."""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from rdzv_plugins.config import redact
from rdzv_plugins.kv import ClientClosedError, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.retry import retry

if TYPE_CHECKING:
    from rdzv_plugins.stores.dynamodb import Options

__all__ = ["INDEX", "RefusedError", "Table", "not_done"]

# Both the index and the attribute it sorts by.
INDEX = "large_version"

_READY_SECONDS = 120.0
# DynamoDB answers within milliseconds, and a request cannot be broken off by `Table.close`.
_LONGEST_ATTEMPT = 2.0
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+")
_ACTIONS = (
    "dynamodb:GetItem, PutItem, UpdateItem, DeleteItem, Query, BatchGetItem, BatchWriteItem and "
    f"PartiQLUpdate on the table and on index/{INDEX}"
)
_CREATE_ACTIONS = "dynamodb:CreateTable, DescribeTable and UpdateTimeToLive"

# Refused before anything was written.
_THROTTLED = frozenset(
    {
        "LimitExceededException",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "ReplicatedWriteConflictException",
        "RequestLimitExceeded",
        "ThrottlingError",
        "ThrottlingException",
        "TransactionConflict",
        "TransactionConflictException",
    }
)
_TRANSACTION = ("TransactionCanceledException", "TransactionInProgressException")
_DENIED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_UNCONFIGURED = (NoCredentialsError, NoRegionError, PartialCredentialsError, ProfileNotFound)


class RefusedError(Exception):
    """A condition did not hold; ``item`` is what stands there, None if nothing does."""

    def __init__(self, item: dict[str, Any] | None) -> None:
        super().__init__("the condition did not hold")
        self.item = item


class Table:
    """A table that is there, and the server's time in seconds since 1970.

    Raises `ValueError` for what only other settings can mend (no region, no credentials, no such
    table), else what `call` raises.
    """

    def __init__(
        self, endpoint: str, options: Options, request_timeout: float, probe: dict[str, Any]
    ) -> None:
        self.name = options.table
        self.timeout = request_timeout
        self.closed = False
        self._shown = f"dynamodb, table '{options.table}' at {redact(endpoint) or 'AWS'}"
        self._ahead = -math.inf
        self._creates = options.create_table
        self._probe = probe
        try:
            self._client = _connect(endpoint, options, request_timeout)
        except _UNCONFIGURED as error:
            raise ValueError(_mending(error)) from error
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        # Read off the answers: no node's wall clock decides when an item has expired.
        return time.monotonic() + self._ahead

    def call(
        self,
        operation: str,
        *,
        passing: Callable[[Exception], bool] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send one request, again while ``passing`` says so, within the request timeout.

        Raises:
            RefusedError: the request's condition did not hold.
            RendezvousConnectionError: unreachable, throttled for too long, or not authorised.
            RendezvousStateError: too large, or otherwise refused.
        """
        try:
            return self._send(operation, arguments, passing)
        except RendezvousConnectionError as error:
            if not (self._creates and _code(error.__cause__) == "ResourceNotFoundException"):
                raise
        # Somebody deleted the table: that is a store that forgot everything.
        self._create(self.timeout)
        return self._send(operation, arguments, passing)

    def pace(self, doing: str, deadline: float) -> None:
        """Sleep a little before what a batch left over is asked again."""
        if self.closed or time.monotonic() >= deadline:
            raise RendezvousConnectionError(
                f"{self._shown} did not finish {doing} within {self.timeout:g} s"
            )
        time.sleep(random.uniform(0.02, 0.1))

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(BotoCoreError, OSError):
            self._client.close()

    def _send(
        self,
        operation: str,
        arguments: dict[str, Any],
        passing: Callable[[Exception], bool] | None = None,
    ) -> dict[str, Any]:
        if self.closed:
            raise ClientClosedError(self._shown)
        method = getattr(self._client, operation)
        may_pass = passing or _is_passing
        try:
            answer: dict[str, Any] = retry(
                lambda: method(**arguments),
                timeout=self.timeout,
                passing=lambda error: not self.closed and may_pass(error),
            )
        except Exception as error:
            if _code(error) == "ConditionalCheckFailedException":
                raise RefusedError(_response(error).get("Item")) from None
            raise self._explain(error) from error
        self._read_clock(answer)
        return answer

    def _read_clock(self, answer: dict[str, Any]) -> None:
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        with contextlib.suppress(TypeError, ValueError):
            # Each answer shows whole seconds and is a little old: the latest is the nearest.
            ahead = parsedate_to_datetime(date).timestamp() - time.monotonic()
            self._ahead = max(self._ahead, ahead)

    def _open(self) -> None:
        # The probe needs no right that later requests do not need.
        try:
            self._send("query", self._probe)
        except (RendezvousConnectionError, RendezvousStateError) as error:
            cause = error.__cause__
            if isinstance(cause, _UNCONFIGURED):
                raise ValueError(_mending(cause)) from cause
            code = _code(cause)
            if code == "ValidationException":
                raise ValueError(
                    f"the table '{self.name}' was not made for this ({_said(cause)}): it needs "
                    "the string keys pk and sk, and the local secondary index "
                    f"'{INDEX}' on the string '{INDEX}', keys only. Name another with "
                    "--rdzv-conf table=..., or let it be made with create_table=true"
                ) from error
            if code != "ResourceNotFoundException":
                raise
            if not self._creates:
                raise ValueError(
                    f"there is no table '{self.name}': make it with --rdzv-conf create_table=true "
                    f"(needs {_CREATE_ACTIONS}), or name another with table=...; later requests "
                    f"need {_ACTIONS}"
                ) from error
            self._create(max(_READY_SECONDS, self.timeout))
        if self._ahead == -math.inf:
            self._ahead = time.time() - time.monotonic()

    def _create(self, seconds: float) -> None:
        names = ("pk", "sk", INDEX)
        description = {
            "TableName": self.name,
            "BillingMode": "PAY_PER_REQUEST",
            "AttributeDefinitions": [{"AttributeName": n, "AttributeType": "S"} for n in names],
            "KeySchema": _schema("pk", "sk"),
            "LocalSecondaryIndexes": [
                {
                    "IndexName": INDEX,
                    "KeySchema": _schema("pk", INDEX),
                    "Projection": {"ProjectionType": "KEYS_ONLY"},
                }
            ],
        }
        try:
            self._send("create_table", description)
        except RendezvousStateError as error:
            # Another node was faster.
            if _code(error.__cause__) != "ResourceInUseException":
                raise
        deadline = time.monotonic() + seconds
        while not self._is_active():
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"{self._shown} was created but is not active after {seconds:g} s"
                )
            time.sleep(random.uniform(0.2, 1.0))
        expiry = {"Enabled": True, "AttributeName": "expires_at"}
        with contextlib.suppress(RendezvousStateError):  # another node has enabled it
            self._send(
                "update_time_to_live",
                {"TableName": self.name, "TimeToLiveSpecification": expiry},
            )
        self._send("query", self._probe)

    def _is_active(self) -> bool:
        try:
            answer = self._send("describe_table", {"TableName": self.name})
        except RendezvousConnectionError as error:
            # DescribeTable is eventually consistent.
            if _code(error.__cause__) == "ResourceNotFoundException":
                return False
            raise
        return bool(answer["Table"]["TableStatus"] == "ACTIVE")

    def _explain(self, error: Exception) -> Exception:
        code = _code(error)
        said = _said(error)
        if isinstance(error, (*_UNCONFIGURED, CredentialRetrievalError)) or code in _DENIED:
            return RendezvousConnectionError(
                f"{self._shown} refused the credentials ({said}): check them with "
                f"'aws sts get-caller-identity'; they must allow {_ACTIONS}"
            )
        if code == "ResourceNotFoundException":
            return RendezvousConnectionError(f"{self._shown} is not there ({said})")
        if code in _THROTTLED or code in _TRANSACTION:
            return RendezvousConnectionError(
                f"{self._shown} could not keep up for {self.timeout:g} s ({said}); raise the "
                "table's capacity, poll_interval_max or keep_alive_interval"
            )
        if _status(error) >= 500:
            return RendezvousConnectionError(
                f"{self._shown}, or a proxy before it, failed for {self.timeout:g} s ({said})"
            )
        if isinstance(error, BotoConnectionError | HTTPClientError):
            return RendezvousConnectionError(
                f"{self._shown} could not be reached within {self.timeout:g} s ({said}); "
                "is --rdzv-endpoint a region or URL that this host reaches?"
            )
        if isinstance(error, ClientError | BotoCoreError):
            if "size has exceeded" in str(error):
                return RendezvousStateError(
                    f"{self._shown} holds items of at most 400 KB, keys included ({said})"
                )
            return RendezvousStateError(f"{self._shown} refused a request: {said}")
        return error


def not_done(error: Exception) -> bool:
    """Whether a failed request has certainly changed nothing, and may succeed later."""
    return _code(error) in _THROTTLED or isinstance(
        error, EndpointConnectionError | ConnectTimeoutError
    )


def _is_passing(error: Exception) -> bool:
    code = _code(error)
    if code == "TransactionCanceledException":
        reasons = {reason.get("Code") for reason in _response(error)["CancellationReasons"]}
        return reasons <= {"None", None} | _THROTTLED
    if "CERTIFICATE_VERIFY_FAILED" in str(error) or "WRONG_VERSION_NUMBER" in str(error):
        return False
    return (
        _status(error) >= 500
        or code in _THROTTLED
        or code in _TRANSACTION
        or isinstance(error, BotoConnectionError | HTTPClientError)
    )


def _response(error: object) -> dict[str, Any]:
    return dict(error.response) if isinstance(error, ClientError) else {}


def _status(error: object) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: object) -> str | None:
    code = _response(error).get("Error", {}).get("Code")
    return None if code is None else str(code)


def _said(error: object) -> str:
    """The server's own words, without boto3's preamble; a proxy's page is cut short."""
    answer = _response(error).get("Error")
    return f"{answer.get('Code')}: {answer.get('Message')}"[:500] if answer else str(error)


def _mending(error: Exception) -> str:
    if isinstance(error, NoRegionError):
        return "no region: --rdzv-endpoint=us-east-1 names one, so does --rdzv-conf region=..."
    if isinstance(error, ProfileNotFound):
        return f"{error}; `aws configure list-profiles` shows those there are"
    return f"{error}; set $AWS_PROFILE or profile=..., or give this host a role"


def _schema(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]


def _connect(endpoint: str, options: Options, request_timeout: float) -> Any:
    """A boto3 client that does not retry (`retry` does)."""
    region, url = options.region, None
    target = endpoint.strip()
    if target.startswith(("http://", "https://")):
        if "@" in target:
            raise ValueError(
                "a URL with a user name: credentials come from AWS's own configuration"
            )
        url = target
    elif _REGION.fullmatch(target):
        region = target
    elif target:
        raise ValueError(
            f"the endpoint '{redact(target)}' is neither a region (us-east-1) nor a URL "
            "(http://127.0.0.1:8000) nor empty (AWS's own configuration)"
        )
    config = Config(
        connect_timeout=min(request_timeout, _LONGEST_ATTEMPT),
        read_timeout=min(request_timeout, _LONGEST_ATTEMPT),
        retries={"total_max_attempts": 1},
        parameter_validation=False,
        tcp_keepalive=True,
        max_pool_connections=16,
    )
    session = boto3.Session(profile_name=options.profile, region_name=region)
    if options.role_arn:
        session = _assume(session, options.role_arn)
    return session.client("dynamodb", endpoint_url=url, config=config)


def _assume(session: Any, role_arn: str) -> Any:
    """The session under another role, renewed before it runs out."""
    source = session.get_credentials()
    if source is None:
        raise NoCredentialsError
    fetcher = AssumeRoleCredentialFetcher(
        session._session.create_client,
        source,
        role_arn,
        extra_args={"RoleSessionName": "rdzv-plugins"},
    )
    # boto3 has no public way to give a session credentials that renew themselves.
    session._session._credentials = DeferredRefreshableCredentials(
        method="assume-role", refresh_using=fetcher.fetch_credentials
    )
    return session
