"""A training job on this host that loses a node and goes on; ``python -m rdzv_plugins.demo``."""
