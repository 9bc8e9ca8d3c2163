"""What verbs has for ndpy/platforms/__init__.py. See Platform in ndpy/objects/native_steps.py."""

from __future__ import annotations

from ndpy.errors import UnsupportedError
from ndpy.platforms.verbs import adapter_info
from ndpy.platforms.verbs.adapter import VerbsAdapter as open_adapter
from ndpy.platforms.verbs.adapter_info import explain_absence, list_named
from ndpy.platforms.verbs.allocation import allocate
from ndpy.platforms.verbs.counters import read_counters
from ndpy.platforms.verbs.device_files import why_no_adapter
from ndpy.platforms.verbs.poller import VerbsPoller as Poller
from ndpy.platforms.verbs.softverbs import describe_unlisted, is_listed_by_name_only
from ndpy.vocabulary.info import AdapterInfo

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


def list_adapters(provider: str | None = None, version: int | None = None) -> list[AdapterInfo]:
    """List the devices that can be used. libibverbs finds its providers itself."""
    for given, text in (
        (version, f"version={version!r} is one of NetworkDirect, which only Windows has"),
        (
            provider,
            f"provider={provider!r} names the DLL of a NetworkDirect provider, which only Windows loads; libibverbs "
            "finds its providers itself",
        ),
    ):
        if given is not None:
            raise UnsupportedError(text, operation="list adapters")
    return adapter_info.list_adapters()
