"""No password reaches a message, however badly the endpoint is written."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.settings.endpoint import parse_endpoint, redact
from rdzv_plugins.stores import open_client
from tests.servers.process import free_ports, release

SECRET = "hunter2"
CONFIG = {"quorum": {"cluster": "c"}, "azure": {"account": "a"}, "s3": {"region": "r"}}


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("redis://me:hunter2@host:1/0", "redis://***@host:1/0"),
        ("redis://:hunter2@host", "redis://***@host"),
        ("me:hunter2@host:1", "***@host:1"),
        # A token, or a password without its colon.
        ("nats://hunter2@host:4222", "nats://***@host:4222"),
        ("hunter2@a:1,b:2", "***@a:1,b:2"),
        ("nats://hunter2%40host:4222", "nats://***@host:4222"),
        # Its "@" is missing.
        ("redis://me:hunter2", "redis://me:***"),
        ("redis://me:123456", "redis://me:***"),
        ("a:1,me:hunter2,b:1", "a:1,me:***"),
        ("redis://me%3Ahunter2", "redis://me***"),
        # The second host alone has a secret.
        ("nats://a:1,hunter2@b:2", "nats://***@b:2"),
        ("redis://a,redis://me:hunter2@b", "redis://***@b"),
        # Not percent-encoded.
        ("redis://me:hunt/hunter2@host", "redis://***@host"),
        ("redis://me:a@hunter2@host", "redis://***@host"),
        ("redis://me:a#hunter2@host", "redis://***"),
        ("redis://me:a?hunter2@host", "redis://***"),
        ("redis://me:hunter2\n@host", "redis://***"),
        ("http://h:1/?password=hun@ter2", "http://***"),
        ("host=h password=hun@ter2", "***"),
        ("http://h:1/?password=hunter2&db=0", "http://h:1/?***"),
        ("http://h:1/?db=0&auth_token=hunter2", "http://h:1/?db=0&***"),
        ("http://h:1/?pasword=hunter2", "http://h:1/?***"),
        ("redis://h;password=hunter2;db=0", "redis://h;***"),
        ("redis://h#password=hunter2", "redis://h#***"),
        ("host=pg1 password = 'hunter2 x' dbname=x", "host=pg1 ***"),
        ("host=pg1 port=1 dbname=x", "host=pg1 port=1 dbname=x"),
        (
            "postgresql:///d?host=/run/pg&sslmode=require",
            "postgresql:///d?host=/run/pg&sslmode=require",
        ),
        ("postgresql://%2Frun%2Fpg/d", "postgresql://%2Frun%2Fpg/d"),
        ("redis://[::1]:1,h2/0?db=1", "redis://[::1]:1,h2/0?db=1"),
        ("redis://h:", "redis://h:"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("zk1:2181,zk2:2181/chroot", "zk1:2181,zk2:2181/chroot"),
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("", ""),
    ],
)
def test_redact(endpoint: str, shown: str) -> None:
    assert redact(endpoint) == shown


@pytest.mark.parametrize(
    "part", ["?password", "&token", "a:", "//", "x=", "@", "a@b:", "'", "% ", "a=", "[:"]
)
def test_redaction_is_as_quick_for_a_long_text(part: str) -> None:
    """In the square of the length, a text of 4,000 characters took 10 s."""
    redact(part * 100_000)


@pytest.mark.parametrize(
    "endpoint",
    [
        "mongo://me:hunter2@host",
        "redis://me:hunter2@",
        "redis://me:hunter2@host:port",
        "redis://me:hunter2@a:b:c",
        "redis://me:hunter2/@host",
        "redis://me:/\nhunter2@host",
        "redis://me:hunter2#@host",
        "me:hunter2?x@host",
        "redis://me:hunter2@[bad]",
        "redis://me:hunter2@[::1",
        # urllib's own message for these characters shows the password.
        "redis://me:hunter2\u2100@host",
        "redis://me:hunter2",
        "redis://hunter2%40host:port",
    ],
)
def test_a_refused_endpoint_hides_its_password(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_endpoint(endpoint, default_port=1, schemes=["redis"])
    assert SECRET not in "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__cause__ is None
    with pytest.raises(ValueError, match=r"redis at '.*\*\*\*") as caught:
        open_client("redis", endpoint, "run")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_parsed_endpoint_hides_its_user_its_password_and_its_query() -> None:
    endpoint = parse_endpoint("hunter2:hunter2@host?token=hunter2", default_port=1)
    assert (endpoint.user, endpoint.password) == (SECRET, SECRET)
    assert SECRET not in f"{endpoint!r} {endpoint!s}"


AROUND = st.text(st.characters() | st.sampled_from("/@?#:%&=; '\"[],"), max_size=6)
PLACES = (
    "{}@h:1", "u:{}@h:1/0", "a:1,{}@b", "a:1,u:{}@b:2", "u:{}@a,v:{}@b", "h:1/?password={}",
    "h/?db=0&token={}&db=1", "u:{}@h?password={}", "host=h password={} user=u",
)  # fmt: skip


@settings(max_examples=500)
@example(scheme="nats://", endpoint="{}@h:1", before="@0/", after="")
@example(scheme="", endpoint="u:{}@h:1/0", before="a?b=", after="@c")
@given(
    scheme=st.sampled_from(["", "redis://", "postgresql://", "unix://", "az://"]),
    endpoint=st.sampled_from(PLACES),
    before=AROUND,
    after=AROUND,
)
def test_whatever_the_secret_and_wherever_it_is_not_shown(
    endpoint: str, scheme: str, before: str, after: str
) -> None:
    text = scheme + endpoint.replace("{}", f"{before}{SECRET}{after}")
    assert SECRET not in redact(text)
    try:
        shown = repr(parse_endpoint(text, default_port=1, schemes=["redis", "unix", "az"]))
    except ValueError as error:
        shown = str(error)
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("backend", "scheme"),
    [("redis", "redis://"), ("zookeeper", ""), ("dynamodb", "http://"), ("consul", ""),
     ("etcd-v3", "http://"), ("postgres", "postgresql://"), ("nats", "nats://"), ("quorum", ""),
     ("kubernetes", "https://"), ("s3", "s3://"), ("azure", "az://")],
)  # fmt: skip
@pytest.mark.parametrize(
    "endpoint",
    ["hunter2@{0}", "u:hunter2@{0}", "u:hunter2", "{0},u:hunter2@{0}", "{0}?token=hunter2"],
)
def test_no_stores_error_and_no_log_shows_it(
    backend: str, scheme: str, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    (port,) = free_ports(1)
    text = scheme + endpoint.format(f"127.0.0.1:{port}")
    with pytest.raises((ValueError, RendezvousConnectionError)) as caught:
        open_client(backend, text, "run", CONFIG.get(backend), request_timeout=0.05)
    release([port])
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text


@pytest.mark.parametrize("part", ["u:hunter2@127.0.0.1:9", "127.0.0.1:9/?sig=hunter2"])
@pytest.mark.parametrize("backend", ["s3", "azure", "dynamodb"])
def test_no_error_and_no_log_shows_the_secret_of_a_clouds_url(
    backend: str,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """botocore and obstore quote it."""
    caplog.set_level("DEBUG", "rdzv_plugins")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "a-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", f"http://{part}")
    config = CONFIG.get(backend, {}) | ({} if backend == "dynamodb" else {"url": f"http://{part}"})
    endpoint = {"s3": "s3://b", "azure": "az://b"}.get(backend, "")
    with pytest.raises((ValueError, RendezvousConnectionError)) as caught:
        open_client(backend, endpoint, "run", config, request_timeout=0.05)
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text
