"""Copies of the package's code with one rule broken; the simulator must catch each of them.

A mutant is a list of substitutions in the source of some modules. If a replaced text is missing or
occurs twice, `build` raises an error: the mutant would change nothing or the wrong place.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rdzv_plugins.protocol import (
    choice,
    growth,
    kept_out,
    links,
    network_check,
    quarantine,
    ranks,
    roster,
)
from rdzv_plugins.protocol.node import Node

from .plan import EVERYTHING, UNSTEERED, Fault, Focus

__all__ = ["CALM", "MOST_SEEDS_PER_MUTANT", "MUTANTS", "Edit", "Mutant", "build"]

# The search for a mutant begins at the seed that caught it first. After a change of the protocol's
# requests a seed is another run, and a later seed may catch the mutant.
MOST_SEEDS_PER_MUTANT = 3000

_MODULES = (
    "failure_detector",
    "record_cache",
    "roster",
    "ranks",
    "choice",
    "growth",
    "kept_out",
    "quarantine",
    "links",
    "network_check",
    "leader",
    "member",
    "observer",
    "cleanup",
    "contact",
    "node",
)


@dataclass(frozen=True, slots=True)
class Edit:
    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken rule, in words, and the edits that break it.

    ``seed`` is close to a seed that catches the mutant. If the necessary faults are too rare in
    unrestricted plans, ``focus`` restricts the plans.
    """

    breaks: str
    edits: tuple[Edit, ...]
    seed: int = 1
    focus: Focus = EVERYTHING

    @property
    def plans(self) -> Focus:
        """``focus``; as when most of these seeds were found where it does not say otherwise."""
        return replace(self.focus, settings={"inline": 128, **UNSTEERED, **self.focus.settings})


_WITH_NAMES_OF_THEIR_OWN = (
    roster,
    ranks,
    choice,
    growth,
    kept_out,
    quarantine,
    links,
    network_check,
)
"""Modules whose public names others import."""

_UNFIT = Focus(settings={"unfit": 0.5, "checks_restarts": True})

# Where hosts end round after round.
_FLAPS = Focus(
    kinds=("worker failure", "crash, then restart as a newcomer"),
    settings={"quarantine_after": 2, "quarantine_window": 30.0},
)
# Where people give orders.
_DRAINS, _EXCLUDES = (
    Focus(settings={"orders": tuple(Fault(3.0 * n, kind) for n, kind in enumerate(kinds, 1))})
    for kinds in (
        ("drain", "restart", "drain", "drain", "restart"),
        ("exclude", "exclude", "include", "exclude", "exclude"),
    )
)
# Where the store refuses hosts.
_REFUSED = Focus(
    kinds=("newcomer",),
    settings={"refusals": tuple(Fault(4.0 * n, kind) for n, kind in enumerate(("one", "all") * 2))},
)
# Where all but the smallest rounds stand in shards.
_APART = Focus(settings={"inline": 1})


def _parted(*kinds: str, **settings: Any) -> Focus:
    """Runs that check their network, to which these things happen again and again."""
    links = tuple(Fault(0.7 * n, kind) for n, kind in enumerate(3 * kinds))
    return Focus(
        kinds=("worker failure", "newcomer", "crash, then restart as a newcomer"),
        settings={"network_check": True, "links": links, **settings},
    )


_GROWS = {"min_nodes": 1, "max_nodes": 12, "last_call": 0.0}


def _grows(**settings: Any) -> Focus:
    """Runs that newcomers join while a round runs, under these policies."""
    return Focus(kinds=("newcomer", "newcomer", "crash"), settings={**_GROWS, **settings})


_RACKS = ("s0/r0", "s1/r1", "s0/r2", "s0/r0")
_UNITS = Focus(settings={"node_unit": 3, "min_nodes": 1, "max_nodes": 9})
_SEGMENTS = Focus(settings={"segment": 2, "min_nodes": 1, "max_nodes": 6, "domains": _RACKS})
_TOPOLOGY = Focus(
    kinds=("crash", "worker failure", "leave", "newcomer", "newcomer"),
    settings={"topology": True, "min_nodes": 1, "max_nodes": 5, "domains": _RACKS},
)


def _in(module: str, old: str, new: str) -> Edit:
    return Edit(module, old, new)


CALM = Focus(
    kinds=("many crash at once",),
    settings={
        "nodes": 30,
        "max_nodes": 30,
        "min_nodes": 4,
        "lost": 0.0,
        "unacknowledged": 0.0,
        "late": 0.0,
        "ambush": None,
        **UNSTEERED,
    },
)
"""Large worlds in which nothing fails but many hosts at once."""

