"""docs/internals.md's table of layers is true: each module imports only what stands below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rdzv_plugins.stores import STORES
from tests import servers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rdzv_plugins"


def layers() -> dict[str, int]:
    """The row of each module; those of one row may import one another."""
    page = (ROOT / "docs" / "internals.md").read_text()
    rows = page.partition("| module |")[2].partition("\n\n")[0].splitlines()
    names = (re.findall(r"`(\w+)(?:\.py|/)`", row.split("|")[1]) for row in rows if "`" in row)
    return {name: number for number, group in enumerate(names) for name in group}


def imports() -> Iterator[tuple[str, str]]:
    """(module, what it imports), both by their names in the table."""
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__init__.py":
            continue  # It imports what it offers when that is called.
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            package, _, rest = node.module.partition(".")
            if package == "rdzv_plugins":
                names = [rest.split(".")[0]] if rest else [alias.name for alias in node.names]
                yield from ((module, name) for name in names if name != "__version__")


def test_every_module_has_its_layer() -> None:
    modules = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert modules - {"__init__", "__pycache__", "py.typed"} == layers().keys()


def test_each_imports_only_what_stands_below_it() -> None:
    rows = layers()
    assert [pair for pair in imports() if rows[pair[0]] > rows[pair[1]]] == []


def test_the_protocol_and_the_registers_do_nothing_themselves() -> None:
    """No I/O, no thread, no torch: what its modules may import."""
    allowed = {
        "__future__", "collections", "dataclasses", "datetime", "enum", "functools", "hashlib",
        "ipaddress", "math", "msgspec", "random", "re", "types", "typing", "zlib",
        "rdzv_plugins.kv", "rdzv_plugins.protocol", "rdzv_plugins.register",
    }  # fmt: skip
    for path in [*(PACKAGE / "protocol").rglob("*.py"), *(PACKAGE / "register").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                room = ".".join(name.split(".")[: 2 if name.startswith("rdzv_plugins") else 1])
                assert room in allowed, f"{path.name} imports {name}"


def test_the_contract_of_stores_does_not_know_how_options_are_parsed() -> None:
    texts = (path.read_text() for path in (PACKAGE / "kv").rglob("*.py"))
    assert not any("settings.parsing" in text for text in texts)


def test_no_module_outside_stores_and_servers_knows_a_store() -> None:
    """Comments and docstrings may name one, as an example; what runs may not."""
    names = re.compile(rf"(?i)\b({'|'.join({*STORES, *servers.KINDS})})\b")
    allowed = {
        # The help comes without an import of the stores, and a test compares it with their table.
        "cli/options.py": {"BackendOption", "DEFAULT_BACKEND"},
        "cli/local.py": {"serve", "_serve_member"},
        # It needs no server.
        "cli/demo.py": {"_Fleet"},
        # A backend of torch's.
        "settings/parsing.py": {"_unknown"},
    }
    found = {
        (str(path.relative_to(PACKAGE)), where)
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("stores", "servers.py")
        for where, text in strings(ast.parse(path.read_text()))
        if names.search(text)
    }
    assert found == {(path, where) for path, them in allowed.items() for where in them}


def strings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each string and imported module that is no docstring, and the definition at the top."""
    for top in tree.body:
        named = top.targets[0] if isinstance(top, ast.Assign) else top
        where = str(getattr(named, "name", getattr(named, "id", "")))
        docs = {id(node.value) for node in ast.walk(top) if isinstance(node, ast.Expr)}
        for node in ast.walk(top):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) not in docs:
                    yield where, node.value
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield where, node.module
