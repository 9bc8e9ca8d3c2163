"""Shared receive queues over verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.shared_receive_queue import SharedReceiveQueue
from ndpy.platforms.verbs.native_calls import check, ffi, free_once, lib, new_pointer

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter


class VerbsSharedReceiveQueue(SharedReceiveQueue):
    _adapter: VerbsAdapter
    _lib = lib
    _ffi = ffi

    def _native_request(self) -> Any:
        """struct ibv_srq_init_attr."""
        request = ffi.new("struct ibv_srq_init_attr *")
        request.srq_context = ffi.cast("void *", self._serial)
        request.attr.max_wr = self.depth
        request.attr.max_sge = self.max_sge
        return request

    def _native_create(self) -> Any:
        call, request = lib.ibv_create_srq, self._native_request()
        return new_pointer("create shared receive queue", call, self._adapter._domain, request)

    def _native_destroy(self) -> None:
        free_once(self, "_srq", "close shared receive queue", lib.ibv_destroy_srq)

    def _native_modify(self, depth: int, threshold: int) -> None:
        """The provider's queue keeps the depth that it was made with. arm() sets its limit."""

    def _native_arm(self) -> Any:
        if len(self._records) < self._threshold:
            return None
        attributes = ffi.new("struct ibv_srq_attr *")
        attributes.srq_limit = min(self._threshold, self.depth)
        check("arm", lib.ibv_modify_srq(self._srq, attributes, lib.IBV_SRQ_LIMIT))
        # One event notifies everybody who waits.
        return object()

    def _on_limit(self) -> None:
        """Fewer receives than the threshold are left (IBV_EVENT_SRQ_LIMIT_REACHED)."""
        self._end_armed(None)

    def _on_error(self) -> None:
        self._end_armed(
            errors.ProviderError("the adapter reports an error of the queue", operation="shared receive queue")
        )

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return errors.from_errno(operation, number)
