"""The deterministic simulator: the real protocol code under seeded faults, on virtual time."""
