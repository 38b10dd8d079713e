"""A job as it is going to be started: torchrun's arguments, as far as `rdzv check` needs them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rdzv_plugins.cli.options import parse_conf
from rdzv_plugins.endpoint import parse_endpoint
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.run_ids import refuse_unless_possible, why_no_log_folder

__all__ = ["Job", "parse_nnodes", "parse_peers"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments, parsed.

    Attributes:
        nnodes: the least and the most nodes; None: not given.
        peers: (host, port) of other nodes; port None: not to be dialled.
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
    malformed: tuple[Finding, ...] = ()

    @classmethod
    def of(
        cls,
        backend: str,
        endpoint: str,
        conf: str,
        run_id: str | None,
        nnodes: str,
        local_addr: str,
        peers: str,
    ) -> Job:
        """Parse the arguments; what is malformed counts as not given."""
        malformed = []
        options: dict[str, str] = {}
        parsed_nnodes, parsed_peers = None, []
        try:
            wanted = "" if run_id is None else refuse_unless_possible(run_id)
        except ValueError as error:
            malformed.append(Finding(Mark.FAILED, "run", str(error)))
            wanted = ""
        if (why := why_no_log_folder(wanted)) is not None:
            found, advice = f"{why}: no worker starts", "use another id, or --log-dir=/dev/null"
            malformed.append(Finding(Mark.WARNING, "run", found, advice))
        try:
            options = parse_conf(conf)
        except ValueError as error:
            malformed.append(Finding(Mark.FAILED, "options", str(error)))
        try:
            parsed_nnodes = parse_nnodes(nnodes) if nnodes else None
        except ValueError as error:
            malformed.append(Finding(Mark.FAILED, "nnodes", str(error)))
        try:
            parsed_peers = parse_peers(peers)
        except ValueError as error:
            malformed.append(Finding(Mark.FAILED, "peers", str(error)))
        return cls(
            backend=backend,
            endpoint=endpoint,
            conf=options,
            environ=dict(os.environ),
            run_id=wanted,
            nnodes=parsed_nnodes,
            local_addr=local_addr,
            peers=tuple(parsed_peers),
            malformed=tuple(malformed),
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
            # 0 is no port that can be given: it stands for none.
            ((host, port),) = parse_endpoint(item, default_port=0).hosts
        except ValueError:
            raise ValueError(f"--peers: '{item}' is neither host nor host:port") from None
        peers.append((host, port or None))
    return peers
