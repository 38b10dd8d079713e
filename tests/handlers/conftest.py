"""Handlers on a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.handlers.site import Site


@pytest.fixture
def site() -> Iterator[Site]:
    # Imported here, as in tests/unit/conftest.py: it imports torch.
    from tests.handlers.site import site

    with site() as made:
        yield made
