"""Parse ``--rdzv-conf`` and the environment into typed options; secrets are never shown."""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_args, get_type_hints

from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.settings.environment import ENVIRONMENT_PREFIX
from rdzv_plugins.settings.options import Settings

# torch's launcher adds this option, as a number, to a --rdzv-conf without it; options of users are
# text (LaunchConfig.__post_init__). A time-out of a user is for join_timeout.
TIMEOUT_OF_TORCH = "timeout"

_ADDED_BY_TORCH = 900

# Options of torch's own backends that jobs may still set, and why they have no effect here.
WITHOUT_EFFECT = {
    "is_host": "no node hosts the store",
    "store_type": "the store is the one that --rdzv-backend names",
    "read_timeout": "heartbeat_timeout bounds a request",
    "use_libuv": "it is for a TCPStore that hosts the rendezvous",
}

# Options of torch's etcd backends, and what to write instead.
COUNTERPARTS = {
    "protocol": "tls=true, or an endpoint with https://",
    "cacert": "ca_file",
    "ca_cert": "ca_file",
    "cert": "cert_file",
    "ssl_cert": "cert_file",
    "key": "key_file",
    "ssl_cert_key": "key_file",
    "etcd_prefix": "prefix",
}


Options = TypeVar("Options")


def option_names(*classes: type) -> list[str]:
    """The names of the options that the dataclasses define, in order."""
    return [item.name for cls in classes for item in fields(cls)]


def as_typed(backend: str, endpoint: str, config: Mapping[str, object], options: type) -> list[str]:
    """The arguments, without secrets, with which a command reaches the same store."""
    hidden = {it.name for it in fields(options) if it.metadata.get("secret")}
    names = (name for name in option_names(options) if name in config and name not in hidden)
    conf = ",".join(f"{name}={config[name]}" for name in names)
    where = ["-b", backend, *(["-e", redact(endpoint)] if endpoint else [])]
    return [*where, "-c", conf] if conf else where


def parse_options(
    cls: type[Options],
    config: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    also_allowed: Iterable[str] = (),
) -> Options:
    """Fill an options dataclass: ``config`` first, then ``RDZV_PLUGINS_<OPTION>``, then defaults.

    Raises:
        ValueError: an unknown option, or a value of the wrong type or out of range.
    """
    known = [*option_names(cls), *also_allowed]
    for name in _others(config, known):
        raise _unknown(name, known)
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        values |= _given(item, hints[item.name], config, environ)
    return cls(**values)


def refused_options(
    cls: type, config: Mapping[str, object], environ: Mapping[str, str]
) -> list[tuple[str, str]]:
    """All options that `parse_options` would refuse, as (option, why), except unknown options."""
    found, hints = [], get_type_hints(cls)
    for item in fields(cls):
        try:
            _given(item, hints[item.name], config, environ)
        except ValueError as error:
            found.append((item.name, str(error)))
    return found


def unknown_options(config: Mapping[str, object], known: Iterable[str]) -> list[tuple[str, str]]:
    """The options in ``config`` that are not in ``known``, each with a text about it."""
    names = [*known]
    return [(name, str(_unknown(name, names))) for name in _others(config, names)]


def without_effect(config: Mapping[str, object], known: Iterable[str]) -> list[str]:
    """A line for each option in ``config`` that only torch's own backends use."""
    others = set(config) - {*known}
    return [
        f"option '{name}' of torch's own backends has no effect: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if name in others
    ]


def idle_options(
    config: Mapping[str, object],
    environ: Mapping[str, str],
    settings: Settings,
    nnodes: tuple[int, int] | None,
) -> list[str]:
    """A line for each set option of the handler that another option makes ineffective.

    ``nnodes``: the least and the most nodes; None: unknown.
    """
    its, checked = settings, bool(settings.check_command or settings.check_names)
    reasons = [
        (its.no_progress_rounds == 0, "no_progress_rounds is not set", "no_progress_uptime"),
        (its.quarantine_after == 0, "quarantine_after is 0", "quarantine_window"),
        (its.rank_order != "hint", "rank_order is not hint", "rank"),
        (not checked, "there is neither check_command nor checks",
            "check_timeout check_at check_fails_open"),
        ("disk" not in its.check_names, "checks does not name disk", "check_disk check_disk_free"),
        (its.metrics_port is None, "metrics_port is not set", "metrics_host page_token_file"),
        (its.grow == "never", "grow is never", "min_uptime resize_interval"),
        (nnodes is not None and nnodes[0] == nnodes[1],
            "--nnodes is one number, so no round waits for more or grows",
            "last_call_timeout replacement_timeout grow min_uptime resize_interval"),
    ]  # fmt: skip
    idle = {name: why for is_idle, why, names in reasons if is_idle for name in names.split()}
    return [
        f"option '{name}' has no effect: {why}"
        for name, why in idle.items()
        if name in config or environ.get(ENVIRONMENT_PREFIX + name.upper())
    ]


