"""Queue pairs of version 1, where the native one is an endpoint that one connector makes and that serves no other.

A queue pair has an endpoint from its connect() or accept() on. Receives that were posted before are kept by the data path,
and posted to the endpoint at the last moment at which no message can have come: before CompleteConnect, and before Accept.
So an attempt that fails earlier leaves nothing behind but an endpoint that was never used.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.memory import _DESCRIPTOR, Binding, Elements, InlineElements, RemoteMemory, Sge
from ndpy.networkdirect.memory import NetworkDirectMemoryWindow
from ndpy.networkdirect.native_calls import check, create_version1, ffi, lib, release
from ndpy.networkdirect.queue_pair import NetworkDirectQueuePair
from ndpy.networkdirect.version1.memory import Version1MemoryWindow
from ndpy.queue_pair import (
    _INLINE_TOO_LONG,
    _READ,
    _RECEIVE,
    _SEND,
    _SEND_AND_INVALIDATE,
    _WRITE,
    _writable,
    flatten,
    operation_name,
)

if TYPE_CHECKING:
    from ndpy.connection_parameters import ReadLimits
    from ndpy.networkdirect.version1.adapter import Version1Adapter

_NO_WINDOW = ffi.NULL
_pack = _DESCRIPTOR.pack


def window_of(remote: RemoteMemory) -> tuple[int, bytes]:
    """(offset, descriptor) of remote memory: a slice lies in the window that it was sliced from (contract I.4.1)."""
    whole = remote
    while True:
        try:
            whole = whole._whole
        except AttributeError:
            break
    offset = remote.address - whole.address
    if 0 <= offset <= whole.length - remote.length:
        return offset, _pack(whole.address, whole.length, remote.token)
    # The program has changed it since.
    return 0, _pack(remote.address, remote.length, remote.token)


class Version1QueuePair(NetworkDirectQueuePair):
    _adapter: Version1Adapter
    _post_one = staticmethod(lib.version1_post_one)
    _post_list = staticmethod(lib.version1_post)
    _post_marker = staticmethod(lib.version1_post_marker)
    _free_slots = staticmethod(lib.version1_queue_pair_free)
    _element_type = "struct version1_element[]"
    _element_layout = struct.Struct("=QQQ")

    def _new_native(self) -> Any:
        limits = self.limits
        self._endpoint: Any = None
        #: Where the provider may still tell of an invalidation, for windows that were closed while they were bound here.
        self._closed_windows: list[Any] = []
        #: Whether the endpoint, if there is one, has the receives.
        self._in_use = False
        native = lib.version1_endpoint_new(
            limits.initiator_queue_depth, limits.receive_queue_depth, limits.max_receive_sge
        )
        if native == ffi.NULL:
            raise errors.InsufficientResourcesError("out of memory", operation="create queue pair")
        return native

    # ---- the endpoint ----

    def _make_endpoint(self, connector: Any, read_limits: ReadLimits) -> None:
        """Have this native connector make the endpoint."""
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
        """Messages may come from now on: the endpoint gets the receives that were posted."""
        with self._lock:
            self._check()
            if self._in_use:
                return
            self._in_use = True
            check("receive", lib.version1_endpoint_post_kept(self._native))

    def _leave_connector(self) -> None:
        """The attempt to connect, or the connection, is over. The endpoint serves no other connector; one that has the
        receives is the end of the queue pair."""
        with self._lock:
            if self._qp is None:
                return
            if not self._in_use:
                self._drop_endpoint()
            elif self._never_connected:
                self._ended = True
                lib.INDEndpoint_Flush(self._endpoint)

    def _drop_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            lib.version1_endpoint_use(self._qp, ffi.NULL)
            release(endpoint)

    def _release_native(self) -> None:
        self._drop_endpoint()
        if self._native == ffi.NULL:
            lib.version1_endpoint_free(self._qp)
        # Else it goes with the slots.
        self._qp = None

    def _leave_slots(self, native: Any) -> None:
        super()._leave_slots(native)
        if not self._given_back:
            self._leave_behind(self._closed_windows)
        self._closed_windows = []

    def _flush_native(self) -> int:
        if self._in_use:
            return int(lib.INDEndpoint_Flush(self._endpoint))
        self._cancel_rest()
        return 0

    def flush(self) -> None:
        super().flush()
        if not self._in_use:
            # No provider tells of these.
            for queue in {self.receive_cq, self.initiator_cq}:
                queue._wake_all()

    # ---- posting ----

    def send(self, sges: InlineElements, *, context: int = 0, flags: int = 0) -> None:
        self._post(_SEND, self._initiator_records, sges, context, flags, 0, _NO_WINDOW)

    def receive(self, sges: Elements, *, context: int = 0) -> None:
        if not _writable(sges):
            raise self._not_writable(_RECEIVE, sges)
        self._post(_RECEIVE, self._receive_records, sges, context, 0, 0, _NO_WINDOW)

    def read(self, sges: Elements, remote: RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        if type(sges) is Sge and sges.length > remote.length:
            raise self._beyond(sges.length, remote)
        if not _writable(sges):
            raise self._not_writable(_READ, sges)
        offset, descriptor = window_of(remote)
        self._post(_READ, self._initiator_records, sges, context, flags, offset, descriptor, remote)

    def write(self, sges: InlineElements, remote: RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        if type(sges) is Sge and sges.length > remote.length:
            raise self._beyond(sges.length, remote)
        offset, descriptor = window_of(remote)
        self._post(_WRITE, self._initiator_records, sges, context, flags, offset, descriptor, remote)

    def _post_invalidating(self, sges: InlineElements, remote: RemoteMemory, context: int, flags: int) -> None:
        descriptor = window_of(remote)[1]
        self._post_many(_SEND_AND_INVALIDATE, self._initiator_records, sges, context, flags, 0, descriptor, None)

    def _not_writable(self, operation: int, sges: Elements) -> errors.AccessViolationError:
        # The provider would write: its registrations have no rights (contract I.2.1).
        self._check()
        for element in flatten(sges):
            self._require_same_adapter(getattr(element, "region", element), "the region")
        return errors.AccessViolationError(
            "the memory was registered without Access.LOCAL_WRITE", operation=operation_name(operation)
        )

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> errors.NdpyError:
        if refused == _INLINE_TOO_LONG:
            return errors.UnsupportedError(
                "NetworkDirect version 1 has no inline requests, its providers inline what they see fit; register the "
                "bytes, and leave Flags.INLINE out",
                operation=operation_name(operation),
            )
        return super()._refusal(operation, refused, elements, flags)

    # ---- windows ----

    def _bind_native(
        self, flags: int, context: int, region: Any, window: NetworkDirectMemoryWindow, element: Sge, allowed: int
    ) -> int:
        assert isinstance(window, Version1MemoryWindow)
        return int(
            lib.version1_post_bind(
                self._native,
                flags,
                context,
                ffi.cast("void *", region.local_token),
                window._native,
                window._slot,
                element.address,
                element.length,
                allowed,
            )
        )

    def _take_token(self, binding: Binding, window: NetworkDirectMemoryWindow) -> None:
        # Version 1 has no getter: Bind itself gives the descriptor, whose base need not be the buffer's address.
        assert isinstance(window, Version1MemoryWindow)
        granted = window._granted()
        binding.address, binding.length, binding.token = granted.address, granted.length, granted.token

    def _invalidate_native(self, flags: int, context: int, window: NetworkDirectMemoryWindow) -> int:
        return int(lib.version1_post_invalidate(self._native, flags, context, window._native))
