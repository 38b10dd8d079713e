"""No password reaches a message, however badly the endpoint is written."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rdzv_plugins.endpoint import parse_endpoint, redact
from rdzv_plugins.stores import open_client

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("redis://me:hunter2@host:1/0", "redis://me:***@host:1/0"),
        ("redis://:hunter2@host", "redis://:***@host"),
        ("me:hunter2@host:1", "me:***@host:1"),
        ("redis://me:hunt/hunter2@host", "redis://me:***@host"),
        ("redis://me:a@hunter2@host", "redis://me:***@host"),
        ("redis://me:a#hunter2@host", "redis://me:***@host"),
        ("redis://me:hunter2\n@host", "redis://me:***@host"),
        ("http://h:1/?password=hunter2&db=0", "http://h:1/?password=***&db=0"),
        ("http://h:1/?db=0&auth_token=hunter2", "http://h:1/?db=0&auth_token=***"),
        ("http://h:1/?apikey=hunter2", "http://h:1/?apikey=***"),
        ("http://h:1/?auth=hunter2&pass=hunter2", "http://h:1/?auth=***&pass=***"),
        ("http://h:1/?password=hun=ter2&db=0", "http://h:1/?password=***&db=0"),
        ("http://h:1/?password=a;hunter2&db=0", "http://h:1/?password=***&db=0"),
        ("redis://h;password=hunter2;db=0", "redis://h;password=***;db=0"),
        ("redis://h;password=hun ter2;db=0", "redis://h;password=***;db=0"),
        ("redis://h#password=hunter2", "redis://h#password=***"),
        ("redis://h#password=hun;ter 2&db=0", "redis://h#password=***&db=0"),
        ("host=pg1 password=hunter2 dbname=x", "host=pg1 password=*** dbname=x"),
        ("host=pg1 password = 'hunter2 x' dbname=x", "host=pg1 password =*** dbname=x"),
        ("redis://me%3Ahunter2@host", "redis://me:***@host"),
        ("redis://a,redis://me:hunter2@b", "redis://a,redis://me:***@b"),
        ("postgresql://h/d?keepalives=1", "postgresql://h/d?keepalives=1"),
        ("redis://me@host:1", "redis://me@host:1"),
        ("unix:///run/redis@1.sock", "unix:///run/redis@1.sock"),
        ("zk1:2181,zk2:2181/chroot", "zk1:2181,zk2:2181/chroot"),
        ("", ""),
    ],
)
def test_redact(endpoint: str, shown: str) -> None:
    assert redact(endpoint) == shown


@pytest.mark.parametrize("part", ["?password", "&token", "a:", "//", "x=", "@", "a@b:", "'", "% "])
def test_it_is_as_quick_for_a_long_text(part: str) -> None:
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


def test_a_parsed_endpoint_hides_its_password_and_its_query() -> None:
    endpoint = parse_endpoint("me:hunter2@host?token=hunter2", default_port=1)
    assert endpoint.password == SECRET
    assert SECRET not in f"{endpoint!r} {endpoint!s}"


@example(password=f"@0/{SECRET}")
@given(password=st.text(min_size=1).map(lambda text: f"{text}{SECRET}"))
def test_whatever_the_password_it_is_not_shown(password: str) -> None:
    endpoint = f"redis://me:{password}@host:1"
    assert SECRET not in redact(endpoint)
    try:
        shown = repr(parse_endpoint(endpoint, default_port=1, schemes=["redis"]))
    except ValueError as error:
        shown = str(error)
    assert SECRET not in shown