def unknown_variables(
    environ: Mapping[str, str], known: Iterable[str]
) -> list[tuple[str, str | None]]:
    """The set variables that look like options but are not, each with the most similar option."""
    names = [ENVIRONMENT_PREFIX + name.upper() for name in known]
    found: list[tuple[str, str | None]] = []
    for variable in sorted(environ):
        if variable.upper().startswith(ENVIRONMENT_PREFIX) and variable not in names:
            close = difflib.get_close_matches(variable.upper(), names, n=1, cutoff=0.8)
            found.append((variable, close[0] if close else None))
    return found


def _others(config: Mapping[str, object], known: Iterable[str]) -> list[str]:
    accepted = {*known, TIMEOUT_OF_TORCH, *WITHOUT_EFFECT}
    return [name for name in config if name not in accepted]


def _unknown(name: str, known: list[str]) -> ValueError:
    if name in COUNTERPARTS:
        return ValueError(
            f"option '{name}' is one of torch's etcd backends; write here: {COUNTERPARTS[name]}"
        )
    return ValueError(f"unknown option '{name}'; {alternatives(name, known)}")


def cannot_import(who: str, package: str, error: ImportError) -> ValueError:
    """The error if ``who`` needs a missing package; ``package``: what to install."""
    return ValueError(
        f"{who} needs the package '{error.name}', which cannot be imported ({error}). "
        f'Install it with: pip install "{package}"'
    )


def alternatives(name: str, known: Collection[str]) -> str:
    """Advice on a name that is not in ``known``: the most similar name, and all names."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}there are: {', '.join(known)}"


def _given(
    item: Field[Any], hint: Any, config: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, object]:
    """The option with its value; nothing if it has its default. Raises `ValueError`."""
    name, variable = item.name, ENVIRONMENT_PREFIX + item.name.upper()
    if name == "join_timeout" and _has_timeout(config):
        timeout = _convert(TIMEOUT_OF_TORCH, config[TIMEOUT_OF_TORCH], hint, item)
        if name in config and _convert(name, config[name], hint, item) != timeout:
            raise ValueError(
                f"option '{TIMEOUT_OF_TORCH}' is torch's name of '{name}', and the two differ: "
                f"leave '{TIMEOUT_OF_TORCH}' out"
            )
        return {name: timeout}
    if name in config:
        if item.metadata.get("secret"):
            raise ValueError(
                f"option '{name}' is a secret: other users of the host can read --rdzv-conf. "
                f"Set ${variable} instead"
            )
        return {name: _convert(name, config[name], hint, item)}
    if environ.get(variable):
        return {name: _convert(f"${variable}", environ[variable], hint, item)}
    if item.default is MISSING and item.default_factory is MISSING:
        raise ValueError(f"option '{name}' has no default: set it in --rdzv-conf")
    return {}


def _has_timeout(config: Mapping[str, object]) -> bool:
    """Whether a user has set torch's time-out."""
    value = config.get(TIMEOUT_OF_TORCH)
    return value is not None and not (isinstance(value, int) and value == _ADDED_BY_TORCH)


def _convert(name: str, raw: object, hint: Any, item: Field[Any]) -> object:
    # For "X | None", use X.
    kind = next((arg for arg in get_args(hint) if arg is not types.NoneType), hint)
    text = str(raw).strip()
    # Do not show a secret, even a malformed one.
    shown = "its value" if item.metadata.get("secret") else f"'{text}'"
    value: object
    if kind is bool:
        is_true = text.lower() in ("1", "true", "t", "yes", "y")
        if not is_true and text.lower() not in ("0", "false", "f", "no", "n"):
            raise ValueError(f"option '{name}': {shown} is neither true nor false")
        return is_true
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"option '{name}': {shown} is not a valid {kind.__name__}") from None
    least = item.metadata.get("least")
    # This form of the comparison also refuses nan and inf.
    if isinstance(value, int | float) and least is not None and not least <= value < 1e9:
        raise ValueError(f"option '{name}': {shown} must be at least {least} and below 1e9")
    choices = item.metadata.get("choices") or ()
    if choices and value not in choices:
        raise ValueError(f"option '{name}': {shown} is not one of: {', '.join(choices)}")
    return value
