"""Answers that have more than one cause: the line names the one at hand, or all of them.

The answers are as the servers give them; those of clouds, which cannot run here, as documented.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from email.utils import formatdate

import pytest

from rdzv_plugins.kv import AccessDeniedError, RendezvousError
from rdzv_plugins.stores import open_client
from tests.nonsense import ENVIRON, reached, speaking

# Times of the server's, written when it answers: `timed`.
NOW, AHEAD, STAMP = "<now>", "<ten minutes from now, as a server writes it>", "<ahead, as ISO 8601>"


def answer(status: str, body: str, date: str = NOW) -> bytes:
    return f"HTTP/1.1 {status}\r\nDate: {date}\r\nContent-Length: <length>\r\n\r\n{body}".encode()


def timed(said: bytes) -> bytes:
    ahead = time.time() + 600
    times = {
        NOW: formatdate(usegmt=True),
        AHEAD: formatdate(ahead, usegmt=True),
        STAMP: datetime.fromtimestamp(ahead, UTC).isoformat()[:19],
    }
    for mark, it in times.items():
        said = said.replace(mark.encode(), it.encode())
    length = len(said.partition(b"\r\n\r\n")[2])
    return said.replace(b"<length>", b"%d" % length)


def of_kubernetes(message: str) -> bytes:
    return answer("403 Forbidden", json.dumps({"message": message}))


OF_S3 = "<Error><Code>{}</Code><Message>Why.</Message>{}</Error>"
OF_AZURE = "<Error><Code>AuthenticationFailed</Code><Message>Why. Time:{}.1Z</Message></Error>"
OF_DYNAMODB = '{"__type":"com.amazon.coral.service#InvalidSignatureException","message":"Why."}'
POLICY = 'admission webhook "labels.example.org" denied the request: give the label team'
RBAC = 'configmaps is forbidden: User "joe" cannot create resource "configmaps" in API group ""'
ENDS = "unable to create new content in namespace x because it is being terminated"

CLOCK = "this host's clock is (5[5-9]|60)[0-9] s behind the server's"
BUSY = "is it running, not too busy and below its limit of connections, and does"
CASES: dict[str, tuple[str, bytes, str]] = {
    "a clock, s3": ("s3", answer("403 Forbidden", OF_S3.format(
        "RequestTimeTooSkewed", f"<ServerTime>{STAMP}Z</ServerTime>")), CLOCK),
    "a key, s3": ("s3", answer("403 Forbidden", OF_S3.format("SignatureDoesNotMatch", "")),
        r"SignatureDoesNotMatch\); they must allow"),
    "a clock, azure": ("azure", answer("403 Forbidden", OF_AZURE.format(STAMP)), CLOCK),
    "a clock, dynamodb": ("dynamodb", answer("400 Bad Request", OF_DYNAMODB, AHEAD), CLOCK),
    "a key, dynamodb": ("dynamodb", answer("400 Bad Request", OF_DYNAMODB), r"Why.\); check them"),
    "a clock, kubernetes": ("kubernetes", answer("401 Unauthorized", "", AHEAD), CLOCK),
    "a token, kubernetes": ("kubernetes", answer("401 Unauthorized", ""), r"\(HTTP 401: \); set"),
    "a policy": ("kubernetes", of_kubernetes(POLICY), "policies .* a proxy in between; labels="),
    "a proxy": ("kubernetes", answer("403 Forbidden", "<html>"), "its policies .* a proxy in"),
    "a role": ("kubernetes", of_kubernetes(RBAC), "bind the user to a role with the verbs"),
    "a namespace that ends": ("kubernetes", of_kubernetes(ENDS), "is deleting the namespace"),
    "a proxy, consul": ("consul", answer("403 Forbidden", "<html>"), "perhaps a proxy's answer"),
    "a busy etcd": ("etcd-v3", answer("429 Too Many Requests",
        '{"code":8,"message":"etcdserver: too many requests"}'), "do their disks"),
    "crowd, redis": ("redis", b"-ERR max number of clients reached\r\n", "raise its maxclients"),
    "crowd, consul": ("consul", b"", BUSY),
    "crowd, zookeeper": ("zookeeper", b"", BUSY),
    "crowd, nats": ("nats", b"INFO {}\r\n-ERR 'maximum connections exceeded'\r\n", BUSY),
}  # fmt: skip


@pytest.mark.parametrize("cause", CASES)
def test_the_line_names_the_cause(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    store, said, line = CASES[cause]
    with speaking(timed(said), greets=store == "nats") as address:
        endpoint, config = reached(store, address)
        with pytest.raises(RendezvousError, match=line) as told:
            open_client(store, endpoint, "run", config, request_timeout=0.5)
    if "its policies" in line:
        assert not isinstance(told.value, AccessDeniedError), "others are refused too"
