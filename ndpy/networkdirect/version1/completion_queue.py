"""Completion queues of version 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.networkdirect.native_calls import create_version1, lib

if TYPE_CHECKING:
    from ndpy.networkdirect.version1.adapter import Version1Adapter


class Version1CompletionQueue(NetworkDirectCompletionQueue):
    _adapter: Version1Adapter
    _poll_native = staticmethod(lib.version1_poll)
    _drain_native = staticmethod(lib.version1_drain)

    def _new_native(self, file: Any, depth: int) -> Any:
        # It reports to the adapter's one file.
        return create_version1(
            "create completion queue",
            "INDCompletionQueue",
            lib.INDAdapter_CreateCompletionQueue,
            self._adapter._native,
            depth,
        )

    def _notify_native(self, kind: int, overlapped: Any) -> int:
        return int(lib.INDCompletionQueue_Notify(self._cq, kind, overlapped))

    def _resize_native(self, depth: int) -> int:
        return int(lib.INDCompletionQueue_Resize(self._cq, depth))
