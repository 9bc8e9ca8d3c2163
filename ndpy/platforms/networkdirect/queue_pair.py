"""Queue pairs over NetworkDirect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.memory import Binding, MemoryWindow
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import Owned, with_own_methods
from ndpy.objects.window_requests import BindRequest
from ndpy.platforms.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.platforms.networkdirect.native_calls import (
    CANCELED,
    check,
    create,
    ffi,
    lib,
    release_once,
    status_error,
    status_name,
)
from ndpy.vocabulary.flags import Access, Status

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter


@with_own_methods
class NetworkDirectQueuePair(QueuePair):
    _adapter: NetworkDirectAdapter
    _lib = lib
    _ffi = ffi
    _post_bind = staticmethod(lib.ndpy_post_bind)
    _post_invalidate = staticmethod(lib.ndpy_post_invalidate)
    _free_slots = staticmethod(lib.ndpy_queue_pair_free)
    receive_cq: NetworkDirectCompletionQueue
    initiator_cq: NetworkDirectCompletionQueue

    def _native_create(self) -> Any:
        limits = self.limits
        # Completions of a shared receive queue bring this number back.
        context = ffi.cast("void *", self._serial)
        initiator = (max(limits.initiator_queue_depth, 1), max(limits.max_initiator_sge, 1), limits.inline_data_size)
        if self.srq is None:
            return create(
                "create queue pair",
                "IND2QueuePair",
                lib.IND2Adapter_CreateQueuePair,
                self._adapter._native,
                self.receive_cq._cq,
                self.initiator_cq._cq,
                context,
                max(limits.receive_queue_depth, 1),
                initiator[0],
                max(limits.max_receive_sge, 1),
                *initiator[1:],
            )
        return create(
            "create queue pair",
            "IND2QueuePair",
            lib.IND2Adapter_CreateQueuePairWithSrq,
            self._adapter._native,
            self.receive_cq._cq,
            self.initiator_cq._cq,
            self.srq._srq,
            context,
            *initiator,
        )

    def _native_destroy(self) -> None:
        release_once(self, "_qp")

    def _native_free_slots(self, native: Any) -> None:
        if self._all_ended:
            self._free_slots(native)
        else:
            # The provider may still name these slots in a completion queue, so free them with the queues.
            self._free_with_queues(Owned(self._free_slots, (native,)))

    def _free_with_queues(self, slots: Any) -> None:
        for queue in {self.receive_cq, self.initiator_cq}:
            queue._freed_with_queue.append(slots)

    def _unless_closed(self, call: Callable[[], int]) -> int:
        """Return call(), which gives the native queue pair to a connector. CANCELED if the queue pair was closed."""
        with self._lock:
            return CANCELED if self._qp is None else call()

    def _set_ended(self) -> None:
        if not self._ended:
            # An overrun of a completion queue ends the connections of its queue pairs.
            for queue in {self.receive_cq, self.initiator_cq}:
                self._adapter._events.call_soon(queue._look_for_failure)
        super()._set_ended()

    def _native_on_failed_completion(self) -> None:
        # The provider ends the connection and tells the peer (contract F.6.1).
        self._set_ended()

    def _native_cancel_requests(self) -> int:
        """Flush. Returns the provider's status. The provider also cancels later requests (contract F.2.4)."""
        return int(lib.IND2QueuePair_Flush(self._qp))

    def _native_begin_flush(self) -> None:
        self._native_cancel_requests()

    def _native_flush(self) -> bool:
        check("flush", self._native_cancel_requests())
        return False

    # ---- windows ----

    def _native_post_bind(self, binding: Binding, context: int, flags: int) -> int:
        window: Any = binding.window
        access = binding.access
        allowed = (lib.ND_OP_FLAG_ALLOW_READ if access & Access.REMOTE_READ else 0) | (
            lib.ND_OP_FLAG_ALLOW_WRITE if access & Access.REMOTE_WRITE & ~Access.LOCAL_WRITE else 0
        )
        region, descriptor = self._native_region_and_descriptor(binding)
        return int(
            self._post_bind(
                self._rings,
                flags,
                context,
                region,
                window._native,
                descriptor,
                binding.address,
                binding.length,
                allowed,
            )
        )

    def _native_region_and_descriptor(self, binding: Binding) -> tuple[Any, Any]:
        """The provider's name for the region, and where the provider writes the window's descriptor."""
        return binding.region._native, ffi.NULL

    def _native_bind_posted(self, request: BindRequest) -> None:
        # The token of the new binding is there before the bind completes (contract E.2.8).
        binding = request.binding
        binding.token = lib.ndpy_window_remote_token(binding.window._native)

    def _native_post_invalidate(self, window: MemoryWindow, binding: Binding | None, context: int, flags: int) -> int:
        return int(self._post_invalidate(self._rings, flags, context, window._native))

    # ---- what went wrong ----

    def _explain(self, status: Status, native_status: int = 0) -> str:
        connector = self.connector
        if status is not Status.IO_TIMEOUT or connector is None:
            return ""
        try:
            host, port = connector.peer_address
        except (errors.NdpyError, OSError):
            return ""
        return f"the peer is {host} port {port}: is its process alive, does it post receives, and is the link up?"

    def _native_status_name(self, native_status: int) -> str:
        return status_name(native_status)

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return status_error(operation, number)
