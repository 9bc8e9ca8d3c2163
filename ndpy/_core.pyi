"""Built from cdefs/core. One file, because a compiled module has one stub."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex, TypeVar, final
from weakref import ref

from typing_extensions import Self

from ndpy import errors
from ndpy.cache import lease
from ndpy.cache.ownership import MemoryRange
from ndpy.cache.registration_cache import RegistrationCache
from ndpy.objects import completion
from ndpy.objects.adapter import Adapter as PublicAdapter
from ndpy.objects.datagram_queue_pair import Destination as PublicDestination
from ndpy.objects.memory import Binding, Elements, InlineElements
from ndpy.objects.memory import MemoryRegion as PublicRegion
from ndpy.objects.memory import RemoteMemory as PublicRemoteMemory
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import Orphans as PublicOrphans
from ndpy.objects.resource import Resource as PublicResource
from ndpy.objects.shared_receive_queue import SharedReceiveQueue
from ndpy.objects.xrc import XrcDestination
from ndpy.vocabulary.datagram import DatagramSource
from ndpy.vocabulary.flags import Access, FlushKind, Operation, Status

T = TypeVar("T")

def with_own_methods(type: type[T], /) -> type[T]:
    """Give a class methods of its own in place of those in C that it inherits from this module. Returns it.

    CPython calls a method in C the quick way only if it is of the object's very class. So this is for the classes
    whose objects programs have.
    """

def is_main_interpreter() -> bool:
    """Whether the caller is not a sub-interpreter."""

class Uncopied:
    """An object that can be neither copied nor pickled, because it owns something, or refers to something that has an owner."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...

class Resource(Uncopied):
    """The life of an object that has close()."""

    _adapter: PublicAdapter
    _defunct: Callable[[], errors.NdpyError] | None
    _owner: Any
    _serial: int
    @property
    def _lifetime(self) -> RLock: ...
    @property
    def closed(self) -> bool:
        """Whether it has been released."""
    def close(self) -> None:
        """Release it. Harmless when repeated.

        Raises:
            DeviceBusyError: other objects use it. Nothing has changed.
        """
    def _opened(self) -> None: ...
    def _mark_still_open(self) -> None: ...
    def _mark_closed(self) -> None: ...
    def _inherit(self) -> None: ...

def seconds(value: Any, name: str, /) -> float:
    """Read how long something lasts.

    Parameters:
        value: any real number. A negative one is 0. One that is greater than 10**9 is infinite.
        name: of the parameter, for the error.
    Raises:
        TypeError: it is not a number, or it is a bool.
        ValueError: it is nan.
    """

def timeout(value: Any, name: str = "timeout_s", /) -> float | None:
    """Read how long a call may wait, as seconds() does. None stands for ever, and so does an infinite time: then this returns None."""

def keep_for_ever(object: object, /) -> None:
    """Never free an object. For memory that is registered when the interpreter ends: the adapter may use it until the process has gone."""

def next_serial() -> int:
    """Return a number that no other object has, in ascending order."""

def slice_bounds(key: slice, length: int, what: str, /) -> tuple[int, int]:
    """The (offset, length) of a slice of `length` bytes. Raises ElementRangeError unless it is inside; `what` names it."""

@final
class Sge(Uncopied):
    """A scatter/gather element: a piece of a region, made by slicing the region.

    Attributes:
        region: the region.
        address, length: where the piece is, and its length in bytes.
        token: the region's local token (verbs: lkey).
    """

    region: PublicRegion
    address: int
    length: int
    token: int
    _export: Any
    def __init__(self, region: PublicRegion, address: int, length: int, token: int) -> None: ...

class RemoteMemory:
    """Memory of a peer."""

    address: int
    length: int
    token: int
    def __init__(self, address: int, length: int, token: int) -> None: ...
    def __getitem__(self, key: slice, /) -> Self: ...
    @property
    def _sliced_from(self) -> Self | None: ...

class MemoryRegion(Resource):
    """The part of a region that slicing, posting, registering and closing need."""

    _handle: int
    _is_elsewhere: bool
    _writable: bool
    buffer: Any
    address: int
    length: int
    access: Access
    local_token: int
    remote_token: int
    @property
    def _bindings(self) -> set[ref[Binding]]: ...
    def __getitem__(self, key: slice, /) -> Sge: ...

