"""The network interfaces of a Windows machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

_TRIES = 10


def statistics() -> dict[str, Any]:
    """What psutil.net_if_stats() returns: whether an interface is up, and its MTU."""
    return _asked(psutil.net_if_stats)


def addresses() -> dict[str, list[Any]]:
    """What psutil.net_if_addrs() returns."""
    return _asked(psutil.net_if_addrs)


def _asked(ask: Callable[[], T]) -> T:
    # GetAdaptersAddresses() is called for the size and then for the list, which fails if an interface has come meanwhile.
    for _ in range(_TRIES - 1):
        try:
            return ask()
        except (OSError, RuntimeError):
            continue
    return ask()
