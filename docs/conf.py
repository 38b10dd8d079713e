"""How Sphinx builds the site from the pages in this folder; `make docs` runs it."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath

from docutils import nodes
from sphinx.application import Sphinx

from rdzv_plugins import __version__

project = "rdzv-plugins"
author = "The rdzv-plugins authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

# The button copies only the commands of an example with prompts.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

# GitHub's anchors, which links between the pages use.
myst_heading_anchors = 4
highlight_language = "text"
# It would make a dash of the hyphens of --rdzv-conf.
smartquotes = False

# What stands in single backticks in a docstring: a link if it names something in the API.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# No network is needed to build the site, so names of Python and of torch are not links.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!rdzv_plugins\b).*"),
    (r"py:class", r"rdzv_plugins\..*\.T"),  # A TypeVar.
]

# Consul's rules are not quite HCL, and psql has commands of its own.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"rdzv-plugins {release}"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["site.css"]
# `rdzv docs --print` prints the pages' sources, which the site brings along.
html_copy_source = True
html_show_sourcelink = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", anchor_rows)
    app.connect("build-finished", point_into_the_site)


def anchor_rows(_: Sphinx, doctree: nodes.document) -> None:
    """Give each row that is about one name, such as an option, an anchor and a link to it."""
    for row in doctree.findall(nodes.row):
        name = row[0].astext()
        literals = [it.astext() for it in row[0].findall(nodes.literal)]
        if literals != [name] or not re.fullmatch(r"[a-z]\w*", name):
            continue
        section = row.parent
        while not isinstance(section, nodes.section):
            section = section.parent
        # Several stores have options of one name: the first has the name for itself.
        anchor = name if name not in doctree.ids else f"{section['ids'][0]}-{name}"
        if anchor not in doctree.ids:
            doctree.ids[anchor] = row
            row["ids"].append(anchor)
            link = f'<a class="headerlink" href="#{anchor}" title="Link to this row">#</a>'
            row[0][0] += nodes.raw("", link, format="html")


def point_into_the_site(app: Sphinx, error: Exception | None) -> None:
    """Let the links of the pages' sources, which `rdzv docs --print` prints, lead into the site."""
    if error is not None or app.builder.name != "html":
        return
    files = {path: f"_images/{name}" for path, name in app.builder.images.items()}
    for path, (_, name) in app.env.dlfiles.items():
        files[path.as_posix()] = f"_downloads/{name.as_posix()}"
    sources = Path(app.outdir) / "_sources"
    for source in sources.rglob("*.md.txt"):
        folder = source.parent.relative_to(sources).as_posix()

        def inside(link: re.Match[str], folder: str = folder) -> str:
            path = normpath(f"{folder}/{link[1]}")
            path = files.get(path, re.sub(r"\.md$", ".html", path))
            return f"]({relpath(path, folder)}{link[2]})"

        text = re.sub(r"\]\((?!\w+:)([^)#\s]+)([^)]*)\)", inside, source.read_text("utf-8"))
        source.write_text(text, "utf-8")
