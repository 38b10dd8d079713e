"""How Sphinx builds the site from the pages in this folder; `make docs` runs it."""

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

# GitHub's anchors, which links between the pages use.
myst_heading_anchors = 4
highlight_language = "text"

# What stands in single backticks in a docstring: a link if it names something in the API.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# No network is needed to build the site, so names of Python and of torch are not links.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!rdzv_plugins\b).*"),
    # Not public; it stands in the types of what `rdzv_plugins.servers.start` is made of.
    (r"py:class", r"rdzv_plugins\.servers\.process\.Kind"),
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
