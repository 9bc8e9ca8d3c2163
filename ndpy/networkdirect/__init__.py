"""The public classes over NetworkDirect providers, and what only Windows has.

The names are imported when they are used, since the catalogue's rules and the search for softnd work on any system.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndpy.networkdirect.adapter import NetworkDirectAdapter, open_adapter
    from ndpy.networkdirect.allocation import allocate
    from ndpy.networkdirect.devices import NetworkDirectAdapterInfo, list_adapters, why_no_adapter
    from ndpy.networkdirect.library import ffi
    from ndpy.networkdirect.poller import NetworkDirectPoller as Poller

_MODULES = {
    "NetworkDirectAdapter": "adapter",
    "NetworkDirectAdapterInfo": "devices",
    "Poller": "poller",
    "allocate": "allocation",
    "ffi": "library",
    "list_adapters": "devices",
    "open_adapter": "adapter",
    "why_no_adapter": "devices",
}
_RENAMED = {"Poller": "NetworkDirectPoller"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = globals()[name] = getattr(module, _RENAMED.get(name, name))
    return value


__all__ = [
    "NetworkDirectAdapter",
    "NetworkDirectAdapterInfo",
    "Poller",
    "allocate",
    "ffi",
    "list_adapters",
    "open_adapter",
    "why_no_adapter",
]