MUTANTS: dict[str, Mutant] = {
    "no-exclusivity": Mutant(
        "rule 5: a round does not wait for the participants of the last round",
        (
            _in(
                "leader",
                "    if pending := without(awaited, gone):  # Rule 5.\n",
                "    if pending := ():\n",
            ),
        ),
        seed=3,
    ),
    "stale-join": Mutant(
        "rule 5: a join request from before the round counts as one from after it",
        (
            _in(
                "leader",
                "    return _round_in(document, record) >= ended_round\n",
                "    return True\n",
            ),
        ),
        seed=2,
    ),
    "no-compare": Mutant(
        "rule 1: a leader treats a refused write as done",
        (
            _in(
                "node",
                "        if not written:\n"
                "            yield from seen.adopt(entry)\n"
                "            return False\n",
                "",
            ),
        ),
        seed=2,
    ),
    "wall-clocks": Mutant(
        "rule 2: a heartbeat is the writer's clock, and its age is the difference to the reader's",
        (
            _in(
                "node",
                "beat=self.record.beat + 1, looks=self._seen.looks)",
                "beat=int(self._clock() * 1000), looks=self._seen.looks)",
            ),
            _in(
                "failure_detector",
                "_Seen(beat, max(now, self._grace_ends), now, forgiven=forgiven)",
                "_Seen(beat, (beat or 0) / 1000, now)",
            ),
        ),
        seed=10,
    ),
    "half-a-lease": Mutant(
        "rule 2: a node is lost after half a lease of silence",
        (
            _in(
                "leader",
                "    return _said_so(record) or view.is_silent(node)\n",
                "    return _said_so(record) or node != view.me and "
                "view.confirmed_silence(node) >= view.patience(node) / 2\n",
            ),
        ),
        seed=2,
    ),
    "coup": Mutant(
        "rule 4: the leader is replaced without waiting for its lease",
        (
            _in(
                "member",
                "    if view.confirmed_silence(leader) < lease and view",
                "    if False and view",
            ),
            _in(
                "member",
                "    if view.confirmed_silence(leader) >= lease + turn:\n",
                "    if view.confirmed_silence(leader) >= turn:\n",
            ),
        ),
    ),
    "no-heir": Mutant(
        "rule 4: no node takes over from a dead leader",
        (
            _in(
                "member",
                "    if view.confirmed_silence(leader) < lease and "
                "view.confirmed_idleness < idle:\n",
                "    if True:\n",
            ),
        ),
        seed=6,
    ),
    "never-mind-leading": Mutant(
        "rule 4: a leader that sends heartbeats but cannot read all records stays the leader",
        (
            _in("member", "    idle = lease + (", "    idle = 1e9 + ("),
            _in(
                "observer",
                "        return self._clock() - self.listed_since >= self._rules.lease\n",
                "        return False\n",
            ),
        ),
        seed=31,
        focus=Focus(kinds=("grey host",), settings={"stays_grey": True}),
    ),
    "own-ranks": Mutant(
        "rule 6: a node puts itself first instead of reading its rank",
        (
            _in(
                "node",
                "            case rules.Start(document):\n",
                "            case rules.Start(document):\n"
                "                people = document.participants\n"
                "                people = sorted(people, key=lambda node: node != self.id)\n"
                "                document = replace(document, participants=tuple(people))\n",
            ),
        ),
    ),
    "below-minimum": Mutant(
        "rule 7: one node is enough for a round",
        (
            _in(
                "choice",
                "    return count if count >= sizes.min_nodes else 0\n",
                "    return count\n",
            ),
        ),
        seed=9,
    ),
    "above-maximum": Mutant(
        "rule 7: a round takes all nodes",
        (_in("choice", "        return ready[:size]\n", "        return ready\n"),),
        seed=4,
    ),
    "no-last-call": Mutant(
        "rule 7: the round completes as soon as the minimum is reached",
        (_in("leader", "        if not enough or left > 0:\n", "        if not enough:\n"),),
    ),
    "spares-disturb": Mutant(
        "rule 8: a waiting node restarts a full round",
        (_in("leader", "    grows = size > len(present)\n", "    grows = bool(newcomers)\n"),),
        seed=2,
    ),
    "newcomers-wait": Mutant(
        "rule 8: a waiting node is not admitted although there is room",
        (_in("leader", " or (grows and held is None)", ""),),
        seed=2,
    ),
    "loss-unseen": Mutant(
        "rule 9: the loss of a participant does not restart the round",
        (_in("leader", " or (lost and view.rules.restart_on_loss)", ""),),
        seed=329,
    ),
    "failure-unseen": Mutant(
        "a participant that joins again does not restart the round of the others",
        (_in("leader", "    if rejoined or ordered or", "    if ordered or"),),
        seed=24,
    ),
    "no-window-after-outage": Mutant(
        "rule 11: observation windows continue across an outage of the store",
        (
            _in(
                "observer",
                "        if away > self._rules.outage:\n",
                "        if False:\n",
            ),
        ),
        seed=34,
    ),
    "no-grace-after-outage": Mutant(
        "rule 11: after an outage, a node that reconnects late gets no extra lease",
        (
            _in(
                "observer",
                "self.liveness.restart(now, self._rules.lease)",
                "self.liveness.restart(now)",
            ),
        ),
        seed=43,
    ),
    "repeated-requests": Mutant(
        "rule 11: an outage through which a client repeated a request is none",
        (
            _in(
                "observer",
                "        if away > self._rules.outage:\n",
                "        if trouble and away > self._rules.outage:\n",
            ),
        ),
        seed=31000613,
    ),
    "no-grace-at-first-sight": Mutant(
        "rule 11: a node that is first seen after an outage gets no extra lease",
        (_in("failure_detector", "max(now, self._grace_ends)", "now"),),
        seed=70000263,
        focus=Focus(kinds=("outage", "outage", "newcomer", "leave", "crash", "slow store")),
    ),
    "no-window-at-takeover": Mutant(
        "a new leader judges nodes by observations from before it led",
        (_in("observer", "        self.liveness.restart(now, unless=deposed)\n", ""),),
        seed=275,
    ),
    "answer-time": Mutant(
        "a slow answer counts as an observation at the time when it arrived",
        (
            _in(
                "failure_detector",
                "            seen.looked, seen.stale = asked, False\n",
                "            seen.looked, seen.stale = now, False\n",
            ),
        ),
        seed=84,
        focus=Focus(
            kinds=("slow store", "crash", "stall"),
            settings={"rates": (1.0, 1.0), "lease": 3.0, "latency": 0.3},
        ),
    ),
    "documents-are-no-beats": Mutant(
        "documents written by the leader do not count as its heartbeats, although two "
        "amnesias within a lease hide the heartbeats",
        (
            _in(
                "observer",
                "            self.liveness.heard(document.leader, self._clock())\n",
                "            pass\n",
            ),
        ),
        seed=141,
        focus=Focus(
            kinds=("amnesia",),
            settings={
                "rates": (0.84, 1.2),
                "lease": 2.0,
                "latency": 0.3,
                "request_timeout": 3.0,
                "other_settings": 0.0,
            },
        ),
    ),
    "no-write-back": Mutant(
        "rule 12: no node writes the document back after the store lost it",
        (_in("member", "    if latest is None:\n        if not", "    if True:\n        if not"),),
        seed=13,
    ),
    "newcomer-rules": Mutant(
        "rule 12: a node accepts a document that is older than the one it remembers",
        (_in("member", "    return document.place < latest.place\n", "    return False\n"),),
        seed=131,
        focus=Focus(
            kinds=("fail-over", "worker failure"), settings={"stop": 0.05, "max_restarts": 100}
        ),
    ),
    "no-memory": Mutant(
        "rule 12: a node forgets that it has seen a later round",
        (
            _in(
                "observer",
                "(not latest.closed and document.place >= latest.place)\n",
                "not latest.closed\n",
            ),
            # Else it restarts, needlessly, and so comes back.
            _in("member", " or document.world_id != member.world_id:\n", ":\n"),
        ),
        seed=131,
        focus=Focus(
            kinds=("fail-over", "worker failure"), settings={"stop": 0.05, "max_restarts": 100}
        ),
    ),
    "strays-unseen": Mutant(
        "rule 12: a leader ignores nodes that run in a round it does not know",
        (
            _in(
                "leader",
                "    if strays or highest >= document.round:\n",
                "    strays = []\n    if highest >= document.round:\n",
            ),
        ),
        seed=349,
    ),
    "numbers-from-zero": Mutant(
        "rule 12: a leader numbers rounds without looking at the records",
        (
            _in("leader", "    if strays or highest >= document.round:\n", "    if strays:\n"),
            _in("leader", "round=max(document.round, highest + 1),", "round=document.round,"),
        ),
        seed=4246,
        focus=Focus(
            kinds=("amnesia", "amnesia", "partition", "worker failure"),
            settings={"stop": 0.05, "max_restarts": 100, "last_call": 0.0, "min_nodes": 1},
        ),
    ),
    "numbers-alike": Mutant(
        "two rounds with the same number are treated as the same round",
        (
            _in(
                "member",
                "view.record.world_id == document.world_id\n",
                "view.record.round == document.round\n",
            ),
            _in("leader", "or record.world_id != world_id", "or record.round != document.round"),
        ),
        seed=1154,
    ),
    "closed-reopens": Mutant(
        "rule 14: a closed run continues",
        (
            _in(
                "member",
                "    if latest is not None and latest.closed:\n"
                "        if view.record.status is Status.RUN and _is_strange(view, latest):\n"
                "            return AskTombstone(str(view.own))\n"
                "        return _on_closed(view)\n",
                "",
            ),
        ),
        seed=2,
    ),
    "no-confirmation": Mutant(
        "a round runs before its participants have confirmed it",
        (
            _in(
                "leader",
                "    if unconfirmed(document, records):\n",
                "    if document.participants[0] in unconfirmed(document, records):\n",
            ),
        ),
        seed=3,
    ),
    "confirming-blind": Mutant(
        "the leader waits for a participant that dies while the round is being confirmed",
        (_in("leader", "    if lost or rejoined or out:\n", "    if rejoined or out:\n"),),
        seed=38,
    ),
    "mixed-nodes": Mutant(
        "a node with other --nnodes is admitted",
        (
            _in(
                "member",
                "    if (document.min_nodes, document.max_nodes) != "
                "(rules.min_nodes, rules.max_nodes):\n",
                "    if False:\n",
            ),
            _in(
                "leader",
                "    return (record.min_nodes, record.max_nodes) == "
                "(document.min_nodes, document.max_nodes)\n",
                "    return True\n",
            ),
        ),
        seed=6,
    ),
    "lost-for-good": Mutant(
        "a participant that returns to a round that continued without it stays lost",
        (_in("leader", "- {*rejoined, *back}", "- {*rejoined}"),),
        seed=61,
    ),
    "silent-failure": Mutant(
        "a failed join is not reported to the agent while the store is unreachable",
        (
            _in(
                "node",
                "            except (RendezvousConnectionError, RendezvousStateError):\n"
                "                # The others",
                "            except ZeroDivisionError:\n                # The others",
            ),
        ),
        seed=292,
    ),
    "missed-round": Mutant(
        "if a round ended before a participant saw it run, the participant never starts it",
        (
            _in(
                "member",
                "    if latest.ran != confirmed.world_id:\n",
                "    if latest.phase is not Phase.RUNNING or latest.ran != confirmed.world_id:\n",
            ),
        ),
        seed=272,
    ),
    "swept-runs-again": Mutant(
        "a node writes a round back to an empty store without looking for the tombstone",
        (
            _in(
                "member",
                "    if latest.incarnation not in view.asked_tombstones:\n",
                "    if False:\n",
            ),
        ),
        seed=355,
    ),
    "no-tombstone-for-ever": Mutant(
        "that a run had no tombstone holds for as long as the document stays away",
        (_in("observer", " if asked > oldest)", ")"),),
        seed=1025,
        focus=Focus(
            kinds=("workers succeed", "amnesia"),
            settings={
                "sweep_after": 1.0,
                "unacknowledged": 0.1,
                "ambush": "amnesia",
                "latency": 0.05,
                "inline": 2,
            },
        ),
    ),
    "no-tombstone": Mutant(
        "the node that closes a run writes no tombstone",
        (_in("cleanup", "yield from PutTombstone(closed)", "pass"),),
        seed=216,
        focus=Focus(kinds=("close, then resubmit",), settings={"sweep_after": 1.0}),
    ),
    "older-run-wins": Mutant(
        "the nodes of an older run overwrite the document of another live run of the same id",
        (
            _in(
                "observer",
                " and not (latest.closed and latest.is_of(self.confirmed))",
                " and False",
            ),
        ),
        seed=23,
    ),
    "anybody-closes": Mutant(
        "rule 14: a node that was replaced closes the run of the others",
        (
            _in(
                "cleanup",
                "        if not may_close(document):\n",
                "        if False:\n",
            ),
        ),
        seed=480,
        focus=Focus(
            kinds=("partition", "partition", "close", "close", "crash"),
            settings={"rates": (1.0, 1.0), "lease": 2.0},
        ),
    ),
    "closes-any-run": Mutant(
        "rule 14: a node closes any run of its id, also another incarnation",
        (_in("cleanup", "not document.is_of(latest)):\n", "False):\n"),),
        seed=273,
        focus=Focus(
            kinds=("amnesia", "partition", "close", "close"),
            settings={"rates": (1.0, 1.0), "lease": 6.0, "poll": 0.5},
        ),
    ),
    "nobody-told-of-failure": Mutant(
        "rule 14: a run that is closed as failed does not end the other agents",
        (_in("member", "int(latest.outcome is not None and latest.outcome.ends_workers)", "0"),),
        seed=3,
    ),
    "done-is-gone": Mutant(
        "a node whose workers succeeded is treated as lost",
        (
            _in(
                "leader",
                "    return record.world_id == document.world_id\n",
                "    return False\n",
            ),
        ),
        seed=2,
    ),
    "done-is-disturbed": Mutant(
        "newcomers restart a round in which a node's workers have succeeded",
        (_in("leader", "    if newcomers and not done:\n", "    if newcomers:\n"),),
        seed=191,
        focus=Focus(kinds=("workers succeed", "newcomer", "newcomer")),
    ),
    "nobody-closes-what-is-done": Mutant(
        "nodes that are done wait in torch's exit barrier for lost nodes",
        (_in("leader", "    if done and done >= set", "    if not gone and done == set"),),
        seed=792,
    ),
    "one-lease-for-all": Mutant(
        "each node is judged by the leader's lease instead of its own",
        (
            _in(
                "leader",
                "    return _said_so(record) or view.is_silent(node)\n",
                "    return _said_so(record) or node != view.me and "
                "view.confirmed_silence(node) >= view.rules.lease\n",
            ),
        ),
        seed=50,
    ),
    "beats-go-back": Mutant(
        "a delayed heartbeat overrides a later record of the same node",
        (
            _in(
                "record_cache",
                "late = known is not None and known[1].beat > record.beat",
                "late = False",
            ),
        ),
        seed=45,
        focus=Focus(kinds=("leave", "workers succeed", "worker failure"), settings={"late": 0.3}),
    ),
    "stray-founds-at-once": Mutant(
        "a node with other --nnodes creates a run while the nodes of another run live",
        (
            _in(
                "member",
                "    if any(view.moved(str(node)) for node in holders):\n",
                "    if False:\n",
            ),
            _in("member", "    if alive:\n", "    if False:\n"),
        ),
        seed=6,
    ),
    "evicted-at-once": Mutant(
        "a node that has not yet asked for the next round is evicted at once",
        (_in("leader", "        if view.round_age >= patience:\n", "        if True:\n"),),
        seed=2,
    ),
    "drained-joins-again": Mutant(
        "a leader names a drained node that asks for a round",
        (_in("leader", "    ready, sizes = asks.difference(out),", "    ready, sizes = asks,"),),
        seed=34,
        focus=_DRAINS,
    ),
    "drained-stays": Mutant(
        "a leader takes no drained node out of the round that runs",
        (_in("leader", "        if node in kept and not view", "        if False and not view"),),
        seed=4,
        focus=_DRAINS,
    ),
    "excluded-is-named": Mutant(
        "a leader names the nodes of excluded hosts",
        (
            _in(
                "kept_out",
                "    return {*document.drained, *excluded}",
                "    return document.drained",
            ),
        ),
        focus=_EXCLUDES,
    ),
    "excluded-for-ever": Mutant(
        "a leader takes an exclusion that has ended for one that holds",
        (_in("kept_out", " for it in both if it.holds(now)}", " for it in both}"),),
        focus=_EXCLUDES,
    ),
    "does-not-look-back": Mutant(
        "a run keeps nodes that were excluded from the run before it",
        (_in("leader", "    if view.carried and (after", "    if False and (after"),),
        seed=33,
        focus=Focus(
            kinds=("close, then resubmit",),
            settings={
                "orders": tuple(Fault(at, "exclude") for at in (1.0, 2.0, 3.0, 4.0, 6.0)),
                "sweep_after": 1.0,
                "ambush": None,
            },
        ),
    ),
    "quarantine-starves": Mutant(
        "hosts stay in quarantine though the run cannot have the minimum of nodes without them",
        (_in("leader", "            if let is not None:", "            if False:"),),
        seed=10,
        focus=Focus(
            kinds=_FLAPS.kinds,
            settings={
                "nodes": 3,
                "min_nodes": 3,
                "max_nodes": 3,
                "quarantine_after": 1,
                "quarantine_window": 10000.0,
            },
        ),
    ),
    "quarantined-at-once": Mutant(
        "a host is put into quarantine the first time that it ends a round",
        (_in("quarantine", "len(times) < rules.quarantine_after:", "False:"),),
        focus=_FLAPS,
    ),
    "deaf-to-restart": Mutant(
        "a leader does not restart a round that runs when people ask for it",
        (_in("leader", "    if rejoined or ordered or", "    if rejoined or out or"),),
        seed=20,
        focus=_DRAINS,
    ),
    "never-evicted": Mutant(
        "the leader waits for a node with a hanging agent as long as it sends heartbeats",
        (_in("leader", "        if view.round_age >= patience:\n", "        if False:\n"),),
        seed=38,
    ),
    "spare-for-ever": Mutant(
        "a spare keeps waiting after its round has ended",
        (
            _in(
                "member",
                "document is None or document.phase is not Phase.RUNNING:\n",
                "document is None:\n",
            ),
        ),
        seed=119,
    ),
    "withdrawal-after-join": Mutant(
        "the withdrawal of an abandoned join also cancels the next join",
        (
            _in(
                "node",
                "        self._withdraw_ordered, self._join_ordered = False, True\n",
                "        self._join_ordered = True\n",
            ),
        ),
        seed=6239,
    ),
    "join-goes-on": Mutant(
        "an abandoned join still takes a rank",
        (
            _in(
                "node",
                "            self._withdraw_ordered = self._joining = False\n"
                "            yield from self._leave()\n",
                "            self._withdraw_ordered = False\n",
            ),
        ),
        seed=197,
    ),
    "no-expiry": Mutant(
        "no leader sets a deadline for the keys of a run",
        (
            _in(
                "node",
                "        if leads and self._clock() >= self._expiry_due:\n",
                "        if False:\n",
            ),
        ),
        seed=4,
    ),
    "zombie-leaves-its-record": Mutant(
        "a node that learns of its run's end does not delete the record that it has written since",
        (_in("node", "                if ended is not None:\n", "                if False:\n"),),
        seed=322,
        focus=Focus(kinds=("close, then resubmit",), settings={"sweep_after": 1.0}),
    ),
    "old-master-is-taken": Mutant(
        "a TCPStore that opens too late is used for the next round",
        (
            _in(
                "node",
                "        if opening is not None and opening[0] == world_id:\n",
                "        if True:\n",
            ),
        ),
        seed=1636,
    ),
    "opens-in-a-loop": Mutant(
        "rank 0 that cannot open a TCPStore tries it again and again, and asks the store for "
        "nothing meanwhile",
        (
            _in("node", "self._reopens and not self._openings.seconds_left", "self._reopens"),
            _in(
                "node",
                "                left = min(left, self._openings.seconds_left)\n",
                "                return None\n",
            ),
        ),
    ),
    "opens-without-a-pause": Mutant(
        "rank 0 that cannot open a TCPStore tries it again at once, after a look at the store",
        (
            _in("node", "self._reopens and not self._openings.seconds_left", "self._reopens"),
            _in(
                "node",
                "                left = min(left, self._openings.seconds_left)\n",
                "                left = 0.0\n",
            ),
        ),
        focus=Focus(settings={"no_master": 0.9}),
    ),
    "one-tombstone-at-a-time": Mutant(
        "a node that was in two runs asks for their tombstones in turn, forever",
        (
            _in(
                "observer",
                "        self._asked_tombstones[incarnation] = asked\n",
                "        self._asked_tombstones = {incarnation: asked}\n",
            ),
        ),
        seed=458,
        focus=Focus(kinds=("amnesia", "fail-over", "crash", "newcomer")),
    ),
    "spares-of-the-dead": Mutant(
        "a spare waits without end for a round that has lost all its nodes",
        (_in("member", "    if document.has_lost_all:\n", "    if False:\n"),),
        seed=520,
        focus=Focus(
            kinds=("kill all, then resubmit",),
            settings={"restart_on_loss": False},
        ),
    ),
    "cause-forgotten": Mutant(
        "a round that ends before it runs loses its cause",
        (
            _in(
                "leader",
                "        cause = _amended(document.cause, records, lost)\n",
                "        cause = _amended(Cause(), records, lost)\n",
            ),
        ),
        seed=77,
    ),
    "loss-unnamed": Mutant(
        "a node lost while a round forms is missing from the cause",
        (
            _in(
                "leader",
                "    cause = _amended(document.cause, records, missing).plus(",
                "    cause = document.cause.plus(",
            ),
        ),
        seed=7,
    ),
    "rubbish-stays": Mutant(
        "no node overwrites an unreadable document",
        (
            _in(
                "observer",
                "            if self.latest is None:\n                raise\n",
                "            raise\n",
            ),
        ),
        seed=188,
    ),
    "waits-for-the-dead": Mutant(
        "the c10d store of a finished round does not answer an agent's pending reads",
        (
            _in(
                "node",
                "        return self.waiting > 0 or self._seen.closed\n",
                "        return False\n",
            ),
        ),
        seed=315,
    ),
    "no-digest": Mutant(
        "nodes are taken for those of a round though not all of them were found",
        (
            _in(
                "roster",
                "len(nodes) == shards.size and digest_of(incarnation, nodes) == shards.digest",
                "bool(nodes)",
            ),
        ),
        seed=51000230,
        focus=_APART,
    ),
    "missing-is-lost": Mutant(
        "a leader whose store lost the shards waits for no node to write its record again",
        (_in("leader", "    if view.confirmed_silence(MISSING) < lease:\n", "    if False:\n"),),
        seed=51000190,
        focus=_APART,
    ),
    "shards-written-once": Mutant(
        "a leader does not write shards again that a fail-over has lost",
        (
            _in(
                "node",
                "        if leads and waits and self._shards and age >= self._shards_due:\n",
                "        if False:\n",
            ),
        ),
        seed=52002430,
        focus=_APART,
    ),
    "decides-before-an-outage": Mutant(
        "what a leader decided before an outage is written after it, once the shards are",
        (_in("node", "        if seen.outages != outages:\n", "        if False:\n"),),
        seed=52003284,
        focus=_APART,
    ),
    "roster-of-no-one": Mutant(
        "a node with other --nnodes takes a run over whose nodes it has not found",
        (_in("member", "    if not document.is_whole:\n", "    if False:\n"),),
        seed=51000886,
        focus=Focus(
            kinds=("newcomer with other --nnodes", "crash", "partition", "fail-over"),
            settings=_APART.settings,
        ),
    ),
    "closes-without-its-rank": Mutant(
        "a node whose shard is lost does not know that it may close the run that it is in",
        (
            _in(
                "cleanup",
                "with_rank(document, node_id, known_ranks(latest))",
                "with_rank(document, node_id, {})",
            ),
        ),
        seed=393,
        focus=Focus(kinds=("fail-over", "close", "worker failure"), settings={"inline": 1}),
    ),
    "no-doubt": Mutant(
        "a leader takes a large part of the world for lost without another lease",
        (_in("leader", "    if len(late) < _FEWEST_DOUBTED or", "    if True or"),),
        seed=9,
        focus=CALM,
    ),
    "doubts-for-ever": Mutant(
        "a leader doubts the same silence again and again",
        (
            _in("failure_detector", " is not None and seen.forgiven is None:", " is not None:"),
            _in(
                "leader",
                "        if view.confirmed_silence(node) >= view.lease(node) and _is_fresh",
                "        if view.confirmed_silence(node) >= view.patience(node) and _is_fresh",
            ),
            _in("leader", "    return view.forgiven(node) is None and view", "    return view"),
            _in("leader", "(node for node in late if view.forgiven(node) is None)", "(late)"),
            _in(
                "leader",
                "    longest = view.lease(node) + view.rules.outage\n",
                "    longest = view.patience(node) + view.rules.outage\n",
            ),
        ),
        seed=2,
        focus=CALM,
    ),
    "lists-for-the-done": Mutant(
        "a leader waits for the lease of a participant that is done and gone",
        (_in("leader", "view, without(present, done))", "view, present)"),),
        seed=1419,
    ),
    "heirs-doubt-again": Mutant(
        "a leader that followed a silent one doubts those that fell silent with it once more",
        (_in("observer", "        if self._outlived is not None:\n", "        if False:\n"),),
        seed=414,
        focus=CALM,
    ),
    "odd-worlds": Mutant(
        "node_unit: a round takes all nodes that are ready",
        (_in("choice", "    count -= count % sizes.step\n", ""),),
        focus=_UNITS,
    ),
    "unit-disturbs": Mutant(
        "node_unit: a newcomer ends a round before a whole unit has come",
        (_in("leader", "    grows = size > len(present)\n", "    grows = size > 0\n"),),
        focus=_UNITS,
    ),
    "torn-segments": Mutant(
        "segment: nodes are taken wherever they are",
        (
            _in(
                "choice",
                "    if not rules.minds_domains or size == len(ready):\n",
                "    if True:\n",
            ),
            _in(
                "choice", "    if sizes.segment > 1:\n        count", "    if False:\n        count"
            ),
        ),
        focus=_SEGMENTS,
    ),
    "survivors-torn": Mutant(
        "segment: survivors are taken first though their segment is not whole",
        (
            _in(
                "choice",
                "    if not rules.minds_domains or size == len(ready):\n",
                "    if True:\n",
            ),
        ),
        focus=_SEGMENTS,
    ),
    "scattered-domains": Mutant(
        "rank_order=topology: nodes are in their natural order",
        (_in("ranks", '    elif rank_order == "topology":\n', "    elif False:\n"),),
        focus=_TOPOLOGY,
    ),
    "rank-0-leaves-its-domain": Mutant(
        "rank_order=topology: a node that can host is put first without its domain",
        (
            _in(
                "ranks",
                "        _put_its_domain_first(first, natural, records)\n",
                "        pass\n",
            ),
        ),
        focus=_TOPOLOGY,
        seed=93,
    ),
    "places-forgotten": Mutant(
        "rank_order=topology: survivors are in their natural order",
        (
            _in(
                "ranks",
                "_in_their_domains(natural, records, places or {})",
                "_in_their_domains(natural, records, {})",
            ),
        ),
        seed=77,
        focus=_TOPOLOGY,
    ),
    "waits-for-the-unfit": Mutant(
        "a round waits for a node whose check failed as for one that will ask for it",
        (
            _in(
                "leader",
                "    return record is not None and record.is_over\n",
                "    return record is not None and not record.unfit and (\n"
                "        record.status in (Status.LEFT, Status.DONE)\n"
                "    )\n",
            ),
        ),
        seed=83000006,
        focus=_UNFIT,
    ),
    "joins-unfit": Mutant(
        "a node whose check failed says so, and stays in its round or asks for one all the same",
        (_in("node", "replace(record, status=Status.LEFT, unfit=", "replace(record, unfit="),),
        seed=83000000,
        focus=_UNFIT,
    ),
    "no-rest": Mutant(
        "a node that left waits for a heartbeat that is never due",
        (
            _in(
                "node",
                "        if seen.closed or not self._beats:\n",
                "        if seen.closed:\n",
            ),
        ),
        seed=12,
    ),
    "links-ignored": Mutant(
        "network_check: a round runs whatever its nodes have found",
        (_in("links", "    if not (failed or cut):\n", "    if True:\n"),),
        seed=2,
        focus=_parted("cut off", "unreachable"),
    ),
    "rank-0-undialled": Mutant(
        "network_check: a node confirms its rank without having dialled rank 0",
        (_in("network_check", "        if self._first is not None:\n", "        if False:\n"),),
        focus=_parted("hidden"),
    ),
    "rank-0-for-ever": Mutant(
        "network_check: a rank 0 that nobody reached is rank 0 of the next round too",
        (
            _in(
                "leader",
                "    hosts = able_to_host(document, records, chosen)\n",
                "    hosts = records\n",
            ),
        ),
        seed=72,
        focus=_parted("hidden"),
    ),
    "one-failure-is-enough": Mutant(
        "network_check: a node is left out that failed with one other",
        (_in("links", "_SEVERAL = 2\n", "_SEVERAL = 1\n"),),
        seed=39,
        focus=_parted("bad link"),
    ),
    "nobody-at-fault": Mutant(
        "network_check: who failed with several others stays in the round",
        (_in("links", "_SEVERAL = 2\n", "_SEVERAL = 200\n"),),
        seed=61,
        focus=_parted("cut off", "unreachable"),
    ),
    "always-the-same-partner": Mutant(
        "network_check: the next round pairs the same nodes",
        (_in("links", "    step = 1 + round_ % (len(ring) - 1)\n", "    step = 1\n"),),
        seed=2,
        focus=_parted("bad link"),
    ),
    "one-way-speaks-for-both": Mutant(
        "network_check: a dial that fails is forgotten once the other one has dialled",
        (
            _in(
                "links",
                "if link not in passed and here",
                "if link not in passed and link[::-1] not in passed and here",
            ),
        ),
        seed=2,
        focus=_parted("unreachable", nodes=3, min_nodes=3, max_nodes=3),
    ),
    "unheard-verdict": Mutant(
        "network_check: a node that is left out asks again at once",
        (
            _in(
                "member",
                "    if document.phase is Phase.FORMING and judged and document.faults",
                "    if False and document.faults",
            ),
        ),
        seed=2,
        focus=_parted("cut off", "unreachable", "cut off"),
    ),
    "ends-rounds-for-the-cut-off": Mutant(
        "network_check: a running round is ended for a node that was cut off",
        (
            _in(
                "leader",
                "    if present and not document.resize:\n",
                "    if False:\n",
            ),
        ),
        seed=2,
        focus=_parted("cut off", "unreachable", min_nodes=2, max_nodes=6, nodes=4),
    ),
    "tries-the-cut-off-at-once": Mutant(
        "network_check: a round that forms takes a node that was cut off, without need",
        (_in("leader", "    if document.faults.rounds:\n", "    if False:\n"),),
        seed=2,
        focus=_parted("cut off", "unreachable", min_nodes=2, max_nodes=6, nodes=5),
    ),
    "one-bad-link-for-ever": Mutant(
        "network_check: no round runs as long as one link is bad",
        (_in("links", "(not fresh or was.rounds >= _MOST_ROUNDS)", "False"),),
        seed=107,
        focus=_parted("bad link", "bad link", nodes=4, min_nodes=3, one_stays_bad=True),
    ),
    "deaf-while-it-checks": Mutant(
        "network_check: a leader that waits for a rank 0 which is dead finds out nothing",
        (
            _in(
                "member",
                "        if view.checks and isinstance(action, Confirm):\n",
                "        if False:\n",
            ),
        ),
        seed=14,
        focus=_parted("slow"),
    ),
    "stays-though-refused": Mutant(
        "rule 24: a node that the store refuses stops its workers after its lease",
        (_in("contact", "            self._denied = self._clock()\n", "            pass\n"),),
        focus=_REFUSED,
    ),
    "refused-for-ever": Mutant(
        "rule 24: a heartbeat that the store accepts ends a refusal",
        (_in("contact", "self._accepted, self._denied = sent, None", "self._accepted = sent"),),
        focus=Focus(
            kinds=("outage",),
            settings={"refusals": tuple(Fault(3.0 * n, "some") for n in range(6))},
        ),
    ),
    "deaf-to-outage-limit": Mutant(
        "rule 24: with on_outage=stop a node without an accepted heartbeat stops its workers",
        (_in("contact", "unheard >= rules.outage_limit or (self", "(self"),),
        focus=Focus(kinds=("partition", "outage"), settings={"outage_limit": 2.0}),
    ),
    "stops-at-the-first-refusal": Mutant(
        "rule 24: a store that comes back and refuses for less than an interval stops nobody",
        (
            _in(
                "contact",
                "since is not None and self._clock() - since >= self._rules.interval",
                "since is not None",
            ),
        ),
        focus=Focus(
            kinds=("outage",),
            settings={"refusals": tuple(Fault(1.0 * n, "all") for n in range(20))},
        ),
    ),
    "cut-off-in-a-closed-run": Mutant(
        "rule 24: in a closed run nobody beats, and the round that runs goes on",
        (_in("node", "not self._joining and not self._seen.closed", "not self._joining"),),
        seed=20,
        focus=Focus(kinds=("close",), settings={"outage_limit": 2.0}),
    ),
    "runs-on-replaced": Mutant(
        "rule 24: a node stops its workers once it reads that a later round ran without it",
        (
            _in(
                "member",
                "    if document.round > member.round or document.world_id != member.world_id:\n"
                "        return max(1, document.waiting)\n",
                "    if document.round > member.round + 2:\n"
                "        return max(1, document.waiting)\n",
            ),
        ),
        focus=Focus(kinds=("partition", "partition", "stall")),
    ),
    "token-by-the-clock": Mutant(
        "rule 25: a fencing token grows with each round, whatever the clocks of leaders show",
        (_in("leader", "max(document.fencing_token + 1, int(wall * 1000))", "int(wall * 1000)"),),
        focus=Focus(kinds=("leave", "newcomer"), settings={"last_call": 0.0, "min_nodes": 1}),
    ),
    "token-by-the-count": Mutant(
        "rule 25: a fencing token is larger than all before also where the store lost them",
        (
            _in(
                "leader",
                "max(document.fencing_token + 1, int(wall * 1000))",
                "document.fencing_token + 1",
            ),
        ),
        focus=Focus(kinds=("amnesia", "worker failure", "kill all, then resubmit")),
    ),
    "ends-rounds-too-soon": Mutant(
        "rule 17: a round runs for min_uptime before it is ended for newcomers",
        (_in("growth", '        (rules.min_uptime - view.uptime, "to min_uptime"),\n', ""),),
        focus=_grows(min_uptime=5.0),
    ),
    "grows-too-often": Mutant(
        "rule 17: resize_interval passes between two rounds that let newcomers in",
        (_in("growth", "(rules.resize_interval - view.grown_for,", "(0.0,"),),
        focus=_grows(resize_interval=8.0),
    ),
    "grows-without-a-last-call": Mutant(
        "rule 17: newcomers that do not fill the round wait for the last call while it runs",
        (_in("growth", "    if newcomers < room and not permitted:\n", "    if False:\n"),),
        focus=_grows(last_call=3.0),
    ),
    "grows-unasked": Mutant(
        "rule 17: with grow=checkpoint newcomers wait until a worker names the moment",
        (_in("growth", 'rules.grow == "checkpoint" and not permitted', "False"),),
        focus=_grows(grow="checkpoint"),
    ),
    "no-last-call-after-a-loss": Mutant(
        "rule 17: a restart after a loss waits for a replacement",
        (
            _in(
                "growth",
                "    if gone == 0 or size >= len(document.previous) + gone:\n",
                "    if True:\n",
            ),
        ),
        focus=_grows(replacement=2.0),
    ),
    "gives-up-too-soon": Mutant(
        "rule 18: only rounds that ran for less than no_progress_uptime count against a run",
        (_in("leader", "short_rounds + (not only_grows) if short else 0", "short_rounds + 1"),),
        focus=_grows(no_progress_rounds=2, no_progress_uptime=0.5),
    ),
}


