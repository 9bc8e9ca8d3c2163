"""Queue pairs of version 1.

The native queue pair is an endpoint. One connector makes it, and it serves no other connector. So a queue pair has an
endpoint from its connect() or accept() on. The data path keeps the receives that are posted earlier. It posts them to
the endpoint at the last moment before a message can come: before CompleteConnect, and before Accept. So an attempt that
fails earlier leaves only an endpoint that was never used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.memory import Binding
from ndpy.objects.operations import TABLE
from ndpy.objects.window_requests import BindRequest
from ndpy.objects.work_queues import INLINE_TOO_LONG
from ndpy.platforms.networkdirect.native_calls import check, create_version1, ffi, lib, release
from ndpy.platforms.networkdirect.queue_pair import NetworkDirectQueuePair

if TYPE_CHECKING:
    from ndpy.objects.connection_parameters import ReadLimits
    from ndpy.platforms.networkdirect.version1.adapter import Version1Adapter


class Version1QueuePair(NetworkDirectQueuePair):
    _adapter: Version1Adapter
    _native_provider = staticmethod(lib.version1_provider_table)
    _post_bind = staticmethod(lib.version1_post_bind)
    _post_invalidate = staticmethod(lib.version1_post_invalidate)
    _free_slots = staticmethod(lib.version1_queue_pair_free)

    def _native_create(self) -> Any:
        limits = self.limits
        # The provider would write to memory of any rights, because its registrations have none (contract I.2.1).
        self._sinks_must_be_writable = True
        self._endpoint: Any = None
        #: Slots of windows that were closed while bound to this queue pair. The provider may still report there that
        #: the peer has invalidated them.
        self._closed_windows: list[Any] = []
        #: Whether the receives were posted to the endpoint.
        self._in_use = False
        native = lib.version1_endpoint_new(
            limits.initiator_queue_depth, limits.receive_queue_depth, limits.max_receive_sge
        )
        if native == ffi.NULL:
            raise errors.InsufficientResourcesError("out of memory", operation="create queue pair")
        return native

    # ---- the endpoint ----

    def _make_endpoint(self, connector: Any, read_limits: ReadLimits) -> None:
        """Create the endpoint with this native connector."""
        limits = self.limits
        with self._lock:
            self._check()
            self._drop_endpoint()
            endpoint = create_version1(
                "create queue pair",
                "INDEndpoint",
                lib.INDConnector_CreateEndpoint,
                connector,
                self.receive_cq._cq,
                self.initiator_cq._cq,
                max(limits.receive_queue_depth, 1),
                max(limits.initiator_queue_depth, 1),
                max(limits.max_receive_sge, 1),
                max(limits.max_initiator_sge, 1),
                read_limits.inbound,
                read_limits.outbound,
                ffi.NULL,
            )
            self._endpoint = endpoint
            lib.version1_endpoint_use(self._qp, endpoint)

    def _use_endpoint(self) -> None:
        """Post the kept receives to the endpoint, because messages may come from now on."""
        with self._lock:
            self._check()
            if self._in_use:
                return
            self._in_use = True
            check("receive", lib.version1_endpoint_post_kept(self._rings))

    def _leave_connector(self) -> None:
        """The attempt to connect, or the connection, is over.

        The endpoint serves no other connector. If the receives were posted to it, the queue pair can no longer be
        used.
        """
        with self._lock:
            if self._qp is None:
                return
            if not self._in_use:
                self._drop_endpoint()
            elif self._never_connected:
                self._set_ended()
                lib.INDEndpoint_Flush(self._endpoint)

    def _drop_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            lib.version1_endpoint_use(self._qp, ffi.NULL)
            release(endpoint)

    def _native_destroy(self) -> None:
        self._drop_endpoint()
        if self._rings is None:
            lib.version1_endpoint_free(self._qp)
        # Otherwise _native_free_slots() frees it.
        self._qp = None

    def _native_free_slots(self, native: Any) -> None:
        super()._native_free_slots(native)
        if not self._all_ended:
            self._free_with_queues(self._closed_windows)
        self._closed_windows = []

    def _native_cancel_requests(self) -> int:
        if self._in_use:
            return int(lib.INDEndpoint_Flush(self._endpoint))
        self._cancel_rest()
        return 0

    def _native_post_marker(self, native: Any) -> int:
        return int(lib.version1_post_marker(native))

    def _native_flush(self) -> bool:
        super()._native_flush()
        # Without an endpoint, no provider reports their completions.
        return not self._in_use

    # ---- posting ----

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> Exception:
        if refused == INLINE_TOO_LONG:
            return errors.UnsupportedError(
                "NetworkDirect version 1 has no inline requests, and its providers decide what to inline; register the "
                "bytes, and leave out Flags.INLINE",
                operation=TABLE[operation].words,
            )
        return super()._refusal(operation, refused, elements, flags)

    # ---- windows ----

    def _native_region_and_descriptor(self, binding: Binding) -> tuple[Any, Any]:
        slot = binding.window._slot  # type: ignore[attr-defined]
        return ffi.cast("void *", binding.region.local_token), lib.version1_window_descriptor(slot)

    def _native_bind_posted(self, request: BindRequest) -> None:
        # Version 1 has no getter. Bind itself gives the descriptor. Its base may differ from the buffer's address.
        binding = request.binding
        granted = binding.window._granted()  # type: ignore[attr-defined]
        binding.address, binding.length, binding.token = granted.address, granted.length, granted.token
