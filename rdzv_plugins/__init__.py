"""torchrun rendezvous on the store you already run."""

# Nothing is imported here: torch loads every entry point of this package at each start.
__version__ = "0.1.0"