@functools.cache
def build(name: str) -> type[Node]:
    """The mutant's code; raises `LookupError` if a replaced text does not occur exactly once."""
    edits = MUTANTS[name].edits
    modules = {}
    for module in _MODULES:
        source = _source(module)
        for edit in edits:
            if edit.module == module:
                if source.count(edit.old) != 1:
                    raise LookupError(
                        f"mutant {name}: {source.count(edit.old)} times in {module}.py: {edit.old}"
                    )
                source = source.replace(edit.old, edit.new)
        modules[module] = _load(f"mutant_{name}_{module}".replace("-", "_"), source)
    for name in ("fits", "lead", "next_round", "unconfirmed", "without"):
        setattr(modules["member"], name, getattr(modules["leader"], name))
    observer, node = modules["observer"], modules["node"]
    observer.__dict__.update(
        FailureDetector=modules["failure_detector"].FailureDetector,
        RecordCache=modules["record_cache"].RecordCache,
    )
    cleanup = modules["cleanup"]
    cleanup.__dict__.update(with_rank=observer.with_rank)
    node.__dict__.update(
        member=modules["member"],
        Contact=modules["contact"].Contact,
        Observer=observer.Observer,
        close_run=cleanup.close_run,
        let_expire=cleanup.let_expire,
        tidy_up=cleanup.tidy_up,
    )
    for loaded in modules.values():
        for real in _WITH_NAMES_OF_THEIR_OWN:
            own = modules[real.__name__.rpartition(".")[2]]
            for public in loaded.__dict__.keys() & {*real.__all__}:
                setattr(loaded, public, getattr(own, public))
    mutant: type[Node] = node.Node
    return mutant


def _source(module: str) -> str:
    spec = importlib.util.find_spec(f"rdzv_plugins.protocol.{module}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def _load(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    # Dataclasses look up their module by its name.
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module
