"""`make build` as a release runs it: the site, both distributions, and the wheel installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from rdzv_plugins import __version__
from tests.unit.test_docs import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# Each builds the site and both distributions, so one process runs them all.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("build")]

# What make and the tests leave behind; the rest of the checkout is what git would bring.
TRACES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in a copy: a build leaves traces in its tree."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    shutil.copytree(ROOT, tree, ignore=TRACES)
    shutil.copy(ROOT / ".gitignore", tree)
    run("make", "--old-file=.venv/installed", f"BIN={BIN}", "build", folder=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("rdzv_plugins-*-py3-none-any.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new environment with the wheel; it borrows torch and typer from ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = Path(run(str(python), "-c", ask).strip())
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python"]
    run(*pip, str(python), "install", "--no-index", "--no-deps", str(wheel))
    ours = run(sys.executable, "-c", ask).strip()
    # Behind the wheel on the path, and without the .pth file by which ours finds the checkout.
    (theirs / "borrowed.pth").write_text(f"{ours}\n")
    return folder / "bin"


def run(*command: str, folder: Path | None = None, **environ: str) -> str:
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def site(wheel: Path, name: str) -> str:
    return zipfile.ZipFile(wheel).read(f"rdzv_plugins/cli/site/{name}").decode()


def test_both_distributions_bring_every_page_along(dist: Path, wheel: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {f"rdzv_plugins/cli/site/{page.with_suffix('.html')}" for page in pages}
    assert built <= set(zipfile.ZipFile(wheel).namelist())
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert built <= names
    assert {"tests/integration/test_build.py", "Makefile", "docs/conf.py"} <= names


def test_nothing_is_loaded_from_another_site(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        if name.endswith(".html"):
            text = archive.read(name).decode()
            loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="([^"]+)"', text)
            assert [it for it in loaded if urlsplit(it).netloc] == [], name
        elif name.endswith(".css"):
            assert not re.search(r"url\(['\"]?(https?:)?//", archive.read(name).decode()), name


def test_every_public_name_is_on_the_page_of_the_api(wheel: Path) -> None:
    shown = set(re.findall(r'<dt class="sig[^>]* id="([\w.]+)"', site(wheel, "api.html")))
    assert {f"{module}.{name}" for module, name in PUBLIC} - shown == set()


def test_the_installed_command_opens_and_prints_the_pages(installed: Path, tmp_path: Path) -> None:
    rdzv = str(installed / "rdzv")
    assert run(rdzv, "--version", folder=tmp_path) == f"rdzv-plugins {__version__}\n"
    opened = run(rdzv, "docs", "start/redis", folder=tmp_path, BROWSER="echo opened %s")
    told, _, seen = opened.strip().partition("\n")
    assert seen == f"opened {told}"
    page = Path(unquote(urlsplit(told).path))
    assert installed.parent in page.parents
    assert "<h1>Start with Redis or Valkey" in page.read_text()
    printed = run(rdzv, "docs", "--print", "options", folder=tmp_path)
    assert printed == (ROOT / "docs" / "options.md").read_text()
    assert "troubleshooting" in run(rdzv, "docs", "--print", folder=tmp_path).splitlines()
