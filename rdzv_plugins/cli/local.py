"""Commands for this host: a local server, and a demonstration."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from typing import Annotated

import typer

from rdzv_plugins.cli.interrupt import Interrupt
from rdzv_plugins.cli.options import ConfOption, RunOption, parse_conf

__all__ = ["demo", "serve"]

_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def serve(
    kind: Annotated[
        str,
        typer.Argument(
            help="one of: redis, valkey, zookeeper, dynamodb, consul, etcd, postgres, nats, "
            "quorum, kubernetes, s3, azure"
        ),
    ] = "valkey",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="first server's port; default: a free one")
    ] = None,
    nodes: Annotated[int, typer.Option(help="number of servers: 1, or all of an ensemble")] = 1,
    host: Annotated[
        str,
        typer.Option(help="this host's name or address for the others, where the kind serves them"),
    ] = "127.0.0.1",
    endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            "-e",
            help="run this host's member of a store that the nodes keep up: the hosts of all "
            "members, as the job names them",
        ),
    ] = "",
    run_id: RunOption = "",
    conf: ConfOption = "",
) -> None:
    """Run a server until Ctrl-C, on 127.0.0.1 or where --host says: for tests and single jobs.

    With --rdzv-endpoint it is this host's member of the store, for the run of -i, or for all runs
    with the same cluster=... in --rdzv-conf. --host then names this host among the members.

    Redis and Valkey have the password of RDZV_PLUGINS_PASSWORD or RDZV_PLUGINS_PASSWORD_FILE, and
    where others reach them at least a new one, which is shown once. A file that is missing is made
    with a new one.
    """
    from rdzv_plugins import servers
    from rdzv_plugins.servers.process import HOST

    if endpoint:
        _serve_member(kind, endpoint, run_id, conf, None if host == HOST else host)
        return
    password, is_new = _password(kind, host)
    security = servers.Security(password=password)
    with servers.start(kind, nodes=nodes, port=port, host=host, security=security) as server:
        interrupt = Interrupt()
        conf = ",".join(f"{name}={value}" for name, value in server.config.items())
        typer.echo(f"{kind} runs at {server.endpoint}; Ctrl-C stops it. For a job:")
        if is_new:
            typer.echo(f"  export RDZV_PLUGINS_PASSWORD={password}  # shown this once")
        for name, value in server.environ.items():
            if name != "RDZV_PLUGINS_PASSWORD":
                typer.echo(f"  export {name}={shlex.quote(value)}")
        words = [f"--rdzv-backend={server.backend}", f"--rdzv-endpoint={server.endpoint}"]
        words += [f"--rdzv-conf={conf}"] if conf else []
        typer.echo(f"  rdzv run {shlex.join(words)} ...")

        def look() -> None:
            for node in server.nodes:
                node.check()

        interrupt.wait(look)


def _serve_member(kind: str, endpoint: str, run_id: str, conf: str, local_addr: str | None) -> None:
    from rdzv_plugins.servers import KINDS
    from rdzv_plugins.settings.endpoint import redact
    from rdzv_plugins.settings.parsing import parse_options
    from rdzv_plugins.stores import client_class

    client = client_class(KINDS[kind].backend if kind in KINDS else kind)
    if client.run_by != "nodes":
        raise typer.BadParameter(
            f"a {kind} has no members among the nodes: leave it out", param_hint="-e"
        )
    options = client.of_run(parse_options(client.options, parse_conf(conf), os.environ), run_id)
    interrupt = Interrupt()
    attendance = client.attend(endpoint, options, local_addr, run_id or options.cluster)
    assert attendance is not None
    told = False

    def look() -> None:
        nonlocal told
        if attendance.member_runs() and not told:
            told = True
            where = redact(endpoint)
            typer.echo(f"the member of this host runs, of those on {where}; Ctrl-C stops it")

    try:
        look()
        interrupt.wait(look)
    finally:
        attendance.hurry()
        attendance.close()


def _password(kind: str, host: str) -> tuple[str | None, bool]:
    """The server's password, and whether it is a new one; None: it needs none."""
    import secrets

    from rdzv_plugins.peers.addresses import is_loopback
    from rdzv_plugins.servers import KINDS
    from rdzv_plugins.settings.options import ServerOptions
    from rdzv_plugins.settings.parsing import parse_options

    if kind not in KINDS or not KINDS[kind].for_others:
        return None, False
    options, new = parse_options(ServerOptions, {}, os.environ), secrets.token_urlsafe(24)
    if (file := options.password_file) is not None:
        # Mode 0600; a file that is there stays as it is.
        with suppress(FileExistsError), open(os.open(file, _NEW_FILE, 0o600), "w") as made:
            made.write(new + "\n")
    given = options.current_password()
    return (given, False) if given or is_loopback(host) else (new, True)


def demo(
    endpoint: Annotated[
        str, typer.Option(help="of your own store; default: the agents run one themselves")
    ] = "",
) -> None:
    """Train with three agents, kill one, continue the training, and show a timeline."""
    from rdzv_plugins.demo import run
    from rdzv_plugins.entry_points import refuse_without_torch

    refuse_without_torch("rdzv demo")

    raise typer.Exit(run(endpoint))
