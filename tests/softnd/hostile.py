"""What a hostile peer sends, and the program that receives it.

The caller seeds the generator of everything random, so a stream is identified by its seed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import iwarp
import pytest
from iwarp import Endpoint, Opcode, Queue, Rtr, Startup

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "softrdma/build/programs"
SECRET = b"GUARD!@#"  # fills memory that is not granted
OPEN_SIZE = 0x1000
WINDOW_SIZE = 0x200
READABLE = b"r" * WINDOW_SIZE
READY_BY_READ = Startup(ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ)
P = TypeVar("P", bound="Program")
_GRANT = struct.Struct("<QQQ4s4s4s")

# A round of the program under Wine takes milliseconds. A round that takes this long hangs.
LIMIT_S = 20.0


def windows_program(name: str) -> Path:
    """Build the programs and the DLL if needed. Skip if Wine or the cross compiler is missing."""
    if not (ROOT / ".rig/wine/stamp").exists():
        pytest.skip("no Windows Python: make setup")
    if shutil.which("x86_64-w64-mingw32-gcc") is None:
        pytest.skip("no cross compiler: install gcc-mingw-w64-x86-64")
    if "SOFTND_DLL" not in os.environ:
        subprocess.run(["make", "-s", "-C", str(ROOT / "softrdma"), "build/softnd.dll"], check=True, timeout=300)
    subprocess.run(["make", "-s", "-C", str(ROOT / "tests/softnd/programs")], check=True, timeout=300)
    return PROGRAMS / f"{name}.exe"


def dll() -> str:
    return os.environ.get("SOFTND_DLL", str(ROOT / "softrdma/build/softnd.dll"))


class Program:
    """A program and its output lines, which a thread reads. Leaving the block ends it.

    Wine's services start with the first program and share its output. One of them may crash at its start. Such a
    message counts as the program's only if the program failed too.
    """

    def __init__(self, command: list[Any], environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._crashes: list[str] = []
        self._taken = 0
        self._ended = False
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                (self._crashes if line.startswith("wine: Unhandled ") else self.lines).append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait_for(self, found: Callable[[], str | None], what: str, limit_s: float) -> str:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._ended, limit_s)
            line = found()
            if line is not None:
                return line
            said = "\n".join(self.lines[-20:])
            if self._ended:
                raise EOFError(f"the program ended without {what}:\n{said}")
            raise TimeoutError(f"no {what} in {limit_s:g} s, after:\n{said}")

    def next_line(self, limit_s: float = 60.0) -> str:
        def found() -> str | None:
            return self.lines[self._taken] if self._taken < len(self.lines) else None

        line = self._wait_for(found, "another line", limit_s)
        self._taken += 1
        return line

    def wait_for(self, beginning: str, limit_s: float) -> str:
        """Return the first line that begins with the text. next_line() does not skip it."""

        def found() -> str | None:
            return next((line for line in self.lines if line.startswith(beginning)), None)

        return self._wait_for(found, f"line that begins with {beginning!r}", limit_s)

    def between(self, begin: str, end: str) -> list[str]:
        return self.lines[self.lines.index(begin) + 1 : self.lines.index(end)]

    def finish(self, limit_s: float = 60.0) -> int:
        """Wait until the program has ended and `lines` has all its output. Return its exit status."""
        status = self.process.wait(limit_s)
        self._reader.join(10)
        if status != 0:
            self.lines += self._crashes
        return status

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class WindowsProcess(Program):
    """A program under Wine. A .py program runs in the Windows Python."""

    def __init__(self, program: Path, *arguments: object, limit_s: float, **environment: str) -> None:
        command = [ROOT / "rig/wine-python", program, *arguments]
        if program.suffix != ".py":
            command.insert(1, "--run")
        super().__init__(command, {**os.environ, "WINE_LIMIT": str(int(limit_s)), **environment})


@dataclasses.dataclass(frozen=True)
class Grant:
    """What the target grants this connection: addresses and tokens (as numbers in network order)."""

    open: int
    writable: int
    readable: int
    open_token: int
    writable_token: int
    readable_token: int


class Target:
    """The program hostile_target; its source in programs/ says what it offers."""

    def __init__(self, process: Program, address: str = "127.0.0.1") -> None:
        self.process, self.address = process, address
        first = json.loads(process.next_line())
        self.port: int = first["port"]

    def connect(self) -> Endpoint:
        return iwarp.connect(self.address, self.port, limit_s=LIMIT_S)

    def join(self, start: Startup = READY_BY_READ) -> tuple[Endpoint, Grant]:
        """Return a connection that was set up correctly, and what it was granted."""
        endpoint = self.connect()
        try:
            endpoint.start(start)
            if not start.peer_to_peer:
                endpoint.read_start(0, 0, 0)  # the active side speaks first
            words = _GRANT.unpack(endpoint.receive().data)
        except BaseException:
            endpoint.close()
            raise
        return endpoint, Grant(*words[:3], *(int.from_bytes(word, "big") for word in words[3:]))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.process.lines if line.startswith('{"event"')]

    def report(self, endpoint: Endpoint) -> dict[str, Any]:
        """Ask the program for its counters, over a connection that keeps to the rules."""
        endpoint.send(b"report " + SECRET)
        while True:
            line = self.process.next_line()
            if line.startswith('{"event": "report"'):
                return dict(json.loads(line))

    def quit(self, endpoint: Endpoint) -> dict[str, Any]:
        endpoint.send(b"quit " + SECRET)
        while True:
            line = self.process.next_line()
            if line.startswith('{"event": "end"'):
                return dict(json.loads(line))

    def end(self) -> None:
        """Let the program end. It must have found nothing wrong."""
        endpoint, _ = self.join()
        end = self.quit(endpoint)
        endpoint.close()
        status = self.process.finish()
        assert (end["violations"], end["failures"], status) == (0, 0, 0), (end, self.process.lines[-40:])


def leaked(data: bytes) -> bool:
    """Whether received bytes include some that were not granted."""
    return any(SECRET[turn:] + SECRET[:turn] in data for turn in range(len(SECRET)))


def run_out(endpoint: Endpoint) -> bytes:
    """End this end's stream and read until the peer closes. Raise TimeoutError if it does not."""
    taken = bytearray()
    endpoint.socket.settimeout(LIMIT_S)
    try:
        endpoint.socket.shutdown(socket.SHUT_WR)
        while data := endpoint.socket.recv(1 << 16):
            taken += data
    except (ConnectionError, BrokenPipeError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
    return bytes(taken)


# --- Streams ------------------------------------------------------------------------------------------


def valid_frames(rng: random.Random, grant: Grant, crc: bool) -> list[bytes]:
    """Return some FPDUs that keep to the rules and follow the Read Request that made the connection ready."""
    frames: list[bytes] = []
    sends, reads = 0, 1

    def add(ulpdu: bytes) -> None:
        frames.append(iwarp.fpdu(ulpdu, crc=crc))

    for _ in range(rng.randint(1, 6)):
        size = rng.randint(0, 64)
        kind = rng.randrange(8)
        if kind == 0:
            at = rng.randint(0, WINDOW_SIZE - size)
            add(iwarp.tagged(Opcode.WRITE, grant.writable_token, grant.writable + at, rng.randbytes(size)))
        elif kind == 1:
            size = rng.randint(0, OPEN_SIZE)
            at = rng.randint(0, OPEN_SIZE - size)
            half = size // 2
            add(iwarp.tagged(Opcode.WRITE, grant.open_token, grant.open + at, b"w" * half, last=False))
            add(iwarp.tagged(Opcode.WRITE, grant.open_token, grant.open + at + half, b"w" * (size - half)))
        elif kind in (2, 3):
            reads += 1
            source = (grant.readable_token, grant.readable) if kind == 2 else (grant.open_token, grant.open)
            request = iwarp.read_request(rng.randrange(1 << 32), rng.randrange(1 << 32), size, *source)
            add(iwarp.untagged(Opcode.READ_REQUEST, Queue.READ_REQUEST, reads, request))
        elif kind == 4:
            sends += 1
            add(iwarp.untagged(Opcode.SEND_INVALIDATE, 0, sends, b"mine", invalidate=grant.writable_token))
            break
        elif kind == 5:
            sends += 1
            half = size // 2
            add(iwarp.untagged(Opcode.SEND, 0, sends, rng.randbytes(half), last=False))
            add(iwarp.untagged(Opcode.SEND, 0, sends, rng.randbytes(size - half), offset=half))
        elif kind == 6:
            sends += 1
            add(iwarp.untagged(Opcode.SEND_SE, 0, sends, b"echo" + rng.randbytes(rng.randint(0, 60))))
        else:
            sends += 1
            add(iwarp.untagged(Opcode.SEND, 0, sends, b"invalidate"))
    return frames


_INTERESTING = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff" * 8, b"\0\x0e", b"\0\x12")


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change, insert, omit or duplicate a few bytes, or cut the end off."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(mutated) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(mutated):
            mutated[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(mutated):
            mutated[at] = rng.randrange(256)
        elif kind == 2:
            value = rng.choice(_INTERESTING)
            mutated[at : at + len(value)] = value
        elif kind == 3:
            mutated[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 4:
            del mutated[at : at + rng.randint(1, 8)]
        elif kind == 5:
            mutated[at:at] = mutated[at : at + rng.randint(1, 64)]
        else:
            del mutated[at:]
    return bytes(mutated)


def mutate_fields(rng: random.Random, frames: list[bytes], crc: bool) -> bytes:
    """Change one header field of one FPDU and correct its CRC, to test what a CRC would otherwise hide."""
    chosen = rng.randrange(len(frames))
    frame = bytearray(frames[chosen])
    (length,) = struct.unpack_from("!H", frame)
    ulpdu = bytearray(frame[2 : 2 + length])
    tagged = bool(ulpdu[0] & 0x80)
    fields = [(0, 1), (1, 1), (2, 4), (6, 8)] if tagged else [(0, 1), (1, 1), (2, 4), (6, 4), (10, 4), (14, 4)]
    if not tagged and len(ulpdu) == 46:
        fields += [(18, 4), (22, 8), (30, 4), (34, 4), (38, 8)]
    at, size = rng.choice(fields)
    value = int.from_bytes(ulpdu[at : at + size], "big")
    changes: list[Callable[[], int]] = [
        lambda: value + rng.choice((-1, 1, 64, -64, 512, 4096, -4096)),
        lambda: value ^ 1 << rng.randrange(8 * size),
        lambda: rng.randrange(1 << 8 * size),
        lambda: (1 << 8 * size) - rng.randint(1, 64),
    ]
    ulpdu[at : at + size] = (rng.choice(changes)() % (1 << 8 * size)).to_bytes(size, "big")
    return b"".join([*frames[:chosen], iwarp.fpdu(bytes(ulpdu), crc=crc), *frames[chosen + 1 :]])


def startup_stream(rng: random.Random) -> bytes:
    """Return a start-up frame that is wrong or cut off in some way."""
    data = rng.randbytes(rng.choice((0, 3, 4, 20, 508, 512, 513, 600)))
    frame = iwarp.raw_startup(iwarp.REQUEST_KEY, rng.choice((0, 0x10, 0x40, 0x50)), rng.choice((1, 2)), data)
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 600))
    if kind == 1:
        return frame[: rng.randrange(len(frame))]
    if kind == 2:
        length = rng.choice((513, 1024, 65535))
        return iwarp.raw_startup(iwarp.REQUEST_KEY, 0, rng.choice((1, 2)), data, length)
    if kind == 3:
        return iwarp.raw_startup(rng.choice((iwarp.REPLY_KEY, rng.randbytes(16))), 0, 1, data)
    return mutate(rng, frame)
