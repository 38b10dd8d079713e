"""Users and TLS switched on, on real servers: who is let in, and what the others are told."""

from __future__ import annotations

import base64
import logging
import secrets
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

import pytest

from rdzv_plugins.kv import AccessDeniedError, RendezvousConnectionError
from rdzv_plugins.settings.options import ServerOptions
from tests import Measure
from tests.integration.agents import Run, one_world, until
from tests.integration.credentials import Certificates
from tests.integration.jobs import Run as TorchRun
from tests.integration.stores import GUARDED, KINDS, Kind, RunningStore, kind_of, started

# Far below the request timeout of 5 s: what trying again cannot mend is not tried again.
PROMPT = 2.5

Patch = pytest.MonkeyPatch

every_kind = pytest.mark.parametrize("kind", GUARDED, ids=lambda kind: kind.name)


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A store that demands a user and a client's certificate.

    Attributes:
        secret: the password of the user "joe", or the token.
        takes: the option that holds it.
    """

    store: RunningStore
    secret: str = field(repr=False)
    takes: str = "password"

    @property
    def variable(self) -> str:
        return f"RDZV_PLUGINS_{self.takes.upper()}"

    def credentials(self, secret: str | None = None) -> dict[str, str]:
        """The environment of a client that comes with this secret; None: with the right one."""
        user = {} if self.takes == "token" else {"RDZV_PLUGINS_USER": "joe"}
        return {**user, self.variable: secret or self.secret}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=GUARDED, ids=lambda kind: kind.name)
def running_guarded(
    request: pytest.FixtureRequest, certificates: Certificates
) -> Iterator[Guarded]:
    kind: Kind = request.param
    takes = "token" if kind.name in ("consul", "kubernetes") else "password"
    # With characters that a URL must escape; a token is a UUID.
    secret = str(uuid.uuid4()) if takes == "token" else f"{secrets.token_hex(8)}:@/#{{}}"
    security = certificates.security(user="joe", password=secret, client=True)
    with started(kind, security=security) as store:
        yield Guarded(store=store, secret=secret, takes=takes)


@pytest.fixture
def guarded(running_guarded: Guarded, forgotten: None) -> Guarded:
    return running_guarded


@pytest.fixture
def forgotten(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing in the environment opens a store, and everything is logged."""
    for name in ("USER", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)
    caplog.set_level(logging.DEBUG)


