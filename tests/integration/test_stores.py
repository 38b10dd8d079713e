"""Where the tests' servers come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.stores import KINDS, running

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"

ETCD = next(kind for kind in KINDS if kind.server == "etcd")


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without etcd: none is named, none is installed and no Docker engine answers."""
    monkeypatch.delenv(ETCD.variable, raising=False)
    monkeypatch.delenv("RDZV_ETCD_BINARY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
@pytest.mark.usefixtures("nothing_there")
def test_missing_store_skips_its_tests_and_in_ci_fails_them(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome) as caught, running(ETCD):
        pass
    reason = str(caught.value)
    assert "$RDZV_TEST_ETCD is not set" in reason
    assert "apt-get install etcd-server" in reason
    assert "no Docker engine answers" in reason


def test_containers_are_of_the_same_images_everywhere() -> None:
    compose = COMPOSE.read_text()
    images = {line.split()[1] for line in compose.splitlines() if line.startswith("    image: ")}
    assert images == {kind.image for kind in KINDS if kind.image}
