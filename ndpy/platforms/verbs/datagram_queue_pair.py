"""Queue pairs for datagrams over verbs."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any

from ndpy.errors import ProviderError
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.connection_parameters import ReadLimits
from ndpy.objects.datagram_queue_pair import DatagramQueuePair, Destination
from ndpy.objects.multicast_group import MulticastGroup
from ndpy.objects.pending import Pending
from ndpy.objects.work_queues import QueuePairLimits
from ndpy.platforms.verbs.datagram_calls import JoinCall, ResolveCall
from ndpy.platforms.verbs.endpoint import active_port
from ndpy.platforms.verbs.native_calls import check, check_pointer, ffi, free_once, lib
from ndpy.platforms.verbs.queue_pair import VerbsQueuePair
from ndpy.platforms.verbs.queue_pair_attributes import modify, write_vector
from ndpy.vocabulary.queue_pair_attributes import QueuePairState, QueuePairType

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

HEADER_SIZE = 40


class VerbsDestination(Destination):
    _adapter: VerbsAdapter

    def _native_create(self) -> None:
        attributes = ffi.new("struct ibv_ah_attr *")
        write_vector(attributes, self.vector)
        self._handle = check_pointer("destination", lib.ibv_create_ah(self._adapter._domain, attributes))

    def _address(self) -> int:
        return int(ffi.cast("uintptr_t", self._handle))

    def _native_destroy(self) -> None:
        free_once(self, "_handle", "close destination", lib.ibv_destroy_ah)


class VerbsDatagramQueuePair(DatagramQueuePair, VerbsQueuePair):
    _destination_class = VerbsDestination

    #: The registration of the memory for the headers.
    _headers: Any = None

    def __init__(
        self,
        adapter: VerbsAdapter,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        qkey: int,
        pkey_index: int,
    ) -> None:
        self.qkey = qkey
        self._pkey_index = pkey_index
        self.max_datagram = active_port(adapter).mtu
        super().__init__(adapter, receive_cq, initiator_cq, limits, None, QueuePairType.UD)

    def _receive_elements(self) -> int:
        return self.limits.max_receive_sge + 1

    def _native_set_up(self) -> None:
        length = max(self.limits.receive_queue_depth, 1) * HEADER_SIZE
        self._owner = mmap.mmap(-1, length)
        start = ffi.from_buffer(self._owner)
        self._headers = check_pointer(
            "create queue pair", lib.ibv_reg_mr(self._adapter._domain, start, length, lib.IBV_ACCESS_LOCAL_WRITE)
        )
        lib.ndpy_queue_pair_take_headers(self._rings, start, self._headers.lkey)
        super()._native_set_up()
        self._endpoint_limits = ReadLimits(0, 0)
        self._set_connected()

    def _initialise(self) -> None:
        first = {
            "state": QueuePairState.INIT,
            "port": self._adapter._port,
            "pkey_index": self._pkey_index,
            "qkey": self.qkey,
        }
        modify(self._qp, first, "create queue pair")
        modify(self._qp, {"state": QueuePairState.RTR}, "create queue pair")
        modify(self._qp, {"state": QueuePairState.RTS, "send_psn": 0}, "create queue pair")

    def _native_destroy(self) -> None:
        # The kernel destroys no queue pair that is attached to a group.
        while self._groups:
            self._leave_group(*next(iter(self._groups)))
        super()._native_destroy()

    def _native_free_slots(self, native: Any) -> None:
        super()._native_free_slots(native)
        # If the provider refuses, _release() tries again.
        with contextlib.suppress(ProviderError):
            self._free_headers()

    def _release(self) -> None:
        super()._release()
        self._free_headers()

    def _free_headers(self) -> None:
        free_once(self, "_headers", "close queue pair", lib.ibv_dereg_mr)

    def _local_port(self) -> int:
        return self._adapter._port

    def _native_resolve(
        self, family: int, destination: tuple[Any, ...], target: str, private_data: bytes
    ) -> Pending[Destination]:
        return ResolveCall(self._adapter, self, family, destination, target, private_data).begin()

    def _native_join(self, family: int, group: tuple[Any, ...]) -> Pending[MulticastGroup]:
        return JoinCall(self._adapter, self, family, group).begin()

    def _native_multicast(self, operation: str, group: bytes, lid: int) -> None:
        gid = ffi.new("union ibv_gid *")
        gid.raw = list(group)
        call = lib.ibv_attach_mcast if operation == "attach_multicast" else lib.ibv_detach_mcast
        check(operation, call(self._qp, gid, lid))
