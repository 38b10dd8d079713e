"""Quarantine: a host that ends round after round is kept out for a growing time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import Cause, Exclusion, Names, Phase, RoundDocument, Strikes
from rdzv_plugins.protocol.policies.kept_out import in_force, without_hosts
from rdzv_plugins.protocol.policies.policy import Policy, Stage
from rdzv_plugins.protocol.rules import Rules, View, Write
from rdzv_plugins.protocol.sizes import world_size

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

# A host's first quarantine lasts this share of the window; each further quarantine doubles.
_FIRST_SHARE = 0.1
_MOST_DOUBLINGS = 10

# The losses within the window that put a host into quarantine if quarantine_after is not set.
_BY_DEFAULT = 3

# A document keeps strikes for this many hosts; the oldest are dropped.
_HOSTS_KEPT = 32


class Quarantine(Policy):
    """Rule: quarantine. `KeptOut` keeps out the hosts that this policy puts into the document."""

    def judge(self, view: View, at: Situation, stage: Stage) -> Write | None:
        if stage is not Stage.TOO_FEW:
            return None
        after = let_in(at)
        return Write(after) if after is not None else None

    def note(self, view: View, at: Situation, after: RoundDocument) -> RoundDocument:
        was = at.document.phase
        if was is Phase.CONFIRMING and after.phase is Phase.RUNNING:
            return counted(after, view.rules, view.wall)
        if was is Phase.FORMING and after.phase is Phase.CONFIRMING:
            # Decide again without the nodes of a newly quarantined host.
            stricter = quarantined(at, after.cause)
            return after if stricter == at.document else stricter
        return after


def blamed(cause: Cause, rules: Rules) -> list[str]:
    """The hosts because of which a round ended early.

    These are the hosts of lost nodes, and of nodes that failed and left; otherwise the host whose
    workers failed or hung. If workers of several hosts failed, one failure may have caused the
    others, and no host is blamed. No host is blamed for failed workers either if the round ended
    for another reason, such as a newcomer, because workers fail when their peers stop. If
    ``quarantine_after`` is not set, no host is blamed for workers that failed and start again,
    because ``--max-restarts`` limits that.
    """
    gave_up = tuple(label for label in cause.left.first if label in cause.failed)
    if to_blame := _hosts(Names((*cause.lost.first, *gave_up))):
        return to_blame
    if rules.quarantine_after is None:
        return []
    failed = _hosts(Names((*cause.failed.first, *cause.stuck.first)))
    ended_for = cause.joined or cause.left or cause.drained or cause.excluded
    return failed if len(failed) == 1 and not ended_for else []


def _hosts(names: Names) -> list[str]:
    # A node without a record is named by its id, which tells no host.
    hosts = (label.rpartition("[")[0] for label in names.first)
    return list(dict.fromkeys(filter(None, hosts)))


def counted(document: RoundDocument, rules: Rules, now: float) -> RoundDocument:
    """A round that begins to run, with a strike for each host that ended the round before it."""
    if (most := _most(rules)) == 0:
        return document
    kept_out = in_force(document, now)
    strikes = {it.host: it for it in document.strikes if _matters(it, rules, now)}
    for host in blamed(document.cause, rules):
        if host not in kept_out:
            was = strikes.pop(host, Strikes(host))
            times = (*_recent(was, rules, now), now)[-most:]
            strikes[host] = replace(was, times=times)
    return replace(document, strikes=tuple(strikes.values())[-_HOSTS_KEPT:])


def quarantined(at: Situation, cause: Cause) -> RoundDocument:
    """The forming round with a quarantine for each host that has ended too many rounds.

    No quarantine leaves fewer ready nodes than a round needs.
    """
    document, records, rules, now = at.document, at.records, at.rules, at.wall
    if (most := _most(rules)) == 0:
        return document
    kept_out, known = in_force(document, now), {it.host: it for it in document.strikes}
    left = [*at.ready]
    for host in blamed(cause, rules):
        was = known.get(host, Strikes(host))
        times = (*_recent(was, rules, now), now)
        others = [node for node in left if host not in records[node].called]
        if host in kept_out or len(times) < most:
            continue
        if len(others) < len(left) and not world_size(others, records, at.sizes):
            continue
        left, served = others, was.served + 1
        seconds = rules.quarantine_window * _FIRST_SHARE * 2.0 ** min(was.served, _MOST_DOUBLINGS)
        until = now + min(seconds, rules.quarantine_window)
        why = "a round ended because of it"
        if len(times) > 1:
            within = max(1.0, now - times[0])
            why = f"{len(times)} rounds ended because of it within {within:.0f} s"
        known[host] = Strikes(host, (), served, until)
        document = replace(
            document,
            quarantined=(*without_hosts(document.quarantined, [host]), Exclusion(host, until, why)),
            strikes=tuple(known.values())[-_HOSTS_KEPT:],
        )
    return document


def let_in(at: Situation) -> RoundDocument | None:
    """Let as many quarantined hosts in as the forming round needs; None: that would not help.

    Quarantines end in the order of their deadlines.
    """
    document, records, now = at.document, at.records, at.wall
    nodes, freed = [*at.ready], list[str]()
    barred = {it.host for it in document.excluded if it.is_in_force(now)}
    asks = [node for node in at.asking if node not in document.drained]
    for it in sorted(document.quarantined, key=lambda quarantine: quarantine.until or 0.0):
        of_host = [node for node in asks if it.host in records[node].called]
        is_barred = any(barred.intersection(records[node].called) for node in of_host)
        if is_barred or not of_host or not it.is_in_force(now):
            continue
        nodes += of_host
        freed.append(it.host)
        if world_size(nodes, records, at.sizes):
            return replace(document, quarantined=without_hosts(document.quarantined, freed))
    return None


def _most(rules: Rules) -> int:
    """How many rounds a host may end within the window; 0: any number."""
    return _BY_DEFAULT if rules.quarantine_after is None else rules.quarantine_after


def _recent(strikes: Strikes, rules: Rules, now: float) -> tuple[float, ...]:
    return tuple(at for at in strikes.times if now - at < rules.quarantine_window)


def _matters(strikes: Strikes, rules: Rules, now: float) -> bool:
    last = max((strikes.served_until, *strikes.times))
    return now - last < rules.quarantine_window
