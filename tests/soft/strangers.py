"""Runs stranger.py: as another user, or on another host."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from kit.helpers import DEADLINE_S


class Strangers:
    """The process that forks strangers. Starting Python for each would take longer than the tests."""

    def __init__(self) -> None:
        self.commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("stranger.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self.commands.close()
        self._process.wait(DEADLINE_S)


class Stranger:
    """One run of a function of stranger.py. Leaving the block ends it."""

    all: ClassVar[Strangers]

    def __init__(self, do: str, **arguments: Any) -> None:
        their_input, self._input = os.pipe()
        output, their_output = os.pipe()
        words = json.dumps({"do": do, **arguments}).encode()
        socket.send_fds(self.all.commands, [words], [their_input, their_output])
        os.close(their_input)
        os.close(their_output)
        self._output, self._read = output, b""
        self._process = self.found()["process"]

    def found(self) -> dict[str, Any]:
        """What it found out next."""
        while b"\n" not in self._read:
            assert select.select([self._output], [], [], DEADLINE_S)[0], f"nothing in {DEADLINE_S:g} s"
            more = os.read(self._output, 1 << 16)
            assert more, "the stranger has ended"
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return dict(json.loads(line))

    def tell(self, line: str = "") -> None:
        os.write(self._input, line.encode() + b"\n")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._input)
        os.close(self._output)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


def once(do: str, **arguments: Any) -> dict[str, Any]:
    """What a stranger found out first."""
    with Stranger(do, **arguments) as stranger:
        return stranger.found()
