"""An hour of faults, drawn from a seed, on real agents and a real server.

python -m tests.faults --store redis --seed 1 --minutes 60
python -m tests.faults --keep report.json  # into docs/faults.json, and docs/faults.md of it
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults import checks
from tests.faults.page import keep
from tests.faults.site import INTERVAL, LEASE, Site
from tests.faults.table import STORES, Plan, draw
from tests.integration.hosts import in_namespaces

_INSIDE = "RDZV_FAULTS_INSIDE"
_FIRST_MINUTE = 60.0
_START_SECONDS = 180.0
# Until what a fault leaves has gone: connections, descriptors and threads that wait for a timeout.
_SETTLE_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, default="redis")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--hours", type=float, help="in place of --minutes")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--torch", action="store_true", help="workers that use torch's gloo")
    parser.add_argument("--neighbours", type=int, default=0, help="other runs on the server")
    parser.add_argument("--only", default="", help="only the faults whose name has this")
    parser.add_argument(
        "--folder", type=Path, help="for logs, journals and report.json; default: one of /tmp"
    )
    parser.add_argument("--keep", type=Path, help="a report, to be kept in docs/faults.json")
    parser.add_argument("--note", default="", help="what else there is to say of that report")
    parser.add_argument("--page", action="store_true", help="write docs/faults.md anew")
    options = parser.parse_args()
    if options.keep or options.page:
        report = json.loads(options.keep.read_text()) if options.keep else None
        keep(report and {**report, "note": options.note})
        return 0
    if options.neighbours and options.store == "quorum":
        parser.error("a quorum serves one run: it has no neighbours")
    if _INSIDE not in os.environ:
        unshare, *command = in_namespaces("tests.faults", *sys.argv[1:])
        # A namespace of processes too: all that is started here ends with this program.
        command = [unshare, "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rdzv-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run(options, folder)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    for finding in report["findings"]:
        say(f"FOUND: {finding}")
    say(f"{len(report['episodes'])} faults, {report['rounds']} rounds, {report['steps']} steps, "
        f"{len(report['findings'])} findings; logs: {folder}")  # fmt: skip
    return 1 if report["findings"] else 0


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The report."""
    seconds = 3600 * options.hours if options.hours else 60 * options.minutes
    findings: list[str] = []
    episodes: list[checks.Episode] = []
    rows: list[dict[str, Any]] = []
    with Site(
        folder, options.store, options.agents, seconds + 1200, seed=options.seed,
        torch=options.torch,
    ) as site:  # fmt: skip
        began = time.monotonic()
        if site.await_step(0.0, options.agents, _START_SECONDS) is None:
            raise SystemExit(f"no world of {options.agents} within {_START_SECONDS:g} s: {folder}")
        say(f"all {options.agents} train after {time.monotonic() - began:.0f} s; logs: {folder}")
        neighbours = site.start_neighbours(options.neighbours) if options.neighbours else None
        time.sleep(max(0.0, began + _FIRST_MINUTE - time.monotonic()))
        first, memory = site.counts(), site.megabytes()
        held = site.descriptors
        began = time.monotonic()
        for plan in draw(options.seed, options.store, site.addresses):
            if time.monotonic() - began > seconds:
                break
            if options.only not in plan.fault.name:
                continue
            rows.append(strike(site, plan, options.agents, episodes, findings))
            if rows[-1]["whole"] is None:
                findings.append(f"{plan.fault.name}: the run did not come back; stopped here")
                break
            site.await_that(plan.calm)
        time.sleep(_SETTLE_SECONDS)
        last = site.counts()
        findings += checks.leaks(first, last, options.agents)
        (folder / "descriptors.json").write_text(json.dumps([held, site.descriptors], indent=1))
        more = site.megabytes()
        if neighbours is not None and (ended := int(neighbours.communicate(timeout=120)[0])):
            findings.append(f"{ended} of {options.neighbours} neighbours' rounds have ended")
        notes = list(site.read_notes())
        worlds = checks.worlds(notes)
        for row, episode in zip(rows, episodes, strict=True):
            during = [it for it in worlds if episode.began <= it.began < episode.over]
            row["causes"] = [it.cause for it in during]
            row["restarts"] = len(during)
        findings += checks.steps(notes)
        findings += checks.two_worlds(notes, episodes)
        findings += checks.causes(notes, episodes)
        findings += checks.deaths(site.ends, episodes)
        return {
            "store": options.store,
            "seed": options.seed,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "agents": options.agents,
            "neighbours": options.neighbours,
            "workers": "torch (gloo)" if options.torch else "sockets",
            "interval": INTERVAL,
            "lease": LEASE,
            "machine": f"{os.cpu_count()} cores, {platform.release()}",
            "rounds": len(worlds),
            "steps": max(it.step for it in notes),
            "first": first,
            "last": last,
            "megabytes": [round(memory), round(more)],
            "episodes": rows,
            "findings": findings,
        }


def strike(
    site: Site, plan: Plan, agents: int, episodes: list[checks.Episode], findings: list[str]
) -> dict[str, Any]:
    """One fault, until all train again; its row of the report."""
    fault, targets = plan.fault, plan.targets
    before = time.monotonic()
    if episodes:
        episodes[-1].over = before
    with fault.begin(site, targets):
        site.await_that(plan.seconds)
    ended = time.monotonic()
    episodes.append(
        checks.Episode(
            fault=fault.name,
            targets=targets,
            began=before,
            ended=ended,
            over=float("inf"),
            names=tuple(
                it.replace("{host}", host.replace(".", r"\."))
                for it in fault.names
                for host in targets
            ),
            restarts=fault.restarts,
            kills=fault.kills,
            two_worlds=fault.two_worlds,
        )
    )
    moves = site.await_step(ended, 1, 3 * fault.within)
    whole = site.await_whole(ended, agents, 3 * fault.within)
    row = {
        "fault": fault.name,
        "targets": targets,
        "at": round(before - site.began, 1),
        "seconds": plan.seconds,
        "moves": None if moves is None else round(moves - ended, 1),
        "whole": None if whole is None else round(whole - ended, 1),
    }
    if whole is not None and whole - ended > fault.within:
        findings.append(
            f"{fault.name} of {', '.join(targets)}: whole again after {whole - ended:.0f} s, "
            f"in place of {fault.within:g} s"
        )
    say(f"{fault.name} ({', '.join(targets)}) for {plan.seconds:g} s: next step after "
        f"{row['moves']} s, whole after {row['whole']} s")  # fmt: skip
    return row


if __name__ == "__main__":
    sys.exit(main())
