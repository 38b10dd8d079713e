"""Programs that the tests start: what agents run as workers, and a gateway before a bucket."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
