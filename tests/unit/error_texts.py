"""Collects the texts of the product's errors and warnings from its source.

A text is what a raised error says, what is logged as a warning or an error, and what a store's
`Problem` or a node's `Tell` puts into such a line. What is put into a text is shown as "…".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = ["Said", "of_code", "of_product", "strings_of_product"]

ROOT = Path(__file__).resolve().parents[2]

_LOGS = ("warning", "error", "exception", "critical")
# Calls of the product whose first argument becomes a part of an error.
_PARTS = ("Problem", "BadParameter")
# The kinds of `Tell` that are no warnings; see its docstring.
_NEWS = ("joined", "waiting", "forming", "round", "closed")


@dataclass
class Said:
    """What people are told when something is wrong, each with its place in the source.

    Attributes:
        texts: as they are told.
        computed: expressions whose text is made elsewhere.
    """

    texts: dict[str, str] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)


@cache
def of_product() -> Said:
    """The package's, without those of the conformance suite: they are a test's."""
    said = Said()
    for path in sorted((ROOT / "rdzv_plugins").rglob("*.py")):
        if "testing" not in path.parts:
            found = of_code(path.read_text(), str(path.relative_to(ROOT)))
            said.texts |= found.texts
            said.computed |= found.computed
    return said


@cache
def strings_of_product() -> list[str]:
    """All strings of the package, with "…" for what is put into them."""
    found = []
    for path in sorted((ROOT / "rdzv_plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (text := filled(node)) is not None:
                found.append(text)
    return found


def of_code(code: str, path: str) -> Said:
    said, module = Said(), _Module(code)
    for expression in module.told():
        place = f"{path}:{expression.lineno}"
        texts = [it for it in module.texts(expression) if re.search(r"[^\W_]", it)]
        if not texts:
            said.computed[ast.unparse(expression)] = place
        said.texts |= dict.fromkeys(texts, place)
    return said


class _Module:
    def __init__(self, code: str) -> None:
        self._nodes = [*ast.walk(ast.parse(code))]
        functions = [it for it in self._nodes if isinstance(it, ast.FunctionDef)]
        self._functions = {it.name: it for it in functions}
        imports = [it for it in self._nodes if isinstance(it, ast.ImportFrom)]
        self._imported = {name.name for it in imports for name in it.names}
        # The innermost comes last.
        self._scopes = sorted(functions, key=lambda it: it.lineno)

    def told(self) -> Iterator[ast.expr]:
        """The expressions whose value people are told."""
        for node in self._nodes:
            match node:
                case ast.Call(func=function, args=[first, *more]):
                    yield from self._told_by_call(_name(function), first, more)
                case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[first, *_])):
                    # A class that is chosen at run time.
                    if name.islower() and name not in {*self._functions, *self._imported}:
                        yield first
                case ast.FunctionDef(name="remarks"):
                    yield from self._told_by_remarks(node)

    def _told_by_call(self, name: str, first: ast.expr, more: list[ast.expr]) -> Iterator[ast.expr]:
        if name == "Tell":
            if not _is_news(first):
                yield more[0]
        elif name == "_end" and more:
            yield more[0]  # What the handler logs if the first argument fails.
        elif name in _LOGS and ast.unparse(first) == "\"run '%s': %s\"":
            yield more[1]
        elif name in _LOGS or name in _PARTS or re.fullmatch(r"[A-Z_]\w*Error", name):
            yield first

    def _told_by_remarks(self, remarks: ast.FunctionDef) -> Iterator[ast.expr]:
        for node in ast.walk(remarks):
            match node:
                case ast.Yield(value=ast.Tuple(elts=[kind, _, text])):
                    if not _is_news(kind):
                        yield text

    def texts(self, node: ast.expr) -> Iterator[str]:
        if (text := filled(node)) is not None:
            yield text
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                yield from self.texts(body)
                yield from self.texts(orelse)
            case ast.Call(func=ast.Attribute(value=ast.JoinedStr() as inner)):
                yield from self.texts(inner)  # f"...".rstrip()
            case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                for it in ast.walk(self._functions[name]):
                    if isinstance(it, ast.Return) and it.value is not None:
                        yield from self.texts(it.value)
            case ast.Name(id=name):
                for it in ast.walk(self._scope(node)):
                    match it:
                        case ast.Assign(targets=[ast.Name(id=assigned)], value=value):
                            if assigned == name and not isinstance(value, ast.Name):
                                yield from self.texts(value)

    def _scope(self, node: ast.expr) -> ast.AST:
        around = [it for it in self._scopes if it.lineno <= node.lineno <= (it.end_lineno or 0)]
        return around[-1] if around else self._nodes[0]


def filled(node: ast.AST) -> str | None:
    """The text of a string, with "…" for what is put into it; None: ``node`` is no string."""
    match node:
        case ast.Constant(value=str(text)):
            # What `str.format` puts in, and what logging does.
            return re.sub(r"\{[a-z]+(:g)?\}|%s|%g|%\.0f", "…", text)
        case ast.JoinedStr(values=values):
            return "".join(filled(it) or "…" for it in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right) if any(map(filled, (left, right))):
            return (filled(left) or "…") + (filled(right) or "…")
    return None


def _is_news(kind: ast.expr) -> bool:
    return isinstance(kind, ast.Constant) and kind.value in _NEWS


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