def test_secret_from_the_environment(
    guarded: Guarded, run_id: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    remember(monkeypatch, guarded.credentials())
    shown = form_a_round(guarded.store, run_id)
    assert_hidden(shown + caplog.text, guarded.secret)


def test_secret_from_a_file(
    guarded: Guarded,
    run_id: str,
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    remember(monkeypatch, guarded.credentials())
    monkeypatch.delenv(guarded.variable)
    file = tmp_path / "secret"
    file.write_text(guarded.secret + "\n")
    shown = form_a_round(configured(guarded.store, **{f"{guarded.takes}_file": str(file)}), run_id)
    assert_hidden(shown + caplog.text, guarded.secret)


def test_secret_in_the_endpoint(
    guarded: Guarded, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    if guarded.store.backend == "kubernetes":
        # The API server's clients take none there.
        error = refused(at(guarded.store, guarded.secret), run_id)
        assert isinstance(error, ValueError)
        assert "leave it out, and set a token" in str(error)
        assert_hidden(caplog.text + everything(error), guarded.secret)
        return
    shown = form_a_round(at(guarded.store, guarded.secret), run_id)
    wrong = str(uuid.uuid4())
    error = refused(at(guarded.store, wrong), run_id)
    assert_clear(error, guarded.store, f"${guarded.variable}")
    assert_hidden(shown + caplog.text + everything(error), guarded.secret, wrong)


@pytest.mark.parametrize("given", ["wrong", "none"])
def test_wrong_secret(
    guarded: Guarded,
    run_id: str,
    given: str,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    record_property: Measure,
) -> None:
    wrong = str(uuid.uuid4())
    if given == "wrong":
        remember(monkeypatch, guarded.credentials(wrong))
    began = time.monotonic()
    error = refused(guarded.store, run_id)
    assert_prompt(began, record_property)
    # Without a password there is no log-in by SASL: no server is asked.
    unasked = given == "none" and guarded.store.backend == "zookeeper"
    assert isinstance(error, ValueError if unasked else AccessDeniedError)
    assert_clear(error, guarded.store, f"${guarded.variable}")
    assert_hidden(caplog.text + everything(error), guarded.secret, wrong)


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("no certificate", "cert_file"),
        ("foreign certificate", "cert_file"),
        ("untrusted authority", "ca_file"),
    ],
)
def test_refused_certificate(
    guarded: Guarded,
    run_id: str,
    certificates: Certificates,
    fault: str,
    advice: str,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    record_property: Measure,
) -> None:
    if guarded.store.backend == "kubernetes" and fault != "untrusted authority":
        pytest.skip("a client with a token needs no certificate")
    remember(monkeypatch, guarded.credentials())
    foreign = certificates.foreign_client
    changes: dict[str, dict[str, str | None]] = {
        "no certificate": {"cert_file": None, "key_file": None},
        "foreign certificate": {"cert_file": foreign.cert_file, "key_file": foreign.key_file},
        "untrusted authority": {"ca_file": certificates.foreign_ca_file},
    }
    if guarded.store.backend != "redis":  # redis-py trusts this host's authorities too.
        monkeypatch.setenv("SSL_CERT_FILE", certificates.ca_file)
    began = time.monotonic()
    error = refused(configured(guarded.store, **changes[fault]), run_id)
    if guarded.store.backend != "nats":
        # Its refusal comes after the handshake: on a busy host it looks like one that stops.
        assert_prompt(began, record_property)
    assert_clear(error, guarded.store, advice)
    assert isinstance(error, RendezvousConnectionError)
    # It is this client that does not trust the server.
    assert isinstance(error, AccessDeniedError) == (fault != "untrusted authority")
    assert_hidden(caplog.text + everything(error), guarded.secret)


def test_no_tls(
    guarded: Guarded, run_id: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    remember(monkeypatch, guarded.credentials())
    store = configured(guarded.store, tls=None, ca_file=None, cert_file=None, key_file=None)
    # Not asserted to be prompt: it looks like a server that is about to stop.
    error = refused(
        replace(store, endpoint=store.endpoint.replace("rediss:", "redis:")),
        run_id,
        heartbeat_timeout="1",
    )
    assert any(word in str(error) for word in ("rediss://", "https://", "tls=true")), error
    assert_clear(error, guarded.store, "")
    assert isinstance(error, RendezvousConnectionError)
    assert_hidden(caplog.text + everything(error), guarded.secret)


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file", "password_file"])
def test_file_that_is_not_there(
    guarded: Guarded, run_id: str, option: str, monkeypatch: Patch, record_property: Measure
) -> None:
    if option != "password_file":
        remember(monkeypatch, guarded.credentials())
    began = time.monotonic()
    error = refused(configured(guarded.store, **{option: "/nowhere/file.pem"}), run_id)
    assert_prompt(began, record_property)
    assert isinstance(error, ValueError)
    assert_clear(error, guarded.store, option)
    assert "/nowhere/file.pem" in str(error)
    assert_hidden(everything(error), guarded.secret)


def test_secret_on_the_command_line(guarded: Guarded, run_id: str) -> None:
    error = refused(configured(guarded.store, **{guarded.takes: guarded.secret}), run_id)
    assert isinstance(error, ValueError)
    assert f"${guarded.variable}" in str(error)
    assert_hidden(everything(error), guarded.secret)


@every_kind
@pytest.mark.usefixtures("forgotten")
def test_certificate_of_another_host(kind: Kind, run_id: str, certificates: Certificates) -> None:
    with started(kind, security=certificates.security(server=certificates.misnamed)) as store:
        error = refused(store, run_id)
    assert isinstance(error, RendezvousConnectionError)
    assert not isinstance(error, AccessDeniedError)
    assert_clear(error, store, "ca_file")


@every_kind
@pytest.mark.usefixtures("forgotten")
def test_tls_without_users_and_clients_certificates(
    kind: Kind, run_id: str, certificates: Certificates
) -> None:
    with started(kind, security=certificates.security()) as store:
        form_a_round(store, run_id)


def test_options_hide_their_secrets() -> None:
    options = ServerOptions(password="hunter2")
    assert "hunter2" not in repr(options) + str(options)


@pytest.mark.usefixtures("forgotten")
def test_zookeeper_digest(
    run_id: str, monkeypatch: Patch, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """By this scheme ZooKeeper knows no users: it guards a run for the user that made it."""
    kind = kind_of("zookeeper")
    # It would make a client's certificate a second identity, under which the others get in.
    with started(kind, security=certificates.security()) as store:
        right = {"RDZV_PLUGINS_USER": "joe", "RDZV_PLUGINS_PASSWORD": str(uuid.uuid4())}
        remember(monkeypatch, right)
        shown = form_a_round(store, run_id)
        wrong = str(uuid.uuid4())
        monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", wrong)
        errors = [refused(store, run_id)]
        for name in right:
            monkeypatch.delenv(name)
        errors.append(refused(store, run_id))
    for error in errors:
        assert isinstance(error, AccessDeniedError)
        assert_clear(error, store, "$RDZV_PLUGINS_PASSWORD")
        shown += everything(error)
    assert_hidden(shown + caplog.text, right["RDZV_PLUGINS_PASSWORD"], wrong)


@pytest.mark.usefixtures("forgotten")
def test_torchrun_hides_the_secret(
    tmp_path: Path, monkeypatch: Patch, certificates: Certificates, record_property: Measure
) -> None:
    """The secret is in no line of an agent, be it let in or refused, however much it logs."""
    secret, wrong = str(uuid.uuid4()), str(uuid.uuid4())
    security = certificates.security(user="joe", password=secret, client=True)
    with started(KINDS[0], security=security) as store:
        monkeypatch.setenv("LOGLEVEL", "DEBUG")
        with closing(TorchRun(tmp_path, store, nodes="1:1")) as run:
            run.start_at("a")
            monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", wrong)
            began = run.start_at("b").started
            assert run.await_ends("b")["b"] != 0
            record_property("refused after, s", round(time.monotonic() - began, 2))
            run.await_world("a")
    logs = {name: agent.log.read_text() for name, agent in run.agents.items()}
    assert "rdzv_endpoint" in logs["a"], "torch did not log its configuration"
    assert f"redis at {store.endpoint} refused the credentials" in logs["b"]
    assert_hidden(logs["a"] + logs["b"], secret, wrong)


def remember(monkeypatch: Patch, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def configured(store: RunningStore, **changes: str | None) -> RunningStore:
    """The store with other options; None: without that one."""
    config = {**store.config, **changes}
    given = {name: value for name, value in config.items() if value is not None}
    return replace(store, config=given)


def at(store: RunningStore, secret: str) -> RunningStore:
    """The store with this secret in its endpoint."""
    scheme, separator, host = store.endpoint.rpartition("://")
    # A token belongs to no user.
    user = "" if store.backend in ("consul", "kubernetes") else "joe"
    return replace(store, endpoint=f"{scheme}{separator}{user}:{quote(secret, safe='')}@{host}")


def form_a_round(store: RunningStore, run_id: str) -> str:
    """Let two nodes form a round; returns what is shown of their objects."""
    with Run(store, run_id) as run:
        agents = [run.start((2, 2)) for _ in range(2)]
        until(lambda: one_world(agents)() or any(agent.error for agent in agents), 30)
        assert [agent.error for agent in agents] == [None, None]
        handlers = [agent.handler for agent in agents]
        return "".join(f"{it!r}{it}{it._client!r}{it._settings!r}" for it in handlers)


def refused(store: RunningStore, run_id: str, **options: str) -> Exception:
    """What a node is told that is not let in."""
    try:
        handler = Run(store, run_id).handler((2, 2), **options)
    except (RendezvousConnectionError, ValueError) as error:
        return error
    handler.shutdown()
    pytest.fail(f"{store.name} let in whom it should not")


def assert_prompt(began: float, record_property: Measure) -> None:
    seconds = time.monotonic() - began
    record_property("refused after, s", round(seconds, 2))
    assert seconds < PROMPT


def assert_clear(error: Exception, store: RunningStore, advice: str) -> None:
    """One line that names the endpoint and what to set."""
    text = str(error)
    assert "\n" not in text
    assert store.endpoint.rpartition("/")[2] in text
    assert advice in text


def everything(error: Exception) -> str:
    """What a log would show of it, its causes included."""
    return repr(error) + "".join(traceback.format_exception(error))


def assert_hidden(text: str, *hidden: str) -> None:
    for secret in hidden:
        plain = secret.encode()
        login = base64.b64encode(b"joe:" + plain).decode()
        forms = {secret, quote(secret, safe=""), base64.b64encode(plain).decode(), login}
        for form in forms:
            # Not in the assertion: pytest would show it, and so hide which place does.
            place = text.find(form)
            assert place < 0, f"a secret is shown after: {text[max(0, place - 200) : place]}"
