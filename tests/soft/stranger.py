"""What test_strangers.py runs as another user, or on another host: it knows no more than what it is told.

python stranger.py DESCRIPTOR

Each message on the socket is a JSON object and two descriptors: {"do": NAME, "uid": NUMBER, "namespace": NAME, ...}. A
fork becomes that user, and calls the function of that name with the other members. It writes a line of JSON to the
second descriptor for its process, and one for each thing that it found out. With "told" it begins when the first one
has a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "softnd"))

import iwarp
from iwarp import Rtr, Startup
from kit.deadlines import DEADLINE_S

CLONE_NEWNET = 0x40000000
LIMIT_S = DEADLINE_S


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def become(uid: int | None, namespace: str | None) -> None:
    if namespace is not None:
        with open(f"/run/netns/{namespace}", "rb") as opened:
            if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def connected(address: str, port: int, source: str | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family)
    made.settimeout(LIMIT_S)
    if source is not None:
        made.bind((source, 0))
    made.connect((address, port))
    return made


def request(address: str, port: int, private: str, source: str | None = None) -> None:
    """Ask for a connection, and say how the answer came. Then send each line of input as a message."""
    try:
        endpoint = iwarp.Endpoint(connected(address, port, source), limit_s=LIMIT_S)
    except OSError as error:
        say(answer="unreachable", error=str(error))
        return
    start = Startup(ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ, private_data=bytes.fromhex(private))
    try:
        reply = endpoint.start(start)
    except (iwarp.ClosedError, ConnectionError):
        say(answer="closed")
        return
    say(answer="rejected" if reply.rejected else "accepted")
    for line in sys.stdin:
        endpoint.send(line.strip().encode())
    with contextlib.suppress(iwarp.ClosedError, ConnectionError):
        endpoint.run_to_the_end()


def hasty(address: str, port: int, private: str, rounds: int = 1) -> None:
    """Send all that a peer sends, and be gone before anybody can ask who it was."""
    start = Startup(ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ, private_data=bytes.fromhex(private))
    first = iwarp.untagged(iwarp.Opcode.READ_REQUEST, iwarp.Queue.READ_REQUEST, 1, iwarp.read_request(1, 0, 0, 0, 0))
    message = iwarp.untagged(iwarp.Opcode.SEND, iwarp.Queue.SEND, 1, b"forged")
    for _ in range(rounds):
        with connected(address, port, None) as made:
            made.sendall(start.encode() + iwarp.fpdu(first, crc=False) + iwarp.fpdu(message, crc=False))
    say(sent=True)


def crowd(address: str, port: int, count: int, private: str | None = None) -> None:
    """Open connections that say nothing, or that ask and then say nothing. Then say how many of them are still open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 64, count + 64))
    sockets = [connected(address, port, None) for _ in range(count)]
    if private is not None:
        frame = Startup(ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ, private_data=bytes.fromhex(private)).encode()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.sendall(frame)
    say(opened=len(sockets))
    while sys.stdin.readline():
        open_ones = 0
        for each in sockets:
            each.setblocking(False)
            try:
                open_ones += bool(each.recv(1000, socket.MSG_PEEK))
            except BlockingIOError:
                open_ones += 1
            except OSError:
                pass
        say(open=open_ones)


def listen(address: str, port: int) -> None:
    """Try to get a port for itself."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address, port))
        made.listen()
    except OSError as error:
        say(listens=False, errno=error.errno)
    else:
        say(listens=True)


def impostor(above: int) -> None:
    """Listen on a port above this one, and accept whoever asks for an iWARP connection, one after the other."""
    for port in range(65535, above, -1):
        try:
            listening = socket.create_server(("127.0.0.1", port))
            break
        except OSError:
            continue
    else:
        raise RuntimeError(f"no port above {above}")
    say(port=port)
    listening.settimeout(LIMIT_S)
    while True:
        endpoint = iwarp.Endpoint(listening.accept()[0], limit_s=LIMIT_S)
        # Whoever asks may give up at any time.
        with contextlib.suppress(ConnectionError, iwarp.ClosedError):
            say(asked=endpoint.await_start().private_data.hex())
            endpoint.answer(Startup(reply=True, ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ))
            endpoint.run_until(lambda endpoint=endpoint: bool(endpoint.messages))
        say(messages=[message.data.hex() for message in endpoint.messages])


def greeting(to: int, sender: int, to_psn: int, from_psn: int, version: int = 2) -> bytes:
    """softrdma/verbs/greeting.h has the format."""
    return b"softqp\0" + struct.pack("!BIIII", version, to, sender, to_psn, from_psn)


def run(arguments: dict[str, Any], descriptors: list[int]) -> None:
    for descriptor, standard in zip(descriptors, (0, 1), strict=True):
        os.dup2(descriptor, standard)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    say(process=os.getpid())
    if arguments.pop("told", False):
        sys.stdin.readline()
    become(arguments.pop("uid", None), arguments.pop("namespace", None))
    globals()[arguments.pop("do")](**arguments)


if __name__ == "__main__":
    commands = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        words, descriptors, _, _ = socket.recv_fds(commands, 1 << 16, 2)
        if not words:
            break
        if os.fork() == 0:
            commands.close()
            try:
                run(json.loads(words), descriptors)
            finally:
                with contextlib.suppress(BrokenPipeError):
                    sys.stdout.flush()
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
