"""An HTTP gateway before a bucket; at an S3 it has an account of its own; run as a program.

What is signed for an Azure names no host, and is passed on as it is.

``python -m tests.integration.programs.gateway HOST PORT OPTIONS``: the options are JSON:

- ``drops``: names of headers, in lower case, that it does not pass on.
- ``signs``: it signs what it passes on, as an S3 wants it.
- ``tls``: files with its certificate and its key.
- ``judges``: of these headers it looks itself whether the condition holds, and then writes without.

It prints the port on which it listens, then, for each line of its input, as JSON how often it was
asked so far, by kind of request. It ends with its input.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

__all__ = ["Gateway", "gateway"]

Address = tuple[str, int]
Answer = tuple[int, dict[str, str], bytes]

# What belongs to a connection, or to the signature that the gateway makes anew.
_OWN = {
    "host", "connection", "content-length", "transfer-encoding",
    "authorization", "x-amz-date", "x-amz-content-sha256",
}  # fmt: skip


class Gateway:
    """A running gateway.

    Attributes:
        address: where clients reach it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: Address = "127.0.0.1", int(self._read())

    def asked(self) -> Counter[str]:
        """How often it was asked so far, by kind of request: put, get, list, delete."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Counter(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def gateway(
    target: Address,
    *,
    drops: Sequence[str],
    judges: Sequence[str],
    signs: bool,
    tls: Sequence[str] = (),
) -> Iterator[Gateway]:
    """Start one before the bucket at ``target``.

    Args:
        signs: with the account of an S3 in the environment; ``drops`` and ``judges`` need it.
    """
    names = {"drops": [it.lower() for it in drops], "judges": [it.lower() for it in judges]}
    given = {**names, "signs": signs, "tls": tls}
    options = json.dumps(given)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, target[0], str(target[1]), options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Gateway(process)
    finally:
        process.kill()
        process.communicate()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, target: Address, drops: set[str], judges: set[str], signs: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.drops, self.judges = target, drops, judges
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.signer: S3SigV4Auth | None = None
        if signs:
            names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            account = Credentials(*(os.environ[name] for name in names))
            self.signer = S3SigV4Auth(account, "s3", "us-east-1")


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lists = "list-type=" in self.path or "comp=list" in self.path
        kind = "list" if lists else self.command.lower()
        with self.server.lock:
            # A POST deletes many.
            self.server.asked["delete" if kind == "post" else kind] += 1
        given = {name.lower(): value for name, value in self.headers.items()}
        own = _OWN if self.server.signer is not None else _OWN - {"authorization"}
        headers = {it: given[it] for it in given.keys() - own - self.server.drops}
        judged = {it: headers.pop(it) for it in self.server.judges & headers.keys()}
        new, tag = judged.get("if-none-match"), judged.get("if-match")
        if new or tag:
            status, found, _ = self._ask("HEAD", {}, b"")
            there = found.get("etag") if status == 200 else None
            if (new and there is not None) or (tag and tag != there):
                self._answer(412, {}, b"")
                return
        self._answer(*self._ask(self.command, headers, body))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815 - the base class names them

    def _ask(self, method: str, headers: dict[str, str], body: bytes) -> Answer:
        target = self.server.target
        if self.server.signer is not None:
            url = f"http://{target[0]}:{target[1]}{self.path}"
            request = AWSRequest(method, url, headers=headers, data=body)
            self.server.signer.add_auth(request)
            headers = dict(request.headers.items())
        with closing(HTTPConnection(*target, timeout=30)) as connection:
            connection.request(method, self.path, body, headers)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        # The client may have given up.
        with suppress(ConnectionError):
            self.send_response_only(status)
            for name in headers.keys() - _OWN:
                self.send_header(name, headers[name])
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def main(host: str, port: str, options: str) -> None:
    given = json.loads(options)
    server = _Server((host, int(port)), set(given["drops"]), set(given["judges"]), given["signs"])
    if given["tls"]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*given["tls"])
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _say(str(server.server_address[1]))
    for _ in sys.stdin:
        with server.lock:
            _say(json.dumps(server.asked))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
