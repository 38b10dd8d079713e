"""The command that shows the documentation, which the wheel brings along."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["docs"]

HERE = Path(__file__).resolve().parent

# In a wheel `make build` has put the site here; in a checkout it is where `make docs` builds it.
_PLACES = HERE / "site", HERE.parents[1] / "build" / "site"


def docs(
    page: Annotated[
        str, typer.Argument(help="such as options; default: the first page", show_default=False)
    ] = "index",
    as_text: Annotated[
        bool, typer.Option("--print", help="print the page's Markdown; without a page, all names")
    ] = False,
) -> None:
    """Open the documentation in a browser, or print it."""
    site = next((place for place in _PLACES if (place / "index.html").exists()), None)
    if site is None:
        raise ValueError(
            "this installation has no built pages; in a checkout, make docs builds them"
        )
    sources = {
        path.relative_to(site / "_sources").as_posix().removesuffix(".md.txt"): path
        for path in sorted((site / "_sources").rglob("*.md.txt"))
    }
    if page not in sources:
        from rdzv_plugins.config import alternatives

        raise ValueError(f"there is no page '{page}'; {alternatives(page, sources)}")
    if not as_text:
        _open(site / f"{page}.html")
    elif page == "index":
        typer.echo("\n".join(name for name in sources if name != page))
    else:
        typer.echo(sources[page].read_text(encoding="utf-8"), nl=False)


def _open(path: Path) -> None:
    import webbrowser

    typer.echo(path.as_uri())
    if not webbrowser.open(path.as_uri()):
        typer.echo("no browser was found; rdzv docs --print shows the pages here", err=True)
