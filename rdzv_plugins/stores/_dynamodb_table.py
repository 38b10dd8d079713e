"""A DynamoDB table: how it is reached and made, and what its errors say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
from botocore.exceptions import (
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
)

from rdzv_plugins.config import redact

if TYPE_CHECKING:
    from rdzv_plugins.stores.dynamodb import Options

__all__ = [
    "CREATE_ACTIONS",
    "INDEX",
    "UNCONFIGURED",
    "advice",
    "code_of",
    "connect",
    "reasons_of",
    "said_by",
    "status_of",
    "table_of",
]

INDEX = "large_version"
"""Both the index and the attribute it sorts by."""

CREATE_ACTIONS = "dynamodb:CreateTable and UpdateTimeToLive"

UNCONFIGURED = (NoCredentialsError, NoRegionError, PartialCredentialsError, ProfileNotFound)
"""What only other settings can mend; see `advice`."""

# DynamoDB answers within milliseconds, and a request cannot be broken off when we close.
_LONGEST_ATTEMPT = 2.0
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+")


def connect(endpoint: str, options: Options, request_timeout: float) -> Any:
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
    except UNCONFIGURED as error:
        raise ValueError(advice(error)) from error


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


def table_of(name: str) -> dict[str, Any]:
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


def code_of(error: object) -> str | None:
    """DynamoDB's code of an error; None: it did not answer."""
    code = _answer(error).get("Error", {}).get("Code")
    return None if code is None else str(code)


def status_of(error: object) -> int:
    """HTTP's; 0: nobody answered."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def reasons_of(error: object) -> set[str]:
    """The codes of a transaction's parts, "None" for those that had no fault."""
    return {str(reason.get("Code")) for reason in _answer(error).get("CancellationReasons", ())}


def said_by(error: Exception) -> str:
    """The server's own words, without boto3's preamble; a proxy's page is cut short."""
    if answer := _answer(error).get("Error"):
        return f"{answer.get('Code')}: {answer.get('Message')}"[:500]
    return str(error) or type(error).__name__


def advice(error: Exception) -> str:
    """What to set, for one of `UNCONFIGURED`."""
    if isinstance(error, NoRegionError):
        return "no region: --rdzv-endpoint=us-east-1 names one, so does --rdzv-conf region=..."
    if isinstance(error, ProfileNotFound):
        return f"{error}; `aws configure list-profiles` shows those there are"
    return f"{error}; set $AWS_PROFILE or profile=..., or give this host a role"


def _answer(error: object) -> dict[str, Any]:
    return dict(error.response) if isinstance(error, ClientError) else {}
