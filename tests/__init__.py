"""Unit tests, tests against real servers, and the simulator of the protocol."""

import warnings
from collections.abc import Callable

# torch says so, as it is imported, to every program of an environment without NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

Measure = Callable[[str, object], None]
"""pytest's ``record_property``: what it is given is shown at the end of a run."""
