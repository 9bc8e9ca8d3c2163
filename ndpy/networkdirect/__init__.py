"""The public classes over NetworkDirect providers, and what only Windows has."""

from ndpy.networkdirect.adapter import NetworkDirectAdapter, open_adapter
from ndpy.networkdirect.devices import NetworkDirectAdapterInfo, list_adapters, why_no_adapter
from ndpy.networkdirect.memory import address_of, allocate
from ndpy.networkdirect.poller import NetworkDirectPoller as Poller

__all__ = [
    "NetworkDirectAdapter",
    "NetworkDirectAdapterInfo",
    "Poller",
    "address_of",
    "allocate",
    "list_adapters",
    "open_adapter",
    "why_no_adapter",
]
