"""The TLS options of a server as Python's own context."""

from __future__ import annotations

import re
import socket
import ssl

from rdzv_plugins.config import ServerOptions
from rdzv_plugins.kv.base import Problem

__all__ = ["stays_refused", "tls_context", "tls_problem", "unheard_alert"]

# A server that has something against a certificate says so within a round trip.
_ALERT_SECONDS = 0.5

_OF_A_CERTIFICATE = re.compile(r"CERTIFICATE|UNKNOWN_CA|WRONG_VERSION_NUMBER")


def stays_refused(reason: str) -> bool:
    """Whether OpenSSL's reason for a failed handshake is one that trying again cannot mend."""
    return _OF_A_CERTIFICATE.search(reason) is not None


def tls_context(options: ServerOptions) -> ssl.SSLContext:
    """A context that verifies the server's certificate and name.

    Raises:
        ValueError: a file that cannot be used, naming its option.
    """
    if (options.cert_file is None) != (options.key_file is None):
        raise ValueError("options 'cert_file' and 'key_file' are given both or not at all")
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except OSError as error:
        raise ValueError(f"ca_file '{options.ca_file}' cannot be used: {error}") from error
    if options.cert_file is not None:
        try:
            context.load_cert_chain(options.cert_file, options.key_file)
        except OSError as error:
            raise ValueError(
                f"cert_file '{options.cert_file}' with key_file '{options.key_file}' cannot be "
                f"used: {error}"
            ) from error
    return context


def unheard_alert(host: str, port: int, context: ssl.SSLContext) -> ssl.SSLError | None:
    """What the server has against us, if it broke a connection off as soon as we spoke; else None.

    In TLS 1.3 it judges our certificate while our first request is on its way, and by closing with
    that unread it takes back what it said. To a client that asks nothing it can be heard.
    """
    try:
        with (
            socket.create_connection((host, port), _ALERT_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=host) as line,
        ):
            line.recv(1)
    except ssl.SSLError as error:
        return error if stays_refused(str(error)) else None
    except OSError:
        return None
    return None


def tls_problem(reason: str) -> Problem:
    """What a failed handshake means."""
    return Problem(
        f"failed in TLS ({reason}); check that ca_file signed the server's certificate, that it "
        "names the endpoint's host, and cert_file and key_file if the server asks for them"
    )
