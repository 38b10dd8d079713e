"""From ``kill -9`` of a node to the first step of all others, cold and with ``rdzv run --warm``.

Three agents on 127.0.0.1 to .3, each with one worker that imports torch and trains by all-reduces
over gloo. Once a replacement trains in the place of the killed node, and all standbys are ready,
the next node is killed. With a spare, a fourth node waits for a place and takes it, and the time
counts to the first step of all three.

``python -m benchmarks.warm --stores redis quorum etcd --turns 10`` prints a line for each kill.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rdzv_plugins.process import standby
from tests import servers
from tests.fleet.agents import RDZV_RUN, Agent, Fleet

_LIMIT = 120.0
# Each turn kills a node of one of three hosts.
_CONFIG = {"last_call_timeout": 0.2, "quarantine_after": 0}


@contextmanager
def _fleet(store: str, is_warm: bool, nodes: str) -> Iterator[Fleet]:
    with ExitStack() as until_the_end:
        endpoint, config = "127.0.0.1,127.0.0.2,127.0.0.3", dict[str, str]()
        if store != "quorum":
            server = until_the_end.enter_context(servers.start(store))
            endpoint, config = server.endpoint, server.config
        folder = until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-bench-"))
        yield until_the_end.enter_context(
            Fleet(
                Path(folder),
                backend="etcd-v3" if store == "etcd" else store,
                endpoint=endpoint,
                run_id=uuid.uuid4().hex[:8],
                nodes=nodes,
                config={**_CONFIG, **config},
                environ={},
                training={"seconds": 3600},
                launcher=(*RDZV_RUN, "--warm") if is_warm else RDZV_RUN,
                max_restarts=None,
            )
        )


def is_ready(agent: Agent) -> bool:
    """Whether the agent has a standby that imports no more: its processor time stands still."""
    for children in Path(f"/proc/{agent.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            folder = Path(f"/proc/{pid}")
            if (folder / "oom_score_adj").read_text() != standby.KILLED_FIRST + "\n":
                continue
            used = [(folder / "stat").read_text().split()[13:15] for _ in _pause(1.0)]
            return used[0] == used[1]
    return False


def _pause(seconds: float) -> Iterator[None]:
    yield
    time.sleep(seconds)
    yield


def measure(store: str, is_warm: bool, turns: int, spares: bool) -> Iterator[float]:
    """Seconds from each kill to the first step of all nodes of the next round."""
    with _fleet(store, is_warm, "3:3" if spares else "2:3") as fleet:
        trains = {name: f"127.0.0.{place}" for place, name in enumerate("abc", 1)}
        for name, address in trains.items():
            fleet.start(name, address)
        fleet.await_world(trains, timeout=_LIMIT)
        for turn in range(turns):
            waits = {f"{turn}": "127.0.0.4"} if spares else {}
            for name, address in waits.items():
                fleet.start(name, address)
            for name in [*trains, *waits] if is_warm else []:
                fleet.await_that(partial(is_ready, fleet.agents[name]), "a standby", _LIMIT)
            if spares and not is_warm:
                time.sleep(10)
            victim = [*trains][turn % 3]
            place = trains.pop(victim)
            killed = fleet.agents[victim].kill()
            trains |= dict.fromkeys(waits, place)
            world = fleet.await_world(trains, after=killed, timeout=_LIMIT)
            yield max(world.stepped.values()) - killed
            if not spares:
                trains[f"{turn}"] = place
                fleet.start(f"{turn}", place)
                fleet.await_world(trains, after=killed, timeout=_LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", nargs="+", default=["redis", "quorum", "etcd"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--spares", action="store_true")
    given = parser.parse_args()
    for store in given.stores:
        for is_warm in (False, True):
            times = []
            name = f"{store}, {'warm' if is_warm else 'cold'}{', a spare' * given.spares}"
            for seconds in measure(store, is_warm, given.turns, given.spares):
                times.append(seconds)
                print(f"{name}: {seconds:.2f} s", flush=True)  # noqa: T201
            print(f"{name}: median {statistics.median(times):.2f} s of {len(times)}")  # noqa: T201


if __name__ == "__main__":
    main()
