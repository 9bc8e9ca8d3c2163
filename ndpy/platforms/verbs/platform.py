"""The names that ndpy/platforms/__init__.py imports from verbs."""

from __future__ import annotations

from ndpy.platforms.verbs.adapter import VerbsAdapter as open_adapter
from ndpy.platforms.verbs.adapter_info import explain_absence, list_adapters, list_named
from ndpy.platforms.verbs.allocation import allocate
from ndpy.platforms.verbs.counters import read_counters
from ndpy.platforms.verbs.device_files import why_no_adapter
from ndpy.platforms.verbs.poller import VerbsPoller as Poller
from ndpy.platforms.verbs.softverbs import describe_unlisted, is_listed_by_name_only

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
