"""Put the pages, and the script of `rdzv demo`, into each wheel, however it is built."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "rdzv_plugins/cli")
        script = Path("examples/train.py").read_text(encoding="utf-8")
        # The first line tells it from the site's copy: check-wheel-contents wants no duplicates.
        (package / "train.py").write_text(f"# What rdzv demo trains with.\n{script}", "utf-8")
        if (package / "site").exists():
            return  # `make build` made it; it has the pages too.
        for page in Path("docs").rglob("*.md"):
            copy = package / "pages" / page.relative_to("docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copyfile(page, copy)


setup(cmdclass={"build_py": BuildWithPages})
