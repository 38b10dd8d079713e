"""Each line that the page on troubleshooting quotes is one that the product prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def texts() -> list[str]:
    """All strings of the product, with "…" for what is put into them."""
    found = []
    for path in sorted((ROOT / "rdzv_plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (it.value if isinstance(it, ast.Constant) else "…" for it in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts()


@pytest.mark.parametrize("line", re.findall("^### `(.*)`$", PAGE, re.MULTILINE))
def test_it_is_printed(line: str) -> None:
    assert any(line in text for text in TEXTS)


def test_it_quotes_lines() -> None:
    assert len(re.findall("^### `", PAGE, re.MULTILINE)) > 20
