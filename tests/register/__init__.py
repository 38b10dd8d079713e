"""The registers of the quorum, under faults on virtual time."""
