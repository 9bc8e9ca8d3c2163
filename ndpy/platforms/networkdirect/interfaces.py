"""The network interfaces of a Windows machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psutil

from ndpy.vocabulary.info import NetworkInterface, is_same_address

T = TypeVar("T")

_TRIES = 10


def statistics() -> dict[str, Any]:
    """What psutil.net_if_stats() returns: whether an interface is up, and its MTU."""
    return _asked(psutil.net_if_stats)


def addresses() -> dict[str, list[Any]]:
    """What psutil.net_if_addrs() returns."""
    return _asked(psutil.net_if_addrs)


def with_any_of(wanted: Sequence[str]) -> tuple[NetworkInterface, ...]:
    """The interfaces that have any of these addresses, with these. Windows does not tell what kind they are."""
    found = []
    for name, entries in addresses().items():
        own = [entry.address for entry in entries]
        if own := [address for address in wanted if any(is_same_address(address, entry) for entry in own)]:
            found.append(NetworkInterface(name, "unknown", None, None, tuple(own)))
    return tuple(found)


def _asked(ask: Callable[[], T]) -> T:
    # GetAdaptersAddresses() is called for the size and then for the list, which fails if an interface has come
    # meanwhile.
    for _ in range(_TRIES - 1):
        try:
            return ask()
        except (OSError, RuntimeError):
            continue
    return ask()