class Adapter(Resource):
    """What making and closing its objects touch of an adapter."""

    _orphans: PublicOrphans
    _closing: bool
    _device: PublicAdapter
    @property
    def _is_used(self) -> bool: ...
    def register(
        self, buffer: Any, access: Access = Access.LOCAL_WRITE, *, timeout_s: float | None = None
    ) -> PublicRegion:
        """Pin a buffer, and let the adapter use it with these rights.

        The region keeps the buffer in place until it is closed.

        Parameters:
            buffer: any contiguous buffer or array of 1 to info.max_registration_size bytes, at any address: an object with
                the buffer protocol, __dlpack__, __array_interface__ or __cuda_array_interface__. Or the (address, length) of
                memory that the caller keeps. An array in memory of a CUDA device is registered when its stream has ended.
            access: see Access; LOCAL_WRITE (1) unless given. If info.capabilities lacks REGION_ACCESS (NetworkDirect version
                1), the adapter enforces no rights. Then ndpy itself refuses to receive or read into a region without
                LOCAL_WRITE. Remote rights have no effect then: peers get rights from windows, and every region can have
                windows.
            timeout_s: how long to wait. None waits for ever. A registration that takes longer is cancelled.
        Raises:
            InvalidBufferError: the buffer is empty, is not C-contiguous, or holds Python objects.
            AccessViolationError: a right needs to write, but the buffer is read-only. Or the memory is not mapped.
            LimitExceededError: the buffer is too long.
            InsufficientResourcesError: the memory cannot be pinned. The message gives the reason and the remedy.
            TimeoutError: the deadline passed.
            UnsupportedError: a device has the memory, and the adapter or the system gives no way to it.
            ProviderError: the device's driver refused. `native` is the number of its error.
        Source: IND2MemoryRegion::Register (contract D.2); INDAdapter::RegisterMemory (contract I.2); ibv_reg_mr(3).
        """
    def _make(self, kind: Callable[..., T], /, *arguments: Any) -> T:
        """Call kind(self, *arguments). The adapter stays open meanwhile. Raises ClosedError after close() began."""
    def _own_children(self) -> list[PublicResource]:
        """The open objects that were made from this adapter. Other threads do not change this list."""
    def _own_child(self, serial: int, /) -> PublicResource | None:
        """The one with this number, or None."""
    def _attach_registrar(
        self,
        registrar: int,
        domain: int,
        rights: tuple[int, ...],
        longest: int,
        region_class: type[PublicRegion],
        /,
    ) -> None: ...

class Orphans(Uncopied):
    """What tells whether an object was dropped without close()."""

    may_have_some: bool

class RLock(Uncopied):
    """A lock as threading.RLock, which C code can take too."""

    @property
    def _waiters(self) -> int: ...
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As that of threading.Lock."""
    def release(self) -> None:
        """As that of threading.Lock."""
    def locked(self) -> bool:
        """As that of threading.Lock."""
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

class Lock(Uncopied):
    """A lock as threading.Lock, which C code can take too."""

    @property
    def _waiters(self) -> int: ...
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As that of threading.Lock."""
    def release(self) -> None:
        """As that of threading.Lock."""
    def locked(self) -> bool:
        """As that of threading.Lock."""
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Records(Uncopied):
    """What the requests of one work queue use, oldest first."""

    def append(self, record: Any, /) -> None:
        """Add the record of the newest request."""
    def pop(self) -> Any:
        """Take out the record of the newest request."""
    def popleft(self) -> Any:
        """Take out the record of the oldest request."""
    def __len__(self) -> int: ...

class PostedRequests(Uncopied):
    """The requests of one queue pair that the adapter still works on."""

    failed: bool
    watched: bool
    stored_shared: int
    def __init__(self, queue_pair: WorkQueues, /) -> None: ...
    @property
    def queue_pair(self) -> Callable[[], QueuePair | None]: ...
    @property
    def initiator(self) -> Records: ...
    @property
    def receive(self) -> Records: ...
    @property
    def stored(self) -> dict[int, int]: ...

