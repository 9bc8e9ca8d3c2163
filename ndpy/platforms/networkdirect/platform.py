"""What NetworkDirect has for ndpy/platforms/__init__.py. See Platform in ndpy/objects/native_steps.py."""

from __future__ import annotations

from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter
from ndpy.platforms.networkdirect.adapter_info import NetworkDirectAdapterInfo, list_adapters, why_no_adapter
from ndpy.platforms.networkdirect.allocation import allocate
from ndpy.platforms.networkdirect.poller import NetworkDirectPoller as Poller
from ndpy.platforms.networkdirect.version1.adapter import Version1Adapter

__all__ = [
    "Poller",
    "allocate",
    "describe_unlisted",
    "explain_absence",
    "is_listed_by_name_only",
    "list_adapters",
    "list_named",
    "open_adapter",
    "read_counters",
    "why_no_adapter",
]


def open_adapter(info: NetworkDirectAdapterInfo) -> NetworkDirectAdapter:
    """Open an adapter by the version that it is listed with."""
    return Version1Adapter(info) if info.version == 1 else NetworkDirectAdapter(info)


def read_counters(name: str) -> dict[int, dict[str, int]]:
    """No counters: NetworkDirect has none."""
    return {}


def explain_absence(name: str) -> None:
    """Do nothing. Names of adapters are ndpy's own, so there is no reason to tell."""


def list_named(which: str | None) -> None:
    """Every adapter is listed."""


def is_listed_by_name_only(which: str | None) -> bool:
    return False


def describe_unlisted() -> dict[str, str]:
    return {}
