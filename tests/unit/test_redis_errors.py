"""What Redis' own words mean, as redis-py reads them."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError, ResponseError

from rdzv_plugins.kv.base import Problem
from rdzv_plugins.stores.redis import Client

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
    "ERR Protocol error: unauthenticated bulk length",
    "ERR Protocol error: unauthenticated multibulk length",
    "NOPERM this user has no permissions to run the 'hget' command",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "ERR ACL failure in script: User x has no permissions to run the 'time' command",
    SCRIPT_MET.format(error="The user executing the script can't run this command or subcommand"),
]

FULL = [
    "OOM command not allowed when used memory > 'maxmemory'.",
    "OOM command not allowed when used memory > 'maxmemory'. script: 5b5d2a, on @user_script:4.",
    SCRIPT_MET.format(error="-OOM command not allowed when used memory > 'maxmemory'."),
]

HOPELESS = [
    "NOTANUMBER",
    "BUSYGROUP Consumer Group name already exists",
]


@pytest.mark.parametrize("answer", NOT_NOW)
def test_what_may_be_done_at_another_time_is_asked_again(answer: str) -> None:
    problem = meaning(read(answer))
    assert problem.retryable
    assert problem.undone, "an addition would not be asked again"
    assert "did not execute a request within" in problem.text


@pytest.mark.parametrize("answer", FULL)
def test_a_full_server_is_an_outage(answer: str) -> None:
    problem = meaning(read(answer))
    assert problem.text.startswith("is full: it took no write for 5 s (")
    assert "user_script" not in problem.text or "Error running" in problem.text
    assert problem.retryable
    assert problem.undone, "an addition would not be asked again"


@pytest.mark.parametrize("answer", REFUSALS)
def test_missing_right_is_a_refusal(answer: str) -> None:
    problem = meaning(read(answer))
    assert "refused the credentials" in problem.text
    assert problem.denied
    assert not problem.retryable
    assert not problem.state


@pytest.mark.parametrize("answer", HOPELESS)
def test_anything_else_is_neither(answer: str) -> None:
    problem = meaning(read(answer))
    assert problem.state
    assert "refused a request" in problem.text
    assert not problem.retryable
    assert not problem.denied


def test_value_that_quotes_an_error_is_none() -> None:
    assert not meaning(ResponseError("wrong kind of value: READONLY or not")).retryable


def test_lost_answer_leaves_an_addition_in_doubt() -> None:
    lost = meaning(ConnectionError("Connection reset by peer"))
    assert lost.retryable
    assert not lost.undone


def test_former_primary_under_a_sentinel_has_done_nothing() -> None:
    # As redis-py's SentinelManagedConnection passes it on.
    error = ConnectionError("The previous master is now a slave")
    error.__context__ = read("READONLY You can't write against a read only replica.")
    assert meaning(error).undone


def test_error_of_nobodys_is_passed_on() -> None:
    assert client()._problem(KeyError("key")) is None


def client() -> Client:
    """A client that is connected to nothing."""
    client = object.__new__(Client)
    client.timeout = 5.0
    client._tls = None
    client._grant = "ACL SETUSER joe"
    return client


def meaning(error: Exception) -> Problem:
    problem = client()._problem(error)
    assert problem is not None
    return problem


def read(answer: str) -> Exception:
    error: Exception = BaseParser.parse_error(answer)  # type: ignore[no-untyped-call]
    return error
