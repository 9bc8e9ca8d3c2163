"""The names that ndpy/platforms.py imports from verbs."""

from __future__ import annotations

from ndpy.verbs.adapter import VerbsAdapter as open_adapter
from ndpy.verbs.adapter_info import explain_absence, list_adapters, why_no_adapter
from ndpy.verbs.allocation import allocate
from ndpy.verbs.poller import VerbsPoller as Poller

__all__ = ["Poller", "allocate", "explain_absence", "list_adapters", "open_adapter", "why_no_adapter"]
