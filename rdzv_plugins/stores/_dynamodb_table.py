"""The boto3 client of one table: connecting, creating, the server's clock, and what errors mean."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from functools import partial
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

from rdzv_plugins.endpoint import redact
from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.kv.base import Limit, Problem, Wake
from rdzv_plugins.kv.retry import retry

if TYPE_CHECKING:
    from rdzv_plugins.stores.dynamodb import Options

__all__ = ["INDEX", "Table", "code_of", "problem_of"]

INDEX = "large_version"
"""Both the index and the attribute it sorts by."""

_READY_SECONDS = 120.0
# DynamoDB answers within milliseconds, and a request cannot be broken off when we close.
_LONGEST_ATTEMPT = 2.0
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+")

_ACTIONS = (
    "dynamodb:GetItem, PutItem, UpdateItem, Query, BatchGetItem, BatchWriteItem and PartiQLUpdate "
    f"on the table and on index/{INDEX}"
)
_CREATE_ACTIONS = "dynamodb:CreateTable and UpdateTimeToLive"

_MISSING = "ResourceNotFoundException"
# Refused before anything was written.
_THROTTLED = re.compile(
    "(LimitExceeded|ProvisionedThroughputExceeded|ReplicatedWriteConflict|RequestLimitExceeded"
    "|Throttling|ThrottlingError|TransactionConflict)(Exception)?"
)
_DENIED = re.compile(
    "(AccessDenied|ExpiredToken|IncompleteSignature|InvalidSignature|MissingAuthenticationToken"
    "|UnrecognizedClient)(Exception)?|InvalidClientTokenId|SignatureDoesNotMatch"
)
_UNTRUSTED = re.compile("CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER")
_UNCONFIGURED = (NoCredentialsError, NoRegionError, PartialCredentialsError, ProfileNotFound)


class Table:
    """A table, and the server's clock. Its requests are one attempt and raise boto3's errors."""

    def __init__(self, endpoint: str, options: Options, where: str, request_timeout: float) -> None:
        """Raises `ValueError` for what only other settings can mend."""
        self.name = options.table
        self._where = where
        self._timeout = request_timeout
        self._creates = options.create_table
        self._probe: dict[str, Any] = {}
        # The server's clock less the monotonic clock, in seconds.
        self._ahead = -math.inf
        self._boto = _connect(endpoint, options, request_timeout)

    def now(self) -> float:
        """The server's time, in seconds since 1970."""
        # Read off the answers: no node's wall clock decides when an item has expired.
        if self._ahead == -math.inf:
            self._ahead = time.time() - time.monotonic()
        return time.monotonic() + self._ahead

    def open(self, limit: Limit, probe: dict[str, Any]) -> None:
        """See that the table is there and answers the query ``probe``; make it if that is wanted.

        Raises `ValueError` for what only other settings can mend.
        """
        self._probe = probe
        try:
            self._send(limit, "query", **probe)
        except _UNCONFIGURED as error:
            raise ValueError(_advice(error)) from error
        except ClientError as error:
            if code_of(error) == "ValidationException":
                raise ValueError(
                    f"the table '{self.name}' was not made for this ({_said(error)}): it needs "
                    "the string keys pk and sk, and the local secondary index "
                    f"'{INDEX}' on the string '{INDEX}', keys only. Name another with "
                    "--rdzv-conf table=..., or let it be made with create_table=true"
                ) from error
            if code_of(error) != _MISSING:
                raise
            if not self._creates:
                raise ValueError(
                    f"there is no table '{self.name}': make it with --rdzv-conf create_table=true "
                    f"(needs {_CREATE_ACTIONS}), or name another with table=...; later requests "
                    f"need {_ACTIONS}"
                ) from error
            self._create(limit, max(_READY_SECONDS, self._timeout))

    def ask(self, limit: Limit, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; ends with WokenError as soon as the limit's wake rings."""
        try:
            return self._send(limit, operation, **arguments)
        except ClientError as error:
            if not self._creates or code_of(error) != _MISSING:
                raise
        # Somebody deleted the table: that is a store that forgot everything.
        self._create(limit, self._timeout)
        return self._send(limit, operation, **arguments)

    def close(self) -> None:
        with contextlib.suppress(BotoCoreError, OSError):
            self._boto.close()

    def _send(self, limit: Limit, operation: str, **arguments: Any) -> dict[str, Any]:
        request = partial(getattr(self._boto, operation), **arguments)
        answer: dict[str, Any] = request() if limit.wake is None else _aside(request, limit)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            date = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            # Each answer shows whole seconds and is a little old: the latest is the nearest.
            self._ahead = max(self._ahead, date.timestamp() - time.monotonic())
        return answer

    def _create(self, limit: Limit, seconds: float) -> None:
        """Make the table; it may take so long until it can be used."""

        def retryable(error: Exception) -> bool:
            problem = problem_of(error, self._timeout)
            return code_of(error) == _MISSING or (problem is not None and problem.retryable)

        def attempt(operation: str, arguments: dict[str, Any], done: str = "") -> None:
            request = partial(self._send, limit, operation, **arguments)
            try:
                retry(request, timeout=seconds, retryable=retryable, sleep=limit.sleep)
            except ClientError as error:
                # By another node, which was faster.
                if code_of(error) != done:
                    raise

        attempt("create_table", _description(self.name), done="ResourceInUseException")
        try:
            # Until the table is active it is as if it were not there.
            attempt("query", self._probe)
        except ClientError as error:
            if code_of(error) != _MISSING:
                raise
            raise RendezvousConnectionError(
                f"{self._where} was created but is not active after {seconds:g} s"
            ) from error
        expiry = {"Enabled": True, "AttributeName": "expires_at"}
        attempt(
            "update_time_to_live",
            {"TableName": self.name, "TimeToLiveSpecification": expiry},
            done="ValidationException",
        )


def problem_of(error: Exception, timeout: float) -> Problem | None:
    """As `StoreClient._problem`, for requests that may take ``timeout`` seconds."""
    code, said = code_of(error) or "", _said(error)
    throttled = _THROTTLED.fullmatch(code) is not None
    if isinstance(error, (*_UNCONFIGURED, CredentialRetrievalError)) or _DENIED.fullmatch(code):
        return Problem(
            f"refused the credentials ({said}): check them with 'aws sts get-caller-identity'; "
            f"they must allow {_ACTIONS}"
        )
    if code == _MISSING:
        return Problem(f"is not there ({said})")
    if throttled or code == "TransactionCanceledException":
        faults = {str(it.get("Code")) for it in _answer(error).get("CancellationReasons", ())}
        return Problem(
            f"could not keep up for {timeout:g} s ({said}); raise the table's capacity, "
            "poll_interval_max or keep_alive_interval",
            retryable=all(_THROTTLED.fullmatch(fault) for fault in faults - {"None"}),
            undone=throttled,
        )
    if _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return Problem(f"or a proxy before it, failed for {timeout:g} s ({said})", retryable=True)
    if isinstance(error, BotoConnectionError | HTTPClientError | TimeoutError):
        return Problem(
            f"could not be reached within {timeout:g} s ({said}); "
            "is --rdzv-endpoint a region or URL that this host reaches?",
            retryable=_UNTRUSTED.search(said) is None,
            undone=isinstance(error, EndpointConnectionError | ConnectTimeoutError),
        )
    if isinstance(error, ClientError | BotoCoreError):
        if "size has exceeded" in said:
            return Problem(f"holds items of at most 400 KB, keys included ({said})", state=True)
        return Problem(f"refused a request: {said}", state=True)
    return None


def code_of(error: object) -> str | None:
    """DynamoDB's code of an error; None: it did not answer."""
    code = _answer(error).get("Error", {}).get("Code")
    return None if code is None else str(code)


def _said(error: Exception) -> str:
    """The server's own words, without boto3's preamble; a proxy's page is cut short."""
    if answer := _answer(error).get("Error"):
        return f"{answer.get('Code')}: {answer.get('Message')}"[:500]
    return str(error) or type(error).__name__


def _answer(error: object) -> dict[str, Any]:
    return dict(error.response) if isinstance(error, ClientError) else {}


def _advice(error: Exception) -> str:
    """What to set, for one of `_UNCONFIGURED`."""
    if isinstance(error, NoRegionError):
        return "no region: --rdzv-endpoint=us-east-1 names one, so does --rdzv-conf region=..."
    if isinstance(error, ProfileNotFound):
        return f"{error}; `aws configure list-profiles` shows those there are"
    return f"{error}; set $AWS_PROFILE or profile=..., or give this host a role"


def _connect(endpoint: str, options: Options, request_timeout: float) -> Any:
    """A boto3 client that does not retry. Raises `ValueError` for what other settings can mend."""
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
    try:
        session = boto3.Session(profile_name=options.profile, region_name=region)
        if options.role_arn:
            session = _assume(session, options.role_arn)
        return session.client("dynamodb", endpoint_url=url, config=config)
    except _UNCONFIGURED as error:
        raise ValueError(_advice(error)) from error


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


def _description(name: str) -> dict[str, Any]:
    """What CreateTable is asked for."""
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [
            {"AttributeName": attribute, "AttributeType": "S"} for attribute in ("pk", "sk", INDEX)
        ],
        "KeySchema": _schema("pk", "sk"),
        "LocalSecondaryIndexes": [
            {
                "IndexName": INDEX,
                "KeySchema": _schema("pk", INDEX),
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
        ],
    }


def _schema(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]


def _aside(request: Callable[[], dict[str, Any]], limit: Limit) -> dict[str, Any]:
    """What ``request`` returns, in a thread that is left alone once the limit is reached.

    boto3 cannot break a request off.
    """
    answer: Future[dict[str, Any]] = Future()
    done = Wake()

    def ask() -> None:
        try:
            answer.set_result(request())
        except Exception as error:
            answer.set_exception(error)
        done.ring()

    thread = threading.Thread(target=ask, name="rdzv-dynamodb", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on there are no new threads once the interpreter ends.
        ask()
    try:
        limit.await_readable(done.fd)
    finally:
        done.close()
    return answer.result()
