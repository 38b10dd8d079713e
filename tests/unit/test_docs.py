"""The pages against the code, and the command that shows them.

What docs/api.md calls public is documented, the pages' own code needs nothing else, and the pages
that the product names exist.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from rdzv_plugins.cli import docs

ROOT = Path(__file__).resolve().parents[2]
API = (ROOT / "docs" / "api.md").read_text()


def public() -> list[tuple[str, str]]:
    """(module, name) of all that the page shows."""
    found = re.findall(r"autodata:: (\S+)\.(\S+)\n", API)
    alone = {name for _, name in found}
    for module, listed in re.findall(r"automodule:: (\S+)\n   :members:(.*)\n", API):
        names = listed.split(",") if listed else import_module(module).__all__
        found += [(module, name.strip()) for name in names if name not in alone]
    return found


PUBLIC = public()


def described(module: ModuleType) -> set[str]:
    """The module's constants that are followed by a text, as Sphinx takes it for theirs."""
    names = set()
    for node, after in pairwise(ast.parse(inspect.getsource(module)).body):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names |= {ast.unparse(getattr(it, "target", it)) for it in targets}
    return names


def undocumented(module: str, name: str) -> Iterator[str]:
    if name in described(import_module(module)):
        return
    thing = inspect.unwrap(getattr(import_module(module), name))
    text = thing.__doc__ if isinstance(thing, type | FunctionType) else None
    # A dataclass without a text has its signature there.
    if not text or text.startswith(f"{name}("):
        yield name
    if not thing.__module__.startswith("rdzv_plugins") or not isinstance(thing, type):
        return
    for method, value in vars(thing).items():
        if method.startswith(("_", "test_")):
            continue
        # What overrides a documented method needs no second text.
        if isinstance(value, FunctionType | classmethod | property) and not inspect.getdoc(
            getattr(thing, method)
        ):
            yield f"{name}.{method}"


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_a_public_name_is_documented(module: str, name: str) -> None:
    assert list(undocumented(module, name)) == []


def python_in_the_pages() -> Iterator[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for code in re.findall(r"^ *```python[^\n]*\n(.*?)^ *```$", page.read_text(), re.M | re.S):
            yield page.name, textwrap.dedent(code)
    # The page writing-a-backend.md links this file.
    yield "mystore.py", (ROOT / "examples" / "backend" / "mystore.py").read_text()


def test_the_code_in_the_pages_imports_only_what_is_public() -> None:
    names = {name for _, name in PUBLIC}
    modules = {module for module, _ in PUBLIC}
    others, seen = [], 0
    for page, code in python_in_the_pages():
        if page == "writing-a-policy.md":
            continue  # Its file becomes a part of this package.
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rdzv_plugins"):
                seen += 1
                imported = {alias.name for alias in node.names}
                if node.module not in modules or imported - names:
                    others.append((page, ast.unparse(node)))
    assert seen > 3
    assert others == []


def told() -> Iterator[tuple[str, str]]:
    """(file, text) of what the product may show; the text of a module or a class is for readers."""
    for path in sorted((ROOT / "rdzv_plugins").rglob("*.py")):
        tree = ast.parse(path.read_text())
        unseen = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in unseen:
                yield path.name, str(node.value)


def test_a_user_of_the_wheel_can_open_the_pages_that_the_product_names() -> None:
    texts = list(told())
    assert [it for it in texts if re.search(r"docs/[\w-]+\.md", it[1])] == []
    named = {page for _, text in texts for page in re.findall(r"rdzv docs ([a-z][\w/-]*)", text)}
    assert {"stores", "options"} <= named
    assert [page for page in named if not (ROOT / "docs" / f"{page}.md").exists()] == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(docs, "_PLACES", (tmp_path / "elsewhere", tmp_path))
    monkeypatch.setattr(docs, "_PAGES", (tmp_path / "pages",))
    return tmp_path


@pytest.fixture
def built(site: Path) -> Path:
    for page in ("index", "options", "start/index", "start/redis", "recipes/slurm"):
        source = site / f"_sources/{page}.md.txt"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"# {page}\n")
    (site / "index.html").touch()
    return site


def test_without_a_site_the_command_says_how_to_build_one(site: Path) -> None:
    with pytest.raises(ValueError, match="make docs"):
        docs.docs()


