"""Generate docs/options.md, docs/stores.md, and parts of troubleshooting.md and simulation.md.

python -m docs.generate          # write
python -m docs.generate --check  # exit status 1 if what is there is out of date
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path

from rdzv_plugins.settings.options import PollingOptions, ServerOptions, Settings, StoreOptions
from rdzv_plugins.settings.parsing import COUNTERPARTS, WITHOUT_EFFECT
from rdzv_plugins.stores import STORES, client_class
from tests.simulation.mutants import MUTANTS

HERE = Path(__file__).parent
# A line of the index has the first words of a heading.
_INDEXED_WORDS = 6
# Headings of docs/protocol.md that only group rules.
_PARTS = ("Safety", "Liveness", "Policies")
_RULES = """
How many tests carry the name of a rule of [the protocol](protocol.md) in `pytest.mark.rule(...)`
(whole files, classes or functions), and how many mutants break it. The invariants check all rules.
`make docs` writes this table.
"""
GENERATED = "<!-- Generated from the code by `make docs`; edit that. -->\n\n"


def option_rows(cls: type) -> list[tuple[str, str, str]]:
    """(option, default, meaning) of each option of a dataclass's own; the string below says it."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    meanings = {
        ast.unparse(option.target): " ".join(text.value.value.split())
        for option, text in pairwise(definition.body)
        if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr)
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    own = [it for it in fields(cls) if it.name in inspect.get_annotations(cls)]
    return [(it.name, shown(it.default), meanings[it.name]) for it in own]


def shown(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def markdown_list(*classes: type) -> str:
    lines = []
    for name, default, meaning in chain.from_iterable(map(option_rows, classes)):
        linked = re.sub(r"\b([a-z-]+)\.md\b", r"[\1](\1.md)", meaning.replace("``", "`"))
        lines.append(f"- `{name}`{default and f' ({default})'}: {linked}\n")
    return "".join(lines)


def options_page() -> str:
    options = {name: client_class(name).options for name in STORES}
    shared: list[type[StoreOptions]] = [ServerOptions, PollingOptions]
    parts = [
        GENERATED,
        "# Options\n\n",
        "Set an option with `--rdzv-conf name=value,name=value`, or with the environment variable "
        "`RDZV_PLUGINS_<NAME>`, which `--rdzv-conf` overrides. An unknown option or a wrong value "
        "is refused with a line that says what is allowed. Secrets come from the environment, a "
        "file or the endpoint, never from `--rdzv-conf`; no log, exception or `repr` shows "
        "them. Defaults are in brackets.\n\n",
        "## Every backend\n\n",
        markdown_list(Settings, StoreOptions),
    ]
    for base in shared:
        named = [name for name, cls in options.items() if issubclass(cls, base)]
        parts += [f"\n## {', '.join(named)}\n\n", markdown_list(base)]
    for name, cls in options.items():
        if option_rows(cls):
            parts += [f"\n## {name}\n\n", markdown_list(cls)]
    parts += [
        "\n## Options of torch's own backends\n\n",
        "The options of torch's dynamic handler mean the same here. These options of `c10d` and "
        "`etcd` have no effect, and the agent's log says so:\n\n",
        *(f"- `{name}`: {why}\n" for name, why in WITHOUT_EFFECT.items()),
        "\nThese are refused; write instead:\n\n",
        *(f"- `{'`, `'.join(theirs)}`: {here}\n" for here, theirs in counterparts().items()),
    ]
    return "".join(parts)


def counterparts() -> dict[str, list[str]]:
    """By what to write here, the options of torch's backends."""
    found: dict[str, list[str]] = {}
    for name, here in COUNTERPARTS.items():
        found.setdefault(here, []).append(name)
    return found


def stores_page() -> str:
    parts = [
        GENERATED,
        "# The stores and their limits\n\n"
        "Reads are linearizable, unless a section says otherwise. [Choosing a store](choosing.md) "
        "compares them; the [start pages](start/index.md) have the commands.\n",
    ]
    for name in STORES:
        text = inspect.getdoc(import_module(client_class(name).__module__)) or ""
        parts.append(f"\n## {name}\n\n{text.replace('``', '`').replace('::', ':')}\n")
    return "".join(parts)


def troubleshooting_page() -> str:
    """The page as it is, with the beginnings of its headings, in alphabetical order."""
    head, mark, rest = _read(HERE / "troubleshooting.md").partition("\n## Index of lines\n")
    _, _, body = rest.partition("\n## ")
    headings = re.findall(r"^### (.+)$", body, re.MULTILINE)
    rows = {}
    for heading in headings:
        anchor = re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        words = heading.replace("`", "").lstrip("…; -").split()
        begins = " ".join(words[:_INDEXED_WORDS]) + "…" * (len(words) > _INDEXED_WORDS)
        rows[f"- [{begins}](#{anchor})\n"] = begins.lower().lstrip("'*")
    lines = sorted(rows, key=rows.__getitem__)
    return f"{head}{mark}\n{''.join(lines)}\n## {body}"


def simulation_page() -> str:
    """The page as it is, with a table of the rules of docs/protocol.md."""
    head, mark, _ = _read(HERE / "simulation.md").partition("\n## Rules\n")
    return f"{head}{mark}{rules_table()}"


def rules_table() -> str:
    """Raises `KeyError` for a test or a mutant of a rule that docs/protocol.md does not have."""
    headings = re.findall(r"^###? (.+)$", _read(HERE / "protocol.md"), re.MULTILINE)
    rules = {it.lower(): it for it in headings if it not in _PARTS}
    paths = (HERE.parent / "tests").glob("*/test_*.py")
    tests = Counter(rules[rule.lower()] for path in paths for rule in _marked(path))
    mutants = Counter(rules[mutant.rule.lower()] for mutant in MUTANTS.values())
    lines = ["| rule | tests | mutants |", "| --- | --- | --- |"]
    lines += [f"| {it} | {tests[it]} | {mutants[it]} |" for it in rules.values()]
    return f"{_RULES}\n" + "\n".join(lines) + "\n"


def _marked(path: Path) -> Iterator[str]:
    """The rule of each mark of the file, of a class or of a function."""
    for node in ast.parse(_read(path)).body:
        marks = getattr(node, "decorator_list", [])
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = list(ast.walk(node.value))
        for mark in marks:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
                yield from map(ast.literal_eval, mark.args)


def main() -> int:
    pages = {
        "options.md": options_page(),
        "stores.md": stores_page(),
        "troubleshooting.md": troubleshooting_page(),
        "simulation.md": simulation_page(),
    }
    stale = [name for name, text in pages.items() if _read(HERE / name) != text]
    if "--check" in sys.argv:
        for name in stale:
            sys.stderr.write(f"docs/{name} is out of date: run `make docs`\n")
        return 1 if stale else 0
    for name in stale:
        (HERE / name).write_text(pages[name], encoding="utf-8")
        sys.stdout.write(f"wrote docs/{name}\n")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
