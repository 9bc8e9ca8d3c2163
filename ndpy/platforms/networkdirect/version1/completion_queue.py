"""Completion queues of version 1. They report to the adapter's one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy.platforms.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.platforms.networkdirect.native_calls import check, create_version1, lib

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.version1.adapter import Version1Adapter


class Version1CompletionQueue(NetworkDirectCompletionQueue):
    _adapter: Version1Adapter
    _native_provider = staticmethod(lib.version1_provider_table)
    _native_drain = staticmethod(lib.version1_drain)

    def _new_cq(self, depth: int) -> Any:
        create_queue = lib.INDAdapter_CreateCompletionQueue
        return create_version1(
            "create completion queue", "INDCompletionQueue", create_queue, self._adapter._native, depth
        )

    def _native_notify(self, kind: int, overlapped: Any) -> int:
        return int(lib.INDCompletionQueue_Notify(self._cq, kind, overlapped))

    def _native_resize(self, depth: int) -> None:
        check("resize", lib.INDCompletionQueue_Resize(self._cq, depth))
