/* The table of operations: everything that a queue pair can be asked to do. This is its only place. C reads it here,
   Python reads it as ndpy._core.operations() (ndpy/objects/operations.py), and cffi gets enum ndpy_operation of it
   (cdefs/operations.py). The numbers are those of ndpy/vocabulary/flags.py, as far as completions have them. */

#ifndef NDPY_OPERATIONS_H
#define NDPY_OPERATIONS_H

/* What an operation is like. */
enum operation_trait {
    FILLS_LOCAL = 0x1,      /* the adapter writes to the local memory */
    NAMES_REMOTE = 0x2,     /* it names memory of the peer, which the local memory has to fit */
    NAMES_TOKEN = 0x4,      /* it names memory of the peer, of which only the token matters */
    TO_DESTINATION = 0x8,   /* it says where it goes: see struct ndpy_remote */
    HAS_IMMEDIATE = 0x10,   /* it has immediate data */
    HAS_OPERANDS = 0x20,    /* it has operands: see struct ndpy_remote */
    IS_ATOMIC = 0x40,       /* its local memory is one element of 8 bytes, which the adapter fills */
    IS_ALIGNED = 0x80,      /* it is on 8 bytes of the peer's memory, at a multiple of 8 */
    COUNTS_AS_READ = 0x100, /* the connection's read limits count it */
    HAS_OTHER_CALL = 0x200  /* it has no elements, and some providers have another call for it: no list takes it */
};

/* Which queue pairs take it, as far as the adapter has it. */
enum operation_type { BY_RC = 1, BY_UC = 2, BY_UD = 4, BY_XRC = 8 };

#define OF_ALL     (NDPY_SILENT_SUCCESS | NDPY_READ_FENCE)
#define OF_SENDS   (OF_ALL | NDPY_SOLICITED | NDPY_INLINE)
#define OF_WINDOWS (OF_ALL | NDPY_MARKER)

/* ROW(operation, number, words, completes_as, opcode, traits, flags, types, capability)

   words: what it is in an error.
   completes_as: the operation of its completion. Numbers from 16 on are only for posting.
   opcode: that of ibv_post_send(3), if it has one.
   flags: those that it takes, of enum ndpy_flag and enum ndpy_internal_flag. One with NDPY_INLINE may be sent inline.
   capability: the member of ndpy.Capability that the adapter needs, or "". */
/* clang-format off */
#define NDPY_OPERATIONS(ROW) \
    ROW(RECEIVE, 0, "receive", RECEIVE, 0, \
        FILLS_LOCAL, NDPY_UNWRITABLE, BY_RC | BY_UC | BY_UD, "") \
    ROW(SEND, 1, "send", SEND, IBV_WR_SEND, \
        0, OF_SENDS, BY_RC | BY_UC, "") \
    ROW(BIND, 2, "bind", BIND, IBV_WR_BIND_MW, \
        0, OF_WINDOWS, BY_RC | BY_UC | BY_XRC, "") \
    ROW(INVALIDATE, 3, "invalidate", INVALIDATE, IBV_WR_LOCAL_INV, \
        0, OF_WINDOWS, BY_RC | BY_UC | BY_XRC, "") \
    ROW(READ, 4, "read", READ, IBV_WR_RDMA_READ, \
        FILLS_LOCAL | NAMES_REMOTE | COUNTS_AS_READ, OF_ALL, BY_RC | BY_XRC, "") \
    ROW(WRITE, 5, "write", WRITE, IBV_WR_RDMA_WRITE, \
        NAMES_REMOTE, OF_ALL | NDPY_INLINE, BY_RC | BY_UC | BY_XRC, "") \
    /* Nobody posts it. In C it is a receive that completes with NDPY_WRITTEN. */ \
    ROW(RECEIVE_RDMA_WITH_IMMEDIATE, 6, "receive", RECEIVE, 0, \
        0, 0, 0, "") \
    ROW(COMPARE_AND_SWAP, 7, "compare_and_swap", COMPARE_AND_SWAP, IBV_WR_ATOMIC_CMP_AND_SWP, \
        FILLS_LOCAL | NAMES_REMOTE | HAS_OPERANDS | IS_ATOMIC | IS_ALIGNED | COUNTS_AS_READ, \
        OF_ALL | NDPY_UNWRITABLE, BY_RC | BY_XRC, "ATOMICS") \
    ROW(FETCH_AND_ADD, 8, "fetch_and_add", FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD, \
        FILLS_LOCAL | NAMES_REMOTE | HAS_OPERANDS | IS_ATOMIC | IS_ALIGNED | COUNTS_AS_READ, \
        OF_ALL | NDPY_UNWRITABLE, BY_RC | BY_XRC, "ATOMICS") \
    ROW(ATOMIC_WRITE, 9, "atomic_write", ATOMIC_WRITE, 0, \
        NAMES_REMOTE | HAS_OPERANDS | IS_ALIGNED | COUNTS_AS_READ | HAS_OTHER_CALL, OF_ALL, BY_RC, "ATOMIC_WRITE") \
    ROW(FLUSH_MEMORY, 10, "flush_memory", FLUSH_MEMORY, 0, \
        NAMES_REMOTE | HAS_OPERANDS | COUNTS_AS_READ | HAS_OTHER_CALL, OF_ALL, BY_RC, "FLUSH") \
    ROW(SEND_AND_INVALIDATE, 16, "send_and_invalidate", SEND, IBV_WR_SEND_WITH_INV, \
        NAMES_TOKEN, OF_SENDS, BY_RC, "SEND_INVALIDATE") \
    ROW(SEND_WITH_IMMEDIATE, 17, "send with immediate data", SEND, IBV_WR_SEND_WITH_IMM, \
        HAS_IMMEDIATE, OF_SENDS, BY_RC | BY_UC, "IMMEDIATE_DATA") \
    ROW(WRITE_WITH_IMMEDIATE, 18, "write with immediate data", WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, \
        NAMES_REMOTE | HAS_IMMEDIATE, OF_SENDS, BY_RC | BY_UC, "IMMEDIATE_DATA") \
    ROW(SEND_TO, 19, "send", SEND, IBV_WR_SEND, \
        TO_DESTINATION, OF_SENDS, BY_UD | BY_XRC, "") \
    ROW(SEND_TO_WITH_IMMEDIATE, 20, "send with immediate data", SEND, IBV_WR_SEND_WITH_IMM, \
        TO_DESTINATION | HAS_IMMEDIATE, OF_SENDS, BY_UD | BY_XRC, "") \
    ROW(WRITE_TO_WITH_IMMEDIATE, 21, "write with immediate data", WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, \
        NAMES_REMOTE | TO_DESTINATION | HAS_IMMEDIATE, OF_SENDS, BY_XRC, "")

