from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.settings.environment import environment, give_back, inherited, withhold
from rdzv_plugins.settings.options import ServerOptions, Settings, StoreOptions, option
from rdzv_plugins.settings.parsing import (
    COUNTERPARTS,
    idle_options,
    option_names,
    parse_options,
    without_effect,
)
from rdzv_plugins.stores import client_class


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("join_timeout", "900", 900.0),
        ("join_timeout", "0.5", 0.5),
        ("last_call_timeout", "0", 0.0),
        ("close_timeout", 7, 7.0),
        ("heartbeat_timeout", " 2 ", 2.0),
        ("keep_alive_interval", "0.05", 0.05),
        ("keep_alive_max_attempt", "2", 2),
        ("restart_on_loss", "False", False),
        ("restart_on_loss", "yes", True),
        ("restart_on_loss", True, True),
        ("restart_on_loss", 0, False),
        ("rank_order", "stable", "stable"),
        ("rank", "12", 12),
        ("closed_ttl", "0", 0.0),
        ("handler", "torch", "torch"),
    ],
)
def test_an_option_is_converted_to_its_type(name: str, raw: object, value: object) -> None:
    parsed = getattr(parse_options(Settings, {name: raw}, {}), name)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("interval", "given", "seconds"),
    [(5, None, 5), (2, None, 2), (1, None, 2), (60, None, 5), (1, 4, 4)],
)
def test_a_request_over_a_lost_connection_ends_within_the_lease(
    interval: float, given: float | None, seconds: float
) -> None:
    assert (
        Settings(keep_alive_interval=interval, heartbeat_timeout=given).request_timeout == seconds
    )


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("join_timeout", "soon", "'soon' is not a valid float"),
        ("join_timeout", "0", "'0' must be at least 0.001"),
        ("join_timeout", "nan", "'nan' must be at least"),
        ("join_timeout", "inf", "below 1e9"),
        ("last_call_timeout", "-1", "'-1' must be at least 0"),
        ("keep_alive_interval", "0.01", "at least 0.05"),
        ("keep_alive_max_attempt", "1", "at least 2"),
        ("keep_alive_max_attempt", "2.5", "'2.5' is not a valid int"),
        ("restart_on_loss", "maybe", "'maybe' is neither true nor false"),
        ("rank_order", "random", "'random' is not one of: natural, stable, hint, topology"),
        ("rank", "-1", "at least 0"),
        ("handler", "", "'' is not one of: rdzv, torch"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, raw: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as in_config:
        parse_options(Settings, {name: raw}, {})
    assert f"'{name}'" in str(in_config.value)
    if raw:
        variable = f"RDZV_PLUGINS_{name.upper()}"
        with pytest.raises(ValueError, match=re.escape(f"'${variable}'")):
            parse_options(Settings, {}, {variable: raw})


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown option 'join_timeot'; did you mean") as caught:
        parse_options(Settings, {"join_timeot": "1"}, {})
    assert "'join_timeout'?" in str(caught.value)
    assert "closed_ttl" in str(caught.value)
    with pytest.raises(ValueError, match="unknown option 'zzz'; there are: join_timeout"):
        parse_options(Settings, {"zzz": "1"}, {})


def test_an_option_of_torchs_etcd_backends_names_its_counterpart() -> None:
    with pytest.raises(ValueError, match=r"'cacert' is one of torch's .* write here: ca_file$"):
        parse_options(Settings, {"cacert": "ca.pem"}, {})
    for name, here in COUNTERPARTS.items():
        assert here.split("=")[0].split(",")[0] in option_names(ServerOptions), name


def test_an_option_that_only_torchs_backends_use_has_no_effect_and_is_told() -> None:
    carried = {"is_host": "1", "use_libuv": "0", "join_timeout": "5"}
    assert parse_options(Settings, carried, {}).join_timeout == 5
    first, second = without_effect(carried, option_names(Settings))
    assert first.startswith("option 'is_host' of torch's own backends has no effect: ")
    assert "'use_libuv'" in second
    assert without_effect({"read_timeout": "1"}, ["read_timeout"]) == [], "a foreign store has it"


@pytest.mark.parametrize("name", ["etcd", "etcdv3", "etcd3"])
def test_a_backend_that_does_not_exist_is_met_with_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'; did you mean 'etcd-v3'\?"):
        client_class(name)


def test_torchs_timeout_is_the_join_timeout_unless_torch_added_it() -> None:
    def parsed(**config: object) -> float:
        return parse_options(Settings, config, {"RDZV_PLUGINS_JOIN_TIMEOUT": "7"}).join_timeout

    # torchrun reads what --rdzv-conf says as text, and adds a number.
    assert parsed(timeout="20") == 20
    assert parsed(timeout="900") == 900
    assert parsed(timeout=20) == 20
    assert parsed(timeout=900) == 7
    assert parsed(timeout=900, join_timeout="5") == 5
    assert parsed(timeout="5.0", join_timeout="5") == 5
    with pytest.raises(ValueError, match="'timeout' is torch's name of 'join_timeout', and the"):
        parsed(timeout="20", join_timeout="5")
    with pytest.raises(ValueError, match="option 'timeout': 'soon' is not a valid float"):
        parsed(timeout="soon")


@pytest.mark.parametrize(
    ("config", "idle"),
    [
        ({"no_progress_uptime": "5"}, True),
        ({"no_progress_uptime": "5", "no_progress_rounds": "3"}, False),
        ({"quarantine_window": "5", "quarantine_after": "0"}, True),
        ({"quarantine_window": "5"}, False),
        ({"rank": "5"}, True),
        ({"rank": "5", "rank_order": "hint"}, False),
        ({"check_timeout": "5"}, True),
        ({"check_timeout": "5", "checks": "disk"}, False),
        ({"check_at": "restart", "check_command": "true"}, False),
        ({"on_unhealthy": "exit"}, False),
        ({"check_disk": "/tmp", "check_command": "true"}, True),
        ({"check_disk_free": "1", "checks": "disk"}, False),
        ({"metrics_host": "0.0.0.0"}, True),
        ({"metrics_host": "0.0.0.0", "metrics_port": "0"}, False),
        ({"min_uptime": "5", "grow": "never"}, True),
        ({"min_uptime": "5"}, False),
    ],
)
def test_an_option_that_another_one_leaves_no_effect_is_named(
    config: dict[str, str], idle: bool
) -> None:
    settings = parse_options(Settings, config, {})
    name = next(iter(config))
    found = idle_options(config, {}, settings, (1, 2))
    assert [line.partition(" has no effect: ")[0] for line in found] == [f"option '{name}'"] * idle
    environ = {f"RDZV_PLUGINS_{name.upper()}": value for name, value in config.items()}
    assert idle_options({}, environ, settings, (1, 2)) == found


def test_options_of_a_world_that_varies_are_named_where_it_does_not() -> None:
    config = {"last_call_timeout": "5", "grow": "never", "join_timeout": "5"}
    settings = parse_options(Settings, config, {})
    for nnodes in ((2, 3), None):
        assert idle_options(config, {}, settings, nnodes) == []
    said = " ".join(idle_options(config, {}, settings, (3, 3)))
    assert re.findall(r"'(\w+)' has no effect: --nnodes", said) == ["last_call_timeout", "grow"]


def test_options_of_others_and_the_one_torch_adds_are_let_through() -> None:
    config = {"prefix": "x", "timeout": 900}
    assert parse_options(Settings, config, {}, also_allowed=["prefix"]) == Settings()
    assert parse_options(StoreOptions, config, {}) == StoreOptions(prefix="x")


def test_config_comes_before_the_environment_and_that_before_the_default() -> None:
    environ = {"RDZV_PLUGINS_JOIN_TIMEOUT": "7", "RDZV_PLUGINS_RANK": ""}
    assert parse_options(Settings, {}, {}).join_timeout == 600
    assert parse_options(Settings, {}, environ).join_timeout == 7
    assert parse_options(Settings, {"join_timeout": 8}, environ).join_timeout == 8
    # An empty variable is one that a launcher did not set.
    assert parse_options(Settings, {}, environ).rank is None


def test_an_option_without_a_default_must_be_set() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        table: str

    with pytest.raises(ValueError, match="'table' has no default"):
        parse_options(Needy, {}, {})
    assert parse_options(Needy, {"table": "t"}, {}).table == "t"


@pytest.mark.parametrize("prefix", ["", "/rdzv", "rdzv/", "a//b"])
def test_a_prefix_with_an_empty_part_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="option 'prefix'"):
        parse_options(ServerOptions, {"prefix": prefix}, {})


