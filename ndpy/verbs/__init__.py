"""The public classes over libibverbs and librdmacm, and what only verbs has."""

from ndpy.verbs.adapter import VerbsAdapter, open_adapter
from ndpy.verbs.allocation import allocate
from ndpy.verbs.devices import list_adapters, why_no_adapter
from ndpy.verbs.library import ffi
from ndpy.verbs.poller import VerbsPoller as Poller

__all__ = [
    "Poller",
    "VerbsAdapter",
    "allocate",
    "ffi",
    "list_adapters",
    "open_adapter",
    "why_no_adapter",
]
