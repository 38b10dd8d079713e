"""Shared by AWS's stores: the files of AWS's configuration, and credentials that will end."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from botocore.credentials import RefreshableCredentials

log = logging.getLogger(__name__)


def files_of_aws() -> list[Path]:
    """The files of AWS's configuration, as botocore finds them."""
    named = {
        "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
        "AWS_CONFIG_FILE": "~/.aws/config",
    }
    return [Path(os.environ.get(name) or usual).expanduser() for name, usual in named.items()]


def tell_of_session(credentials: Any) -> None:
    """Warn of credentials that end with a session which nothing renews."""
    renewed = isinstance(credentials, RefreshableCredentials)
    if credentials is not None and not renewed and credentials.token:
        log.warning(
            "the credentials of AWS (%s) are a session's, and nothing renews them: requests are "
            "refused once it ends; use a profile, or a role of the host",
            credentials.method,
        )
