"""A connection to NATS that breaks."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from rdzv_plugins.stores.nats import Link

pytestmark = pytest.mark.timeout(60)

INFO = b'INFO {"server_id":"a","version":"2.10.0","max_payload":1048576}\r\n'


def reset(writer: asyncio.StreamWriter) -> None:
    line: socket.socket = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def test_a_waiting_client_is_told_where_the_last_write_fails_too() -> None:
    """Else it waits until its time is over: for an answer, or for a change."""

    async def waits() -> None:
        came = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(INFO)
            while not (await reader.readline()).startswith(b"PING"):
                pass
            writer.write(b"PONG\r\n")
            came.set_result(writer)

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            link = Link("$JS.API")
            await link.connection.connect(
                f"nats://127.0.0.1:{port}",
                error_cb=link.failed,
                closed_cb=link.closed,
                allow_reconnect=False,
            )
            waiter = asyncio.ensure_future(link.unless_it_fails(asyncio.sleep(60)))
            await asyncio.sleep(0)
            # What the next write would take along.
            link.connection._pending.append(b"PING\r\n")
            link.connection._pending_data_size += 6
            reset(await came)
            await asyncio.wait_for(waiter, 10)

    with pytest.raises(ConnectionResetError):
        asyncio.run(waits())
