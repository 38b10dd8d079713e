"""What a node may know when it decides: views with the documents and records they are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rdzv_plugins.protocol.documents import NodeRecord, Outcome, Phase, RoundDocument, Status
from rdzv_plugins.protocol.failure_detector import Watched
from rdzv_plugins.protocol.rules import Action, Rules, View, Write
from rdzv_plugins.protocol.situation import assess_from_outside
from rdzv_plugins.protocol.words import Diagnosis, of_run
from tests import replace

RUN = "the-run"
RULES = Rules(min_nodes=2, max_nodes=3, lease=3.0, interval=1.0, last_call_timeout=5.0)


def record(name: str, status: Status = Status.JOIN, round_: int = -1, **more: object) -> NodeRecord:
    base = NodeRecord(
        address=name, pid=1, beat=1, status=status, round=round_, min_nodes=2, max_nodes=3,
        interval=RULES.interval, lease=RULES.lease, incarnation=RUN if round_ >= 0 else None,
    )  # fmt: skip
    return replace(base, **more)


def document(
    phase: Phase, round_: int = 4, leader: str | None = "n1", **more: object
) -> RoundDocument:
    """A round; one that forms after those of the records has the number above theirs: 5."""
    base = RoundDocument(
        incarnation=RUN, round=round_, phase=phase, leader=leader, min_nodes=2, max_nodes=3
    )
    if phase in (Phase.CONFIRMING, Phase.RUNNING):
        base = replace(base, participants=("n1", "n2", "n3"))
    if phase is Phase.RUNNING:
        base = replace(base, ran=base.world_id, master="n1:1")
    if phase is Phase.CLOSED:
        base = replace(base, outcome=Outcome.CLOSED)
    return replace(base, **more)


def as_named(of: RoundDocument) -> RoundDocument:
    """How a round stood when its participants confirmed it."""
    return replace(of, phase=Phase.CONFIRMING, ran=None, master=None)


def running(name: str, of: RoundDocument) -> NodeRecord:
    return record(name, Status.RUN, of.round, world_id=of.world_id, master=f"{name}:1")


def watching(
    silent: Mapping[str, float],
    forgiven: Mapping[str, float] | None = None,
    moved: Collection[str] = (),
) -> dict[str, Watched]:
    """Nodes whose beats have stood still for so long, at the time 0, when they were looked at."""
    excused = forgiven or {}
    return {
        node: Watched(
            1,
            -silent.get(node, 0.0),
            0.0,
            had_grace=node in excused,
            forgiven=excused.get(node, 0.0),
            moved=node in moved,
        )
        for node in {*silent, *excused, *moved}
    }


def view(
    me: NodeRecord,
    now: RoundDocument | None,
    others: Mapping[str, NodeRecord] | None = None,
    *,
    joining: bool = True,
    silent: Mapping[str, float] | None = None,
    forgiven: Mapping[str, float] | None = None,
    latest: RoundDocument | None = None,
    **more: object,
) -> View:
    ages = silent or {}
    idle = ages.get(now.leader or "", 0.0) if now else 0.0
    base = View(
        me=me.address,
        rules=RULES,
        record=me,
        joining=joining,
        document=now,
        document_age=0.0,
        round_age=0.0,
        uptime=0.0,
        longest_uptime=0.0,
        grown_for=0.0,
        latest=latest or now,
        without_tombstone=frozenset(),
        member=None,
        confirmed=as_named(now) if now and me.world_id == now.world_id else None,
        rounds_given={},
        records=others,
        leader=None,
        now=0.0,
        watched=watching(ages, forgiven or {}),
        confirmed_idleness=idle,
        possible_idleness=idle,
        lag=0.0,
        cannot_list=False,
        abdicated=False,
        enough_for=None,
        share=0.5,
        fresh="a-new-run",
        wall=0.0,
        carried=(),
    )
    return replace(base, **more)


def written(action: Action) -> RoundDocument:
    assert isinstance(action, Write), action
    return action.document


def joining(*names: str, round_: int = -1) -> dict[str, NodeRecord]:
    return {name: record(name, round_=round_) for name in names}


def all_running(of: RoundDocument) -> dict[str, NodeRecord]:
    return {name: running(name, of) for name in of.participants}


def diagnose(
    of: RoundDocument,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool] = lambda _: False,
    quiet_for: float | None = None,
    now: float = 0.0,
    is_lost: Callable[[str], bool] | None = None,
) -> Diagnosis:
    """The diagnosis by an observer; ``is_lost`` None: each silent node is lost."""
    return of_run(assess_from_outside(of, records, is_silent, is_lost or is_silent, now), quiet_for)
