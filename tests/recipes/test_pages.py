"""Each file of a folder of examples is on a page."""

from __future__ import annotations

from tests.recipes.pages import ROOT


def test_every_file_of_an_example_is_on_a_page() -> None:
    pages = "".join(file.read_text() for file in (ROOT / "docs").rglob("*.md"))
    folders = (ROOT / "examples").iterdir()
    files = [file for folder in folders for file in folder.glob("*") if file.is_file()]
    assert files
    assert not [file.name for file in files if f"../{file.relative_to(ROOT)})" not in pages]
