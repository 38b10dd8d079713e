"""The TLS options as Python's own context, and the meaning of failed handshakes."""

from __future__ import annotations

import re
import ssl
import time
from functools import partial

from rdzv_plugins.kv.base import Limit, Problem
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions, UnreadableFileError
from rdzv_plugins.stores._names import connected

# A server that refuses a certificate sends its alert within a round trip.
_ALERT_SECONDS = 0.5

_OF_A_CERTIFICATE = re.compile(
    r"CERTIFICATE|UNKNOWN_CA|WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|PACKET_LENGTH_TOO_LONG"
)

# A server's alerts to a client that it refuses, in the spelling of OpenSSL and libpq. Before TLS
# 1.3 a client without a certificate gets "handshake failure".
_REFUSES_CLIENT = re.compile(
    "(?i)alert[_ ](bad[_ ]certificate|unsupported[_ ]certificate|certificate[_ ]|unknown[_ ]ca"
    "|no[_ ]certificate|access[_ ]denied|handshake[_ ]failure)"
)

# Advice that follows OpenSSL's reason. The first pattern that matches counts.
_CAUSES = [
    (
        re.compile("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|PACKET_LENGTH_TOO_LONG"),
        ": what answers at this port does not speak TLS; leave out tls=true and write redis:// or "
        "http://, or name the port for TLS",
    ),
    (
        re.compile("(?i)hostname mismatch|ip address mismatch|not valid for"),
        ": the certificate is of another host; name the host as its certificate does, or give the "
        "server a certificate for this name that ca_file signed",
    ),
    (
        re.compile("(?i)self.signed|unable to get (local )?issuer"),
        ": the authority of the server's certificate is not trusted; set ca_file to its PEM file",
    ),
]
_ANY_CAUSE = (
    "; check that ca_file signed the server's certificate, that it names the endpoint's host and "
    "is valid by this host's clock, and cert_file and key_file if the server requires them"
)


def is_of_tls(reason: str) -> bool:
    """Whether a connection failed because of TLS; a server that hung up does not show that."""
    return "[SSL" in reason and "UNEXPECTED_EOF" not in reason


def stays_refused(reason: str) -> bool:
    """Whether a handshake that failed for OpenSSL's ``reason`` will fail again."""
    return _OF_A_CERTIFICATE.search(reason) is not None


def refuses_client(reason: str) -> bool:
    """Whether the server refused this client; False: this client may not trust the server."""
    return _REFUSES_CLIENT.search(reason) is not None


def tls_context(options: ServerOptions) -> ssl.SSLContext:
    """A context that verifies the server's certificate and name, of TLS 1.2 or later.

    Raises:
        ValueError: only one of certificate and key is set.
        UnreadableFileError: a file cannot be used; the message names its option.
    """
    if (options.cert_file is None) != (options.key_file is None):
        raise ValueError("options 'cert_file' and 'key_file' must be set together")
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except OSError as error:
        raise UnreadableFileError(f"ca_file '{options.ca_file}' cannot be used: {error}") from error
    # A host's OpenSSL may allow older versions.
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    if options.cert_file is not None:
        try:
            context.load_cert_chain(options.cert_file, options.key_file)
        except OSError as error:
            raise UnreadableFileError(
                f"cert_file '{options.cert_file}' with key_file '{options.key_file}' cannot be "
                f"used: {error}"
            ) from error
    return context


def context_if(
    encrypted: bool, options: ServerOptions, how: str
) -> FromFiles[ssl.SSLContext] | None:
    """A maker of contexts for encrypted connections; None: they are not encrypted.

    Args:
        how: how to turn on encryption, for an error.

    Raises:
        ValueError: see `tls_context`; or an option names a file of TLS, but TLS is off.
    """
    if encrypted:
        files = options.ca_file, options.cert_file, options.key_file
        return FromFiles(partial(tls_context, options), *files)
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(options, name) is not None:
            raise ValueError(f"option '{name}': nothing would be encrypted; {how}")
    return None


def unheard_alert(host: str, port: int, context: ssl.SSLContext) -> ssl.SSLError | None:
    """The TLS alert of a server that closed a connection at the first request; None: there is none.

    In TLS 1.3 a server checks the client's certificate while the first request is under way. If the
    server closes with that request unread, its alert is lost. A client without a request gets it.
    """
    try:
        with connected((host, port), Limit(time.monotonic() + _ALERT_SECONDS)) as raw:
            raw.settimeout(_ALERT_SECONDS)
            with context.wrap_socket(raw, server_hostname=host) as line:
                line.recv(1)
    except ssl.SSLError as error:
        return error if stays_refused(str(error)) else None
    except OSError:
        return None
    return None


def tls_problem(reason: str) -> Problem:
    """The meaning of a failed handshake."""
    advice = next((text for pattern, text in _CAUSES if pattern.search(reason)), _ANY_CAUSE)
    return Problem(f"failed the TLS handshake ({reason}){advice}", denied=refuses_client(reason))
