"""Parse ``--rdzv-endpoint``, and redact its secrets for logs and errors."""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed ``--rdzv-endpoint``; its ``repr`` shows only the servers' addresses.

    Attributes:
        scheme: in lower case; "" if absent.
        hosts: (name, port) pairs, at least one; empty for a socket, ``unix:///path``.
        path: with its leading "/"; "" if absent.
        query: the parameters after "?".
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    path: str = field(default="", repr=False)
    query: Mapping[str, str] = field(default_factory=dict, repr=False)

    def refuse_all_but(
        self,
        *,
        path: bool = False,
        parameters: Collection[str] = (),
        instead: Mapping[str, str] | None = None,
    ) -> None:
        """Raise `ValueError` for a path or parameters that a store does not take.

        ``instead``: what to write for parameters of other names.
        """
        if self.path.strip("/") and not path:
            raise ValueError(f"the endpoint has a path, '{redact(self.path)}': leave it out")
        for name, value in self.query.items():
            if name not in parameters:
                names = f"are: {', '.join(parameters)}" if parameters else "are none"
                said = (instead or {}).get(name, f"there {names}")
                raise ValueError(f"the endpoint has an unknown parameter '{name}'; {said}")
            if not value.strip():
                raise ValueError(f"the parameter '{name}' of the endpoint has no value")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store's servers are, as far as its endpoint tells; nothing is looked up.

    Attributes:
        hosts: (name, port); port 0: not named. Empty: no host is named.
        on_socket: the servers listen at a path of this host instead.
        of_nodes: the servers run on nodes of the run, which listen for the other nodes.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    on_socket: bool = False
    of_nodes: bool = False

    @property
    def names(self) -> list[str]:
        """The hosts in the endpoint if they are nodes of the run."""
        return [host for host, _ in self.hosts] if self.of_nodes else []

    @property
    def dialled(self) -> list[tuple[str, int]]:
        """The hosts, each with a port; any port will do to find a route."""
        return [(host, port or _ANY_PORT) for host, port in self.hosts]


# The discard port; nothing is sent to it.
_ANY_PORT = 9

# Scheme, authority, path, query. Not urlsplit: patched Pythons accept an address in brackets only
# if it is the only host.
_URL = re.compile(r"(?s)(?:([^:/?#]+)://)?([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?")
_PORT = re.compile(r"[0-9]{1,5}")
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
# Also matches the percent-encoded form and letters that normalize to it.
_AT = re.compile("@|%40|\uff20|\ufe6b")
# Matches the character before parameters, in a URL or in a connection string of libpq.
_PARAMETERS = re.compile(r"[?#;\s]|^\s*\w+\s*=")
# Only these parts are shown: hosts, ports, a path, and parameters without a secret. Python 3.11.2
# gets possessive quantifiers wrong, so lookaheads end a name.
_PLAIN = re.compile(
    r"""(?x)
    (?: (?: (?:[\w.-]|%2[Ff])+ (?! [\w.-] | %2[Ff] | \s*= ) | \[[0-9A-Fa-f:.]*(?:%\w+)?\] )
        (?: :[0-9]{1,5} (?![^,/?&\s]) )? ,? )*
    (?: /[^\s?#;=&:]* )?
    (?: [?&\s]* (?:db|host|hostaddr|port|dbname|sslmode|target_session_attrs)
        =[\w.,:/%\[\]-]* (?![^&\s]) )*
    """
)


def at(host: str, port: int) -> str:
    """A host's name or address with a port, in the form of URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address, or ``localhost``; no other name is looked up."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def redact(endpoint: str) -> str:
    """The endpoint with every possible secret replaced by ``***``, even if it is malformed.

    Everything before the last ``@`` is hidden. The rest is shown up to the first part that is
    neither host, port, path nor a parameter that is known to hold no secret.

    Takes time in proportion to the endpoint's length.
    """
    found = _SCHEME.match(endpoint)
    scheme = found[0] if found is not None else ""
    rest = endpoint[len(scheme) :]
    at = max((it.end() for it in _AT.finditer(rest)), default=0)
    if at and _PARAMETERS.search(rest[:at]):
        # The "@" may belong to a password or to a parameter, so hide everything.
        return f"{scheme}***"
    shown = _PLAIN.match(rest, at)
    assert shown is not None  # _PLAIN also matches "".
    hidden = rest[shown.end() :]
    mark = hidden[:1] if hidden[:1] in (":", "?", "#", "&", ";", " ") else ""
    more = f"{mark}***" if hidden != mark else mark
    return f"{scheme}{'***@' if at else ''}{shown[0]}{more}"


def redact_urls(text: str) -> str:
    """Redact each URL in the text, because libraries' errors quote the URLs of their requests."""
    return _ANY_URL.sub(lambda found: redact(found[0]), text)


