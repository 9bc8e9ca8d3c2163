"""The flags and enumerations of the public API. Values are NetworkDirect's where it has one (contract B.2)."""

from __future__ import annotations

import enum


class Access(enum.IntFlag):
    """Rights of a region or window. Local read needs no flag; REMOTE_WRITE contains LOCAL_WRITE.

    READ_SINK: memory that RDMA reads are to fill. An adapter with READ_SINK_REQUIRED in info.flags may refuse reads into
    memory without it, on all others it changes nothing, so portable programs set it (contract J.10 to J.12). On iWARP it
    makes the peer's answer possible, which is a write to the region, for as long as the region is registered.
    REMOTE_ATOMIC, ON_DEMAND: verbs only. With ON_DEMAND nothing is pinned, and the adapter faults pages in as it uses them;
    UnsupportedError where info.flags lacks ON_DEMAND_PAGING. On rxe, whose on-demand paging moves data to the wrong place in a
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
