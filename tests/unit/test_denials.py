"""Which answers are a store's own refusal of this client: `AccessDeniedError`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from kazoo.exceptions import InvalidACLError
from nats.js.errors import APIError
from psycopg.errors import SyntaxError
from redis import exceptions as redis_errors

from rdzv_plugins.kv import AccessDeniedError, MemoryServer, RendezvousConnectionError
from rdzv_plugins.kv.base import Limit, Problem, StoreClient, Stored
from rdzv_plugins.stores import consul, dynamodb, etcd, nats, postgres, redis, zookeeper
from rdzv_plugins.stores._dynamodb_table import problem_of
from rdzv_plugins.stores._tls import tls_problem
from rdzv_plugins.stores._zookeeper_session import Session
from tests.unit.test_store_client import DictClient

# Python's ssl and libpq show a server's alert in these words.
ALERTS = [
    "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required (_ssl.c:2559)",
    "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2559)",
    "[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert bad certificate (_ssl.c:2559)",
    "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired (_ssl.c:2559)",
    "[SSL: SSLV3_ALERT_HANDSHAKE_FAILURE] sslv3 alert handshake failure (_ssl.c:997)",
    "SSL error: tlsv1 alert unknown ca",
    "SSL error: sslv3 alert certificate revoked",
]
# What a client finds wrong with the server.
DISTRUST = [
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer "
    "certificate (_ssl.c:1006)",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch, certificate is "
    "not valid for 'a'. (_ssl.c:1006)",
    "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
    "SSL error: certificate verify failed",
]


@pytest.mark.parametrize("reason", ALERTS)
def test_alert_of_the_server_is_a_denial(reason: str) -> None:
    assert tls_problem(reason).denied


@pytest.mark.parametrize("reason", DISTRUST)
def test_distrust_of_the_server_is_none(reason: str) -> None:
    assert not tls_problem(reason).denied


@pytest.mark.parametrize(
    "code",
    ["AccessDeniedException", "ExpiredTokenException", "UnrecognizedClientException"],
)
def test_answer_of_aws_is_a_denial(code: str) -> None:
    error = ClientError({"Error": {"Code": code, "Message": "no"}}, "Query")
    assert meaning(error).denied


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError(),
        ClientError({"Error": {"Code": "ResourceNotFoundException", "Message": "no"}}, "Query"),
        ClientError({"Error": {"Code": "403", "Message": "of a proxy"}}, "Query"),
    ],
)
def test_what_aws_did_not_refuse_is_none(error: Exception) -> None:
    assert not meaning(error).denied


# The right or the setting that may be missing where a store refuses a request for its own reasons.
LIKELY = [
    (
        redis.Client,
        redis_errors.ResponseError("unknown command 'EVALSHA'"),
        "the server's rename-command, takes that command away",
    ),
    (redis.Client, redis_errors.ResponseError("no"), "the user needs: the right"),
    (
        zookeeper.Client,
        InvalidACLError(),
        "the user needs rights there, in zkCli.sh: the right",
    ),
    (
        consul.Client,
        consul.RefusedError(405, b"no", True),
        "and the token needs the right",
    ),
    (
        etcd.Client,
        etcd.RefusedError(400, b'{"code": 3, "message": "etcdserver: no"}'),
        "the role of the user needs the right",
    ),
    (
        postgres.Client,
        SyntaxError("no"),
        "GRANT SELECT, INSERT, UPDATE, DELETE ON rdzv TO joe",
    ),
    (
        dynamodb.Client,
        ClientError({"Error": {"Code": "ValidationException", "Message": "no"}}, "Query"),
        "The role must allow dynamodb:GetItem",
    ),
    (
        nats.Client,
        APIError(code=400, err_code=10003, description="no"),
        "The permissions must allow the right",
    ),
]


@pytest.mark.parametrize(("store", "error", "advice"), LIKELY)
def test_refused_request_says_what_may_be_missing(
    store: type[StoreClient], error: Exception, advice: str
) -> None:
    client: Any = object.__new__(store)
    client.timeout, client._tls, client._session = 5.0, None, object.__new__(Session)
    client._session._proven = True
    client._name, client._user, client._options = "rdzv", "joe", nats.Options()
    if store is not postgres.Client:
        client._grant, client._parents = "the right", ["/"]
    problem = client._problem(error)
    assert problem.state
    assert problem.text.startswith("refused a request: ")
    assert advice in problem.text
    assert problem.text.endswith("; rdzv check tries each kind of request")


class PartlyDenied(DictClient):
    """One of two servers refuses, and the other one is silent."""

    def __init__(self, *answers: Exception) -> None:
        super().__init__(MemoryServer(), "run", 0.3)
        self.answers = [*answers]

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        raise self.answers.pop(0) if self.answers else ConnectionResetError("silent")

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, KeyError):
            return Problem("refused", retryable=True, denied=True)
        return super()._problem(error)


def test_refusal_of_one_server_outlasts_the_silence_of_another() -> None:
    with pytest.raises(AccessDeniedError):
        PartlyDenied(KeyError("refused"), ConnectionResetError("silent"), KeyError("no")).get("key")


@pytest.mark.parametrize(
    "answers",
    [[], [KeyError("refused")]],
    ids=["silence of all", "a server that stops in a log-in"],
)
def test_a_server_that_is_silent_in_the_end_refuses_nobody(answers: list[Exception]) -> None:
    with pytest.raises(RendezvousConnectionError) as caught:
        PartlyDenied(*answers).get("key")
    assert not isinstance(caught.value, AccessDeniedError)


def meaning(error: Exception) -> Problem:
    problem = problem_of(error, 5.0)
    assert problem is not None
    return problem