@final
class Completion(Uncopied):
    """The result of one request. Its fields are decoded when they are read.

    Fields:
        context: the value that was given with the request.
        operation: an Operation.
        status: a Status.
        nbytes: how many bytes a successful request moved. For RECEIVE_RDMA_WITH_IMMEDIATE: how many the peer wrote.
        native_status: the provider's own number for the status.
        vendor_status: what the adapter adds to an error, or 0.
    """

    def __init__(self, entry: tuple[int, ...], posted: PostedRequests, /) -> None: ...
    @property
    def context(self) -> int:
        """The value that was given with the request."""
    @property
    def nbytes(self) -> int:
        """How many bytes a successful request moved."""
    @property
    def native_status(self) -> int:
        """The provider's own number for the status."""
    @property
    def vendor_status(self) -> int:
        """What the adapter adds to an error, or 0."""
    @property
    def immediate(self) -> int | None:
        """The 32 bits that the peer sent with its message or write, in host order. None if it sent none."""
    @property
    def source(self) -> DatagramSource | None:
        """A DatagramSource: where a received datagram came from. None for everything else."""
    @property
    def timestamp(self) -> int | None:
        """When the request ended, in ticks of the adapter's clock. None unless the queue brings CompletionDetails.TIMESTAMP."""
    @property
    def wall_clock_ns(self) -> int | None:
        """When the request ended, in nanoseconds since 1970. None unless the queue brings CompletionDetails.WALL_CLOCK."""
    @property
    def flow_tag(self) -> int | None:
        """The tag of the flow that brought the message. None unless the queue brings CompletionDetails.FLOW_TAG."""
    @property
    def operation(self) -> Operation:
        """An Operation."""
    @property
    def status(self) -> Status:
        """A Status."""
    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
    @property
    def queue_pair(self) -> QueuePair | None:
        """The queue pair of the request. None if the program has dropped it."""
    def raise_for_status(self) -> None:
        """Raise the exception that fits the status. Does nothing if the request succeeded."""

def set_up_completions(
    operations: tuple[Operation, ...],
    statuses: tuple[Status, ...],
    raise_for_status: Callable[[Completion], None],
    describe: Callable[[Completion], str],
    read_source: Callable[[bytes], DatagramSource],
    /,
) -> None:
    """Give the members of Operation and Status in the order of their numbers, two functions of a Completion, and one that
    makes a DatagramSource of the bytes of a struct ndpy_details.
    """

def operations() -> tuple[tuple[str, int, str, int, int, int, int, str, str], ...]:
    """The rows of the table of operations (cdefs/operations.h): name, number, words, completes_as, traits, flags, types,
    capability.
    """

