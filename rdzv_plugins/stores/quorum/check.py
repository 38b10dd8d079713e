"""Findings of ``rdzv check`` on a quorum's members, most of which run only while a job runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import replace

from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.stores.quorum.attending import OwnMember, free_port, look_at, own_member
from rdzv_plugins.stores.quorum.members import Members, Options


def check(
    endpoint: str, options: Options, local_addr: str | None
) -> Generator[Finding, None, bool]:
    """Yield what is known before a client connects; return whether a majority answers.

    ``options`` without a cluster: the run is unknown, and so are the ports.
    """
    named = options.cluster is not None
    try:
        members = Members.of(endpoint, options if named else replace(options, cluster="?"))
        secret = options.secret_bytes()
    except ValueError as error:
        yield Finding(Mark.FAILED, "store", str(error))
        return False
    if len(members.hosts) == 1:
        found = "there is one: its death costs the run a restart"
        yield Finding(Mark.WARNING, "members", found, "name three hosts in --rdzv-endpoint")
    own = None
    try:
        own, unknown = own_member(members, local_addr)
        yield _of_member(members, own, unknown)
    except ValueError as error:
        yield Finding(Mark.FAILED, "member", str(error))
    if not named:
        advice = "name the run with -i"
        found = "not looked for: each run has members of its own, on ports that its id decides"
        yield Finding(Mark.UNKNOWN, "store", found, advice)
        return False
    if own is not None:
        yield _own_port(members, own, secret)
    answering, size = 0, len(members.hosts)
    for host, (name, _) in enumerate(members.hosts):
        port, said = look_at(members, host, secret)
        answering += port is not None
        if own is None or host != own.host:
            mark = Mark.UNKNOWN if port is None else Mark.OK
            values = {"host": name, "answers": port is not None}
            yield Finding(mark, "member", f"'{name}' {said}", _advice(said), values)
    if answering > size // 2:
        return True
    found = (
        f"not tried: {answering} of {size} members answer, which is no majority yet. The agents on "
        f"{members} start them with the job"
    )
    yield Finding(Mark.UNKNOWN, "store", found, "check again while it runs")
    return False


def _advice(said: str) -> str:
    if "no name" in said:
        return "check the spelling, and this host's DNS or /etc/hosts"
    if "secret" in said:
        return "give all nodes and commands the same secret, in $RDZV_PLUGINS_SECRET or secret_file"
    if "not answer" in said or "reached" in said:
        return "is the host up, and is there a firewall in between?"
    return ""


def _of_member(members: Members, own: OwnMember | None, unknown: bool) -> Finding:
    if own is not None:
        name = members.hosts[own.host][0]
        values = {"host": name, "address": own.address}
        found = f"this host is '{name}': an agent started here runs a member, at {own.address}"
        return Finding(Mark.OK, "member", found, values=values)
    if unknown:
        found = f"not known whether this host is one of {members}: some have no address yet"
        advice = "check the spelling, and this host's DNS or /etc/hosts"
        return Finding(Mark.UNKNOWN, "member", found, advice)
    found = f"this host is none of {members}: it runs no member"
    advice = "if it is one, name its address among them with --local-addr"
    return Finding(Mark.OK, "member", found, advice)


def _own_port(members: Members, own: OwnMember, secret: bytes) -> Finding:
    try:
        port, taken, listener = free_port(members, own, secret)
    except OSError as error:
        return Finding(Mark.FAILED, "ports", f"none is free for the member: {error}")
    with closing(listener) if listener is not None else nullcontext():
        runs = listener is None
        found = "runs already," if runs else "will listen"
        beside = "".join(f"; {it}" for it in taken)
        found = f"the member of this host {found} on {port} at {own.address}{beside}"
        return Finding(Mark.OK, "ports", found, values={"port": port, "runs": runs})
