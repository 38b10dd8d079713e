"""The training without torch, which first writes down what it knows of its round."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import rdzv_plugins
from tests.integration import train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name")
    options, _ = parser.parse_known_args()
    now = rdzv_plugins.current()
    assert now is not None
    file = options.folder / f"{options.name}.round"
    file.write_text(json.dumps(dataclasses.asdict(now)))
    train.main()


if __name__ == "__main__":
    main()
