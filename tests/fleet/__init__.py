"""Agents and a training of real processes on this host, for the tests and the benchmarks."""
