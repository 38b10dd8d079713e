"""Commands that show all runs of a store to browsers and to Prometheus, until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from rdzv_plugins.cli.interrupt import Interrupt
from rdzv_plugins.cli.options import Access, possible

if TYPE_CHECKING:
    from rdzv_plugins.observe.survey import Survey

OfClusterOption = Annotated[
    str,
    typer.Option(
        "--rdzv-id",
        "-i",
        callback=possible,
        help="if the job's hosts keep the store: the run, if there are several",
    ),
]
HostOption = Annotated[
    str, typer.Option(help="address to listen at; if other hosts can reach it, a token is needed")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="port to listen at; 0: a free one")]


def dashboard(
    access: Access,
    run_id: OfClusterOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = 8265,
) -> None:
    """Serve a page that shows all runs under a prefix while they go on, until Ctrl-C.

    If other hosts can reach it, it asks for the token of RDZV_PLUGINS_PAGE_TOKEN or of
    page_token_file in --rdzv-conf, or for a new token, which it shows once.
    """
    _require("dashboard", "dashboard", "starlette", "uvicorn")
    from rdzv_plugins.dashboard.server import Dashboard
    from rdzv_plugins.observe.page_access import PageAccess
    from rdzv_plugins.settings.endpoint import is_loopback

    where, settings, new = _where(access), access.settings, ""
    if not is_loopback(host) and settings.current_page_token() is None:
        new = secrets.token_urlsafe(24)
        settings = replace(settings, page_token=new)
    who = PageAccess(host, settings)
    survey = _survey(access, run_id)
    survey.look()
    try:
        page = Dashboard(survey, where, host, port, who)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    interrupt = Interrupt()
    typer.echo(f"{page.url} shows the runs of {where}; Ctrl-C ends it")
    if new:
        name = socket.gethostname()
        typer.echo(f"  http://{name}:{page.port}/?token={new}  # its token, shown this once")
    page.serve(interrupt.wait)


def exporter(
    access: Access,
    run_id: OfClusterOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = 9747,
) -> None:
    """Serve metrics of all runs under a prefix to Prometheus, until Ctrl-C.

    If other hosts can reach it, it needs the token of RDZV_PLUGINS_PAGE_TOKEN or of page_token_file
    in --rdzv-conf, which Prometheus sends.
    """
    _require("exporter", "metrics", "prometheus_client")
    from rdzv_plugins.observe.exporter import Exporter
    from rdzv_plugins.observe.page_access import PageAccess

    where, who = _where(access), PageAccess(host, access.settings)
    survey = _survey(access, run_id)
    # Two looks show whether a heartbeat moves; the first scrape is the second look.
    survey.look()
    source = Exporter(survey)
    try:
        url = source.serve(host, port, who)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    interrupt = Interrupt()
    typer.echo(f"{url}/metrics has the runs of {where}; Ctrl-C ends it")
    interrupt.wait()
    source.close()


def _survey(access: Access, run_id: str) -> Survey:
    surveys = access.surveys(run_id)
    if len(surveys) != 1:
        raise ValueError(f"{len(surveys)} runs have a store at {access.endpoint}: name one with -i")
    return surveys[0]


def _cannot_listen(host: str, port: int, error: Exception) -> ValueError:
    return ValueError(f"cannot listen at {host}:{port} ({error}); choose another --port")


def _where(access: Access) -> str:
    """The store and the prefix, in words."""
    from rdzv_plugins.settings.endpoint import redact

    at = f" at {redact(access.endpoint)}" if access.endpoint else ""
    return f"{access.backend}{at}, prefix {access.prefix}"


def _require(command: str, extra: str, *packages: str) -> None:
    from rdzv_plugins.settings.parsing import cannot_import

    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise cannot_import(f"rdzv {command}", f"rdzv-plugins[{extra}]", error) from error
