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
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from selenium.webdriver import Chrome

from rdzv_plugins import __version__
from rdzv_plugins.testing.harness import until
from tests.integration.browser import browser
from tests.unit.test_docs import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# Each builds the site and both distributions, so one process runs them all.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("build"), pytest.mark.full]

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


def test_the_wheel_brings_every_file_of_the_package(wheel: Path) -> None:
    """Also those that are no Python, such as the page's and Redis's scripts."""
    files = (path for path in (ROOT / "rdzv_plugins").rglob("*.*") if path.is_file())
    package = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert package <= set(zipfile.ZipFile(wheel).namelist())


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
    page = Path(told)
    assert seen == f"opened {page.as_uri()}"
    assert installed.parent in page.parents
    assert "<h1>Start with Redis or Valkey" in page.read_text()
    printed = run(rdzv, "docs", "--print", "start", folder=tmp_path)
    assert printed.startswith("# Start")
    assert "troubleshooting" in run(rdzv, "docs", "--print", folder=tmp_path).splitlines()


def test_without_a_browser_rdzv_docs_prints_the_path(installed: Path, tmp_path: Path) -> None:
    # No program of this name is anywhere, as on a node of a cluster.
    path = run(str(installed / "rdzv"), "docs", "slurm", folder=tmp_path, BROWSER="", PATH="")
    page = Path(path.removesuffix("\n"))
    assert page.parts[-2:] == ("recipes", "slurm.html")
    assert installed.parent in page.parents
    assert page.exists()


def test_the_links_of_all_printed_pages_lead_somewhere(installed: Path, tmp_path: Path) -> None:
    rdzv = str(installed / "rdzv")
    seen, broken = set(), []
    for name in run(rdzv, "docs", "--print", folder=tmp_path).splitlines():
        text = run(rdzv, "docs", "--print", name, folder=tmp_path)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                continue
            target = Path(unquote(parts.path))
            seen.add(target.suffix)
            there = parts.scheme == "file" and target.is_file()
            if not there or (parts.fragment and f'id="{parts.fragment}"' not in target.read_text()):
                broken.append((name, link))
    assert broken == []
    # Pages, pictures and examples.
    assert {".html", ".svg", ".png", ".py", ".sbatch", ".yaml"} <= seen


@pytest.fixture
def phone() -> Iterator[Chrome]:
    """A browser of 400 pixels, without a mouse."""
    with browser() as chrome:
        size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        chrome.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        features = [{"name": "hover", "value": "none"}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield chrome


def opened(installed: Path, page: str) -> str:
    """The address of a page of the installed site."""
    path = run(str(installed / "rdzv"), "docs", page, BROWSER="", PATH="").strip()
    return Path(path).as_uri()


# For each table: how much is out of sight, and how far it scrolls.
TABLES = """return [...document.querySelectorAll('.table-wrapper')].map(it => {
  it.scrollLeft = 100000;
  const hidden = it.querySelector('table').getBoundingClientRect().right - innerWidth;
  return [it.scrollWidth - it.clientWidth, it.scrollLeft, hidden];
})"""


def test_tables_scroll_on_a_phone(installed: Path, phone: Chrome) -> None:
    scrolled = 0
    for name in ("options", "commands", "protocol", "choosing", "troubleshooting", "redis"):
        phone.get(opened(installed, name))
        assert phone.execute_script("return document.documentElement.scrollWidth") <= 400, name
        for beyond, reached, hidden in phone.execute_script(TABLES):
            assert reached == beyond
            assert hidden <= 0, name
            scrolled += beyond > 0
    assert scrolled > 3


def test_code_is_copied_by_a_button(installed: Path, phone: Chrome) -> None:
    phone.get(opened(installed, "redis"))
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    phone.execute_cdp_cmd("Browser.grantPermissions", grant)
    blocks = phone.find_elements("css selector", "div.highlight pre")
    buttons = phone.find_elements("css selector", "div.highlight button.copybtn")
    assert len(buttons) == len(blocks) > 3
    assert {it.value_of_css_property("opacity") for it in buttons} == {"1"}
    buttons[0].click()
    read = "navigator.clipboard.readText().then(arguments[0])"
    assert phone.execute_async_script(read) == blocks[0].text
    # An example with a prompt is copied as the command without its output.
    phone.get(opened(installed, "check"))
    phone.find_element("css selector", "div.highlight button.copybtn").click()
    copied = phone.execute_async_script(read)
    assert copied.startswith("rdzv check --rdzv-backend redis")
    assert "--nnodes 2:4" in copied
    assert "$" not in copied


def test_rows_of_options_have_anchors(installed: Path, phone: Chrome) -> None:
    page = opened(installed, "options")
    phone.get(page)
    rows = phone.execute_script(
        "return [...document.querySelectorAll('tbody tr')].map(it =>"
        "[it.id, it.querySelector('code').innerText, it.querySelector('a.headerlink')?.hash])"
    )
    assert len(rows) > 80
    for anchor, name, link in rows:
        assert anchor == name or anchor.endswith(f"-{name}")
        assert link == f"#{anchor}"
    anchors = [anchor for anchor, _, _ in rows]
    assert len(anchors) == len(set(anchors))
    assert {"grow", "quarantine_after", "sentinel"} <= set(anchors)
    phone.get(f"{page}#quarantine_after")
    shown = "return document.querySelector('tr:target').getBoundingClientRect().top"
    # The page glides there.
    assert until(lambda: 0 < phone.execute_script(shown) < 400, 30)
