"""What is made of files is made anew once they change, and not before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdzv_plugins.kv import (
    AccessDeniedError,
    KeyValueClient,
    MemoryServer,
    RendezvousConnectionError,
)
from rdzv_plugins.kv.base import Limit
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions, UnreadableFileError, first_line
from rdzv_plugins.stores import open_run
from rdzv_plugins.stores.redis import Options
from tests.unit.test_store_client import DictClient


class Counted:
    """The first line of a file, and how often it was read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.read = 0

    def __call__(self) -> str:
        self.read += 1
        return first_line("password_file", str(self.file))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("one\n")
    return file


def test_file_that_does_not_change_is_read_once(file: Path) -> None:
    read = Counted(file)
    made = FromFiles(read, str(file), None)
    assert [made.get() for _ in range(3)] == ["one"] * 3
    assert read.read == 1


def test_file_that_is_replaced_is_read_again(file: Path) -> None:
    made = FromFiles(Counted(file), str(file))
    new = file.with_suffix(".new")
    # It has the same size and age: only the file itself is another one.
    new.write_text("two\n")
    os.utime(new, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    new.replace(file)
    assert made.get() == "two"


def test_link_that_leads_elsewhere_is_read_again(tmp_path: Path) -> None:
    """Kubernetes replaces a mounted secret so."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret").write_text(f"{name}\n")
    data = tmp_path / "data"
    data.symlink_to("one")
    made = FromFiles(Counted(data / "secret"), str(data / "secret"))
    new = tmp_path / "new"
    new.symlink_to("two")
    new.replace(data)
    assert made.get() == "two"


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff"])
def test_file_that_is_away_is_tried_again(file: Path, content: str | bytes | None) -> None:
    made = FromFiles(Counted(file), str(file))
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for _ in range(2):
        with pytest.raises(UnreadableFileError):
            made.get()
    file.write_text("two\n")
    assert made.get() == "two"


def test_file_that_is_away_from_the_start_is_a_bad_option(file: Path) -> None:
    with pytest.raises(ValueError, match=r"password_file '.*nowhere' cannot be read"):
        FromFiles(Counted(file.with_name("nowhere")), None)


class FileClient(DictClient):
    """Logs in with a password from a file, at each request."""

    name = "file"
    options = ServerOptions

    def __init__(
        self, endpoint: str, namespace: str, options: ServerOptions, request_timeout: float
    ) -> None:
        self.log_in = options.current_password
        options.current_password()
        super().__init__(MemoryServer(), namespace, request_timeout)

    def _put(self, values: object, limit: Limit) -> None:
        self.log_in()


def reach(file: Path, endpoint: str) -> KeyValueClient:
    options = ServerOptions(password_file=str(file))
    return open_run(FileClient, endpoint, "run", options, request_timeout=0.2)


def test_file_that_is_away_is_an_outage_after_the_start(
    file: Path,
) -> None:
    endpoint = str(file)  # No other test has it: what was reached counts for the process.
    content = file.read_text()
    file.unlink()
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)$"):
        reach(file, endpoint)
    file.write_text(content)
    client = reach(file, endpoint)
    file.unlink()
    with pytest.raises(RendezvousConnectionError, match="was not asked, for password_file") as told:
        client.put("key", b"value")
    assert not isinstance(told.value, AccessDeniedError)
    with pytest.raises(RendezvousConnectionError, match="is it being replaced"):
        reach(file, endpoint)
    file.write_text(content)
    client.put("key", b"value")
    reach(file, endpoint).close()


@pytest.mark.parametrize("name", ["user", "password", "password_file"])
def test_options_of_sentinels_need_sentinels(name: str) -> None:
    given = {f"sentinel_{name}": "x"}
    with pytest.raises(ValueError, match=f"option 'sentinel_{name}' needs sentinel="):
        Options(**given)  # type: ignore[arg-type]
    Options(sentinel="training", **given)  # type: ignore[arg-type]


def test_one_password_of_sentinels_is_enough() -> None:
    with pytest.raises(ValueError, match="are both set"):
        Options(sentinel="training", sentinel_password="x", sentinel_password_file="y")


def test_secret_of_sentinels_is_not_shown() -> None:
    assert "hunter2" not in repr(Options(sentinel="training", sentinel_password="hunter2"))
