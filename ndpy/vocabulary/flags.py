"""The flags and enumerations of the public API. They have NetworkDirect's values if it has them (contract B.2)."""

from __future__ import annotations

import enum


class NamedInt(enum.IntEnum):
    """Prints members by their names, as enum.Enum does. A format of numbers, such as "d" or "#x", prints the number."""

    __str__ = enum.Enum.__str__

    def __format__(self, spec: str) -> str:
        return _format(self, spec)


class NamedFlags(enum.IntFlag):
    """As NamedInt, for flags."""

    __str__ = enum.Flag.__str__

    def __format__(self, spec: str) -> str:
        return _format(self, spec)


def _format(member: NamedInt | NamedFlags, spec: str) -> str:
    return int.__format__(member, spec) if spec[-1:] in set("bcdnoxX") else format(str(member), spec)


class Capability(enum.Flag):
    """What some adapters can do and others cannot. AdapterInfo.capabilities has those of an adapter.

    Names:
        NONE: none of these.
        MEMORY_WINDOWS: create_memory_window(), bind() and invalidate() work.
        SHARED_RECEIVE_QUEUES: create_shared_receive_queue() works.
        RESIZE_COMPLETION_QUEUE: CompletionQueue.resize() works.
        IN_ORDER_DMA: the last byte of a message is written last. So a program may poll the memory for it.
        LOOPBACK_CONNECTIONS: two queue pairs of this adapter can be connected to each other.
        ATOMICS: compare_and_swap() and fetch_and_add() work, and regions take Access.REMOTE_ATOMIC.
        GLOBAL_ATOMICS: these operations are atomic also with the host's processors and its other adapters.
        IMMEDIATE_DATA: send() and write() take `immediate`.
        RELIABLE_CONNECTIONS: connections, and create_queue_pair() with QueuePairType.RC, work. Few adapters have
            datagrams only.
        UNRELIABLE_CONNECTIONS: create_queue_pair() takes QueuePairType.UC.
        DATAGRAMS: create_datagram_queue_pair() works.
        XRC: Adapter.open_xrc_domain() and create_xrc_sender() work.
        COUNTERS: Adapter.counters() works.
        EVENTS: Adapter.events() works.
        PROTECTION_DOMAINS: create_protection_domain() works.
        TYPE_1_WINDOWS: beside MEMORY_WINDOWS: the windows are of verbs' type 1. Every peer of the window's protection
            domain can use its token, not only that of its queue pair. To bind a bound window binds it anew.
        ATOMIC_WRITE: QueuePair.atomic_write() works.
        FLUSH, FLUSH_PERSISTENT: QueuePair.flush_memory() works with FlushKind.GLOBAL, with FlushKind.PERSISTENT.
        DATA_IN_ORDER: QueuePair.data_in_order() works.
        DEVICE_MEMORY: Adapter.alloc_device_memory() works.
        TIMESTAMPS, WALL_CLOCK_TIMESTAMPS, FLOW_TAGS: create_completion_queue() takes CompletionDetails.TIMESTAMP,
            WALL_CLOCK, FLOW_TAG.
        SINGLE_THREADED_QUEUES: create_completion_queue() takes single_threaded.
        CLOCK: Adapter.clock() works.
        MODIFY: QueuePair.modify() and query() work, and so do local_endpoint() and connect_endpoint().
        READ_SINK_REQUIRED: memory that a read fills needs Access.READ_SINK.
        GIDS: ports have tables of GIDs.
        REFUSE_OFFER: a client can withdraw its request, and can refuse the connection after the server accepted it.
        REGION_ACCESS: regions have the remote rights that register() gives them. Without it, peers reach memory through
            windows only, and remote rights that register() is given grant nothing.
        INLINE: Flags.INLINE works.
        SEND_INVALIDATE: send_and_invalidate() works.
        BIND_RESERVES_PORT: bind() of a connector fails if the port is in use. Without it, connect() fails.
        REREGISTRATION: MemoryRegion.reregister() works.
        ON_DEMAND_PAGING: Access.ON_DEMAND works.
        IMPLICIT_ON_DEMAND: Adapter.register_implicit() works.
        CHOSEN_ADDRESS: Adapter.register_at() works.
        RELAXED_ORDERING: Access.RELAXED_ORDERING works.
        NULL_REGIONS: Adapter.register_null() works.
        DMABUF: Adapter.register_dmabuf() works.
        RETRY_POLICY: connect() and accept() take a RetryPolicy.
    Source: ND2_ADAPTER_INFO (contract B.6); ibv_query_device_ex(3).
    """

    NONE = 0
    MEMORY_WINDOWS = enum.auto()
    SHARED_RECEIVE_QUEUES = enum.auto()
    RESIZE_COMPLETION_QUEUE = enum.auto()
    IN_ORDER_DMA = enum.auto()
    LOOPBACK_CONNECTIONS = enum.auto()
    ATOMICS = enum.auto()
    READ_SINK_REQUIRED = enum.auto()
    GIDS = enum.auto()
    REFUSE_OFFER = enum.auto()
    REGION_ACCESS = enum.auto()
    INLINE = enum.auto()
    SEND_INVALIDATE = enum.auto()
    BIND_RESERVES_PORT = enum.auto()
    REREGISTRATION = enum.auto()
    ON_DEMAND_PAGING = enum.auto()
    IMPLICIT_ON_DEMAND = enum.auto()
    DMABUF = enum.auto()
    RETRY_POLICY = enum.auto()
    GLOBAL_ATOMICS = enum.auto()
    IMMEDIATE_DATA = enum.auto()
    UNRELIABLE_CONNECTIONS = enum.auto()
    MODIFY = enum.auto()
    DATAGRAMS = enum.auto()
    COUNTERS = enum.auto()
    EVENTS = enum.auto()
    PROTECTION_DOMAINS = enum.auto()
    CHOSEN_ADDRESS = enum.auto()
    RELAXED_ORDERING = enum.auto()
    NULL_REGIONS = enum.auto()
    TIMESTAMPS = enum.auto()
    WALL_CLOCK_TIMESTAMPS = enum.auto()
    FLOW_TAGS = enum.auto()
    SINGLE_THREADED_QUEUES = enum.auto()
    CLOCK = enum.auto()
    TYPE_1_WINDOWS = enum.auto()
    DEVICE_MEMORY = enum.auto()
    DATA_IN_ORDER = enum.auto()
    ATOMIC_WRITE = enum.auto()
    FLUSH = enum.auto()
    FLUSH_PERSISTENT = enum.auto()
    XRC = enum.auto()
    RELIABLE_CONNECTIONS = enum.auto()

    def names(self) -> list[str]:
        """The names of the set flags, in alphabetical order."""
        return sorted(name for name, member in Capability.__members__.items() if member.value & self.value)


