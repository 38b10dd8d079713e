"""Azure Blob Storage: as S3, a key is an object, and a compare-and-set is a conditional write.

The endpoint is ``az://container/folder``. Credentials are those of the environment (``AZURE_*``),
or a managed identity. All else is as with the s3 backend.

The identity needs the role Storage Blob Data Contributor on the container.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rdzv_plugins.settings.options import PollingOptions, option
from rdzv_plugins.stores._bucket import BucketClient


@dataclass(frozen=True, kw_only=True)
class Options(PollingOptions):
    """Options of the azure backend, for an endpoint ``az://container/folder``."""

    account: str | None = option(None)
    """name of the storage account; default: $AZURE_STORAGE_ACCOUNT_NAME"""
    url: str | None = option(None)
    """another store of the protocol, such as ``http://127.0.0.1:10000/devstoreaccount1``"""


class Client(BucketClient):
    """One run in a container of Azure Blob Storage."""

    name = "azure"
    options = Options
    scheme = "az"

    def _make_store(self, bucket: str, options: Any, more: dict[str, Any]) -> Any:
        config: dict[str, Any] = {}
        config |= {"account_name": options.account} if options.account else {}
        config |= {"endpoint": options.url} if options.url else {}
        return import_module("obstore.store").AzureStore(bucket, config=config, **more)
