"""The environment's variables, and the variables that workers and checks do not get."""

from __future__ import annotations

import os
import re
import threading
from collections import ChainMap
from collections.abc import Mapping

ENVIRONMENT_PREFIX = "RDZV_PLUGINS_"

# Workers and checks do not get these variables: passwords, secrets and tokens of this package, and
# torchrun's own options. The endpoint among the options may have a password, and a torchrun that a
# worker starts would join the worker's own run.
_NOT_HANDED_DOWN = re.compile(rf"PET_\w+|{ENVIRONMENT_PREFIX}(\w+_)?(PASSWORD|SECRET|TOKEN)")

# The variables that `withhold` has removed, and how many of its calls are not undone yet.
_withheld: dict[str, str] = {}

_withholders = 0

_withholding = threading.Lock()


def environment() -> Mapping[str, str]:
    """The environment, including the variables that `withhold` has removed."""
    # Not a copy of the environment: decoding all variables at each look took 3 % of a round's time.
    return ChainMap(os.environ, _withheld)


def withhold() -> None:
    """Remove the variables that workers must not get, until `give_back` is called as often.

    torch starts workers with a copy of the agent's environment.
    """
    global _withholders
    with _withholding:
        _withholders += 1
        for name in [*os.environ]:
            if _NOT_HANDED_DOWN.fullmatch(name):
                # Copy first: at any moment one of the two mappings has the variable.
                _withheld[name] = os.environ[name]
                del os.environ[name]


def inherited() -> dict[str, str]:
    """The part of the environment that workers get."""
    return {name: it for name, it in os.environ.items() if not _NOT_HANDED_DOWN.fullmatch(name)}


def give_back() -> None:
    """Undo one `withhold`."""
    global _withholders
    with _withholding:
        _withholders = max(0, _withholders - 1)
        if _withholders == 0:
            for name, value in _withheld.items():
                os.environ.setdefault(name, value)
            _withheld.clear()
