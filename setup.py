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
        for page in Path("docs").rglob("*.md"):
            copy = Path(self.build_lib, "rdzv_plugins/cli/pages", page.relative_to("docs"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copyfile(page, copy)
        copyfile("examples/train.py", Path(self.build_lib, "rdzv_plugins/cli/train.py"))


setup(cmdclass={"build_py": BuildWithPages})
