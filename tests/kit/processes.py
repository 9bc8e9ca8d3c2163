"""Programs that tests start. Their output is read line by line, every wait has a deadline, and no process is left.

    with start_example("pingpong", "server", "--port", "0") as server:
        port = server.wait_for(r"listening on \\S+ port (\\d+)")[1]
        ...
        result = server.finish()

At the end of the block the process is killed if it still runs. Only processes that were started here are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
import pytest

import ndpy
from kit.deadlines import PROGRAM_DEADLINE_S as DEADLINE_S
from kit.deadlines import wait_until
from kit.starting import create_process
from ndpy.platforms.verbs import distribution, softverbs

INTERRUPTIBLE = Path(__file__).resolve().parent / "interruptible.py"
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Shorter than the deadline, so the example itself says which of its steps did not end.
STEP_LIMIT_S = 40


@dataclass(frozen=True)
class Result:
    """How a process ended, and what it wrote."""

    status: int
    out: str
    err: str
    seconds: float


class Process:
    """A running program. Its standard output and error are collected as they come.

    variables: of its environment, besides those of this process.
    """

    def __init__(self, *command: str | Path, variables: Mapping[str, str] | None = None) -> None:
        self.command = [str(word) for word in command]
        self._started = time.monotonic()
        self._texts = {"out": "", "err": ""}
        self._changed = threading.Condition()
        # The programs under test use the ndpy that the tests use.
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(ndpy.__file__).parent.parent),
            **(variables or {}),
        }
        self.popen = create_process(
            lambda: subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
        )
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("out", self.popen.stdout), ("err", self.popen.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            with self._changed:
                self._texts[name] += line
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(DEADLINE_S)
        with contextlib.suppress(OSError):
            self.popen.stdin.close()  # type: ignore[union-attr]
        for reader, pipe in zip(self._readers, (self.popen.stdout, self.popen.stderr), strict=True):
            # A process that it started may still hold the other end.
            reader.join(5)
            if not reader.is_alive():
                pipe.close()  # type: ignore[union-attr]
        if kind is not None:
            print(self._report())

    def _report(self) -> str:
        parts = (f"--- {name}\n{text}" for name, text in self._texts.items() if text)
        return "\n".join([f"$ {' '.join(self.command)} (status {self.popen.returncode})", *parts])

    def wait_for(self, pattern: str, timeout_s: float = DEADLINE_S, *, stream: str = "out") -> re.Match[str]:
        """Wait for a match in the standard output, or with stream="err" in standard error. The test fails at the
        deadline or at the end of the output.
        """

        def look() -> re.Match[str] | bool:
            found = re.search(pattern, self._texts[stream])
            return found or not any(reader.is_alive() for reader in self._readers)

        deadline = time.monotonic() + timeout_s
        with self._changed:
            # The readers report each line but not their own end, so check for their end every 0.1 s.
            while not (found := look()) and time.monotonic() < deadline:
                self._changed.wait(0.1)
        if not isinstance(found, re.Match):
            pytest.fail(f"no {pattern!r} in the output within {timeout_s:g} s of\n{self._report()}")
        return found

    def say(self, *words: object) -> None:
        """Write a line to its standard input."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()

    def interrupt(self) -> None:
        """Interrupt a program of start_python() as Ctrl-C does."""
        self._wait_until_asleep()
        self.say()

    def _wait_until_asleep(self) -> None:
        """Wait until the main thread sleeps, for some seconds at most.

        CPython checks for signals before it waits. A signal that comes between this check and the
        system call does not end the wait.
        """
        status = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/status")
        deadline = time.monotonic() + 5
        before = None
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                text = status.read_text()
                found = re.search(r"State:\s+S(?s:.*)voluntary_ctxt_switches:\s+(\d+)\nnonvol", text)
                now = found and found[1]
                if now and now == before:
                    return
                before = now
            time.sleep(0.1)
            if not status.exists():
                # Not Linux, or the process has ended.
                return

    def finish(self, timeout_s: float = DEADLINE_S) -> Result:
        """Wait for its end. The test fails at the deadline."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s:\n{self._report()}")
        seconds = time.monotonic() - self._started
        for reader in self._readers:
            reader.join(5)
        return Result(self.popen.returncode, self._texts["out"], self._texts["err"], seconds)

    def succeed(self, timeout_s: float = DEADLINE_S) -> Result:
        """Wait for its end. The test fails unless its status is 0."""
        result = self.finish(timeout_s)
        if result.status:
            pytest.fail(f"failed:\n{self._report()}")
        return result


def start_python(program: Path, *arguments: str | int | Path, variables: Mapping[str, str] | None = None) -> Process:
    """Run a program with this Python. An object that it forgets to close shows as a warning on standard error.

    variables: of its environment, besides those of this process.
    """
    words = ("-W", "default::ResourceWarning", INTERRUPTIBLE, program, *map(str, arguments))
    return Process(sys.executable, *words, variables=variables)


def start_example(name: str, *arguments: str | int | Path, logged: bool = False) -> Process:
    """Run examples/NAME.py; see start_python(). Each of its steps may take STEP_LIMIT_S.

    logged: standard error gets what ndpy logs, for wait_until_connected().
    """
    limit = () if name == "hello" else ("--timeout", STEP_LIMIT_S)
    variables = {"NDPY_TEST_LOGGED": "1"} if logged else None
    return start_python(EXAMPLES / f"{name}.py", *arguments, *limit, variables=variables)


def wait_until_connected(process: Process, connections: int = 1) -> None:
    """Wait until a program of ndpy.aio that is logged has so many connections."""
    process.wait_for(rf"(?s)( to open: .*){{{connections}}}", stream="err")


def foreign_environment() -> dict[str, str]:
    """The environment in which a program without ndpy uses the adapter under test. soft0 is in libraries of ndpy's."""
    return softverbs.environment(softverbs.folder(), os.environ) if softverbs.is_asked_for() else dict(os.environ)


