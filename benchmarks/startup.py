"""What this package adds to the start of every process that imports torch's elastic package.

torch loads all entry points of ``torchrun.handlers`` then. Each pair of samples imports the same
packages without this package and with it. The difference is all of the entry points' cost:
`importlib.import_module`, by which they are loaded, has no line of its own in ``-X importtime``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import rdzv_plugins
from benchmarks.rendezvous import Sample

__all__ = ["measure"]

_SITE = Path(torch.__file__).parents[1]
_PACKAGE = Path(rdzv_plugins.__file__).parent
_ELASTIC = "torch.distributed.elastic.rendezvous"
# torch first: the time of its import varies by more than what is measured here.
_PROGRAM = f"import torch, torch.distributed, importlib.metadata; import {_ELASTIC}"
_LINE = re.compile(rf"import time: .*\| +(\d+) \| +{re.escape(_ELASTIC)}\n")


def measure(samples: int) -> list[Sample]:
    """Milliseconds that the elastic package's import takes with this one and without, in pairs."""
    with _folders() as (without, with_ours):
        for folder in (without, with_ours):
            _import(folder)  # Compiles, and fills the disk's cache.
        found = []
        for _ in range(samples):
            alone, both = _import(without), _import(with_ours)
            found.append({"ms without": alone, "ms more": both - alone})
        return found


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """Two folders to import from: all installed packages but this one, and this one too."""
    with tempfile.TemporaryDirectory(prefix="rdzv-startup-") as name:
        folders = Path(name) / "without", Path(name) / "with"
        for folder in folders:
            folder.mkdir()
            for entry in _SITE.iterdir():
                if "rdzv_plugins" not in entry.name and entry.suffix != ".pth":
                    (folder / entry.name).symlink_to(entry)
        [facts] = _SITE.glob("rdzv_plugins-*.dist-info")
        (folders[1] / facts.name).symlink_to(facts)
        (folders[1] / _PACKAGE.name).symlink_to(_PACKAGE)
        yield folders


def _import(folder: Path) -> float:
    """Milliseconds of the elastic package's import, with all that it imports and registers."""
    ended = subprocess.run(
        # -S: not the site-packages of this interpreter.
        [sys.executable, "-S", "-W", "ignore", "-X", "importtime", "-c", _PROGRAM],
        env={"PYTHONPATH": str(folder), "PATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    [microseconds] = _LINE.findall(ended.stderr)
    return int(microseconds) / 1000
