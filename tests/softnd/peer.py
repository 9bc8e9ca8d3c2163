"""Another process of a test. It runs a function of a test module; both exchange lines of JSON.

    with Peer("test_h_processes", "server", 5) as peer: ... peer.receive() ... peer.send("go")

This calls server(channel, 5) in the other process. `channel` has send and receive as well.
"""

from __future__ import annotations

import importlib
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from kit.deadlines import PROGRAM_DEADLINE_S as DEADLINE_S


class Channel:
    """The peer's end: standard input and output."""

    def send(self, value: Any) -> None:
        sys.stdout.write("=" + json.dumps(value) + "\n")
        sys.stdout.flush()

    def receive(self) -> Any:
        line = sys.stdin.readline()
        if not line:
            sys.exit(3)  # the test has ended
        return json.loads(line)


class Peer:
    """The test's end."""

    def __init__(self, module: str, function: str, *arguments: Any, **environment: str) -> None:
        import os

        # The peer's end does not need it, and does not search the folder above.
        from kit.starting import create_process

        command = [sys.executable, __file__, module, function, json.dumps(arguments)]
        self.process = create_process(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **environment},
            )
        )
        self.output: list[str] = []
        self._lines: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("="):
                self._lines.put(line[1:])
            else:
                self.output.append(line)
        self._lines.put(None)

    def send(self, value: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float = DEADLINE_S) -> Any:
        line = self._lines.get(timeout=timeout_s)
        assert line is not None, "the peer ended:\n" + "".join(self.output)
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def finish(self) -> int:
        """Wait for a peer that ends by itself; return its exit status."""
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        if kind is not None:
            print("output of the other process:\n" + "".join(self.output))


if __name__ == "__main__":
    _, name, function, arguments = sys.argv
    getattr(importlib.import_module(name), function)(Channel(), *json.loads(arguments))
