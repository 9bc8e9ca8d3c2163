"""The counters that the kernel shows of an adapter's ports."""

from __future__ import annotations

from ndpy.platforms.verbs.adapter_info import folder_of
from ndpy.vocabulary.counters import Counters

_FOLDERS = ("counters", "hw_counters")
# How long the kernel's copy of hw_counters may be used, in milliseconds.
_NO_COUNTERS = {"lifespan"}


def read_counters(name: str) -> Counters:
    """Read the counters of an adapter. A counter that the adapter does not serve is left out.

    Source: Documentation/ABI/stable/sysfs-class-infiniband of Linux.
    """
    found: Counters = {}
    for port in sorted((folder_of(name) / "ports").glob("[0-9]*"), key=lambda path: int(path.name)):
        counters = {}
        for folder in _FOLDERS:
            for path in sorted((port / folder).glob("*")):
                try:
                    if path.name not in _NO_COUNTERS:
                        counters[path.name] = int(path.read_text())
                except (OSError, ValueError):
                    # Such as EINVAL, or "N/A (no PMA)".
                    continue
        found[int(port.name)] = counters
    return found
