"""What runs in an agent's process: torch's handler, the driver of a node, signals, workers."""
