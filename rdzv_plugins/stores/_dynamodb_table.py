"""The table: options, boto3 client, creation, the server's clock, and the meaning of errors."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import boto3
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
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

from rdzv_plugins.kv import LateCredentialsError, RendezvousConnectionError
from rdzv_plugins.kv.base import (
    UNREACHED,
    Limit,
    Problem,
    clock_hint,
    find_problem,
    full,
    in_background,
    is_unresolved,
    refused,
)
from rdzv_plugins.kv.retry import retry
from rdzv_plugins.settings.endpoint import parse_endpoint, redact
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import OptionError, PollingOptions, UnreadableFileError, option
from rdzv_plugins.stores._aws import files_of_aws, tell_of_session
from rdzv_plugins.stores._http import BoundedResponse

INDEX = "large_version"
"""The name of the index, and of the attribute that is its sort key."""

_READY_SECONDS = 120.0
# DynamoDB answers within milliseconds, and `close` cannot cancel a request.
_LONGEST_ATTEMPT = 2.0
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+")

_ACTIONS = (
    "dynamodb:GetItem, PutItem, UpdateItem, Query, BatchGetItem, BatchWriteItem and PartiQLUpdate "
    f"on the table and on index/{INDEX}"
)
_CREATE_ACTIONS = "dynamodb:CreateTable and UpdateTimeToLive"

_MISSING = "ResourceNotFoundException"
# Codes of requests that were refused before any write.
_THROTTLED = re.compile(
    "(LimitExceeded|ProvisionedThroughputExceeded|ReplicatedWriteConflict|RequestLimitExceeded"
    "|Throttling|ThrottlingError|TransactionConflict)(Exception)?"
)
_DENIED = re.compile(
    "(AccessDenied|ExpiredToken|IncompleteSignature|InvalidSignature|MissingAuthenticationToken"
    "|UnrecognizedClient)(Exception)?|InvalidClientTokenId|SignatureDoesNotMatch|RequestExpired"
    "|RequestTimeTooSkewed"
)
_SLOW = (
    "could not keep up for {timeout:g} s ({said}); raise the table's capacity, poll_interval_max "
    "or keep_alive_interval"
)
_REFUSED = (
    "refused the credentials ({said}){clock}; check them with 'aws sts get-caller-identity'; they "
    "must allow {actions}"
)
# The meanings of errors, by a pattern of code and HTTP status; the first match counts.
_PROBLEMS = {
    "^Unconfigured ": Problem(_REFUSED),
    rf"^({_DENIED.pattern}) ": Problem(_REFUSED, denied=True),
    f"^{_MISSING} ": Problem(
        "does not exist ({said}); create it, and the nodes write their run again"
    ),
    "^ItemCollectionSizeLimitExceededException ": full(
        "delete what nobody needs of the run, or name another table"
    ),
    rf"^({_THROTTLED.pattern}) ": Problem(_SLOW, retryable=True, undone=True),
    "^TransactionCanceledException for throttling ": Problem(_SLOW, retryable=True),
    "^TransactionCanceledException ": Problem(_SLOW),
    r" 5\d\d$": Problem("or its proxy failed for {timeout:g} s ({said})", retryable=True),
}
_REFUSALS = {
    "size has exceeded": Problem(
        "holds items of at most 400 KB, keys included ({said})", state=True
    ),
    "": refused(
        "is the table made as rdzv docs stores says, and not by another program? The role must "
        "allow {actions}"
    ),
}
_UNTRUSTED = re.compile("CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER")
_UNCONFIGURED = (NoRegionError, PartialCredentialsError, ProfileNotFound)
# While a host boots, an agent may start before the service with the host role's credentials.
_LATE = (NoCredentialsError, CredentialRetrievalError)


@dataclass(frozen=True, kw_only=True)
class Options(PollingOptions):
    """Options of the dynamodb backend, for endpoints that are a region (``us-east-1``), a URL
    (``http://127.0.0.1:8000``) or empty (AWS's own configuration).

    Credentials come from AWS's usual sources: environment, profile, container, instance.
    """

    table: str = option("rdzv-plugins")
    """name of the table"""
    create_table: bool = option(False)
    """create the table, billed on demand, if there is none"""
    region: str | None = option(None)
    """region; a region in the endpoint takes precedence; default: AWS's own configuration"""
    profile: str | None = option(None)
    """profile of AWS's configuration files"""
    role_arn: str | None = option(None)
    """role to assume with those credentials"""


class Table:
    """A table and the server's clock. A request is one attempt and raises boto3's errors."""

    def __init__(self, endpoint: str, options: Options, where: str, request_timeout: float) -> None:
        """Raises `ValueError` for an error that only other settings can fix, and
        `LateCredentialsError`.
        """
        self.name = options.table
        self._where = where
        self._timeout = request_timeout
        self._creates = options.create_table
        self._probe: dict[str, Any] = {}
        # The server's clock minus the monotonic clock, in seconds.
        self._ahead = -math.inf
        # botocore renews credentials with an end, but never reads the keys in a file again.
        connect = partial(_connect, endpoint, options, request_timeout)
        try:
            self._boto = FromFiles(connect, *files_of_aws())
        except _LATE as error:
            raise self._late(error) from error

    def _late(self, error: Exception) -> LateCredentialsError:
        return LateCredentialsError(
            f"{self._where} cannot be asked without credentials ({error}); set $AWS_PROFILE or "
            "profile=..., or give this host a role"
        )

    @property
    def url(self) -> str:
        """The URL of the service."""
        return str(self._boto.get().meta.endpoint_url)

    def now(self) -> float:
        """The server's time, in seconds since 1970."""
        # From the Date of answers, so that no node's wall clock decides when an item has expired.
        if self._ahead == -math.inf:
            self._ahead = time.time() - time.monotonic()
        return time.monotonic() + self._ahead

    def open(self, limit: Limit, probe: dict[str, Any]) -> None:
        """Check that the table answers the query ``probe``; with create_table=true, create it.

        Raises `OptionError` for an error that only other settings can fix, and
        `LateCredentialsError`.
        """
        self._probe = probe
        try:
            self._send(limit, "query", **probe)
        except _UNCONFIGURED as error:
            raise OptionError(_advice(error)) from error
        except _LATE as error:
            raise self._late(error) from error
        except ClientError as error:
            if code_of(error) == "ValidationException":
                raise OptionError(
                    f"the table '{self.name}' has another schema ({_said(error)}): it needs "
                    "the string keys pk and sk, and the local secondary index "
                    f"'{INDEX}' on the string '{INDEX}', keys only. Name another table with "
                    "--rdzv-conf table=...; create_table=true creates a missing one"
                ) from error
            if code_of(error) != _MISSING:
                raise
            if not self._creates:
                raise OptionError(
                    f"there is no table '{self.name}': create it with --rdzv-conf "
                    f"create_table=true (needs {_CREATE_ACTIONS}), or name another with table=...; "
                    f"later requests need {_ACTIONS}"
                ) from error
            self._create(limit, max(_READY_SECONDS, self._timeout))

    def ask(self, limit: Limit, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request about the table; raises `WokenError` as soon as the limit's wake rings."""
        try:
            return self._send(limit, operation, **arguments)
        except ClientError as error:
            if not self._creates or code_of(error) != _MISSING:
                raise
        # The table was deleted: continue as after a loss of the store's data.
        self._create(limit, self._timeout)
        return self._send(limit, operation, **arguments)

    def close(self) -> None:
        with contextlib.suppress(BotoCoreError, OSError, UnreadableFileError):
            self._boto.get().close()

    def _send(self, limit: Limit, operation: str, **arguments: Any) -> dict[str, Any]:
        # Batches and transactions name the table with each of their items.
        if not operation.startswith(("batch_", "transact_")):
            arguments["TableName"] = self.name
        request = partial(getattr(self._boto.get(), operation), **arguments)
        if limit.wake is None:
            answer: dict[str, Any] = request()
        else:
            # boto3 cannot cancel a request: a woken wait abandons it.
            answer = limit.await_result(in_background("rdzv-dynamodb", request))
        if (date := _date_of(answer)) is not None:
            # A Date has whole seconds and arrives late: the largest difference is the most exact.
            self._ahead = max(self._ahead, date - time.monotonic())
        return answer

    def _create(self, limit: Limit, seconds: float) -> None:
        """Create the table, and wait up to ``seconds`` until it is active."""

        def retryable(error: Exception) -> bool:
            problem = problem_of(error, self._timeout)
            return code_of(error) == _MISSING or (problem is not None and problem.retryable)

        def attempt(operation: str, arguments: dict[str, Any], done: str | None = None) -> None:
            request = partial(self._send, limit, operation, **arguments)
            try:
                retry(request, timeout=seconds, retryable=retryable, sleep=limit.sleep)
            except ClientError as error:
                # Another node was faster.
                if code_of(error) != done:
                    raise

        attempt("create_table", _description(self.name), done="ResourceInUseException")
        try:
            # Until the table is active, requests fail as if it did not exist.
            attempt("query", self._probe)
        except ClientError as error:
            if code_of(error) != _MISSING:
                raise
            raise RendezvousConnectionError(
                f"{self._where} was created but is not active after {seconds:g} s; start again "
                "when it is"
            ) from error
        expiry = {"Enabled": True, "AttributeName": "expires_at"}
        attempt(
            "update_time_to_live",
            {"TimeToLiveSpecification": expiry},
            done="ValidationException",
        )


def problem_of(error: Exception, timeout: float) -> Problem | None:
    """See `StoreClient._problem`; requests may take ``timeout`` seconds."""
    said = _said(error)
    code = code_of(error) or type(error).__name__
    if isinstance(error, _UNCONFIGURED + _LATE):
        code = "Unconfigured"
    if code == "TransactionCanceledException":
        reasons = _answer(error).get("CancellationReasons", ())
        faults = {str(it.get("Code")) for it in reasons} - {"None"}
        code += " for throttling" if all(map(_THROTTLED.fullmatch, faults)) else ""
    status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    problem = find_problem(
        _PROBLEMS, f"{code} {status}", said=said, timeout=timeout, actions=_ACTIONS,
        clock=clock_hint(_date_of(_answer(error))),
    )  # fmt: skip
    if problem is not None:
        return problem
    if is_unresolved(error):
        return Problem(
            f"{UNREACHED} within {timeout:g} s, for its name cannot be resolved ({said}); "
            "check region or URL in --rdzv-endpoint, and this host's DNS",
            retryable=True,
            undone=True,
        )
    if isinstance(error, BotoConnectionError | HTTPClientError | TimeoutError):
        return Problem(
            f"{UNREACHED} within {timeout:g} s ({said}); "
            "is --rdzv-endpoint a region or URL that this host reaches?",
            retryable=_UNTRUSTED.search(said) is None,
            undone=isinstance(error, EndpointConnectionError | ConnectTimeoutError),
        )
    if code.isdecimal():
        # A status instead of a code is another server's answer.
        return Problem(f"does not answer as DynamoDB does ({said}); is it another server's port?")
    if isinstance(error, ClientError | BotoCoreError):
        return find_problem(_REFUSALS, said, said=said, actions=_ACTIONS)
    return None


def code_of(error: object) -> str:
    """DynamoDB's code of an error; "": the error is not an answer."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _date_of(answer: Mapping[str, Any]) -> float | None:
    """The server's time of its answer, in seconds since 1970."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        date = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return date.timestamp()
    return None


def _said(error: Exception) -> str:
    """The server's own message without boto3's preamble, cut to 500 characters."""
    if answer := _answer(error).get("Error"):
        return f"{answer.get('Code')}: {answer.get('Message')}"[:500]
    return str(error) or type(error).__name__


def _answer(error: object) -> dict[str, Any]:
    return dict(error.response) if isinstance(error, ClientError) else {}


def _advice(error: Exception) -> str:
    """The advice for one of `_UNCONFIGURED`."""
    if isinstance(error, NoRegionError):
        return "no region is set: use --rdzv-endpoint=us-east-1 or --rdzv-conf region=us-east-1"
    if isinstance(error, ProfileNotFound):
        return f"{error}; `aws configure list-profiles` lists the profiles"
    return f"{error}; set $AWS_PROFILE or profile=..., or give this host a role"


def _connect(endpoint: str, options: Options, request_timeout: float) -> Any:
    """A boto3 client that does not retry. Raises `ValueError` for bad settings."""
    region, url = options.region, None
    target = endpoint.strip()
    if target.startswith(("http://", "https://")):
        if "@" in target:
            raise ValueError(
                "the URL has a user name: remove it; credentials come from AWS's configuration"
            )
        parsed = parse_endpoint(target, default_port=443, schemes=("http", "https"))
        parsed.refuse_all_but(path=True)
        if len(parsed.hosts) > 1:
            raise ValueError("the URL names several hosts; DynamoDB has one address a region")
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
        tell_of_session(session.get_credentials())
        client = session.client("dynamodb", endpoint_url=url, config=config)
    except (*_UNCONFIGURED, ConfigParseError) as error:
        raise UnreadableFileError(_advice(error)) from error
    # Private. botocore limits the time of each read, but not an answer's whole time or length.
    pools = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool in pools.items():
        bounded = type("Connection", (pool.ConnectionCls,), {"response_class": BoundedResponse})
        pools[scheme] = type("Pool", (pool,), {"ConnectionCls": bounded})
    return client


def _assume(session: Any, role_arn: str) -> Any:
    """The session with another role's credentials, which renew themselves before they expire."""
    source = session.get_credentials()
    if source is None:
        raise NoCredentialsError
    fetcher = AssumeRoleCredentialFetcher(
        session._session.create_client,
        source,
        role_arn,
        extra_args={"RoleSessionName": "rdzv-plugins"},
    )
    # boto3 has no public way to give a session such credentials.
    session._session._credentials = DeferredRefreshableCredentials(
        method="assume-role", refresh_using=fetcher.fetch_credentials
    )
    return session


def _description(name: str) -> dict[str, Any]:
    """The arguments of CreateTable."""
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