def start_installed(name: str, thing: str, *arguments: str | int) -> Process:
    """Run a program of a system package on the adapter under test. If it is not installed, the test fails.

    thing: what ndpy.platforms.verbs.distribution calls the program.
    """
    path = shutil.which(name)
    if path is None:
        pytest.fail(_not_installed(name, thing))
    return Process(path, *map(str, arguments), variables=foreign_environment())


def start_program(config: pytest.Config, name: str, thing: str, *arguments: str | int) -> Process:
    """The same, but the test skips if the program is not installed. With --adapter it fails."""
    if shutil.which(name) is None and not config.getoption("--adapter"):
        pytest.skip(_not_installed(name, thing))
    return start_installed(name, thing, *arguments)


def _not_installed(name: str, thing: str) -> str:
    return f"{name} is not installed; {distribution.read().install(thing)}"


def free_ports(count: int) -> list[int]:
    """Ports that no TCP socket uses now, and that no system chooses by itself.
    RDMA has its own ports, except on iWARP.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(20000, 32000)
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
        return ports


def free_port() -> int:
    return free_ports(1)[0]


def wait_for_rdma_listener(process: Process, port: int) -> None:
    """Wait until the process listens on an RDMA port.

    The kernel lists the connection manager's identifiers, but not their ports. On soft0 the port is one of TCP.
    """
    if softverbs.is_asked_for():
        wait_for_tcp_listener(process, port)
        return

    def listens() -> bool:
        if process.popen.poll() is not None:
            process.finish()
            pytest.fail("the server ended before it listened")
        listing = subprocess.run(
            ["rdma", "-j", "resource", "show", "cm_id"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return any(
            entry.get("pid") == process.popen.pid and entry.get("state") == "LISTEN"
            for entry in json.loads(listing.stdout or "[]")
        )

    wait_until(listens, f"{process.command[0]} listens", DEADLINE_S)


def wait_for_tcp_listener(process: Process, port: int) -> None:
    """Wait until the process listens on a TCP port, without connecting to it."""

    def listens() -> bool:
        if process.popen.poll() is not None:
            process.finish()
            pytest.fail("the server ended before it listened")
        return any(
            socket.pid == process.popen.pid and socket.laddr.port == port and socket.status == psutil.CONN_LISTEN
            for socket in psutil.net_connections("tcp")
        )

    wait_until(listens, f"{process.command[0]} listens on TCP port {port}", DEADLINE_S)
