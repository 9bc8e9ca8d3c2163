"""The place of a VM: alone, or as one of several hosts on a network of their own."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ndpy.tools.standard_output import OutputError

# When a host's command has failed or its VM has ended, the others have this long to end by themselves.
GRACE_S = 30.0


def write_all(fd: int, data: bytes) -> None:
    """Write all the bytes. Raises OutputError for standard output, but BrokenPipeError if its reader has closed it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another program made the output non-blocking
            select.select([], [fd], [])
        except BrokenPipeError:
            raise
        except OSError as error:
            if fd != 1:
                raise
            raise OutputError(error) from error


@dataclass(frozen=True)
class Wire:
    """One Ethernet card of a VM: its MAC address, its IPv4 and IPv6 addresses, and its options for QEMU's -netdev and
    -device.
    """

    mac: str
    ipv4: str
    ipv6: str
    netdev: str
    device_options: str = ""


class Together:
    """What the VMs of one run know of each other. Each VM has a thread, and asks here several times a second."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._ready: set[int] = set()
        self._kill: dict[int, Callable[[], None]] = {}
        #: A host's command failed, or its VM ended without being asked to. The others have GRACE_S left.
        self.failed = False
        #: All of them are to end now.
        self.stopped = False
        # The hosts whose power was cut because another one asked for it.
        self.cut: set[int] = set()

    def is_ready(self, number: int, kill: Callable[[], None]) -> None:
        """This host can begin. kill: cuts its power."""
        with self._lock:
            self._ready.add(number)
            self._kill[number] = kill

    def has_ended(self, number: int) -> None:
        """This host's VM is gone, and the number of its process may soon be another's."""
        with self._lock:
            self._kill.pop(number, None)

    @property
    def all_ready(self) -> bool:
        return len(self._ready) == self._count

    def cut_power_of_others(self, number: int) -> None:
        with self._lock:
            for other, kill in self._kill.items():
                if other != number and other not in self.cut:
                    self.cut.add(other)
                    kill()


def _to_fd(fd: int) -> Callable[[bytes], None]:
    return lambda data: write_all(fd, data)


@dataclass
class Place:
    """Where a VM is, and where its output goes."""

    number: int = 1
    wires: tuple[Wire, ...] = ()
    # Variables that the command gets in addition to the caller's.
    environment: dict[str, str] = field(default_factory=dict)
    out: Callable[[bytes], None] = field(default_factory=lambda: _to_fd(1))
    err: Callable[[bytes], None] = field(default_factory=lambda: _to_fd(2))
    together: Together = field(default_factory=Together)
