"""The interface of a monitor of memory. The registration cache uses it, and a platform supplies it
(Adapter._monitor()).
"""

from __future__ import annotations

from typing import Any, Protocol


class Monitor(Protocol):
    """Watches ranges of memory for one cache, and calls back in the adapter's thread when one of them has changed.

    A watch is a value that only the platform understands. Its range has changed if a part of it was unmapped, moved or
    emptied.
    """

    def watch(self, start: int, end: int) -> Any:
        """Watch a range of addresses from now on. Raises UnsupportedError, with the reason, if that is impossible."""

    def changed(self, watch: Any, /) -> int:
        """Return whether the range has changed, or may have changed. Takes no lock."""

    def unwatch(self, watch: Any, /) -> None:
        """End a watch."""

    def close(self) -> None:
        """End the monitor. Call it after the last unwatch(). Harmless when repeated."""
