"""Why a store that could not be reached was not: what listens at its endpoint, if anything."""

from __future__ import annotations

import socket
import ssl
from enum import Enum, auto

from rdzv_plugins.cli.check.job import Job
from rdzv_plugins.cli.check.options import Chosen
from rdzv_plugins.endpoint import parse_endpoint

__all__ = ["Listener", "look", "reason"]

_PATIENCE = 1.0

# An endpoint need not name it.
_PORTS = {
    "redis": 6379, "zookeeper": 2181, "consul": 8500, "etcd-v3": 2379, "postgres": 5432,
    "nats": 4222,
}  # fmt: skip
_SECURE = ("rediss", "valkeys", "https", "tls")


class Listener(Enum):
    """What there is at an address."""

    NOBODY = auto()
    SILENT = auto()
    PLAIN = auto()
    TLS = auto()


def reason(job: Job, chosen: Chosen) -> str:
    """What to say besides that the store could not be reached; "": nothing is known."""
    scheme = job.endpoint.partition("://")[0] if "://" in job.endpoint else ""
    default = _PORTS.get(job.backend, 443 if scheme == "https" else 80)
    # Without these the endpoint is a socket's path, libpq's own choice, or a region of AWS.
    named = job.endpoint if job.backend == "postgres" else job.backend in _PORTS or scheme
    if scheme == "unix" or not named:
        return ""
    try:
        hosts = parse_endpoint(job.endpoint, default_port=default, schemes=[scheme]).hosts
    except ValueError:
        return ""
    tls = scheme in _SECURE or bool(getattr(chosen.options, "tls", False))
    return "; ".join(
        filter(None, (_told(job, host, port, tls, look(host, port)) for host, port in hosts))
    )


def look(host: str, port: int) -> Listener | None:
    """Dial the address and begin a TLS handshake; None: the name cannot be resolved."""
    context = ssl.create_default_context()
    # Nothing is sent that needs protection: only whether it speaks TLS is of interest.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        raw = socket.create_connection((host, port), _PATIENCE)
    except (socket.gaierror, UnicodeError):
        return None
    except TimeoutError:
        return Listener.SILENT
    except OSError:
        return Listener.NOBODY
    with raw:
        try:
            context.wrap_socket(raw, server_hostname=host).close()
        except ssl.SSLError as error:
            # An alert comes from one who speaks TLS.
            return Listener.TLS if "ALERT" in str(error) else Listener.PLAIN
        except OSError:
            return Listener.PLAIN
    return Listener.TLS


def _told(job: Job, host: str, port: int, tls: bool, listener: Listener | None) -> str:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    told = {
        None: f"'{host}' cannot be resolved: check the spelling, and this host's DNS",
        Listener.NOBODY: f"nothing listens at {where}: the server is down, or the port is wrong",
        Listener.SILENT: f"{where} does not answer: is there a firewall in between?",
    }
    if listener in told:
        return told[listener]
    # PostgreSQL speaks TLS after a request of its own, and says itself whether it does.
    if job.backend != "postgres" and tls and listener is Listener.PLAIN:
        return f"what listens at {where} does not speak TLS: leave out tls=true, rediss:// and https://"
    if job.backend != "postgres" and not tls and listener is Listener.TLS:
        return f"what listens at {where} speaks TLS: set tls=true, or write rediss:// or https://"
    return (
        f"what listens at {where} does not answer as {job.backend} does: is it another server's "
        "port, or does it hang?"
    )
