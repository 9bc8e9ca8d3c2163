"""Runs a command on several hosts: VMs with an Ethernet between them, each with one software adapter.

Each VM has two cards. The adapter is on the first one, whose network a test may disturb. The second one is for the test
itself. QEMU sends each frame of a card as a datagram to a Unix socket of the other VM. So nothing leaves this machine.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path

from ndpy.tools.machines import SetupError, vm
from ndpy.tools.machines.place import Place, Together, Wire, write_all

# The MTU of the adapter's network. RoCE packets of 4096 bytes fit.
MTU = 4200

# Longer lines are cut into pieces, so that output without a line's end is shown too.
_LONGEST_LINE = 65536


class Labelled:
    """Passes whole lines on, each with a label. finish() passes on what has no end of line."""

    def __init__(self, label: str, sink: Callable[[bytes], None]) -> None:
        self._label = label.encode()
        self._sink = sink
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._sink(b"".join(self._label + line + b"\n" for line in lines))

    def finish(self) -> None:
        if self._rest:
            self(b"\n")


def _locked(lock: threading.Lock, fd: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        with lock:
            write_all(fd, data)

    return write


def _wires(folder: Path, number: int) -> tuple[Wire, ...]:
    """The two cards of host 1 or 2."""
    other = 3 - number
    wires = []
    for network, (ipv4, ipv6, options) in enumerate(
        [
            ("203.0.113.{}", "2001:db8:2::{}", f",host_mtu={MTU}"),
            ("198.18.0.{}", "2001:db8:3::{}", ""),
        ],
        1,
    ):
        mine, peers = folder / f"{network}-{number}", folder / f"{network}-{other}"
        netdev = f"dgram,local.type=unix,local.path={mine},remote.type=unix,remote.path={peers}"
        mac = f"52:54:00:12:{network:02x}:{number:02x}"
        wires.append(Wire(mac, ipv4.format(number), ipv6.format(number), netdev, options))
    return tuple(wires)


def _environment(wires: Sequence[Wire], peers: Sequence[Wire], number: int) -> dict[str, str]:
    return {
        "NDPY_HOST": str(number),
        "NDPY_ADDRESS": wires[0].ipv4,
        "NDPY_PEER_ADDRESS": peers[0].ipv4,
        "NDPY_CONTROL_ADDRESS": wires[1].ipv4,
        "NDPY_PEER_CONTROL_ADDRESS": peers[1].ipv4,
        "NDPY_KILL": "/run/ndpy/kill",
    }


def run(command: Sequence[str], machine: vm.Machine, limit_s: float, say: Callable[[str], None]) -> list[vm.Outcome]:
    """Run `command` on two hosts. It begins when all of them have booted.

    Each line of output begins with the number of its host. The environment tells a command which host it is on
    (NDPY_HOST) and both hosts' addresses. Writing a line to the file that NDPY_KILL names cuts the other host's power.
    If a command fails, the other one has GRACE_S seconds to end.
    Returns the outcome of each host. Raises SetupError if a VM cannot be started or set up.
    """
    if len(machine.adapters) != 1:
        raise ValueError("two hosts have one kind of adapter")
    together = Together(2)
    lock = threading.Lock()
    merged = os.path.sameopenfile(1, 2)

    def work(place: Place) -> vm.Outcome:
        try:
            number = place.number
            return vm.run(command, machine, limit_s, lambda text: say(_label(number, text)), place, merged)
        except BaseException:
            together.stopped = True
            raise

    # Not $TMPDIR: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ndpy-hosts-", dir="/tmp") as name:
        wires = {number: _wires(Path(name), number) for number in (1, 2)}
        places = [
            Place(
                number,
                wires[number],
                _environment(wires[number], wires[3 - number], number),
                Labelled(f"{number}: ", _locked(lock, 1)),
                Labelled(f"{number}: ", _locked(lock, 2)),
                together,
            )
            for number in (1, 2)
        ]
        with futures.ThreadPoolExecutor(2) as threads:
            running = [threads.submit(work, place) for place in places]
            try:
                futures.wait(running)
            finally:
                together.stopped = True
                # Not left to the end of the block: Thread.join() does not wait again after Ctrl-C before Python 3.13.
                futures.wait(running)
        for place in places:
            for sink in (place.out, place.err):
                assert isinstance(sink, Labelled)
                sink.finish()
    for place, future in zip(places, running, strict=True):
        error = future.exception()
        if isinstance(error, SetupError):
            raise SetupError(_label(place.number, str(error)))
        if error is not None and not isinstance(error, vm.Stopped):
            raise error
    outcomes = [future.result() for future in running]
    return [replace(outcome, reason=_label(i, outcome.reason)) for i, outcome in enumerate(outcomes, 1)]


def _label(number: int, text: str) -> str:
    return f"host {number}: {text}" if text else ""
