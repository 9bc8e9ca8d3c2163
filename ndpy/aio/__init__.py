"""Connections for programs that use asyncio: messages of any length, and transfers to and from memory of the peer.

    async with aio.serve(("", 7474), handler) as server: ...
    async with aio.connect(("192.0.2.1", 7474)) as connection:
        await connection.send(b"hello")
        answer = await connection.receive()

The two ends may run on Linux and on Windows. docs/aio_protocol.md has the format of the frames that they exchange.
"""

from ndpy.aio.connection import Connection
from ndpy.aio.errors import ConnectionEndedError, ProtocolError
from ndpy.aio.errors import ConnectionResetError as ConnectionResetError
from ndpy.aio.server import Server, connect, serve

# Without the error that has a builtin's name, so that `from ndpy.aio import *` does not hide it.
__all__ = ["Connection", "ConnectionEndedError", "ProtocolError", "Server", "connect", "serve"]
