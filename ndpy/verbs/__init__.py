"""The public classes over libibverbs and librdmacm, and what only verbs has."""

from ndpy.verbs.adapter import VerbsAdapter, open_adapter
from ndpy.verbs.allocation import address_of, allocate, export, pointer_of
from ndpy.verbs.devices import list_adapters, why_no_adapter
from ndpy.verbs.endpoint import Endpoint
from ndpy.verbs.poller import VerbsPoller as Poller

__all__ = [
    "Endpoint",
    "Poller",
    "VerbsAdapter",
    "address_of",
    "allocate",
    "export",
    "list_adapters",
    "open_adapter",
    "pointer_of",
    "why_no_adapter",
]
