"""Findings of ``rdzv check`` on the members of a quorum, which mostly run only while a job does."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from rdzv_plugins.addresses import listen
from rdzv_plugins.kv.findings import Finding, Mark, of_version
from rdzv_plugins.servers.process import ServerError
from rdzv_plugins.servers.quorum import at, find_binary, probe
from rdzv_plugins.stores._quorum_member import Place, own_place
from rdzv_plugins.stores.nats import Client as NatsClient
from rdzv_plugins.stores.quorum import Members, Options

__all__ = ["check"]

_PATIENCE = 1.0


def check(
    endpoint: str, options: Options, local_addr: str | None
) -> Generator[Finding, None, bool]:
    """Yield what is known before anybody connects; return whether a majority answers.

    ``options`` without a cluster: nobody has said of which run the members are.
    """
    named = options.cluster is not None
    try:
        members = Members.of(endpoint, options if named else replace(options, cluster="?"))
        members.options.password()
    except ValueError as error:
        yield Finding(Mark.FAILED, "store", str(error))
        return False
    yield _server()
    if len(members.hosts) == 1:
        found = "there is one: its death costs the run a restart"
        yield Finding(Mark.WARNING, "members", found, "name three hosts in --rdzv-endpoint")
    place, unknown = None, False
    try:
        place, unknown = own_place(members, local_addr)
    except ValueError as error:
        yield Finding(Mark.FAILED, "member", str(error))
    else:
        yield _of_place(members, place, unknown)
    if not named:
        advice = "name the run with -i"
        found = "not looked for: each run has members of its own, on ports that its id decides"
        yield Finding(Mark.UNKNOWN, "store", found, advice)
        return False
    answering = 0
    if place is not None:
        port, finding = _own_port(members, place)
        answering += port
        yield finding
    for host in range(len(members.hosts)):
        if place is None or host != place.host:
            finding = _other(members, host)
            answering += finding.mark is Mark.OK
            yield finding
    size = len(members.hosts)
    if answering > size // 2:
        return True
    found = (
        f"not tried: {answering} of {size} members answer, which is no majority yet. The agents on "
        f"{members} start them with the job"
    )
    yield Finding(Mark.UNKNOWN, "store", found, "check again while it runs")
    return False


def _server() -> Finding:
    try:
        binary = find_binary()
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (ServerError, OSError, subprocess.TimeoutExpired) as error:
        return Finding(Mark.FAILED, "nats-server", str(error))
    found = of_version("nats-server", said.rpartition("v")[2].strip(), NatsClient.least_version)
    return Finding(
        found.mark, "nats-server", f"{found.found}, {binary}", found.advice, found.values
    )


def _of_place(members: Members, place: Place | None, unknown: bool) -> Finding:
    if place is not None:
        name = members.hosts[place.host][0]
        values = {"host": name, "address": place.address}
        found = f"this host is '{name}': an agent started here runs a member, at {place.address}"
        return Finding(Mark.OK, "member", found, values=values)
    if unknown:
        found = f"not known whether this host is one of {members}: some have no address yet"
        advice = "check the spelling, and this host's DNS or /etc/hosts"
        return Finding(Mark.UNKNOWN, "member", found, advice)
    found = f"this host is none of {members}: it runs no member"
    advice = "if it is one, name its address among them with --local-addr"
    return Finding(Mark.OK, "member", found, advice)


def _own_port(members: Members, place: Place) -> tuple[bool, Finding]:
    """Whether this host's member runs, and where it does, or would."""
    taken: list[str] = []
    for port in members.ports(place.host):
        where = f"{port} and {port + 1}"
        beside = f"; {', '.join(taken)}" if taken else ""
        try:
            name = probe(place.address, port, _PATIENCE)
        except ConnectionRefusedError:
            if all(_is_free(place.address, it) for it in (port, port + 1)):
                found = f"the member will listen on {where}, which are free at {place.address}"
                return False, Finding(
                    Mark.OK, "ports", f"{found}{beside}", values={"port": port, "runs": False}
                )
            taken.append(f"of {where} one is another program's")
        except (OSError, ValueError):
            taken.append(f"{port} is another program's")
        else:
            if name == members.name(place.host):
                found = f"the member of this host runs already, on {where} at {place.address}"
                return True, Finding(
                    Mark.OK, "ports", f"{found}{beside}", values={"port": port, "runs": True}
                )
            taken.append(f"{port} is that of '{name}', of other members")
    found = f"none is free for the member at {place.address}: {', '.join(taken)}"
    return False, Finding(
        Mark.FAILED, "ports", found, "name others with ports=..., or in the endpoint"
    )


def _is_free(address: str, port: int) -> bool:
    try:
        with closing(listen(address, [port])):
            return True
    except OSError:
        return False


def _other(members: Members, host: int) -> Finding:
    """Of a member of another host."""
    name = members.hosts[host][0]
    mark, found, advice = Mark.UNKNOWN, f"'{name}' runs none yet", ""
    for port in members.ports(host):
        where = at(name, port)
        try:
            said = probe(name, port, _PATIENCE)
        except (socket.gaierror, UnicodeError):
            found = f"'{name}' has no address on this host yet"
            advice = "check the spelling, and this host's DNS or /etc/hosts"
            break
        except ConnectionRefusedError:
            continue
        except TimeoutError:
            mark, found = Mark.UNKNOWN, f"{where} does not answer"
            advice = "is the host up, and is there a firewall in between?"
            break
        except OSError as error:
            mark, found = Mark.UNKNOWN, f"{where} cannot be reached ({error})"
            advice = "check the network between the hosts"
        except ValueError:
            mark, found = Mark.UNKNOWN, f"'{name}' runs none yet; {port} is another program's there"
        else:
            if said == members.name(host):
                mark, found, advice = Mark.OK, f"{where} answers", ""
                break
            found = f"'{name}' runs none yet; '{said}' is on {port}, of other members"
    return Finding(mark, "member", found, advice, {"host": name, "answers": mark is Mark.OK})
