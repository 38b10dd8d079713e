"""A job's arguments and options, and what is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from rdzv_plugins.cli.options import Access, parse_conf
from rdzv_plugins.entry_points import refuse_without_torch
from rdzv_plugins.health import refuse_unknown_checks
from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.observe.page_access import refuse_open_metrics
from rdzv_plugins.protocol.sizes import Sizes
from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.settings.environment import ENVIRONMENT_PREFIX
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import (
    as_typed,
    idle_options,
    option_names,
    parse_options,
    refused_options,
    unknown_options,
    without_effect,
)
from rdzv_plugins.settings.run_ids import refuse_unless_possible, why_no_log_folder
from rdzv_plugins.stores import client_class, strange_variables

# A user who can read the store can try millions of secrets.
_SHORTEST_SECRET = 16
_PASSWORD = re.compile(
    r"(?i)(?:^|//)[^/?#:]*(?::(?!//)|%3a)[^?#]*@|(?:pass|pwd|secret|token)[^=]*="
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments, parsed.

    Attributes:
        nnodes: the least and the most nodes; None: not given.
        peers: (host, port) of other nodes; port None: do not dial the node.
        malformed: what is wrong with arguments that could not be parsed.
    """

    backend: str
    endpoint: str
    conf: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    run_id: str = ""
    nnodes: tuple[int, int] | None = None
    local_addr: str = ""
    peers: tuple[tuple[str, int | None], ...] = ()
    malformed: Sequence[Finding] = ()

    @property
    def where(self) -> list[str]:
        """See `Access.where`."""
        return as_typed(self.backend, self.endpoint, self.conf, client_class(self.backend).options)

    @classmethod
    def of(
        cls, access: Access, run_id: str | None, nnodes: str, local_addr: str, peers: str
    ) -> Job:
        """Parse the arguments; a malformed argument counts as not given."""
        malformed: list[Finding] = []

        def parsed(what: str, parse: Callable[[str], Any], text: str, otherwise: Any) -> Any:
            try:
                return parse(text)
            except ValueError as error:
                malformed.append(Finding(Mark.FAILED, what, str(error)))
                return otherwise

        wanted = parsed("run", refuse_unless_possible, run_id, "") if run_id is not None else ""
        if (why := why_no_log_folder(wanted)) is not None:
            found, advice = f"{why}: no worker starts", "use another id, or --log-dir=/dev/null"
            malformed.append(Finding(Mark.WARNING, "run", found, advice))
        return cls(
            backend=access.backend,
            endpoint=access.endpoint,
            conf=parsed("options", parse_conf, access.conf, {}),
            environ=dict(os.environ),
            run_id=wanted,
            nnodes=parsed("nnodes", parse_nnodes, nnodes, None) if nnodes else None,
            local_addr=local_addr,
            peers=tuple(parsed("peers", parse_peers, peers, ())),
            malformed=malformed,
        )


