"""A proxy that counts bytes, in a process of its own: for the servers that do not count them.

Each request takes longer through it, so the bytes of a round are measured apart from its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

__all__ = ["counted"]

Address = tuple[str, int]

_CHUNK = 1 << 16


class Counter:
    """Reads the count of a proxy in another process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def read(self) -> int:
        """Bytes so far, in both directions."""
        self._pipe.send(None)
        count: int = self._pipe.recv()
        return count


@contextlib.contextmanager
def counted(targets: list[Address]) -> Iterator[tuple[list[Address], Counter]]:
    """Start a proxy for each address; yields where clients connect instead, and the counter."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(targets, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv(), Counter(ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(targets: list[Address], pipe: Connection) -> None:
    asyncio.run(_forward(targets, pipe))


async def _forward(targets: list[Address], pipe: Connection) -> None:
    passed = 0

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        nonlocal passed
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                passed += len(data)
                sink.write(data)
                await sink.drain()
        sink.close()

    async def listen(target: Address) -> Address:
        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                from_server, to_server = await asyncio.open_connection(*target)
            except OSError:
                writer.close()
                return
            await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

        server = await asyncio.start_server(meet, "127.0.0.1", 0, backlog=4096)
        address: Address = server.sockets[0].getsockname()[:2]
        return address

    pipe.send([await listen(target) for target in targets])
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send(passed)
        except (EOFError, OSError):
            ended.set()

    loop.add_reader(pipe.fileno(), answer)
    await ended.wait()
