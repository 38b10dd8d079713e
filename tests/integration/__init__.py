"""Tests against real servers."""

from collections.abc import Callable

Measure = Callable[[str, object], None]
"""pytest's ``record_property``: what it is given is shown at the end of a run."""
