"""The command that shows the documentation, which is in the wheel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urljoin

import typer

HERE = Path(__file__).resolve().parent

# `make build` puts the site here in a wheel; in a checkout `make docs` builds it elsewhere.
_PLACES = HERE / "site", HERE.parents[1] / "build" / "site"

# setup.py puts the pages into each wheel; a checkout has them elsewhere.
_PAGES = HERE / "pages", HERE.parents[1] / "docs"


def docs(
    page: Annotated[
        str,
        typer.Argument(help="its name, such as options; default: the first", show_default=False),
    ] = "index",
    as_text: Annotated[
        bool,
        typer.Option(
            "--print", help="print the page's Markdown, or without a page the names of all"
        ),
    ] = False,
) -> None:
    """Open the documentation in a browser, or print it.

    A wheel without the built site prints the page's Markdown.
    """
    site = next((place for place in _PLACES if (place / "index.html").exists()), None)
    if site is None:
        pages = next((place for place in _PAGES if place.exists()), None)
        if pages is None:
            raise ValueError(
                "this installation has no built pages; in a checkout, make docs builds them"
            )
        sources = _named(pages, ".md")
    else:
        sources = _named(site / "_sources", ".md.txt")
    page = _found(page, list(sources))
    if page == "index" and (as_text or site is None):
        typer.echo("\n".join(name for name in sources if name != page))
    elif site is None:
        typer.echo(sources[page].read_text(encoding="utf-8"), nl=False)
    elif not as_text:
        _open(site / f"{page}.html")
    else:
        text = sources[page].read_text(encoding="utf-8")
        address = (site / f"{page}.html").as_uri()
        # The links of a source lead into the site; see docs/conf.py.
        links = re.compile(r"\]\(([^)\s]+)\)")
        typer.echo(links.sub(lambda it: f"]({urljoin(address, it[1])})", text), nl=False)


def _named(folder: Path, suffix: str) -> dict[str, Path]:
    """The pages by their names, such as start/redis."""
    found = sorted(folder.rglob(f"*{suffix}"))
    return {path.relative_to(folder).as_posix().removesuffix(suffix): path for path in found}


def _found(page: str, names: list[str]) -> str:
    """The page of this name; ``slurm`` is recipes/slurm, and ``start`` is start/index."""
    if found := [name for name in (page, f"{page}/index") if name in names]:
        return found[0]
    last = {name.rpartition("/")[2]: name for name in names if name != "start/index"}
    if page in last:
        return last[page]
    from rdzv_plugins.settings.parsing import alternatives

    raise ValueError(f"there is no page '{page}'; {alternatives(page.rpartition('/')[2], last)}")


def _open(path: Path) -> None:
    import webbrowser

    # Print the path first, because a browser that runs in the terminal takes over the screen.
    typer.echo(path)
    if not webbrowser.open(path.as_uri()):
        typer.echo("no browser was found; rdzv docs --print shows the pages here", err=True)