class Access(NamedFlags):
    """The rights of a region or window. Reading by the adapter itself needs no right.

    Names:
        NONE: the adapter may only read, for requests of this side.
        LOCAL_WRITE: the adapter may write to the memory, for receives and reads of this side.
        REMOTE_READ: peers may read the memory.
        REMOTE_WRITE: peers may write to the memory. Contains LOCAL_WRITE.
        READ_SINK: RDMA reads may fill the memory. An adapter with Capability.READ_SINK_REQUIRED may refuse reads into
            memory without it. On the others it changes nothing, so portable programs set it (contract J.10 to J.12). On
            iWARP the answer to a read is a write to the region. READ_SINK allows that for as long as the region is
            registered.
        REMOTE_ATOMIC: peers may use atomic operations. Only on verbs.
        ON_DEMAND: the memory is not pinned, and the adapter faults pages in when it uses them. Only on verbs, and only
            with Capability.ON_DEMAND_PAGING, else UnsupportedError. On rxe, ndpy pins the memory all the same, because
            rxe's on-demand paging moves data to the wrong place in a page (seen on Linux 7.2). So there it must be
            mapped when it is registered.
        RELAXED_ORDERING: the adapter may write to the memory in another order than the messages came, which is quicker
            on some machines. Then only a completion says that the data of a message are all there: do not poll the
            memory. An adapter that has no such order ignores it. Only on verbs, and only with
            Capability.RELAXED_ORDERING, else UnsupportedError.
        FLUSH_GLOBAL, FLUSH_PERSISTENT: peers may flush the memory, with this FlushKind. Only on verbs, and only with
            Capability.FLUSH or FLUSH_PERSISTENT, else UnsupportedError.
        DO_NOT_SECURE_VM: the provider does not protect the memory against being freed. Only on NetworkDirect.
    Source: ND_MR_FLAG_* (contract B.2); ibv_reg_mr(3).
    """

    NONE = 0
    LOCAL_WRITE = 0x1
    REMOTE_READ = 0x2
    REMOTE_WRITE = 0x5
    READ_SINK = 0x8
    REMOTE_ATOMIC = 0x10001
    ON_DEMAND = 0x20000
    RELAXED_ORDERING = 0x40000
    FLUSH_GLOBAL = 0x100000
    FLUSH_PERSISTENT = 0x200000
    DO_NOT_SECURE_VM = 0x80000000


