"""Benchmarks of each store, compared with torch's own handlers."""

import warnings

# Without NumPy, torch prints this warning in every process that imports it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
