"""The flags and enumerations of the public API. Values are NetworkDirect's where it has one (contract B.2)."""

from __future__ import annotations

import enum


class Capability(enum.Flag):
    """What an adapter can do beyond what all adapters can: see AdapterInfo.capabilities.

    Names:
        MEMORY_WINDOWS: create_memory_window(), bind() and invalidate().
        SHARED_RECEIVE_QUEUES: create_shared_receive_queue().
        RESIZE_COMPLETION_QUEUE: CompletionQueue.resize().
        IN_ORDER_DMA: the last byte of a message is written last, so that a program may poll memory for it.
        LOOPBACK_CONNECTIONS: two queue pairs of this adapter can be connected to each other.
        ATOMICS: regions take Access.REMOTE_ATOMIC.
        READ_SINK_REQUIRED: memory that a read fills needs Access.READ_SINK.
        GIDS: ports have tables of GIDs.
        REFUSE_OFFER: a client can take back its request, and can refuse what the server accepted.
        REGION_ACCESS: regions have the rights that register() gives them, remote ones too. Without it peers reach memory
            through windows only; remote rights given to register() are kept but grant nothing.
        INLINE: Flags.INLINE.
        SEND_INVALIDATE: send_and_invalidate().
        BIND_RESERVES_PORT: a connector's bind() finds out that a port is taken. Without it connect() does.
        REREGISTRATION: MemoryRegion.reregister().
        ON_DEMAND_PAGING: Access.ON_DEMAND.
        IMPLICIT_ON_DEMAND: Adapter.register_implicit().
        DMABUF: Adapter.register_dmabuf().
        RETRY_POLICY: the RetryPolicy of connect() and accept().
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

    def names(self) -> list[str]:
        """The names of those that are set, in alphabetical order."""
        return sorted(name for name, member in Capability.__members__.items() if member.value & self.value)


class Access(enum.IntFlag):
    """Rights of a region or window. Local read needs no flag; REMOTE_WRITE contains LOCAL_WRITE.

    READ_SINK: memory that RDMA reads are to fill. An adapter with READ_SINK_REQUIRED in info.capabilities may refuse reads into
    memory without it, on all others it changes nothing, so portable programs set it (contract J.10 to J.12). On iWARP it
    makes the peer's answer possible, which is a write to the region, for as long as the region is registered.
    REMOTE_ATOMIC, ON_DEMAND: verbs only. With ON_DEMAND nothing is pinned, and the adapter faults pages in as it uses them;
    UnsupportedError where info.capabilities lacks ON_DEMAND_PAGING. On rxe, whose on-demand paging moves data to the wrong place in a
    page (seen on Linux 7.2), ndpy pins the memory: data is right, and the memory must be mapped when registered.
    """

    NONE = 0
    LOCAL_WRITE = 0x1
    REMOTE_READ = 0x2
    REMOTE_WRITE = 0x5
    READ_SINK = 0x8
    REMOTE_ATOMIC = 0x10001
    ON_DEMAND = 0x20000
    DO_NOT_SECURE_VM = 0x80000000


class Flags(enum.IntFlag):
    """Flags of a posted request.

    SILENT_SUCCESS: no completion when it succeeds (an unsignaled work request).
    READ_FENCE: start only when all earlier reads of this queue pair have completed.
    SOLICITED: the peer's receive completion satisfies a SOLICITED notification (send only).
    INLINE: the bytes are taken during the call; the memory need not be registered (send and write only).
    """

    NONE = 0
    SILENT_SUCCESS = 0x1
    READ_FENCE = 0x2
    SOLICITED = 0x4
    INLINE = 0x20


class Operation(enum.IntEnum):
    """What a completion is the end of.

    RECEIVE_RDMA_WITH_IMMEDIATE (verbs only): the peer wrote with immediate data, which takes a receive for the notice. The
    data are where the peer's token leads; the receive's own memory is untouched (IBV_WC_RECV_RDMA_WITH_IMM).
    """

    RECEIVE = 0
    SEND = 1
    BIND = 2
    INVALIDATE = 3
    READ = 4
    WRITE = 5
    RECEIVE_RDMA_WITH_IMMEDIATE = 6


class Status(enum.IntEnum):
    """How a request ended; Completion.native_status keeps the provider's own number."""

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


class Notify(enum.IntEnum):
    """What a completion queue is armed for: errors of the queue itself, any completion, or a solicited one."""

    ERRORS = 0
    ANY = 1
    SOLICITED = 2
