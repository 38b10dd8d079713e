"""Unit tests, tests against real servers, and the simulator of the protocol."""

from collections.abc import Callable

Measure = Callable[[str, object], None]
"""pytest's ``record_property``: what it is given is shown at the end of a run."""
