"""What an error of redis-py means for the request that met it."""

from __future__ import annotations

import re

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from rdzv_plugins.stores._tls import stays_refused

__all__ = ["LostAnswerError", "is_passing", "is_refusal", "not_now"]

# Those for which redis-py has no class, or had none. Redis 6 puts what a script met behind
# "Error running script (...): @user_script: 5: -".
_NOT_NOW = re.compile(
    "(?:^|: -)(?:ASK|BUSY|CLUSTERDOWN|MASTERDOWN|MISCONF|MOVED|NOREPLICAS|READONLY|TRYAGAIN|"
    "UNBLOCKED) "
)
_NO_RIGHT = re.compile("The user executing the script|ACL failure in script")


class LostAnswerError(ConnectionError):
    """A request that must not be asked twice may have been done."""


def is_refusal(error: Exception) -> bool:
    """Whether the user is unknown, or lacks a right, be it within a script (Redis 6, 7.2)."""
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return True
    return _NO_RIGHT.search(str(error)) is not None


def not_now(error: object) -> bool:
    """Whether this is a server's answer that it has changed nothing, but may at another time.

    It starts, has no primary's rank, lacks replicas or its disk, or another one has the slot.
    """
    if isinstance(
        error,
        # Of these, MovedError is an AskError, MasterDownError a ClusterDownError.
        AskError
        | BusyLoadingError
        | ClusterDownError
        | NoScriptError
        | ReadOnlyError
        | TryAgainError,
    ):
        return True
    return isinstance(error, ResponseError) and _NOT_NOW.search(str(error)) is not None


def is_passing(error: Exception) -> bool:
    """Whether the request may be asked again, and do better."""
    if isinstance(error, LostAnswerError) or is_refusal(error):
        return False
    # redis wraps a failed TLS handshake in a ConnectionError; trying again cannot mend it.
    if stays_refused(str(error)):
        return False
    return not_now(error) or isinstance(
        error, ConnectionError | TimeoutError | RedisClusterException | OSError
    )