/* CALL(name, operation, with_immediate, arguments, batch_doc)

   The methods that post them, of QueuePair and of Batch. bind() and invalidate() are in ndpy/objects/queue_pair.py, because they
   change a window too. with_immediate: the operation of a call with immediate data.
   arguments: as Python writes them. Each name is one of enum argument (cdefs/core/calls.h).
   batch_doc: the docstring of Batch's method. That of QueuePair's is in cdefs/core/call_docs.h. */
#define NDPY_CALLS(CALL) \
    CALL(send, SEND, SEND_WITH_IMMEDIATE, "sges, *, context=0, flags=0, immediate=None", \
         "Add a send. See QueuePair.send().") \
    CALL(receive, RECEIVE, RECEIVE, "sges, *, context=0", \
         "Add a receive. See QueuePair.receive().") \
    CALL(read, READ, READ, "sges, remote, *, context=0, flags=0", \
         "Add an RDMA read. See QueuePair.read().") \
    CALL(write, WRITE, WRITE_WITH_IMMEDIATE, "sges, remote, *, context=0, flags=0, immediate=None", \
         "Add an RDMA write. See QueuePair.write().") \
    CALL(send_to, SEND_TO, SEND_TO_WITH_IMMEDIATE, "sges, destination, *, context=0, flags=0, immediate=None", \
         "Add a send to a destination. See DatagramQueuePair.send() and XrcSender.send_to().") \
    CALL(write_to, WRITE_TO_WITH_IMMEDIATE, WRITE_TO_WITH_IMMEDIATE, \
         "sges, remote, destination, immediate, *, context=0, flags=0", \
         "Add a write with immediate data for a destination. See XrcSender.write_to().") \
    CALL(send_and_invalidate, SEND_AND_INVALIDATE, SEND_AND_INVALIDATE, "sges, remote, *, context=0, flags=0", \
         "Add a send that invalidates a window. See QueuePair.send_and_invalidate().") \
    CALL(compare_and_swap, COMPARE_AND_SWAP, COMPARE_AND_SWAP, \
         "sges, remote, compare, swap, *, context=0, flags=0", \
         "Add an atomic operation. See QueuePair.compare_and_swap().") \
    CALL(fetch_and_add, FETCH_AND_ADD, FETCH_AND_ADD, "sges, remote, add, *, context=0, flags=0", \
         "Add an atomic operation. See QueuePair.fetch_and_add().") \
    CALL(atomic_write, ATOMIC_WRITE, ATOMIC_WRITE, "remote, value, *, context=0, flags=0", \
         "Add an atomic write. See QueuePair.atomic_write().") \
    CALL(flush_memory, FLUSH_MEMORY, FLUSH_MEMORY, \
         "remote, kind=ndpy.FlushKind.GLOBAL, *, whole_region=False, context=0, flags=0", \
         "Add a request that flushes memory of the peer. See QueuePair.flush_memory().")
/* clang-format on */

#define ROW(operation, number, ...) NDPY_##operation = number,
enum ndpy_operation { NDPY_OPERATIONS(ROW) };
#undef ROW

/* What C needs of a row. */
struct operation {
    uint16_t flags;
    uint16_t traits;
    uint8_t completes_as;
    uint8_t types;
};

#endif