def test_the_lease_is_the_interval_times_the_attempts() -> None:
    assert Settings(keep_alive_interval=0.5, keep_alive_max_attempt=4).lease == 2.0


def test_what_workers_do_not_need_is_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("PASSWORD", "SECRET", "TOKEN", "SENTINEL_PASSWORD", "PAGE_TOKEN")
    others = ("PASSWORD_FILE", "SECRET_FILE", "PREFIX")
    for name in (*secret, *others):
        monkeypatch.setenv(f"RDZV_PLUGINS_{name}", "x")
    # A program that checks the node's health gets no more, also before workers start.
    assert {*inherited()} == {*os.environ} - {f"RDZV_PLUGINS_{name}" for name in secret}
    withhold()
    withhold()
    try:
        here = {name.removeprefix("RDZV_PLUGINS_") for name in os.environ}
        assert not here & {*secret}
        assert here >= {*others}
        # Another handler of this process still has them.
        assert {f"RDZV_PLUGINS_{name}" for name in secret} <= environment().keys()
    finally:
        give_back()
        assert "RDZV_PLUGINS_SECRET" not in os.environ
        give_back()
    assert os.environ["RDZV_PLUGINS_SECRET"] == "x"


def test_a_file_of_secrets_has_two_at_most(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("one\ntwo\nthree\n")
    assert StoreOptions(secret_file=str(file)).secrets() == ("one", "two")
    file.write_text("one\n\n")
    assert StoreOptions(secret_file=str(file)).secrets() == ("one",)
    assert StoreOptions(secret="one").secrets() == ("one",)
    assert StoreOptions().secrets() == ()
    assert "hunter2" not in repr(StoreOptions(secret="hunter2"))
    with pytest.raises(ValueError, match="both set"):
        StoreOptions(secret="one", secret_file=str(file))


def test_option_names_are_in_order() -> None:
    assert option_names(StoreOptions, Settings)[:4] == [
        "prefix", "secret", "secret_file", "join_timeout"
    ]  # fmt: skip


def test_the_password_comes_from_the_environment_and_is_never_shown() -> None:
    options = parse_options(ServerOptions, {}, {"RDZV_PLUGINS_PASSWORD": "hunter2"})
    assert options.current_password() == "hunter2"
    assert "hunter2" not in f"{options!r} {options!s}"


def test_a_password_in_the_config_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="RDZV_PLUGINS_PASSWORD") as caught:
        parse_options(ServerOptions, {"password": "hunter2"}, {})
    assert "hunter2" not in str(caught.value)


