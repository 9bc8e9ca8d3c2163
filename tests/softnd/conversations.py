"""What two ends of different kinds say to each other in these tests: rping's conversation, and ndpy's examples."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import psutil
from hostile import ROOT, Program, WindowsProcess, dll
from kit.deadlines import PROGRAM_DEADLINE_S, wait_until

ROUND_TRIPS = 20
SERVED = ROOT / "tests/softnd/iwarp.py"
# ndpy's examples, with the arguments that make them servers.
EXAMPLES = {
    "pingpong 64": ("pingpong.py", "server"),
    "pingpong 100000": ("pingpong.py", "server"),
    "file": ("file_server.py", "serve", "--once", str(SERVED)),
}


def server_of(name: str) -> tuple[Path, list[str]]:
    """Return the example and the arguments that make it a server."""
    program, *arguments = EXAMPLES[name]
    return ROOT / "examples" / program, arguments


def client_of(name: str, host: str) -> tuple[Path, list[str]]:
    """Return the example and the arguments that make it a client."""
    if name == "file":
        arguments = ["fetch", host]
    else:
        arguments = ["client", host, "--size", name.split()[1], "--count", str(ROUND_TRIPS)]
    return server_of(name)[0], arguments


def assert_client_verified(name: str, lines: list[str]) -> None:
    """Check that the client of an example found all bytes right."""
    text = "\n".join(lines)
    if name == "file":
        assert f"SHA-256 verified: {hashlib.sha256(SERVED.read_bytes()).hexdigest()}" in text
        assert "read after revocation refused" in text
    else:
        assert f"verified {ROUND_TRIPS} round trips of {name.split()[1]} bytes" in text


def assert_server_verified(name: str, lines: list[str]) -> None:
    expected = "window invalidated" if name == "file" else f"verified {ROUND_TRIPS} messages"
    assert expected in "\n".join(lines)


def example_on_softnd(example: tuple[Path, list[str]], port: int, limit_s: float) -> WindowsProcess:
    """Run the example on softnd, under Windows Python."""
    program, arguments = example
    options = ["--port", port, "--adapter", "softnd0"]
    return WindowsProcess(program, *arguments, *options, limit_s=limit_s, NDPY_PROVIDER=dll())


def example_on_soft0(example: tuple[Path, list[str]], port: int) -> Program:
    program, arguments = example
    command = [sys.executable, "-B", program, *arguments, "--port", port, "--adapter", "soft0"]
    return Program(command, dict(os.environ))


def rping_on_soft0(*arguments: object) -> Program:
    """Run the rping of rdma-core on soft0."""
    return Program([sys.executable, "-m", "ndpy", "soft", "run", "--", "rping", *arguments], dict(os.environ))


def wait_until_listening(program: Program, port: int) -> None:
    """Wait until the program listens on a TCP port, without connecting to it."""

    def listens() -> bool:
        assert program.process.poll() is None, program.lines
        return any(
            connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
            for connection in psutil.net_connections("tcp")
        )

    wait_until(listens, f"a program listens on TCP port {port}", PROGRAM_DEADLINE_S)
