"""An open adapter: what everything else is made from."""

from __future__ import annotations

import abc
import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from ndpy import errors, quirks
from ndpy.adapter_thread import AdapterThread
from ndpy.addresses import Address
from ndpy.completion_queue import CompletionQueue
from ndpy.connection import Connector
from ndpy.connection_parameters import RetryPolicy
from ndpy.flags import Access, Capability
from ndpy.forking import tell
from ndpy.info import AdapterInfo
from ndpy.listener import Listener
from ndpy.memory import MemoryRegion, MemoryWindow
from ndpy.pending import Pending, wait_or_cancel
from ndpy.queue_pair import QueuePair
from ndpy.resource import Orphans, Resource, _serials, busy
from ndpy.shared_receive_queue import SharedReceiveQueue
from ndpy.work_queues import QueuePairLimits

T = TypeVar("T")

# How long close() waits for its turn to collect garbage.
_COLLECTING_S = 1.0
# How long close() waits for an event that the adapter's thread is handling.
_HANDLING_S = 1.0


def _collect_garbage() -> None:
    """Run a whole garbage collection that begins after this call; give up when the collector stays busy.

    gc.collect() returns at once, having done nothing, while another thread is inside a collection. That thread may stay
    there, in somebody's finalizer.
    """
    own = threading.get_ident()
    begun = False

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        begun = begun or (phase == "start" and info["generation"] == 2 and threading.get_ident() == own)

    deadline = time.monotonic() + _COLLECTING_S
    gc.callbacks.append(note)
    try:
        while True:
            gc.collect()
            if begun or time.monotonic() >= deadline:
                return
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)