@final
class Batch(Uncopied):
    """Requests that QueuePair.post() posts together.

    A batch is filled once, and posted to any queue pair any number of times, also while it is posted. It has requests of
    one direction: either receives, or any mixture of the others. A post copies what the adapter needs, and
    keeps the regions alive until the requests end.

    The numbers of all requests can be changed at once. Each of the columns contexts, remote_addresses, addresses and
    lengths is a memoryview of 64-bit integers, in which NumPy arrays work too: numpy.asarray(batch.contexts). The columns
    addresses and lengths have an item for each element, the others one for each request. Assigning to a column copies a
    buffer of 64-bit integers in any byte order, or a sequence of integers. A post checks what has changed.

    Parameters:
        capacity: how many requests it can hold.
        max_sge: how many elements a request may have.
        signal_all: False: all requests but the last one are SILENT_SUCCESS, so the program gets one completion, and those
            of the requests that fail. True: each request has the flags that it was given. Receives always complete.
    Attributes:
        capacity, max_sge: as given.
    """

    contexts: Any
    remote_addresses: Any
    addresses: Any
    lengths: Any
    def __init__(self, capacity: int, *, max_sge: int = 1, signal_all: bool = False) -> None: ...
    @property
    def capacity(self) -> int:
        """How many requests it was made for."""
    @property
    def max_sge(self) -> int:
        """How many elements a request may have."""
    def __len__(self) -> int: ...
    def send(self, sges: Elements, *, context: int = 0, flags: int = 0, immediate: int | None = None) -> None:
        """Add a send. See QueuePair.send()."""
    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Add a receive. See QueuePair.receive()."""
    def read(self, sges: Elements, remote: PublicRemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        """Add an RDMA read. See QueuePair.read()."""
    def write(
        self,
        sges: Elements,
        remote: PublicRemoteMemory,
        *,
        context: int = 0,
        flags: int = 0,
        immediate: int | None = None,
    ) -> None:
        """Add an RDMA write. See QueuePair.write()."""
    def send_and_invalidate(
        self, sges: Elements, remote: PublicRemoteMemory, *, context: int = 0, flags: int = 0
    ) -> None:
        """Add a send that invalidates a window. See QueuePair.send_and_invalidate()."""
    def send_to(
        self,
        sges: Elements,
        destination: PublicDestination | XrcDestination,
        *,
        context: int = 0,
        flags: int = 0,
        immediate: int | None = None,
    ) -> None:
        """Add a send to a destination. See DatagramQueuePair.send() and XrcSender.send_to()."""
    def write_to(
        self,
        sges: Elements,
        remote: PublicRemoteMemory,
        destination: XrcDestination,
        immediate: int,
        *,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Add a write with immediate data for a destination. See XrcSender.write_to()."""
    def compare_and_swap(
        self,
        sges: Elements,
        remote: PublicRemoteMemory,
        compare: int,
        swap: int,
        *,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Add an atomic operation. See QueuePair.compare_and_swap()."""
    def fetch_and_add(
        self, sges: Elements, remote: PublicRemoteMemory, add: int, *, context: int = 0, flags: int = 0
    ) -> None:
        """Add an atomic operation. See QueuePair.fetch_and_add()."""
    def atomic_write(self, remote: PublicRemoteMemory, value: int, *, context: int = 0, flags: int = 0) -> None:
        """Add an atomic write. See QueuePair.atomic_write()."""
    def flush_memory(
        self,
        remote: PublicRemoteMemory,
        kind: FlushKind = FlushKind.GLOBAL,
        *,
        whole_region: bool = False,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Add a request that flushes memory of the peer. See QueuePair.flush_memory()."""
    def clear(self) -> None:
        """Forget all requests."""
    def _fill(
        self,
        operation: int,
        pairs: list[tuple[PublicRemoteMemory, Any]],
        place: int,
        longest: int,
        context: int,
        last_context: int,
        /,
    ) -> int: ...
    def _calls(
        self, first: int, /
    ) -> list[tuple[int, Any, PublicRemoteMemory | None, int, int, tuple[int, int, int], PublicDestination | None]]: ...

class PostingQueue(Resource):
    """A queue to which requests are posted. receive() is that of a shared receive queue."""

    _lock: Lock
    _sinks_must_be_writable: bool
    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Post memory for one message to any of the queue pairs. See QueuePair.receive().

        Parameters:
            sges: a region, a slice of one, or a sequence of them, up to max_sge.
            context: 0 to 2**64 - 1; comes back in the Completion.
        Raises:
            QueueFullError: `depth` receives are outstanding. Take completions, then try again.
            LimitExceededError, ForeignObjectError, ClosedError: as for QueuePair.receive().
        """
    def _post_elements(
        self,
        operation: int,
        record: list[Any],
        elements: list[Any],
        context: int,
        flags: int,
        remote: PublicRemoteMemory | None,
        words: tuple[int, int, int],
        destination: Any,
        /,
    ) -> None: ...
    def _attach(self, provider: int, native: int, posted_requests: completion.PostedRequests = ..., /) -> None: ...
    def _detach(self) -> None: ...

class WorkQueues(PostingQueue):
    """The part of a queue pair that posts."""

    srq: SharedReceiveQueue | None
    _ended: bool
    _number: int
    @property
    def _posted_requests(self) -> completion.PostedRequests: ...
    def send(self, sges: InlineElements, *, context: int = 0, flags: int = 0, immediate: int | None = None) -> None:
        """Send a message to the peer's oldest posted receive, and return as soon as it is queued.

        Without INLINE the memory belongs to the adapter until the completion is taken. After the connection has ended the
        request completes CANCELED.

        Parameters:
            sges: a region, a slice of one, or a sequence of them. At most limits.max_initiator_sge elements and
                info.max_transfer_length bytes in total. With INLINE also buffers that are not registered, and at most
                limits.inline_data_size bytes.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE.
            immediate: 0 to 2**32 - 1, which the peer gets as the `immediate` of its completion, beside the message. None for no
                such number. It needs Capability.IMMEDIATE_DATA.
        Raises:
            NotConnectedError: there was no connection yet.
            QueueFullError: no initiator slot is free. Take completions, then try again.
            LimitExceededError: there are too many elements or bytes.
            InvalidFlagsError: a flag is not one of these.
            ForeignObjectError: a region belongs to another adapter.
            ClosedError: the queue pair or a region is closed.
            UnsupportedError: the adapter has no immediate data.
        Source: IND2QueuePair::Send (contract F.3); ibv_post_send(3) with IBV_WR_SEND and IBV_WR_SEND_WITH_IMM.
        """
    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Post memory for one message of the peer. This is possible at any time, also before connecting.

        A message that is longer than the memory completes BUFFER_OVERFLOW and ends the connection.

        Parameters:
            sges: a region, a slice of one, or a sequence of them; at most limits.max_receive_sge elements. The regions need
                Access.LOCAL_WRITE.
            context: 0 to 2**64 - 1; comes back in the Completion.
        Raises:
            QueueFullError: no receive slot is free. Take completions, then try again.
            UnsupportedError: the queue pair takes its receives from a shared receive queue.
            LimitExceededError, ForeignObjectError, ClosedError: as for send().
        Source: IND2QueuePair::Receive; ibv_post_recv(3).
        """
    def read(self, sges: Elements, remote: PublicRemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        """Start an RDMA read of the first bytes of `remote` into `sges`, and return as soon as it is queued.

        The elements are filled in order, and decide how much is read.

        Parameters:
            sges: a region, a slice of one, or a sequence of them; at most remote.length bytes in total. At most
                limits.max_initiator_sge elements, and not more than info.max_read_sge. The regions need Access.LOCAL_WRITE, and
                Access.READ_SINK where info.capabilities has READ_SINK_REQUIRED.
            remote: memory of the peer that it has given the right to read.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            ElementRangeError: there are more bytes than `remote` has.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: IND2QueuePair::Read; ibv_post_send(3) with IBV_WR_RDMA_READ.
        """
    def write(
        self,
        sges: InlineElements,
        remote: PublicRemoteMemory,
        *,
        context: int = 0,
        flags: int = 0,
        immediate: int | None = None,
    ) -> None:
        """Start an RDMA write of `sges` into the first bytes of `remote`, and return as soon as it is queued.

        The peer takes no part in it and sees no completion, unless there is immediate data. Then the write ends the peer's
        oldest receive, whose memory stays as it is: its completion is a RECEIVE_RDMA_WITH_IMMEDIATE, and comes after the bytes.

        Parameters:
            sges: as for send(); at most remote.length bytes in total.
            remote: memory of the peer that it has given the right to write.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS, READ_FENCE, INLINE and, with immediate data, SOLICITED.
            immediate: as for send().
        Raises:
            ElementRangeError: there are more bytes than `remote` has.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: IND2QueuePair::Write; ibv_post_send(3) with IBV_WR_RDMA_WRITE and IBV_WR_RDMA_WRITE_WITH_IMM.
        """
    def compare_and_swap(
        self,
        sges: Elements,
        remote: PublicRemoteMemory,
        compare: int,
        swap: int,
        *,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Start an atomic operation: read 8 bytes of the peer's memory and, if they are `compare`, write `swap` there.

        `sges` gets the 8 bytes as they were before, even if they differ from `compare`. They are an integer in host order. Among
        the atomic operations of the peer's adapter no other one comes between. Neither do those of the peer's processors and
        of its other adapters, if the peer's adapter has Capability.GLOBAL_ATOMICS.

        Parameters:
            sges: 8 bytes of a region with Access.LOCAL_WRITE.
            remote: memory of a peer that was registered with Access.REMOTE_ATOMIC. The operation is on its first 8 bytes, whose
                address is a multiple of 8.
            compare, swap: integers of 64 bits, signed or unsigned.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            UnsupportedError: info.capabilities lacks ATOMICS.
            ElementRangeError: `sges` are not 8 bytes, `remote` has less, or its address is not a multiple of 8.
            AccessViolationError: the region of `sges` has no LOCAL_WRITE.
            LimitExceededError: the connection's outbound read limit is 0. It counts atomic operations too.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: ibv_post_send(3) with IBV_WR_ATOMIC_CMP_AND_SWP.
        """
    def fetch_and_add(
        self, sges: Elements, remote: PublicRemoteMemory, add: int, *, context: int = 0, flags: int = 0
    ) -> None:
        """Start an atomic operation: add `add` to 8 bytes of the peer's memory. The sum wraps at 2**64.

        `sges` gets the 8 bytes as they were before.

        Parameters:
            add: an integer of 64 bits, signed or unsigned.
            sges, remote, context, flags: as for compare_and_swap().
        Raises: as for compare_and_swap().
        Source: ibv_post_send(3) with IBV_WR_ATOMIC_FETCH_AND_ADD.
        """
    def send_to(
        self,
        sges: InlineElements,
        destination: PublicDestination | XrcDestination,
        *,
        context: int = 0,
        flags: int = 0,
        immediate: int | None = None,
    ) -> None:
        """Send a message to a shared receive queue, and return as soon as it is queued.

        Parameters:
            sges, context, flags, immediate: as for QueuePair.send().
            destination: the queue.
        Raises:
            TypeError: destination is not an XrcDestination.
            NotConnectedError, QueueFullError and so on: as for QueuePair.send().
        Source: ibv_post_send(3) with IBV_WR_SEND.
        """
    def write_to(
        self,
        sges: InlineElements,
        remote: PublicRemoteMemory,
        destination: XrcDestination,
        immediate: int,
        *,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Write to memory of the peer, and give a receive of a shared receive queue the immediate data. Return as soon as it is queued.

        A write without immediate data goes to no queue: that is write().

        Parameters:
            sges, remote, context, flags, immediate: as for QueuePair.write().
            destination: the queue.
        Raises:
            TypeError: destination is not an XrcDestination.
            NotConnectedError, QueueFullError and so on: as for QueuePair.write().
        Source: ibv_post_send(3) with IBV_WR_RDMA_WRITE_WITH_IMM.
        """
    def send_and_invalidate(
        self, sges: InlineElements, remote: PublicRemoteMemory, *, context: int = 0, flags: int = 0
    ) -> None:
        """Send a message, and have the peer's adapter invalidate a window when the message arrives.

        The window has to be bound to the peer's end of this connection. On the peer's side, is_bound is False as soon as the
        completion of the message's receive was taken. The request completes as a SEND.

        Parameters:
            sges, context, flags: as for send().
            remote: memory that the window gives access to.
        Raises:
            UnsupportedError: info.capabilities lacks SEND_INVALIDATE, or the provider refuses it all the same.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: INDEndpoint::SendAndInvalidate (contract I.4.2); ibv_post_send(3) with IBV_WR_SEND_WITH_INV.
        """
    def atomic_write(self, remote: PublicRemoteMemory, value: int, *, context: int = 0, flags: int = 0) -> None:
        """Write 8 bytes to the peer at once, so that nobody sees a part of them. Return as soon as the request is queued.

        Parameters:
            remote: where the first 8 bytes go. The address must be a multiple of 8. The peer's memory needs REMOTE_WRITE.
            value: an integer of 64 bits, signed or unsigned, written in this host's byte order.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            UnsupportedError: info.capabilities lacks ATOMIC_WRITE.
            ElementRangeError: the address is not a multiple of 8, or there are fewer than 8 bytes.
            NotConnectedError, QueueFullError and so on: as for write().
        Source: ibv_wr_post(3), ibv_wr_atomic_write().
        """
    def flush_memory(
        self,
        remote: PublicRemoteMemory,
        kind: FlushKind = FlushKind.GLOBAL,
        *,
        whole_region: bool = False,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Have the peer's adapter finish the earlier writes of this queue pair. Return as soon as the request is queued.

        Its completion says that they are where `kind` wants them. Without it, the completion of a write says only that the peer's
        adapter has the bytes.

        Parameters:
            remote: the memory that was written to. It needs Access.FLUSH_GLOBAL or FLUSH_PERSISTENT.
            kind: GLOBAL, PERSISTENT, or both.
            whole_region: flush all of the region that the token of `remote` stands for.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            UnsupportedError: info.capabilities lacks FLUSH.
            NotConnectedError, QueueFullError and so on: as for write().
        Source: ibv_wr_post(3), ibv_wr_flush().
        """
    def post(self, batch: Batch, /) -> None:
        """Post the requests of a batch, in one call of the provider where that has such a call, and return as soon as they are
        queued.

        All of them are posted, or none if the queue has too little room for them. If the provider refuses one of them, those
        before it are posted, and the error says how many. So it is too where the provider has no such call, if another thread
        posts single requests meanwhile and takes the last room.

        Parameters:
            batch: a Batch with at least one request. It may be changed and posted again as soon as the call returns.
        Raises:
            ElementRangeError: a number in a column is outside of the memory that the request was made for.
            LimitExceededError: there are more requests than the queue has slots, or a request exceeds a limit.
            QueueFullError, NotConnectedError, ForeignObjectError and so on: as for send().
        Source: ibv_post_send(3) and ibv_post_recv(3) with a list. Providers of NetworkDirect get each request by itself.
        """

@final
class CompletionArray(Uncopied):
    """The completions that CompletionQueue.poll_into() has taken last.

    It is a sequence of Completions, which are made when they are asked for. The columns contexts, nbytes, operations,
    statuses, native_statuses and immediates are memoryviews with a number for each completion, and NumPy arrays of them copy nothing:
    numpy.asarray(array.statuses). The next poll_into() overwrites what a column shows. So take the columns after each
    poll_into(), which also fits their length to the number of completions. timestamps, wall_clocks_ns and flow_tags are
    columns too, which are copied when they are asked for.

    Parameters:
        capacity: how many completions it can hold.
    Attributes:
        capacity: as given.
        all_ok: whether all requests succeeded.
    """

    def __init__(self, capacity: int) -> None: ...
    @property
    def capacity(self) -> int:
        """How many completions it can hold."""
    @property
    def all_ok(self) -> bool:
        """Whether all requests succeeded."""
    @property
    def contexts(self) -> memoryview:
        """The context of each request, 64 bits."""
    @property
    def nbytes(self) -> memoryview:
        """How many bytes each successful request moved, 64 bits."""
    @property
    def operations(self) -> memoryview:
        """The Operation of each request, 32 bits."""
    @property
    def immediates(self) -> memoryview:
        """The immediate data of each receive, 32 bits. It means nothing for a completion that has none."""
    @property
    def statuses(self) -> memoryview:
        """The Status of each request, 32 bits."""
    @property
    def native_statuses(self) -> memoryview:
        """The provider's own number for each status, 32 bits."""
    @property
    def timestamps(self) -> memoryview:
        """The timestamp of each completion, 64 bits. 0 for one that has none. Copied."""
    @property
    def wall_clocks_ns(self) -> memoryview:
        """The wall_clock_ns of each completion, 64 bits. 0 for one that has none. Copied."""
    @property
    def flow_tags(self) -> memoryview:
        """The flow_tag of each completion, 32 bits. 0 for one that has none. Copied."""
    def raise_for_status(self) -> None:
        """Raise the exception that fits the status of the first request that failed. Does nothing if all succeeded."""
    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Completion: ...

class CompletionQueue(Resource):
    """The part of a completion queue that takes completions."""

    _failure: Callable[[], errors.NdpyError] | None
    _lock: Lock
    depth: int
    @property
    def _posted_requests(self) -> dict[int, completion.PostedRequests]: ...
    @property
    def _taken(self) -> int: ...
    @property
    def _kept(self) -> list[Completion]: ...
    def poll(self, max_entries: int = 64, *, spin_s: float = 0.0) -> list[Completion]:
        """Take completions without sleeping.

        Parameters:
            max_entries: how many to take at most.
            spin_s: how long to look again and again until there is one. Other threads run meanwhile. It ends early when another
                thread needs the queue.
        Returns: the completions, oldest first. If there are fewer than max_entries, the queue was empty.
        Raises:
            CompletionQueueOverrunError: more completions arrived than the queue holds, and all those that it kept were taken.
            ClosedError, DeviceRemovedError: the queue was closed, or the adapter has gone.
        Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).
        """
    def poll_into(self, array: CompletionArray, *, at_least: int = 1, spin_s: float = 0.0) -> int:
        """Take completions without sleeping, and allocate nothing for them.

        Parameters:
            array: a CompletionArray. What it had before is forgotten.
            at_least, spin_s: look again and again, for spin_s seconds at most, until the array has at_least. Other threads run
                meanwhile. It ends early when another thread needs the queue.
        Raises:
            ValueError: at_least is more than the array holds.
            CompletionQueueOverrunError, ClosedError, DeviceRemovedError: as for poll().
        Returns: how many completions the array has now, oldest first. If there are fewer than array.capacity, the queue was
            empty.
        Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).
        """
    def _collect_internal(self) -> list[tuple[completion.PostedRequests, bool]]: ...
    def _native_sleep(self, deadline: float | None, /) -> bool: ...
    def _renew(self) -> None: ...
    def _attach(self, provider: int, native: int, /) -> None: ...
    def _detach(self) -> None: ...

def identity(object: Any, /) -> int:
    """Return id(object), as the same int as far as possible."""

class Entry(Uncopied):
    """A registered region."""

    used: int
    cached: bool
    @property
    def uses(self) -> int: ...
    def take(self) -> None:
        """Add one use."""
    def give_back(self) -> None:
        """Remove one use."""

class Export(Uncopied):
    """Export(buffer): keeps the memory of a buffer in place while it exists."""

    def __init__(self, buffer: Any, /) -> None: ...
    @property
    def address(self) -> int:
        """The address of the first byte."""

class Owned(Uncopied):
    """Owned(free, arguments, memory=None): calls free(*arguments) when nothing refers to it any longer. Exports the memory."""

    def __init__(self, free: Callable[..., Any], arguments: tuple[Any, ...], memory: Any = None, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Tensor(Uncopied):
    """Tensor(capsule): takes a DLPack capsule, and calls its deleter when nothing refers to it any longer."""

    def __init__(self, capsule: Any, /) -> None: ...
    def describe(
        self,
    ) -> tuple[int, int, tuple[int, ...], tuple[int, ...] | None, tuple[int, int, int], tuple[int, int], int]:
        """Return (data, offset, shape, strides or None, (code, bits, lanes), (device's type, its number), flags)."""

class ArrayMemory(Uncopied):
    """ArrayMemory(producer, owner, address, length, readonly, device): the bytes of an array, which exports them as a buffer if no device has them."""

    def __init__(
        self, producer: Any, owner: Any, address: int, length: int, readonly: bool, device: Any, /
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def producer(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...

class KnownBuffer(Uncopied):
    """KnownBuffer(entry, rights, start, length, is_exported, changed, watch): a buffer whose entry was found before."""

    def __init__(
        self,
        entry: Entry,
        rights: int,
        start: int,
        length: int,
        is_exported: bool,
        changed: Callable[[Any], Any] | None,
        watch: Any,
        /,
    ) -> None: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def entry(self) -> Any: ...

class Destination(Resource):
    """The part of a destination that requests refer to."""

    _words: tuple[int, int]

class LeaseFinder(Resource):
    """The part of a cache that a hit needs. It calls _local() for a miss."""

    _known_buffers: dict[Any, Any]
    _over_bounds: bool
    @property
    def _hits(self) -> int: ...
    def local(
        self, buffer: Any, access: int = Access.LOCAL_WRITE, *, queue_pair: QueuePair | None = None, raw: bool = False
    ) -> Lease:
        """Lease registered memory for send, receive, read and write of this side.

        A hit calls no provider. The buffer can be neither freed nor resized until the lease is released.

        Parameters:
            buffer: as for Adapter.register(), 1 to info.max_registration_size bytes.
            access: NONE, LOCAL_WRITE (1) or READ_SINK.
            queue_pair: the connection that the memory is for. When it ends or is closed, regions that were used for it alone
                are deregistered.
            raw: True if the caller calls invalidate() before the memory is freed, moved or resized. See the class.
        Returns: a Lease.
        Raises:
            InvalidFlagsError: other rights.
            UnsupportedError: no Python object owns the memory.
            Otherwise what Adapter.register() raises.
        Source: contract K.1.
        """
    def _next_use(self) -> int: ...

class Lease(Uncopied):
    """Registered memory for the time of its use, made by RegistrationCache.local(). It is a context manager.

    lease[a:b] is an Sge of those bytes, and lease[:] of all bytes. The buffer can be neither freed nor resized until
    release() is called and the requests that were posted with lease[a:b] have completed. Call release() after they have
    completed, because it may deregister the region. Then requests that are still under way fail.

    Attributes:
        region: a region that covers the requested bytes, and perhaps more.
        address, length: of the requested bytes.
    """

    _cache: RegistrationCache
    _range: MemoryRange | KnownBuffer
    _view: Any
    @property
    def address(self) -> int:
        """Where the requested bytes are."""
    @property
    def length(self) -> int:
        """How many bytes were requested."""
    @property
    def region(self) -> PublicRegion:
        """A region that covers the requested bytes, and perhaps more."""
    def __len__(self) -> int: ...
    def __getitem__(self, key: slice) -> Sge: ...
    def _entry_in_use(self) -> lease.Entry: ...
    def release(self) -> None:
        """End the lease. The memory stays registered, in the cache. Harmless when repeated."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
