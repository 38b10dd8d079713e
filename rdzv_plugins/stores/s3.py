"""Amazon S3, and stores that speak its protocol with conditional writes: a key is an object.

The endpoint is ``s3://bucket/folder``; `url` names another store than AWS's. Credentials come from
AWS's usual sources. The first client of a process lets two writers compete, and refuses a store in
which both win. Waiters poll, and [requests are billed](choosing.md#know-what-a-bucket-costs). A
later run under the prefix removes runs that have expired; a lifecycle rule takes the rest.

Values up to 4 MiB. S3 takes 3,500 writes and 5,500 reads a second under a prefix. A forked process
may not use the client of its parent; torchrun's workers are not forked, those of a DataLoader are.
``$SSL_CERT_FILE`` names the PEM file of an authority that this host does not know.

The user needs ``s3:GetObject, PutObject, DeleteObject`` on the objects and ``s3:ListBucket`` on the
bucket.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, CredentialRetrievalError, NoCredentialsError

from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import OptionError, PollingOptions, option
from rdzv_plugins.stores._aws import files_of_aws, tell_of_session
from rdzv_plugins.stores._bucket import BucketClient

# obstore asks `_Credentials` again after this time, because a file may have changed.
_ASKED_AGAIN = timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True)
class Options(PollingOptions):
    """Options of the s3 backend, for an endpoint ``s3://bucket/folder``."""

    region: str | None = option(None)
    """region of the bucket; default: $AWS_REGION or $AWS_DEFAULT_REGION"""
    url: str | None = option(None)
    """a compatible store, such as ``https://minio.example.org:9000``; default: $AWS_ENDPOINT_URL,
    or AWS itself"""


class Client(BucketClient):
    """One run in a bucket of S3."""

    name = "s3"
    options = Options
    scheme = "s3"

    @classmethod
    def _url(cls, options: Any) -> str | None:
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        return options.url or next(filter(None, map(os.environ.get, names)), None)

    def _make_store(self, bucket: str, options: Any, more: dict[str, Any]) -> Any:
        config: dict[str, Any] = {"conditional_put": "etag"}
        try:
            credentials = _Credentials()
        except BotoCoreError as error:
            raise OptionError(f"AWS's configuration is not valid: {error}; correct it") from error
        region = options.region or os.environ.get("AWS_REGION") or credentials.region
        config |= {"region": region} if region else {}
        config |= {"endpoint": url} if (url := self._url(options)) else {}
        more["credential_provider"] = credentials
        return import_module("obstore.store").S3Store(bucket, config=config, **more)


class _Credentials:
    """The credentials of AWS's usual sources, which boto3 finds and renews for obstore."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self._session = FromFiles(boto3.Session, *files_of_aws())
        with suppress(CredentialRetrievalError):  # Late: the first request raises it again.
            tell_of_session(self._session.get().get_credentials())

    @property
    def region(self) -> str | None:
        found: str | None = self._session.get().region_name
        return found

    def __call__(self) -> dict[str, Any]:
        found = self._session.get().get_credentials()
        if found is None:
            raise NoCredentialsError
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token or None,
            "expires_at": datetime.now(UTC) + _ASKED_AGAIN,
        }
