"""torchrun's options, if this process is torchrun or `rdzv run`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

OURS = "rdzv run"
"""``sys.argv[0]`` in the process of `rdzv run`."""

_MODULE = "torch.distributed.run"

# Arguments of torchrun's static rendezvous: their defaults, and what to do instead.
_STATIC = {
    "node_rank": ((0,), "--rdzv-conf rank_order=hint,rank={value} asks for that place"),
    "master_addr": (("127.0.0.1",), "rank 0's address is used, which its --local-addr names"),
    # The default is 29500 in older versions of torch, None in later versions.
    "master_port": ((None, 29500), "rank 0 opens another port in each round"),
}


def max_restarts() -> int | None:
    """torchrun's ``--max-restarts``; None in any other process, also in that of ``rdzv run``.

    torch passes it to the agent but not to the handler, so parse the command line again.
    """
    arguments = _arguments()
    if arguments is None or sys.argv[0] == OURS:
        return None
    return int(arguments.max_restarts)


def agent_ends_first() -> bool:
    """Whether torch's agent shuts the handler down before the launcher does, as in torch 2.6."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    # Private. Agents without this parameter leave the handler to their launcher.
    return "is_restart" in signature(LocalElasticAgent._shutdown).parameters


def makes_log_folders() -> bool:
    """Whether this torchrun makes a log folder named after the run, which is the default."""
    arguments = _arguments()
    return arguments is not None and arguments.log_dir != os.devnull


def idle_arguments() -> list[str]:
    """A line for each argument without effect: of torchrun's own rendezvous, or overridden."""
    arguments = _arguments()
    if arguments is None:
        return []
    given = {name: getattr(arguments, name, None) for name in _STATIC}
    options = [item.partition("=")[0].strip() for item in arguments.rdzv_conf.split(",")]
    return [
        f"option '{name}' stands in --rdzv-conf more than once: the last one counts"
        for name in dict.fromkeys(options)
        if name and options.count(name) > 1
    ] + [
        f"--{name.replace('_', '-')}={value} has no effect: {_STATIC[name][1].format(value=value)}"
        for name, value in given.items()
        if value is not None and value not in _STATIC[name][0]
    ]


_DIFFERS = (
    "rdzv run is torchrun, with these differences: a failure that the loss of a peer has caused "
    "does not count against --max-restarts; a signal ends it with 128 and the signal's number; and "
    "no process of the workers outlives a round. `rdzv docs commands` has all of them. Use it on "
    "all nodes of a run or on none. Below is torchrun's own help."
)


def parse(arguments: Sequence[str]) -> Namespace:
    """The options of `rdzv run`: torchrun's options and its own."""
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.usage, parser.description = f"{OURS} [options] script ...", _DIFFERS
    own = parser.add_argument_group("options of rdzv run, which torchrun does not have")
    own.add_argument(
        "--warm",
        action=check_env,
        help="keep one process for each worker in which torch is imported already, so that the "
        "workers of the next round start in milliseconds",
    )
    own.add_argument(
        "--preload",
        action=env,
        default="",
        metavar="MODULE,...",
        help="with --warm: what those processes import after torch; it must not use a GPU",
    )
    parsed: Namespace = parser.parse_args(arguments)
    return parsed


def _arguments() -> Namespace | None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_torchrun = Path(sys.argv[0]).name == "torchrun" or (spec and spec.name == _MODULE)
    if not is_torchrun and sys.argv[0] != OURS:
        return None
    # Import late: only torchrun's own process has loaded the launcher.
    from torch.distributed.run import parse_args

    try:
        parsed: Namespace = (parse if sys.argv[0] == OURS else parse_args)(sys.argv[1:])
    except SystemExit:
        return None  # Another program of that name.
    return parsed
