"""`--hosts`: the ranks are started over ssh by ClusterShell, and then speak by the rendezvous.

The process that the user started measures nothing. It often runs outside the cluster, on a machine without an adapter.
Whoever wants it measured names its machine among the hosts.

A member learns the token from its standard input, because others can read command lines. It ends when that input ends:
after an interrupt, a crash of the process here, and a broken connection.

All members read the same. ClusterShell's tree mixes up what different workers write by one gateway. So a member does
not know its rank: it makes a large number up and writes it to its standard output, of which ClusterShell knows the
host. At the rendezvous it gives that number.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ndpy.fleet.engines.rendezvous import Hub
from ndpy.fleet.engines.start import EngineError, Start, own_addresses, random_token
from ndpy.tools.cli.channel import Arguments, BadRequest, encode, printable

_END_S = 1.0
_JOIN_S = 5.0
_LINES = 3
_LINE_LIMIT = 1 << 16
_MOST_HOSTS = 256
#: The number that a member makes up. No rank is so large.
_LEAST_CLAIM = 1 << 62
_CLAIM = re.compile(rb"member (\d{19})")
# Of a shell that found no program, and of ssh itself.
_NOT_FOUND, _SSH_FAILED = 127, 255


def _cluster_shell(module: str) -> Any:
    """A module of ClusterShell. Raises EngineError without it."""
    if importlib.util.find_spec("ClusterShell") is None:
        raise EngineError(
            "--hosts needs ClusterShell, which does not exist for Windows; start `ndpy fleet` on each machine with "
            "RANK, WORLD_SIZE, MASTER_ADDR and NDPY_FLEET_TOKEN"
            if sys.platform == "win32"
            else "--hosts needs ClusterShell: pip install 'ndpy[fleet]'"
        )
    return importlib.import_module(f"ClusterShell.{module}")


def hosts_of(node_set: str) -> tuple[str, ...]:
    """The hosts of a node set such as "n[1-4],gpu7" or "@rack1". Raises EngineError."""
    library = _cluster_shell("NodeSet")
    try:
        hosts = tuple(map(str, library.NodeSet(node_set)))
    except library.NodeSetException as error:
        raise EngineError(f"--hosts {node_set!r}: {error}") from None
    wrong = [host for host in hosts if host.startswith("-")]
    if wrong or not hosts:
        raise EngineError(f"--hosts {node_set!r}: {f'{wrong[0]} is not a host' if wrong else 'it has no hosts'}")
    return hosts


def start_of(hosts: Sequence[str], environment: Mapping[str, str], port: int, token: bytes) -> Start:
    """What the members are told. Each of these addresses of this machine is tried."""
    token = token or environment.get("NDPY_FLEET_TOKEN", "").encode() or random_token()
    own = filter(None, (environment.get("MASTER_ADDR"), socket.gethostname(), *own_addresses()))
    return Start("ssh", 0, len(hosts), tuple(own), port, token)


class Remote:
    """The processes on the hosts. Those that end are told to the hub, with what they or ssh wrote."""

    def __init__(
        self, hub: Hub, start: Start, hosts: Sequence[str], program: str, options: str, adapters: Sequence[str]
    ) -> None:
        self._hub, self._start, self._hosts = hub, start, hosts
        self._command = f"{program} fleet --member {shlex.join(adapters)}".rstrip()
        self._ranks = {host: rank for rank, host in enumerate(hosts)}
        self._said: dict[str, list[str]] = {}
        self._worker: Any = None
        self._is_over = False
        events = _cluster_shell("Event").EventHandler()
        events.ev_read, events.ev_hup = self._read, self._ended
        events.ev_msg, events.ev_timer = self._end, self._abort
        self._events = events
        # Its thread and no other may use it.
        self._task: Any = None
        self._port: Any = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self._thread.start()

    def _run(self, options: str) -> None:
        try:
            task = self._task = _cluster_shell("Task").task_self()
            # All of them stay until the end, so none can wait for another's.
            task.set_info("fanout", len(self._hosts) + 1)
            task.set_info("ssh_options", options)
            self._port = task.port(handler=self._events, autoclose=True)
            self._worker = task.shell(self._command, nodes=",".join(self._hosts), handler=self._events)
            start = self._start
            told = {"hosts": " ".join(start.hosts), "port": self._hub.port, "token": encode(start.token)}
            self._worker.write(json.dumps(told).encode() + b"\n")
            self._ready.set()
            task.run()
        except Exception as error:
            for rank in self._ranks.values():
                self._hub.tell(rank, f"ClusterShell could not start it: {error}", "try `clush -w HOST true`")
        finally:
            self._ready.set()

    def close(self) -> None:
        """End all of them: their standard input ends, and after a second so do the connections."""
        self._is_over = True
        self._ready.wait(_JOIN_S)
        if self._thread.is_alive() and self._port is not None:
            self._port.msg_send("end")
        self._thread.join(_JOIN_S)

    # ---- in the task's thread ----

    def _read(self, worker: Any, node: str, stream: str, text: bytes) -> None:
        lines = self._said.setdefault(node, [])
        claim = _CLAIM.fullmatch(text)
        if claim:
            self._hub.expect(int(claim[1]), self._ranks[node])
        elif text.strip():
            lines.append(printable(text.decode(errors="replace"), 200))
            del lines[:-_LINES]

    def _ended(self, worker: Any, node: str, status: int | None) -> None:
        if self._is_over:
            return
        said = "; ".join(self._said.get(node, ())) or f"`{self._command}` ended there with status {status}"
        remedy = {
            _SSH_FAILED: f"make `ssh -o BatchMode=yes {node} true` work here",
            _NOT_FOUND: "install ndpy there, or say with --program how it is started",
        }.get(status or 0, "install the same ndpy on all machines, and look what it says there")
        self._hub.tell(self._ranks[node], said, remedy)

    def _end(self, port: Any, message: Any) -> None:
        self._worker.set_write_eof()
        self._task.timer(_END_S, self._events, autoclose=True)

    def _abort(self, timer: Any) -> None:
        self._task.abort()


# ---- on a host ----


def told_by_standard_input(environment: Mapping[str, str]) -> Start:
    """What this member is told. Its rank is the number that it says. Raises EngineError."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
        # Unbuffered: a thread that waits in a buffered read stops the interpreter from ending.
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    try:
        told = json.loads(line)
        arguments = Arguments(told if isinstance(told, dict) else {})
        hosts = arguments.text("hosts", 1 << 14).split()[:_MOST_HOSTS]
        port, token = arguments.integer("port", 1, 65535), arguments.data("token", 4096)
    except (ValueError, BadRequest) as error:
        raise EngineError(
            f"--member is for `ndpy fleet --hosts`, which tells it more by standard input ({error})"
        ) from None
    claim = _LEAST_CLAIM + secrets.randbelow(_LEAST_CLAIM)
    click.echo(f"member {claim}")
    # Where the connection came from: the best address of whoever started this, unless another host was between.
    client = environment.get("SSH_CONNECTION", "").split(" ")[0]
    return Start("ssh", claim, 0, tuple(dict.fromkeys([*filter(None, [client]), *hosts])), port, token)


def end_with_standard_input() -> None:
    """Interrupt the main thread when the standard input ends."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if sys.platform == "win32":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        # The signal ends a system call of the thread that gets it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
