"""The exceptions of connections. All are subclasses of Python's ConnectionError, as those of asyncio's streams."""

from __future__ import annotations

import builtins

from ndpy.errors import NdpyError


class ConnectionEndedError(NdpyError, ConnectionError, EOFError):
    """The peer has closed the connection. receive() raises it when everything that the peer sent has been received."""

    problem = "peer-closed"


class ConnectionResetError(NdpyError, builtins.ConnectionResetError):
    """The connection was lost: the peer ended without close(), its host died, a request failed, or by abort()."""

    problem = "connection-lost"


class ProtocolError(NdpyError, ConnectionError):
    """The peer does not speak the protocol of ndpy.aio, or breaks its rules. The connection has ended."""

    problem = "protocol"
