"""What Redis' own words mean, as redis-py reads them."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError, ResponseError

from rdzv_plugins.stores._redis_errors import LostAnswerError, is_passing, is_refusal, not_now

# As Redis 6.2 passes on what a script met.
SCRIPT_MET = (
    "ERR Error running script (call to f_5b5d2a): @user_script:5: @user_script: 5: {error} "
)

NOT_NOW = [
    "ASK 3999 127.0.0.1:6381",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "CLUSTERDOWN The cluster is down",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
    "MOVED 3999 127.0.0.1:6381",
    "NOREPLICAS Not enough good replicas to write.",
    "NOSCRIPT No matching script. Please use EVAL.",
    "READONLY You can't write against a read only replica. script: 5b5d2a, on @user_script:5.",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    SCRIPT_MET.format(error="-READONLY You can't write against a read only replica."),
    SCRIPT_MET.format(error="-NOREPLICAS Not enough good replicas to write."),
    SCRIPT_MET.format(error="-MISCONF Redis is configured to save RDB snapshots"),
]

REFUSALS = [
    "NOAUTH Authentication required.",
    "NOPERM this user has no permissions to run the 'hget' command",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "ERR ACL failure in script: User x has no permissions to run the 'time' command",
    SCRIPT_MET.format(error="The user executing the script can't run this command or subcommand"),
]

HOPELESS = [
    "NOTANUMBER",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "BUSYGROUP Consumer Group name already exists",
]


@pytest.mark.parametrize("answer", NOT_NOW)
def test_what_may_be_done_at_another_time_is_asked_again(answer: str) -> None:
    error = read(answer)
    assert not_now(error)
    assert is_passing(error)


@pytest.mark.parametrize("answer", REFUSALS)
def test_missing_right_is_a_refusal(answer: str) -> None:
    error = read(answer)
    assert is_refusal(error)
    assert not is_passing(error)


@pytest.mark.parametrize("answer", HOPELESS)
def test_anything_else_is_neither(answer: str) -> None:
    error = read(answer)
    assert not not_now(error)
    assert not is_refusal(error)
    assert not is_passing(error)


def test_value_that_quotes_an_error_is_none() -> None:
    assert not not_now(b"READONLY a value")
    assert not not_now(ResponseError("wrong kind of value: READONLY or not"))


def test_lost_answer_is_not_asked_for_again() -> None:
    assert is_passing(ConnectionError("Connection reset by peer"))
    assert not is_passing(LostAnswerError("Connection reset by peer"))


def read(answer: str) -> Exception:
    error: Exception = BaseParser.parse_error(answer)  # type: ignore[no-untyped-call]
    return error