def test_a_malformed_secret_is_not_shown() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WithPin:
        pin: int = option(0, secret=True)

    with pytest.raises(ValueError, match="its value is not a valid int") as caught:
        parse_options(WithPin, {}, {"RDZV_PLUGINS_PIN": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_password_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\nnot this\n")
    options = ServerOptions(password_file=str(file))
    assert options.current_password() == "hunter2"
    assert "hunter2" not in repr(options)
    with pytest.raises(ValueError, match="are both set: leave one of them out"):
        ServerOptions(password_file=str(file), password="first")
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no first line"):
        options.current_password()
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        options.current_password()


def test_an_endpoint_is_taken_apart() -> None:
    endpoint = parse_endpoint(
        "REDISS://me:p%40ss@one,[::1]:7,three:9/a%20b?db=3", default_port=5, schemes=["rediss"]
    )
    assert endpoint.scheme == "rediss"
    assert endpoint.hosts == (("one", 5), ("::1", 7), ("three", 9))
    assert (endpoint.user, endpoint.password) == ("me", "p@ss")
    assert endpoint.path == "/a b"
    assert endpoint.query == {"db": "3"}


def test_hosts_in_brackets_may_stand_anywhere_among_others() -> None:
    endpoint = parse_endpoint("etcd1:2379,[fd00::2]:2379,[::1]", default_port=5)
    assert endpoint.hosts == (("etcd1", 2379), ("fd00::2", 2379), ("::1", 5))


def test_a_query_may_hold_a_url() -> None:
    endpoint = parse_endpoint("h:7/?from=http://other", default_port=5)
    assert (endpoint.hosts, endpoint.query) == ((("h", 7),), {"from": "http://other"})


def test_an_empty_endpoint_is_this_host() -> None:
    endpoint = parse_endpoint("", default_port=5)
    assert endpoint.hosts == (("localhost", 5),)
    assert (endpoint.user, endpoint.password) == (None, None)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("mongo://h", "starts with 'mongo://'; allowed: host:port, redis://"),
        ("h:0", "no valid port"),
        ("h:65536", "no valid port"),
        ("h:six", "no valid port"),
        ("h,", "no valid host name"),
        (":6379", "no valid host name"),
        ("h h", "no valid host name"),
        ("::1", "write an IPv6 address in brackets"),
        ("1h://h", "starts with '1h://'"),
        ("://h", "no valid host name"),
        ("[::1", "not a valid URL"),
        ("::1]", "not a valid URL"),
        ("h,[::1]6", "not a valid URL"),
        ("h,x[::1]", "not a valid URL"),
        ("h,[10.0.0.1]:6", "not a valid URL"),
    ],
)
def test_a_malformed_endpoint_is_refused(endpoint: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_endpoint(endpoint, default_port=5, schemes=["redis"])


def test_torchs_handler_refuses_what_it_does_not_have() -> None:
    from rdzv_plugins.torch.dynamic_handler import check_settings

    with pytest.raises(ValueError, match="has no on_outage, outage_limit"):
        check_settings(Settings(handler="torch", on_outage="stop", outage_limit=20.0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"outage_limit": "20"}, "with on_outage=stop only"),
        ({"on_outage": "stop", "outage_limit": "9.9"}, "at least twice keep_alive_interval"),
    ],
)
def test_an_outage_limit_that_cannot_be(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_options(Settings, given, {})


def test_how_long_workers_run_on_in_an_outage() -> None:
    assert Settings().patience_in_an_outage == math.inf
    assert Settings(on_outage="stop").patience_in_an_outage == 15.0
    assert Settings(on_outage="stop", outage_limit=40.0).patience_in_an_outage == 40.0
