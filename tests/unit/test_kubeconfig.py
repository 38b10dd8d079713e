"""A kubeconfig that is broken, has no current context, or goes away while a run lasts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.kv import AccessDeniedError
from rdzv_plugins.stores import open_client
from tests.nonsense import serving

pytest.importorskip("kubernetes.config")

REFUSED = b'HTTP/1.1 401 x\r\nContent-Length: 26\r\n\r\n{"message":"Unauthorized"}'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)
    return tmp_path / "config"


def kubeconfig(server: str, **more: str) -> str:
    context = {"cluster": "it", "namespace": "jobs", "user": "joe"}
    known: dict[str, Any] = {
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "joe", "user": {"token": "a-token"}}],
        "contexts": [{"name": "ours", "context": context}],
    }
    return json.dumps(known | more)


def open_with(file: Path, **config: str) -> None:
    open_client("kubernetes", "", "run", {"kubeconfig": str(file), **config}).close()


@pytest.mark.parametrize("text", ["", "clusters: [", "clusters:\n\tx", "none", "[]", "{}", "\0"])
def test_what_cannot_be_read_is_told_in_one_line(file: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"and no kubeconfig \(.*config\)$"):
        open_with(file)
    file.write_text(text)
    with pytest.raises(ValueError, match=r"the kubeconfig cannot be used \(.+\)$"):
        open_with(file)


@pytest.mark.parametrize("more", [{}, {"current-context": ""}], ids=["none", "empty"])
def test_a_named_context_needs_no_current_one(file: Path, more: dict[str, str]) -> None:
    asked: list[bytes] = []

    def refuse(line: socket.socket) -> None:
        while request := line.recv(65536):
            asked.append(request.split()[1])
            line.sendall(REFUSED)

    with serving(refuse) as (host, port):
        file.write_text(kubeconfig(f"http://{host}:{port}", **more))
        with pytest.raises(AccessDeniedError):
            open_with(file, context="ours")
    assert asked[0].startswith(b"/api/v1/namespaces/jobs/")


@pytest.mark.parametrize("left", [None, "clusters: ["], ids=["gone", "half written"])
def test_a_token_is_refused_as_such_while_the_file_is_replaced(
    file: Path, left: str | None
) -> None:
    def refuse(line: socket.socket) -> None:
        while line.recv(65536):
            file.unlink(missing_ok=True)
            if left is not None:
                file.write_text(left)
            line.sendall(REFUSED)

    with serving(refuse) as (host, port):
        file.write_text(kubeconfig(f"http://{host}:{port}", **{"current-context": "ours"}))
        with pytest.raises(AccessDeniedError, match="token"):
            open_with(file)