def test_without_a_site_the_command_prints_the_pages(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "pages" / "start").mkdir(parents=True)
    for page in ("index", "start/redis"):
        (site / "pages" / f"{page}.md").write_text(f"# {page}\n")
    docs.docs()
    docs.docs("redis")
    assert capsys.readouterr().out == "start/redis\n# start/redis\n"


def test_a_misspelt_page_is_answered_with_the_nearest(built: Path) -> None:
    for page in ("reddis", "start/reddis"):
        with pytest.raises(ValueError, match=r"did you mean 'redis'\? there are: index, options, "):
            docs.docs(page)


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ("options", "options"),
        ("start/redis", "start/redis"),
        ("redis", "start/redis"),
        ("slurm", "recipes/slurm"),
        ("start", "start/index"),
    ],
)
def test_a_page_is_found_by_its_last_name(
    asked: str, page: str, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs.docs(asked, as_text=True)
    assert capsys.readouterr().out == f"# {page}\n"


def test_no_two_pages_have_the_same_last_name() -> None:
    names = [path.stem for path in (ROOT / "docs").rglob("*.md") if path.stem != "index"]
    assert len(names) == len(set(names))


def test_the_command_prints_the_names_of_the_pages(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs.docs(as_text=True)
    names = ["options", "recipes/slurm", "start/index", "start/redis"]
    assert capsys.readouterr().out.splitlines() == names


def test_the_links_of_a_printed_page_lead_into_the_site(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "[a](../options.html#grow) [b](#here) [c](https://example.org/d) ![e](../_images/e.svg)"
    (built / "_sources/recipes/slurm.md.txt").write_text(text)
    docs.docs("slurm", as_text=True)
    site = built.as_uri()
    assert capsys.readouterr().out == (
        f"[a]({site}/options.html#grow) [b]({site}/recipes/slurm.html#here) "
        f"[c](https://example.org/d) ![e]({site}/_images/e.svg)"
    )


@pytest.mark.parametrize("found", [True, False])
def test_the_command_opens_a_page_and_tells_where_it_is(
    found: bool, built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = []

    def browse(url: str) -> bool:
        opened.append(url)
        return found

    monkeypatch.setattr("webbrowser.open", browse)
    docs.docs("options")
    out, err = capsys.readouterr()
    page = built / "options.html"
    assert opened == [page.as_uri()]
    assert out == f"{page}\n"
    assert ("no browser" in err) is not found


def test_the_help_and_the_errors_come_without_importing_torch() -> None:
    code = (
        "import sys; sys.argv = ['rdzv', 'docs', 'no-such-page']\n"
        "from rdzv_plugins.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 1\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr.startswith("rdzv: ")


def anchors(page: Path) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", it).lower().replace(" ", "-") for it in headings}


def test_the_rules_that_the_protocol_names_are_on_its_page() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    rules = {rule.lower() for rule in re.findall(r"^### (.*)$", page, re.MULTILINE)}
    named = {
        rule.lower()
        for file in (ROOT / "rdzv_plugins" / "protocol").rglob("*.py")
        for rule in re.findall(r"\bRule: ([^.]+)\.", file.read_text())
    }
    assert len(named) > 5
    assert named <= rules


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_the_links_of_a_page_outside_docs_lead_somewhere(page: Path) -> None:
    """Those of the pages in docs/ are checked when the site is built."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" not in link:
            file = page.parent / target if target else page
            assert file.exists(), link
            assert not anchor or anchor in anchors(file), link


def test_each_environment_variable_is_on_its_page() -> None:
    """Strings that look like one, but for names of the code itself."""
    page = (ROOT / "docs" / "variables.md").read_text()
    sources = {file: file.read_text() for file in (ROOT / "rdzv_plugins").rglob("*.py")}
    theirs = {
        name
        for file, text in sources.items()
        if file.name != "servers.py"
        for name in re.findall(
            r'"((?:RDZV|PG|AWS|SLURM|GLOO|NCCL|TORCH|TORCHELASTIC|TMPDIR|CONSUL)[A-Z_]*)"', text
        )
    }
    own = set(re.findall(r"^([A-Z_]+)\b.* = ", "\n".join(sources.values()), re.MULTILINE))
    assert "RDZV_ENDPOINT" in theirs
    assert sorted(it for it in theirs - own if it not in page) == []
