"""The package's own code with one rule broken at a time; each must be caught.

A mutant is a list of substitutions in the source of some modules. One whose text is no longer
there, or is there twice, fails loudly: it would break nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from rdzv_plugins.node import Node

__all__ = ["MUTANTS", "Edit", "Mutant", "build"]


_MODULES = ("leases", "leading", "protocol", "observer", "node")


@dataclass(frozen=True, slots=True)
class Edit:
    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """What it breaks, in words, and how; ``seed`` is one that notices."""

    breaks: str
    edits: tuple[Edit, ...]
    seed: int = 1


def _in(module: str, old: str, new: str) -> Edit:
    return Edit(module, old, new)


MUTANTS: dict[str, Mutant] = {
    "no-exclusivity": Mutant(
        "rule 5: a round does not wait for the participants of the last",
        (_in("leading", "    if pending:  # Rule 5.\n", "    if False:\n"),),
    ),
    "stale-join": Mutant(
        "rule 5: a join asked for before the round counts as one after it",
        (_in("leading", "    return record.round >= ended_round\n", "    return True\n"),),
    ),
    "no-compare": Mutant(
        "rule 1: a leader takes a refused write for done",
        (
            _in("node", "        if not written:\n            return False\n", ""),
            _in(
                "node",
                "self._seen.adopt(entry, document if written else None)",
                "self._seen.adopt(entry, document)",
            ),
        ),
    ),
    "wall-clocks": Mutant(
        "rule 2: a beat is its writer's clock, and age its distance from the reader's",
        (
            _in(
                "node",
                "        self.record = replace(self.record, beat=self.record.beat + 1)\n"
                "        ring, self._record_due",
                "        self.record = replace(self.record, beat=int(self._clock() * 1000))\n"
                "        ring, self._record_due",
            ),
            _in(
                "leases",
                "            self._seen[node] = _Seen(beat, now, now)\n        elif",
                "            self._seen[node] = _Seen(beat, (beat or 0) / 1000, now)\n        elif",
            ),
        ),
    ),
    "half-a-lease": Mutant(
        "rule 2: half a lease of silence is enough",
        (
            _in(
                "leading",
                "    return view.age(node) >= view.rules.lease\n",
                "    return view.age(node) >= view.rules.lease / 2\n",
            ),
        ),
    ),
    "coup": Mutant(
        "rule 4: the leader is deposed without waiting for its lease",
        (
            _in(
                "protocol",
                "    if leader is not None and view.age(leader) < rules.lease:\n",
                "    if False:\n",
            ),
            _in(
                "protocol",
                "    if view.age(leader) < rules.lease + turn:\n",
                "    if view.age(leader) < turn:\n",
            ),
        ),
    ),
    "no-heir": Mutant(
        "rule 4: nobody takes over from a leader that died",
        (
            _in(
                "protocol",
                "    if leader is not None and view.age(leader) < rules.lease:\n"
                "        return Wait(max(0.0, rules.lease - view.silence(leader)))\n",
                "    if leader is not None:\n        return Wait(None)\n",
            ),
        ),
    ),
    "own-ranks": Mutant(
        "rule 6: a node puts itself first instead of reading its rank",
        (
            _in(
                "node",
                "            case decisions.Start(document):\n",
                "            case decisions.Start(document):\n"
                "                people = document.participants\n"
                "                people = sorted(people, key=lambda node: node != self.id)\n"
                "                document = replace(document, participants=tuple(people))\n",
            ),
        ),
    ),
    "below-minimum": Mutant(
        "rule 7: one node is enough",
        (
            _in(
                "leading",
                "    enough = len(ready) >= rules.min_nodes\n",
                "    enough = len(ready) >= 1\n",
            ),
        ),
    ),
    "above-maximum": Mutant(
        "rule 7: everybody is taken",
        (_in("leading", "newcomers][: rules.max_nodes]", "newcomers]"),),
    ),
    "no-last-call": Mutant(
        "rule 7: the minimum is enough at once",
        (_in("leading", "(enough and last_call >= rules.last_call)", "enough"),),
    ),
    "spares-disturb": Mutant(
        "rule 8: a node that waits restarts a round that is full",
        (_in("leading", "or (newcomers and room > 0)", "or newcomers"),),
    ),
    "newcomers-wait": Mutant(
        "rule 8: a node that waits is not let in where there is room",
        (_in("leading", " or (newcomers and room > 0)", ""),),
    ),
    "loss-unseen": Mutant(
        "rule 9: the loss of a participant changes nothing",
        (_in("leading", " or (lost and view.rules.restart_on_loss)", ""),),
    ),
    "failure-unseen": Mutant(
        "a participant that joins again changes nothing for the others",
        (_in("leading", "    if rejoined or (lost and", "    if (lost and"),),
    ),
    "no-window-after-outage": Mutant(
        "rule 11: windows go on over an outage of the store",
        (
            _in(
                "observer",
                "        self.leases.restart(self._clock())\n        self.minimum_since = None\n",
                "        self.minimum_since = None\n",
            ),
        ),
    ),
    "no-window-after-stall": Mutant(
        "rule 11: windows go on over this node's own lateness",
        (_in("observer", "            self.leases.restart(now)\n", "            pass\n"),),
        seed=86,
    ),
    "no-window-at-takeover": Mutant(
        "a new leader judges by what it saw before it led",
        (_in("observer", "            self.leases.restart(self._clock(), unless=deposed)\n", ""),),
        seed=110,
    ),
    "answer-time": Mutant(
        "a slow answer counts as a look at the time when it came",
        (_in("leases", "            seen.looked = asked\n", "            seen.looked = now\n"),),
        seed=34,
    ),
    "documents-are-no-beats": Mutant(
        "two amnesias within a lease hide the beats of a leader whose documents are seen",
        (
            _in(
                "observer",
                "            self.leases.heard(document.leader, self._clock())\n",
                "            pass\n",
            ),
        ),
        seed=524426700844,
    ),
    "no-write-back": Mutant(
        "rule 12: nobody writes the document back to a store that forgot",
        (
            _in(
                "protocol", "    if latest is None:\n        if not", "    if True:\n        if not"
            ),
        ),
    ),
    "newcomer-rules": Mutant(
        "rule 12: a document that a newcomer founded is taken although it is behind",
        (
            _in(
                "protocol",
                "document is None or (latest is not None and document.place < latest.place):\n",
                "document is None:\n",
            ),
        ),
        seed=969,
    ),
    "no-memory": Mutant(
        "rule 12: a node forgets that it has seen a later round",
        (
            _in(
                "observer",
                "(latest.phase is not Phase.CLOSED and document.place >= latest.place)\n",
                "latest.phase is not Phase.CLOSED\n",
            ),
        ),
        seed=2879,
    ),
    "strays-unseen": Mutant(
        "rule 12: a leader does not look for nodes that run in a round it does not know",
        (
            _in(
                "leading",
                "    if strays or highest >= document.round:\n",
                "    strays = []\n    if highest >= document.round:\n",
            ),
        ),
        seed=220,
    ),
    "numbers-from-zero": Mutant(
        "rule 12: rounds are numbered without looking at the records",
        (
            _in("leading", "    if strays or highest >= document.round:\n", "    if strays:\n"),
            _in("leading", "round=max(document.round, highest + 1),", "round=document.round,"),
        ),
        seed=29,
    ),
    "numbers-alike": Mutant(
        "rounds of one number are taken for the same round",
        (
            _in(
                "protocol",
                "record.naming == document.naming\n    if named and document.phase",
                "record.round == document.round\n    if named and document.phase",
            ),
            _in("leading", "or record.naming != naming", "or record.round != document.round"),
        ),
        seed=3708,
    ),
    "closed-reopens": Mutant(
        "rule 14: a closed run goes on",
        (
            _in(
                "protocol",
                "    if latest is not None and latest.phase is Phase.CLOSED:\n",
                "    if False:\n",
            ),
        ),
    ),
    "no-confirmation": Mutant(
        "a round runs before its participants have seen it",
        (_in("leading", "    if missing:\n", "    if False:\n"),),
    ),
    "confirming-blind": Mutant(
        "a participant that dies while the round is confirmed is waited for",
        (_in("leading", "    if lost or rejoined:\n", "    if rejoined:\n"),),
    ),
    "mixed-nodes": Mutant(
        "a node with other --nnodes is let in",
        (
            _in(
                "protocol",
                "    if (document.min_nodes, document.max_nodes) != "
                "(rules.min_nodes, rules.max_nodes):\n",
                "    if False:\n",
            ),
            _in(
                "leading",
                "    return (record.min_nodes, record.max_nodes) == "
                "(document.min_nodes, document.max_nodes)\n",
                "    return True\n",
            ),
        ),
        seed=117,
    ),
    "lost-for-good": Mutant(
        "a participant that comes back to a round that went on stays lost",
        (_in("leading", "- {*rejoined, *back}", "- {*rejoined}"),),
    ),
    "silent-failure": Mutant(
        "a join that failed is not reported when the store is away",
        (
            _in(
                "node",
                "            except (RendezvousConnectionError, RendezvousStateError):\n"
                "                # The others",
                "            except ZeroDivisionError:\n                # The others",
            ),
        ),
        seed=100,
    ),
    "last-word-unheard": Mutant(
        "an outage at the end of a failed join does not void what was seen before",
        (
            _in(
                "node",
                " its agent is told all the same.\n                self._seen.void()\n",
                " its agent is told all the same.\n                pass\n",
            ),
        ),
        seed=526606901873,
    ),
    "missed-round": Mutant(
        "a round that was over before a participant saw it run is never started there",
        (
            _in(
                "protocol",
                "    if latest.ran != confirmed.naming:\n",
                "    if latest.phase is not Phase.RUNNING or latest.ran != confirmed.naming:\n",
            ),
        ),
        seed=97,
    ),
    "no-rest": Mutant(
        "a node that left waits for a beat that is never due",
        (
            _in(
                "node",
                "        if seen.closed or self.record.wants is Wants.LEFT:\n",
                "        if seen.closed:\n",
            ),
        ),
        seed=53,
    ),
}


@functools.cache
def build(name: str) -> type[Node]:
    """The mutant's code; raises `LookupError` if what it replaces is not there exactly once."""
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
    modules["protocol"].__dict__.update(leading=modules["leading"])
    observer, node = modules["observer"], modules["node"]
    observer.__dict__.update(Leases=modules["leases"].Leases)
    node.__dict__.update(protocol=modules["protocol"], Observer=observer.Observer)
    mutant: type[Node] = node.Node
    return mutant


def _source(module: str) -> str:
    spec = importlib.util.find_spec(f"rdzv_plugins.{module}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def _load(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    # Dataclasses look up their module by its name.
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module