class Flags(NamedFlags):
    """The flags of a posted request.

    Names:
        NONE: none of these.
        SILENT_SUCCESS: the request has no completion if it succeeds (an unsignaled work request).
        READ_FENCE: the request starts when all earlier reads of this queue pair have completed.
        SOLICITED: the completion of the peer's receive satisfies Notify.SOLICITED. Only for send, and for write with
            immediate data.
        INLINE: the bytes are copied during the call, so the memory need not be registered. Only for send and write.
    Source: ND_OP_FLAG_* (contract B.2); ibv_post_send(3).
    """

    NONE = 0
    SILENT_SUCCESS = 0x1
    READ_FENCE = 0x2
    SOLICITED = 0x4
    INLINE = 0x20


class Operation(NamedInt):
    """The kind of request that completed.

    Names:
        RECEIVE: a receive, which took a message.
        SEND: a message of this side, with or without an invalidate.
        BIND, INVALIDATE: a window was bound, or its right taken back.
        READ, WRITE: an RDMA read, or write, of this side.
        COMPARE_AND_SWAP, FETCH_AND_ADD, ATOMIC_WRITE: an atomic operation of this side.
        FLUSH_MEMORY: earlier writes are where flush_memory() wanted them.
        RECEIVE_RDMA_WITH_IMMEDIATE: the peer wrote with immediate data, which uses up a receive. The data are in the
            memory that the peer wrote to. The memory of the receive is unchanged. Only on verbs
            (IBV_WC_RECV_RDMA_WITH_IMM).
    """

    RECEIVE = 0
    SEND = 1
    BIND = 2
    INVALIDATE = 3
    READ = 4
    WRITE = 5
    RECEIVE_RDMA_WITH_IMMEDIATE = 6
    COMPARE_AND_SWAP = 7
    FETCH_AND_ADD = 8
    ATOMIC_WRITE = 9
    FLUSH_MEMORY = 10


class Status(NamedInt):
    """How a request ended. Completion.native_status has the provider's own number.

    Names:
        SUCCESS: it did what it was posted for.
        CANCELED: it was outstanding when the connection ended, or it was flushed. An earlier completion has the reason.
        ACCESS_VIOLATION: memory was used beyond its rights or bounds, at this end or at the peer's. Or its token is
            wrong, or no longer valid.
        BUFFER_OVERFLOW: a message was longer than the receive that took it.
        DATA_OVERRUN: the request has more bytes than the adapter or the peer's receive takes.
        IO_TIMEOUT: the peer did not answer in time, or had no receive posted for too long.
        REMOTE_ERROR: the peer's adapter could not serve the request.
        INVALID_REQUEST: the request was not possible, such as a bind of a bound window.
        INTERNAL_ERROR: the adapter itself failed.
        UNKNOWN: ndpy does not know the provider's number.
    Source: ND2_RESULT (contract F.6); enum ibv_wc_status, ibv_poll_cq(3).
    """

    SUCCESS = 0
    CANCELED = 1
    ACCESS_VIOLATION = 2
    BUFFER_OVERFLOW = 3
    DATA_OVERRUN = 4
    IO_TIMEOUT = 5
    REMOTE_ERROR = 6
    INVALID_REQUEST = 7
    INTERNAL_ERROR = 8
    UNKNOWN = 9


class CompletionDetails(enum.Flag):
    """What each completion of a queue brings in addition, if the queue is made for it. The completion of a failed
    request brings nothing in addition.

    ndpy's tests of timestamps and flow tags ran against a stand-in for a driver only, because no adapter in software
    has them.

    Names:
        NONE: nothing in addition.
        TIMESTAMP: Completion.timestamp, in ticks of the adapter's clock. Adapter.clock() converts them. With
            Capability.TIMESTAMPS.
        WALL_CLOCK: Completion.wall_clock_ns, in nanoseconds since 1970 by the adapter's clock, which somebody has to
            keep in step with the time of day, such as ptp4l(8). With Capability.WALL_CLOCK_TIMESTAMPS.
        FLOW_TAG: Completion.flow_tag. With Capability.FLOW_TAGS.
    Source: ibv_create_cq_ex(3).
    """

    NONE = 0
    TIMESTAMP = 2
    WALL_CLOCK = 4
    FLOW_TAG = 8


class FlushKind(NamedFlags):
    """What QueuePair.flush_memory() waits for.

    Names:
        GLOBAL: all of the peer's processors and adapters see what was written.
        PERSISTENT: it outlives a loss of power of the peer. Only memory that persists has that.
    Source: enum ibv_placement_type, ibv_wr_flush(3).
    """

    GLOBAL = 1
    PERSISTENT = 2


class Notify(NamedInt):
    """What a completion queue is armed for.

    Names:
        ERRORS: an error of the queue itself.
        ANY: any completion.
        SOLICITED: the completion of a solicited message, or of a failed request.
    Source: ND_CQ_NOTIFY_* (contract B.2); ibv_req_notify_cq(3).
    """

    ERRORS = 0
    ANY = 1
    SOLICITED = 2
