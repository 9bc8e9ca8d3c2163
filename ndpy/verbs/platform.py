"""The names that ndpy/platforms.py imports from verbs."""

from __future__ import annotations

from ndpy.verbs.adapter import VerbsAdapter as open_adapter
from ndpy.verbs.adapter_info import explain_absence, list_adapters, list_named
from ndpy.verbs.allocation import allocate
from ndpy.verbs.counters import read_counters
from ndpy.verbs.device_files import why_no_adapter
from ndpy.verbs.poller import VerbsPoller as Poller
from ndpy.verbs.softverbs import describe_unlisted, is_listed_by_name_only

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
