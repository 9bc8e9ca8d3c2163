"""What the registration cache asks of a monitor of memory, which a platform supplies (Adapter._monitor())."""

from __future__ import annotations

from typing import Any, Protocol


class Monitor(Protocol):
    """Watches ranges of memory for one cache, and calls back in the adapter's thread when one of them has changed.

    A watch is a value of the platform's own. Its range has changed when any part of it was unmapped, moved or emptied.
    """

    def watch(self, start: int, end: int) -> Any:
        """Watch a range of addresses from now on. UnsupportedError, saying why, for memory that cannot be watched."""

    def changed(self, watch: Any, /) -> int:
        """Whether the range has changed, or may have. Takes no lock."""

    def unwatch(self, watch: Any, /) -> None:
        """End a watch."""

    def close(self) -> None:
        """End the monitor. Call it after the last unwatch()."""