def parse_nnodes(text: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX``, as torchrun takes it; raises `ValueError`."""
    match = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", text, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise ValueError(f"--nnodes '{text}' is neither N nor MIN:MAX, with 1 <= MIN <= MAX")
    return least, most


def parse_peers(text: str) -> list[tuple[str, int | None]]:
    """``host[:port],...``; an IPv6 address is in brackets. Raises `ValueError`."""
    peers: list[tuple[str, int | None]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            # 0 is no valid port, so it means that no port was given.
            ((host, port),) = parse_endpoint(item, default_port=0).hosts
        except ValueError:
            raise ValueError(f"--peers: '{item}' is neither host nor host:port") from None
        peers.append((host, port or None))
    return peers


@dataclass(frozen=True)
class Chosen:
    """A store that can be tried, with its own options and the handler's."""

    client: type[KeyValueClient]
    options: Any
    settings: Settings


def check_options(job: Job) -> Generator[Finding, None, Chosen | None]:
    """Yield the faults; return the store, or None if its options are too wrong to connect.

    A connection without a misspelt option could send a password to the wrong server.
    """
    options, client, wrong = None, None, list[str]()
    try:
        client = client_class(job.backend)
    except ValueError as error:
        yield Finding(Mark.FAILED, "backend", str(error))
    known = option_names(Settings, *([client.options] if client else []))
    refused = refused_options(Settings, job.conf, job.environ)
    of_handler, settings = [why for _, why in refused], Settings()
    try:
        settings = _settings(job, [name for name, _ in refused])
    except ValueError as error:  # The options are valid alone, but not together.
        of_handler.append(str(error))
    if unfit := _torch():
        yield unfit
    of_handler += _faults(_rules(job, settings, with_torch=unfit is None))
    told: list[tuple[str, str]] = []
    if client:
        wrong = [why for _, why in unknown_options(job.conf, known)]
        wrong += [why for _, why in refused_options(client.options, job.conf, job.environ)]
        told = [*strange_variables(job.environ, known, job.backend)]
    if client and not wrong:
        own = _only(option_names(client.options), job.conf)
        try:
            # Each option is valid alone; a store may refuse the combination.
            options = parse_options(client.options, own, job.environ)
        except ValueError as error:
            wrong = [str(error)]
    for why in (*of_handler, *wrong):
        yield Finding(Mark.FAILED, "options", why)
    for found, advice in told:
        yield Finding(Mark.WARNING if advice else Mark.OK, "environment", found, advice)
    idle = [] if of_handler else idle_options(job.conf, job.environ, settings, job.nnodes)
    for line in (*without_effect(job.conf, known), *idle):
        yield Finding(Mark.OK, "options", line)
    if client is None or wrong or any(finding.what == "options" for finding in job.malformed):
        return None
    if not (job.malformed or of_handler or told):
        here = len({ENVIRONMENT_PREFIX + name.upper() for name in known} & job.environ.keys())
        found = f"{len(job.conf)} in --rdzv-conf and {here} in the environment are valid"
        yield Finding(Mark.OK, "options", found)
    return Chosen(client, options, settings)


def _rules(job: Job, settings: Settings, *, with_torch: bool) -> Iterator[Callable[[], object]]:
    """Checks that the handler makes at its start."""
    yield partial(refuse_unknown_checks, settings)
    yield partial(refuse_open_metrics, settings)
    if settings.handler != "torch" and job.nnodes is not None:
        yield Sizes(*job.nnodes, settings.node_unit, settings.segment).refuse_if_impossible
    if settings.handler == "torch" and with_torch:
        from rdzv_plugins.torch.dynamic_handler import check_settings

        yield partial(check_settings, settings)


def _faults(rules: Iterable[Callable[[], object]]) -> Iterator[str]:
    for rule in rules:
        try:
            rule()
        except ValueError as error:
            yield str(error)


def check_secrets(job: Job, chosen: Chosen) -> Iterator[Finding]:
    """Check which users see the password, whether values are sealed, and how weak the secret is."""
    password = _PASSWORD.search(job.endpoint) is not None
    if password or (chosen.client.user_is_token and "@" in job.endpoint):
        found = "in the endpoint: other users of each host see it in its list of processes"
        name = "password" if password else "token"
        advice = f"set $RDZV_PLUGINS_{name.upper()}, or name a file with {name}_file=..."
        yield Finding(Mark.WARNING, "password", found, advice)
    mark, advice = Mark.OK, ""
    found = "set: every value is sealed, and all nodes and commands need the same"
    try:
        secrets = chosen.options.secrets()
    except ValueError as error:
        yield Finding(Mark.FAILED, "secret", str(error))
        return
    if not secrets:
        found = "none: whoever can write to the store may join, and so run code on the nodes"
        advice = "$RDZV_PLUGINS_SECRET on all nodes keeps strangers out"
    elif min(map(len, secrets)) < _SHORTEST_SECRET:
        mark, advice = Mark.WARNING, "take one of `openssl rand -hex 32`"
        found = (
            f"set, of less than {_SHORTEST_SECRET} characters: "
            "anyone who reads the store may guess it"
        )
    yield Finding(mark, "secret", found, advice)


def _torch() -> Finding | None:
    """The fault of this host's torch, which is not imported; None: there is none."""
    try:
        refuse_without_torch("an agent")
    except ValueError as error:
        # A host that only inspects runs needs no torch.
        mark = Mark.UNKNOWN if find_spec("torch") is None else Mark.FAILED
        return Finding(mark, "torch", str(error))
    return None


def _settings(job: Job, without: Iterable[str]) -> Settings:
    """The handler's options, with defaults for wrong options."""
    names = {*option_names(Settings)} - {*without}
    variables = {ENVIRONMENT_PREFIX + name.upper() for name in names}
    environ = {name: value for name, value in job.environ.items() if name in variables}
    return parse_options(Settings, _only(names, job.conf), environ)


def _only(names: Iterable[str], conf: Mapping[str, Any]) -> dict[str, Any]:
    return {name: conf[name] for name in names if name in conf}
