"""Run a server of any kind until Ctrl-C: ``python -m tests.servers etcd --port 2379``."""

from __future__ import annotations

import argparse
import shlex
import sys

from rdzv_plugins.cli.interrupt import Interrupt
from tests import servers

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=servers.KINDS)
    parser.add_argument("--port", type=int, help="port of the first server; default: a free one")
    parser.add_argument("--nodes", type=int, default=1, help="servers in the ensemble")
    given = parser.parse_args()
    try:
        server = servers.start(given.kind, nodes=given.nodes, port=given.port)
    except (servers.ServerError, ValueError) as error:
        sys.exit(str(error))
    with server:
        interrupt = Interrupt()
        lines = [f"{given.kind} runs at {server.endpoint}; Ctrl-C stops it"]
        lines += [f"export {name}={shlex.quote(it)}" for name, it in server.environ.items()]
        lines += [f"--rdzv-conf={name}={it}" for name, it in server.config.items()]
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()

        def look() -> None:
            for node in server.nodes:
                node.check()

        interrupt.wait(look)
