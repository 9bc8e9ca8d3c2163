"""The distance between an adapter and the processors that the process may use."""

from __future__ import annotations

import os
import sys

from ndpy.vocabulary import system_files
from ndpy.vocabulary.info import AdapterInfo


def parse_cpu_list(text: str) -> set[int]:
    """Return the processors of a list such as "0-3,8"."""
    processors: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            processors.update(range(int(first), int(last or first) + 1))
    return processors


def _usable() -> set[int]:
    """The processors that this process may use. Raises OSError if the system does not tell."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    # It takes long to import.
    import psutil

    try:
        return set(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error) as error:
        raise OSError(str(error)) from error


def placement_warning(info: AdapterInfo) -> str:
    """Return a warning if this process cannot use any processor of the adapter's NUMA node. Otherwise ""."""
    if info.numa_node is None:
        return ""
    try:
        node = system_files.path("/sys/devices/system/node", f"node{info.numa_node}")
        local = parse_cpu_list(system_files.read(node / "cpulist"))
        allowed = _usable()
    except (OSError, ValueError):
        return ""
    if not local or local & allowed:
        return ""
    return (
        f"{info.name} is on NUMA node {info.numa_node}, but this process may only run on processors of other nodes; "
        f"expect about half the bandwidth. Start programs with: numactl --cpunodebind={info.numa_node} "
        f"--membind={info.numa_node} COMMAND"
    )


def usable_processors() -> int:
    """How many processors this process may use."""
    try:
        return len(_usable())
    except OSError:
        return os.cpu_count() or 1
