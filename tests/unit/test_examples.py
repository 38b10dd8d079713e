"""The scripts of examples/ pass on what they are given, and execute none of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "ssh" / "launch"
HOSTILE = "a b'; touch owned; $(touch owned) `touch owned` \"&*\\"

# What sshd does: the user's shell gets the words in one line.
SSH = '#!/bin/sh\nwhile [ "$1" != node1 ]; do shift; done\nshift\nexec sh -c "$*"\n'


def test_ssh_executes_nothing_of_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    (folder / "hosts").write_text("node1\n")
    for name, text in {"ssh": SSH, "rdzv": '#!/bin/sh\nprintf \'%s\\n\' "$PWD" "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(
        [LAUNCH, f"redis://{HOSTILE}", HOSTILE], cwd=folder, env=environ, check=True, timeout=30
    )
    told = (folder / "node1.log").read_text().splitlines()
    assert told[0] == str(folder)
    assert {f"--rdzv-endpoint=redis://{HOSTILE}", f"--rdzv-id={HOSTILE}"} < {*told}
    assert not [*tmp_path.rglob("owned")]
