"""The conversation of ibv_rc_pingpong, for programs with other Python bindings than ndpy.

Such a program gives run() an end, which has:

    connect(number, psn, gid)   connects its queue pair with the peer's
    post_receive(), post_send() post a request for the whole inbox or outbox
    finish()                    waits for one completion and raises an error unless it succeeded
    number, psn, gid            of its own queue pair
    inbox, outbox               writable memoryviews

The client checks every byte that comes back. Completions of sends and receives may change places: each turn takes two.
"""

from __future__ import annotations

import argparse
import random
import socket
from typing import Any

LENGTH = 52
LIMIT_S = 30.0
SEED = 20240229


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("host", nargs="?", help="of the server; without it, this is the server")
    for name in ("device", "port", "gid", "size", "count"):
        parser.add_argument(f"--{name}", required=True, type=str if name == "device" else int)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="so many seconds it waits for the peer")
    return parser.parse_args()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise SystemExit("the peer closed the exchange")
        data += part
    return data


def _line(end: Any) -> bytes:
    return f"0000:{end.number:06x}:{end.psn:06x}:{end.gid.hex()}".encode() + b"\0"


def _connect(end: Any, line: bytes) -> None:
    _, number, psn, gid = line.rstrip(b"\0").decode().split(":")
    end.connect(int(number, 16), int(psn, 16), bytes.fromhex(gid))


def run(end: Any, options: argparse.Namespace) -> None:
    end.post_receive()
    if options.host is None:
        with socket.create_server(("127.0.0.1", options.port)) as listener:
            listener.settimeout(options.limit)
            connection, _ = listener.accept()
        with connection:
            connection.settimeout(options.limit)
            _connect(end, _exactly(connection, LENGTH))
            connection.sendall(_line(end))
            _exactly(connection, 5)
    else:
        with socket.create_connection((options.host, options.port), options.limit) as connection:
            connection.sendall(_line(end))
            _connect(end, _exactly(connection, LENGTH))
            connection.sendall(b"done\0")
    message = random.Random(SEED).randbytes(options.size)
    for left in reversed(range(options.count)):
        if options.host is None:
            end.finish()
            end.outbox[:] = end.inbox
            if left:
                end.post_receive()
            end.post_send()
            end.finish()
            continue
        end.outbox[:] = message  # rc_pingpong wants each message to be the first one
        end.inbox[:] = bytes(options.size)
        end.post_send()
        end.finish()
        end.finish()
        if end.inbox != message:
            raise SystemExit(f"a message came back damaged; {left} were left")
        if left:
            end.post_receive()
    print(f"{options.count} messages of {options.size} bytes verified")