class Adapter(Resource):
    """An RDMA adapter opened by open_adapter(). Objects made from it work together and with no other's.

    It has one background thread, which waits for connection and device events and costs nothing while there are none.
    info: see AdapterInfo. Source: IND2Adapter; ibv_open_device(3).
    """

    _release_order = 99
    #: What an operation of this adapter returns; a platform may need another way to wait.
    _pending_type: ClassVar[type[Pending[Any]]] = Pending

    #: None until the adapter has been opened.
    _events: AdapterThread

    def __init__(self, info: AdapterInfo) -> None:
        self.info = info
        #: What its driver and transport do differently.
        self._differences = quirks.differences(info)
        #: Serial numbers of what is open, and of what is being made. The collector clears weak references before it calls finalizers, so that
        #: children which are about to be handed over are in here only.
        self._open: set[int] = set()
        self._children: weakref.WeakValueDictionary[int, Resource] = weakref.WeakValueDictionary()
        #: Held by the adapter's thread too, so that an adapter that was dropped itself is closed as well.
        self._orphans = Orphans()
        #: close() goes on: nothing more can be made.
        self._closing = False
        super().__init__(self)

    def _opened(self) -> None:
        self._released = False
        tell(self)

    def register(
        self, buffer: Any, access: Access = Access.LOCAL_WRITE, *, timeout_s: float | None = None
    ) -> MemoryRegion:
        """Pin a buffer and let the adapter use it with these rights; see Access.

        buffer: anything with the buffer protocol, 1 to info.max_registration_size bytes, any alignment; or
        (address, length) of memory that the caller keeps. The region keeps the buffer until it is closed.
        access: where info.capabilities lacks REGION_ACCESS (NetworkDirect version 1), the adapter enforces none of it. Then ndpy
        itself refuses to receive or read into a region without LOCAL_WRITE, and remote rights are only kept: peers get
        theirs from windows, which any region can carry.

        Raises InvalidBufferError (empty, scattered), AccessViolationError (read-only but to be written, or not mapped),
        LimitExceededError, InsufficientResourcesError (with RLIMIT_MEMLOCK, what is pinned, and the remedy).
        Source: IND2MemoryRegion::Register (contract D.2); INDAdapter::RegisterMemory (contract I.2); ibv_reg_mr(3).
        """
        if timeout_s is None:
            return self._register(buffer, access)
        return wait_or_cancel(self.begin_register(buffer, access), timeout_s)

    @abc.abstractmethod
    def _register(self, buffer: Any, access: Access) -> MemoryRegion: ...

    @abc.abstractmethod
    def begin_register(self, buffer: Any, access: Access = Access.LOCAL_WRITE) -> Pending[MemoryRegion]:
        """Start to register; many may run at once, and take less time together than one after the other.

        What cannot be registered at all is refused here, as by register(); the rest ends the Pending. Cancelling, or
        closing the adapter meanwhile, ends it with CanceledError, and no region is left of it.
        On Linux, where ibv_reg_mr(3) blocks, four threads of the adapter's make them, and so does a thread that waits in
        result() without a deadline; what registers sooner than it can be handed over, by the times measured last and within
        2 ms, is registered before the call returns. On Windows the provider's requests overlap.
        """

    def register_implicit(self, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """One region for all of the process's memory, present and future; nothing is pinned (implicit on-demand paging).

        Its address is 0, so that its offsets are addresses: region[address:address + length] is an element of any memory.
        The caller keeps that memory until what was posted with it has completed. buffer is None.
        Raises UnsupportedError where info.capabilities lacks IMPLICIT_ON_DEMAND, as on every NetworkDirect adapter.
        Source: ibv_reg_mr(3) with IBV_ACCESS_ON_DEMAND, address 0 and the length SIZE_MAX.
        """
        self._require(Capability.IMPLICIT_ON_DEMAND, "register implicit")
        return self._register_implicit(access)

    def _register_implicit(self, access: Access) -> MemoryRegion:
        """Called only where info.capabilities has IMPLICIT_ON_DEMAND."""
        raise NotImplementedError

    def register_dmabuf(
        self, fd: int, offset: int, length: int, iova: int, access: Access = Access.LOCAL_WRITE
    ) -> MemoryRegion:
        """Register memory of a device, such as a GPU's, that its driver exports as a dma-buf.

        fd: of the dma-buf; it may be closed afterwards. offset, length: the part of it, in bytes. iova: the address that
        elements and peers use for its first byte; its offset within a page has to be that of `offset`. buffer is None.

        Raises UnsupportedError where info.capabilities lacks DMABUF, as on every NetworkDirect adapter; InvalidBufferError;
        ProviderError with EBADF for a descriptor that is no dma-buf. Source: ibv_reg_dmabuf_mr(3).
        """
        self._require(Capability.DMABUF, "register dma-buf")
        if length < 1 or offset < 0 or iova < 0 or max(offset, iova) + length > 1 << 64:
            raise errors.InvalidBufferError(
                f"{length} bytes at offset {offset} and iova {iova:#x} are no range of memory"
            )
        return self._register_dmabuf(fd, offset, length, iova, access)

    def _register_dmabuf(self, fd: int, offset: int, length: int, iova: int, access: Access) -> MemoryRegion:
        """Called only where info.capabilities has DMABUF."""
        raise NotImplementedError

    def _require(self, capability: Capability, operation: str) -> None:
        self._check()
        if capability not in self.info.capabilities:
            raise errors.UnsupportedError(
                f"{self.info.name} ({self.info.driver}) cannot do it: info.capabilities has no {capability.name}",
                operation=operation,
            )

    @abc.abstractmethod
    def create_memory_window(self) -> MemoryWindow:
        """A new, invalid window. UnsupportedError where info.capabilities lacks MEMORY_WINDOWS."""

    @abc.abstractmethod
    def create_completion_queue(self, depth: int) -> CompletionQueue:
        """A queue for `depth` completions, 1 to info.max_completion_queue_depth."""

    @abc.abstractmethod
    def create_shared_receive_queue(self, depth: int, *, max_sge: int = 1, threshold: int = 0) -> SharedReceiveQueue:
        """Receives for several queue pairs: depth 1 to info.max_shared_receive_queue_depth, max_sge elements each.

        threshold: see SharedReceiveQueue.arm(); 0 for none. UnsupportedError where info.capabilities lacks SHARED_RECEIVE_QUEUES.
        """

    @abc.abstractmethod
    def create_queue_pair(
        self,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue | None = None,
        *,
        receive_queue_depth: int = 64,
        initiator_queue_depth: int = 64,
        max_receive_sge: int = 1,
        max_initiator_sge: int = 1,
        inline_data_size: int = 0,
        srq: SharedReceiveQueue | None = None,
    ) -> QueuePair:
        """A queue pair, not connected yet; initiator_cq None means receive_cq for both directions.

        Raises LimitExceededError beyond the limits of info, ForeignObjectError, InsufficientResourcesError.
        """

    @abc.abstractmethod
    def _monitor(self, on_change: Callable[[], None]) -> Any:
        """A monitor of memory for one cache; UnsupportedError, saying why and what to do, where there is none."""

    def _make(self, kind: Callable[..., T], *arguments: Any) -> T:
        """kind(self, *arguments). While it lasts the adapter cannot be closed; ClosedError if it is being closed."""
        number = next(_serials)
        # close() looks for numbers after it has said that it goes on; so one of the two sees the other.
        self._open.add(number)
        try:
            self._check()
            if self._closing:
                raise errors.ClosedError(f"{self._describe()} is being closed")
            return kind(self, *arguments)
        finally:
            self._open.discard(number)

    def _limit(self, what: str, value: int, maximum: int, least: int = 1) -> None:
        if not least <= value <= maximum:
            raise errors.LimitExceededError(f"{what} is {least} to {maximum} on {self.info.name}, not {value}")

    def _limit_shared_receive_queue(self, depth: int, max_sge: int, threshold: int) -> None:
        if Capability.SHARED_RECEIVE_QUEUES not in self.info.capabilities:
            raise errors.UnsupportedError(
                f"{self.info.name} has no shared receive queues", operation="create shared receive queue"
            )
        self._limit("a shared receive queue's depth", depth, self.info.max_shared_receive_queue_depth)
        self._limit("max_sge", max_sge, self.info.max_receive_sge)
        self._limit("threshold", threshold, depth, least=0)

    def _limit_queue_pair(
        self,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        srq: SharedReceiveQueue | None,
    ) -> QueuePairLimits:
        """What was asked for, checked; with a shared receive queue there is no receive queue of its own."""
        self._require_same_adapter(receive_cq, "the receive completion queue")
        self._require_same_adapter(initiator_cq, "the initiator completion queue")
        if srq is not None:
            self._require_same_adapter(srq, "the shared receive queue")
        info = self.info
        self._limit("receive_queue_depth", limits.receive_queue_depth, info.max_receive_queue_depth, least=0)
        self._limit("initiator_queue_depth", limits.initiator_queue_depth, info.max_initiator_queue_depth, least=0)
        self._limit("max_receive_sge", limits.max_receive_sge, info.max_receive_sge, least=0)
        self._limit("max_initiator_sge", limits.max_initiator_sge, info.max_initiator_sge, least=0)
        self._limit("inline_data_size", limits.inline_data_size, info.max_inline_data_size, least=0)
        return limits if srq is None else replace(limits, receive_queue_depth=0)

    @abc.abstractmethod
    def create_connector(self) -> Connector:
        """A connector for the active side."""

    @abc.abstractmethod
    def listen(self, address: Address, *, backlog: int = 128) -> Listener:
        """Listen at (host, port); host "" means every address of this adapter, port 0 chooses one.

        backlog: requests that may wait to be taken, 0 for no limit; more are refused, see Listener.refused.
        AddressInUseError, AddressUnreachableError for an address that is not this adapter's.
        """

    def connect(
        self,
        queue_pair: QueuePair,
        address: Address,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> Connector:
        """Connect a queue pair and complete it in one call; see Connector.connect(). The connector is the caller's to close."""
        connector = self.create_connector()
        try:
            connector.connect(
                queue_pair,
                address,
                private_data=private_data,
                inbound_read_limit=inbound_read_limit,
                outbound_read_limit=outbound_read_limit,
                retry=retry,
                timeout_s=timeout_s,
            )
            connector.complete_connect(timeout_s)
        except BaseException:
            connector.close()
            raise
        return connector

    def _open_children(self) -> list[Resource]:
        """What was made from this adapter and not closed; a snapshot that other threads cannot disturb."""
        return [child for reference in self._children.valuerefs() if (child := reference()) is not None]

    def _refuse_if_used(self) -> None:
        users = self._users_left()
        if users:
            # A queue pair and its connector refer to each other, so that dropped ones wait for the garbage collector. The
            # adapter's thread refers to an object while it handles an event.
            with self._events.resting(_HANDLING_S):
                _collect_garbage()
            users = self._users_left()
        if not users:
            self._closing = True
            users = self._users_left()
        if users:
            self._closing = False
            raise busy(self, users)

    def _users_left(self) -> list[str]:
        self._events.make_calls()
        self._orphans.close(again=True)
        if not self._open:
            return []
        left = {*self._open_children(), *self._orphans.waiting()} - {self}
        return [child._describe() for child in left] or ["objects that are being made or released"]

    def _adopt(self, orphan: Resource) -> None:
        """Take over what was dropped without close(); called by finalizers, so it only notes and wakes the thread."""
        self._orphans.add(orphan)
        self._wake()

    def _wake(self) -> None:
        """Make the adapter's thread look for orphans. Safe in a finalizer."""
        self._events.wake()

    def _mark_removed(self) -> None:
        """The device has gone: from now on everything of this adapter raises DeviceRemovedError, and can be closed."""
        self._defunct = self._removed_error
        for child in self._open_children():
            if not child._released:
                child._defunct = child._removed_error
        for child in self._open_children():
            child._on_removed()

    def _on_forked(self) -> None:
        for child in [*self._open_children(), *self._orphans.take_all_in_child()]:
            if child is not self:
                child._on_forked()
        super()._on_forked()

    def _describe(self) -> str:
        return f"Adapter {self.info.name}"
