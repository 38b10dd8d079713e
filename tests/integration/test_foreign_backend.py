"""The store of docs/writing-a-backend.md, in a package of its own, exactly as the page has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-backend.md"

SHOWN = dict(re.findall(r"(?ms)^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text()))
SHOWN["mypackage/mystore.py"] = (ROOT / "examples" / "backend" / "mystore.py").read_text()

_folder = TemporaryDirectory(prefix="rdzv-foreign-")
FOLDER = Path(_folder.name)


def install() -> None:
    """As pip would: the files, and the entry points that pyproject.toml declares."""
    for name, text in {**SHOWN, "mypackage/__init__.py": ""}.items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text)
    project = tomllib.loads(SHOWN["pyproject.toml"])["project"]
    about = FOLDER / "{name}-{version}.dist-info".format(**project)
    about.mkdir()
    about.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".format(**project)
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    about.joinpath("entry_points.txt").write_text("\n".join(lines))


install()
sys.path.append(str(FOLDER))
try:
    # The page's own test: pytest collects what it holds the store to. `make test` runs a part of
    # it below: on the installed package, and on stores that are broken.
    TestMyStore = pytest.mark.full(import_module("test_mystore").TestMyStore)
finally:
    sys.path.remove(str(FOLDER))

TORCHRUN = """
import sys
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from rdzv_plugins.stores import open_client

params = RendezvousParameters(
    "mystore", sys.argv[1], "run", 1, 1, local_addr="127.0.0.1", durable="true"
)
handler = registry.create_handler(params)
assert handler.next_rendezvous().world_size == 1
assert open_client("mystore", sys.argv[1], "run").list("")
assert handler.shutdown()
print("rendezvous")
try:
    registry.create_handler(RendezvousParameters("mystore", "/nowhere/runs", "run", 1, 1))
except Exception as error:
    print(error)
"""


def test_torch_finds_it_by_its_entry_point(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCHRUN, str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
    )
    assert ended.stdout.splitlines() == [
        "rendezvous",
        "mystore at /nowhere/runs cannot be opened (unable to open database file); "
        "is there such a folder, and is it ours?",
    ], ended.stderr


PUT = """"INSERT OR REPLACE INTO runs VALUES (:run, :key, :data, :now)", *rows)
"""
REPLACE = """= :stamp AND {LIVE}\"\"\"
"""
ASK = """    def _ask(self, limit: Limit, statement: str, *rows: Mapping[str, Any]) -> int:
"""

# What would break the page's store, by what it does to others, and the test that finds it.
BROKEN = {
    "halves": (
        PUT,
        PUT.replace("*rows", "rows[0]")
        + f"""        for row in rows[1:]:
            self._ask(limit, {PUT.replace("*rows", "row")}""",
        "test_killed_put_many_leaves_a_whole_batch_or_its_beginning[20]",
    ),
    "tears": (
        PUT,
        PUT.replace("*rows", '*({**row, "data": row["data"][:-1]} for row in rows)')
        + f"        limit.sleep(0.2)\n        self._ask(limit, {PUT}",
        "test_killed_put_leaves_the_old_or_the_new_value[300]",
    ),
    "loses": (
        REPLACE,
        REPLACE
        + """            self._ask(limit, f"DELETE FROM runs WHERE run = :run AND key = :key", row)
            limit.sleep(0.2)
            return self._replace(key, data, None, limit)
""",
        "test_killed_compare_and_set_leaves_the_old_or_the_new_value[300]",
    ),
    "blocks": (
        ASK,
        ASK
        + """        from pathlib import Path
        while True:
            try:
                lock = Path(self._path + ".lock")
                lock.touch(exist_ok=False)
                break
            except FileExistsError:
                limit.sleep(min(0.001, limit.seconds))
        try:
            return self._locked(limit, statement, *rows)
        finally:
            lock.unlink()

"""
        + ASK.replace("_ask", "_locked"),
        "test_killed_put_leaves_the_old_or_the_new_value[300]",
    ),
}


def test_the_suite_finds_what_a_killed_writer_breaks(tmp_path: Path) -> None:
    for name, (right, wrong, _) in BROKEN.items():
        store, test = SHOWN["mypackage/mystore.py"], SHOWN["test_mystore.py"]
        assert store.count(right) == 1, name
        (tmp_path / f"{name}.py").write_text(store.replace(right, wrong))
        (tmp_path / f"test_{name}.py").write_text(test.replace("mypackage.mystore", name))
    tests = [f"test_{name}.py::TestMyStore::{test}" for name, (*_, test) in BROKEN.items()]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", *tests],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    for test in tests:
        assert f"FAILED {test}" in ended.stdout, ended.stdout


def test_the_installed_package_works_as_the_page_shows(tmp_path: Path) -> None:
    for name, text in {**SHOWN, "mypackage/__init__.py": ""}.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    (shown,) = re.findall(r"```bash\n(pip install .*?)```", PAGE.read_text(), re.DOTALL)
    site, there = str(tmp_path / "site"), str(tmp_path / "try")
    # Not into the environment of all tests, without the network, and two tests of the suite.
    offline = f"python -m pip install --quiet --no-build-isolation --target {site}"
    commands = (
        shown.replace("pip install --force-reinstall", offline)
        .replace("/tmp/try", there)
        .replace("python -m pytest", "python -m pytest -q -k 'killed_add or put_is_read'")
    )
    ended = subprocess.run(
        ["bash", "-e", "-x", "-c", commands],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        cwd=tmp_path / "source",
        env={
            **os.environ,
            "PYTHONPATH": site,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout
    assert "verdict: a job works" in ended.stdout
    assert "run 'try': connected to mystore" in ended.stderr


def test_the_page_keeps_its_word() -> None:
    assert {"mypackage/mystore.py", "mypackage/entry_points.py", "test_mystore.py"} <= SHOWN.keys()
