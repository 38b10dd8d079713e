"""A training job on this host that loses a node and continues: ``python -m examples.demo``."""
