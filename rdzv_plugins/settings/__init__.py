"""What people set: options, the endpoint, the run's id, the domain of a node."""
