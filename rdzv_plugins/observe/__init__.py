"""Runs as seen from outside, from the store alone; and the metrics of a node."""