def parse_endpoint(endpoint: str, *, default_port: int, schemes: Iterable[str] = ()) -> Endpoint:
    """Parse ``[scheme://][user[:password]@]host[:port][,host[:port]...][/path][?name=value]``.

    "" means localhost. IPv6 addresses need brackets.

    Raises:
        ValueError: a scheme that is not in ``schemes``, a malformed host or port, a repeated
            parameter, or a "#".
    """
    text = endpoint.strip() or "localhost"
    allowed = list(schemes)
    parts = _URL.fullmatch(re.sub(r"[\t\r\n]", "", text))
    assert parts is not None  # any text matches
    scheme, authority, path, query, fragment = (part or "" for part in parts.groups())
    # A name look-up normalizes some characters to delimiters: U+2100 becomes "a/c".
    plain = unicodedata.normalize("NFKC", authority)
    if any(plain.count(mark) != authority.count(mark) for mark in "/?#@:"):
        raise _not_a_url(text)
    again = authority.rpartition(",")[2].removesuffix(":").lower()
    if path.startswith("//") and authority.endswith(":") and again in allowed:
        raise ValueError(
            f"the endpoint '{redact(text)}' has '{again}://' after a comma: write it once, in "
            f"front of the first host, as in {again}://host1:{default_port},host2:{default_port}"
        )
    rest = text.partition("://")[2] or text
    if "@" in rest[len(authority) :]:
        raise ValueError(
            f"the endpoint '{redact(text)}' has an '@' after a '/', '?' or '#'; percent-encode "
            "these characters, in a password too"
        )
    if fragment:
        raise ValueError(
            f"the endpoint '{redact(text)}' has a '#', which nothing may follow; if it is part of "
            "a name or value, write %23"
        )
    scheme = scheme.lower()
    if scheme and scheme not in allowed:
        raise ValueError(
            f"the endpoint '{redact(text)}' starts with '{scheme}://'; "
            f"allowed: host:port{''.join(f', {name}://' for name in allowed)}"
        )
    userinfo, _, location = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts: tuple[tuple[str, int], ...] = ()
    if location or scheme != "unix":
        hosts = tuple(_parse_host(item, text, default_port) for item in location.split(","))
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in parameters:
            raise ValueError(f"the endpoint '{redact(text)}' has the parameter '{name}' twice")
        parameters[name] = value
    name, secret = unquote(user) or None, unquote(password) or None
    return Endpoint(scheme, hosts, name, secret, unquote(path), parameters)


def _not_a_url(endpoint: str) -> ValueError:
    return ValueError(f"the endpoint '{redact(endpoint)}' is not a valid URL")


def _parse_host(item: str, endpoint: str, default_port: int) -> tuple[str, int]:
    if "[" in item or "]" in item:
        bracketed = re.fullmatch(r"\[(.*)\](?::(.*))?", item)
        host, port = (bracketed[1], bracketed[2] or "") if bracketed is not None else ("", "")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _not_a_url(endpoint) from None
    elif item.count(":") > 1:
        raise ValueError(
            f"the endpoint '{redact(endpoint)}' has more than one port after a host; "
            "write an IPv6 address in brackets: [::1]:6379"
        )
    else:
        host, _, port = item.partition(":")
    if not host or re.search(r"[\s/]", host):
        raise ValueError(f"the endpoint '{redact(endpoint)}' has no valid host name")
    if port and (not _PORT.fullmatch(port) or not 0 < int(port) < 65536):
        raise ValueError(f"the endpoint '{redact(endpoint)}' has no valid port")
    return host, int(port) if port else default_port
