"""The command that runs a server on this host."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from typing import Annotated

import typer

from rdzv_plugins.cli.interrupt import Interrupt
from rdzv_plugins.cli.options import ConfOption, RunOption, one_run, parse_conf

_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def serve(
    kind: Annotated[
        str,
        typer.Argument(help="one of: valkey, redis, or with -e quorum"),
    ] = "valkey",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="the server's port; default: a free one")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="this host's name or address for the others"),
    ] = "127.0.0.1",
    endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            "-e",
            help="run this host's member of a quorum: the hosts of all "
            "members, as the job names them",
        ),
    ] = "",
    run_id: RunOption = "",
    conf: ConfOption = "",
) -> None:
    """Run a store on this host until Ctrl-C, for tests and single jobs.

    Valkey and Redis listen on 127.0.0.1, or at --host. Their password is RDZV_PLUGINS_PASSWORD, or
    is in RDZV_PLUGINS_PASSWORD_FILE; if that file is missing, it is created with a new password. If
    other hosts can reach the server and no password is set, a new one is shown once.

    With --rdzv-endpoint it runs this host's member of a quorum: for the run of -i, or for all runs
    with the same cluster=... in --rdzv-conf. --host then names this host among the members.
    """
    from rdzv_plugins import servers

    if kind not in servers.KINDS or endpoint:
        named = one_run(run_id, "", needed=False)
        _serve_member(kind, endpoint, named, conf, None if host == servers.HOST else host)
        return
    if run_id or conf:
        raise ValueError(f"{kind} takes neither -i nor -c")
    password, is_new = _password(host)
    with servers.start(kind, port=port, host=host, password=password) as server:
        interrupt = Interrupt()
        typer.echo(f"{kind} runs at {server.endpoint}; Ctrl-C stops it. For a job:")
        if is_new:
            typer.echo(f"  export RDZV_PLUGINS_PASSWORD={password}  # shown this once")
        where = shlex.quote(f"--rdzv-endpoint={server.endpoint}")
        typer.echo(f"  rdzv run --rdzv-backend=redis {where} ...")
        interrupt.wait(server.check)


def _serve_member(kind: str, endpoint: str, run_id: str, conf: str, local_addr: str | None) -> None:
    from rdzv_plugins.settings.endpoint import redact
    from rdzv_plugins.settings.parsing import parse_options
    from rdzv_plugins.stores import STORES, client_class

    client = client_class(kind) if kind in STORES else None
    if client is None or client.run_by != "nodes" or not endpoint:
        raise ValueError(
            "rdzv serve starts valkey or redis, and with -e HOST,HOST,HOST this host's member of a "
            f"quorum, not '{kind}'{' with -e' if endpoint else ''}"
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


def _password(host: str) -> tuple[str | None, bool]:
    """The server's password, and whether it is a new one; None: it needs none."""
    import secrets

    from rdzv_plugins.settings.endpoint import is_loopback
    from rdzv_plugins.settings.options import ServerOptions
    from rdzv_plugins.settings.parsing import parse_options

    options, new = parse_options(ServerOptions, {}, os.environ), secrets.token_urlsafe(24)
    if (file := options.password_file) is not None:
        try:
            # Mode 0600; an existing file is not changed.
            with suppress(FileExistsError), open(os.open(file, _NEW_FILE, 0o600), "w") as made:
                made.write(new + "\n")
        except OSError as error:
            raise ValueError(f"cannot make password_file '{file}': {error.strerror}") from error
    given = options.current_password()
    return (given, False) if given or is_loopback(host) else (new, True)
