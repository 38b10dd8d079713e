"""Commands that show all runs of a store to browsers and to Prometheus, until Ctrl-C."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from rdzv_plugins.cli.options import Access, BackendOption, ConfOption, EndpointOption

__all__ = ["dashboard"]

HostOption = Annotated[str, typer.Option(help="address to listen at; it has no password")]


def dashboard(
    backend: BackendOption = "redis", endpoint: EndpointOption = "", conf: ConfOption = "",
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one")] = 8265,
) -> None:  # fmt: skip
    """Serve a page that shows all runs under a prefix while they go on."""
    _require("dashboard", "dashboard", "starlette", "uvicorn")
    from rdzv_plugins.dashboard.server import Dashboard
    from rdzv_plugins.survey import Survey

    access = Access(backend, endpoint, conf)
    where = _where(access)
    survey = Survey(access.open, access.archive)
    survey.look()
    try:
        page = Dashboard(survey, where, host, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"cannot listen at {host}:{port} ({error}); choose another --port"
        ) from error
    typer.echo(f"{page.url} shows the runs of {where}; Ctrl-C ends it")
    page.serve()


def _where(access: Access) -> str:
    """Which store, and which of its prefixes."""
    from rdzv_plugins.endpoint import redact

    at = f" at {redact(access.endpoint)}" if access.endpoint else ""
    return f"{access.backend}{at}, prefix {access.prefix}"


def _require(command: str, extra: str, *packages: str) -> None:
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise ValueError(
                f"rdzv {command} needs the package '{package}', which cannot be imported "
                f'({error}). Install it with: pip install "rdzv-plugins[{extra}]"'
            ) from error
