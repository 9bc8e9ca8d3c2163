"""The GPUs whose memory adapters may reach, and how far from an adapter they are.

Source: "PCI Code and ID Assignment", base class 03h; Linux, Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ndpy.vocabulary.system_files import names, path, read, read_number

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
# Modules by which the kernel registers memory of a GPU by its address.
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")

# What lies between two PCI functions, from the nearest on.
_DISTANCES = (
    "behind the same PCIe switch",
    "on the same host bridge",
    "on the same NUMA node, by another host bridge",
    "by another host bridge",
    "on another NUMA node",
)


class Gpu(NamedTuple):
    """function: its PCI address."""

    function: str
    folder: Path


def gpus() -> list[Gpu]:
    """NVIDIA's GPUs of this machine."""
    bus = path("/sys/bus/pci/devices")
    return [
        Gpu(function, bus / function)
        for function in names(bus)
        if read(bus / function / "vendor") == _NVIDIA and read(bus / function / "class").startswith(_DISPLAY)
    ]


def by_distance(adapter: str) -> dict[str, list[Gpu]]:
    """The GPUs for each distance from an adapter, the nearest first. Empty for an adapter in software."""
    found: dict[str, list[Gpu]] = {distance: [] for distance in _DISTANCES}
    folder = path("/sys/class/infiniband", adapter, "device")
    if folder.exists():
        for gpu in gpus():
            found[_distance(folder, gpu.folder)].append(gpu)
    return {distance: some for distance, some in found.items() if some}


def _distance(first: Path, second: Path) -> str:
    common = 0
    for one, other in zip(bridges(first), bridges(second), strict=False):
        if one != other:
            break
        common += 1
    if common:
        # The first is the host bridge, and the second its port to a switch.
        return _DISTANCES[0] if common > 1 else _DISTANCES[1]
    nodes = read_number(first / "numa_node"), read_number(second / "numa_node")
    if None in nodes:
        return _DISTANCES[3]
    return _DISTANCES[2] if nodes[0] == nodes[1] else _DISTANCES[4]


def bridges(folder: Path) -> tuple[str, ...]:
    """The bridges that lead to a function, the host bridge first."""
    place = folder.resolve().parent
    top = path("/sys/devices").resolve()
    return place.relative_to(top).parts if place.is_relative_to(top) else ()


def has_peer_module() -> bool:
    """Whether the kernel registers memory of a GPU by its address."""
    return any(path("/sys/module", name).is_dir() for name in _PEER_MODULES)
