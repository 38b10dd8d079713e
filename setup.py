"""Put the pages into each wheel, however it is built; pyproject.toml has everything else."""

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


setup(cmdclass={"build_py": BuildWithPages})
