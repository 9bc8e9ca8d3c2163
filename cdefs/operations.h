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

/* ROW(operation, number, words, completes_as, opcode, traits, flags, types, capability, rights)

   words: what it is in an error.
   completes_as: the operation of its completion. Numbers from 16 on are only for posting.
   opcode: that of ibv_post_send(3), if it has one.
   flags: those that it takes, of enum ndpy_flag and enum ndpy_internal_flag. One with NDPY_INLINE may be sent inline.
   capability: the member of ndpy.Capability that the adapter needs, or "".
   rights: those of ndpy.Access that the peer's memory needs, for an error, or "". */
/* clang-format off */
#define NDPY_OPERATIONS(ROW) \
    ROW(RECEIVE, 0, "receive", RECEIVE, 0, \
        FILLS_LOCAL, NDPY_UNWRITABLE, BY_RC | BY_UC | BY_UD, "", "") \
    ROW(SEND, 1, "send", SEND, IBV_WR_SEND, \
        0, OF_SENDS, BY_RC | BY_UC, "", "") \
    ROW(BIND, 2, "bind", BIND, IBV_WR_BIND_MW, \
        0, OF_WINDOWS, BY_RC | BY_UC | BY_XRC, "", "") \
    ROW(INVALIDATE, 3, "invalidate", INVALIDATE, IBV_WR_LOCAL_INV, \
        0, OF_WINDOWS, BY_RC | BY_UC | BY_XRC, "", "") \
    ROW(READ, 4, "read", READ, IBV_WR_RDMA_READ, \
        FILLS_LOCAL | NAMES_REMOTE | COUNTS_AS_READ, OF_ALL, BY_RC | BY_XRC, "", "REMOTE_READ") \
    ROW(WRITE, 5, "write", WRITE, IBV_WR_RDMA_WRITE, \
        NAMES_REMOTE, OF_ALL | NDPY_INLINE, BY_RC | BY_UC | BY_XRC, "", "REMOTE_WRITE") \
    /* Nobody posts it. In C it is a receive that completes with NDPY_WRITTEN. */ \
    ROW(RECEIVE_RDMA_WITH_IMMEDIATE, 6, "receive", RECEIVE, 0, \
        0, 0, 0, "", "") \
    ROW(COMPARE_AND_SWAP, 7, "compare_and_swap", COMPARE_AND_SWAP, IBV_WR_ATOMIC_CMP_AND_SWP, \
        FILLS_LOCAL | NAMES_REMOTE | HAS_OPERANDS | IS_ATOMIC | IS_ALIGNED | COUNTS_AS_READ, \
        OF_ALL | NDPY_UNWRITABLE, BY_RC | BY_XRC, "ATOMICS", "REMOTE_ATOMIC") \
    ROW(FETCH_AND_ADD, 8, "fetch_and_add", FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD, \
        FILLS_LOCAL | NAMES_REMOTE | HAS_OPERANDS | IS_ATOMIC | IS_ALIGNED | COUNTS_AS_READ, \
        OF_ALL | NDPY_UNWRITABLE, BY_RC | BY_XRC, "ATOMICS", "REMOTE_ATOMIC") \
    ROW(ATOMIC_WRITE, 9, "atomic_write", ATOMIC_WRITE, 0, \
        NAMES_REMOTE | HAS_OPERANDS | IS_ALIGNED | COUNTS_AS_READ | HAS_OTHER_CALL, \
        OF_ALL, BY_RC, "ATOMIC_WRITE", "REMOTE_WRITE") \
    ROW(FLUSH_MEMORY, 10, "flush_memory", FLUSH_MEMORY, 0, \
        NAMES_REMOTE | HAS_OPERANDS | COUNTS_AS_READ | HAS_OTHER_CALL, \
        OF_ALL, BY_RC, "FLUSH", "FLUSH_GLOBAL or FLUSH_PERSISTENT") \
    ROW(SEND_AND_INVALIDATE, 16, "send_and_invalidate", SEND, IBV_WR_SEND_WITH_INV, \
        NAMES_TOKEN, OF_SENDS, BY_RC, "SEND_INVALIDATE", "") \
    ROW(SEND_WITH_IMMEDIATE, 17, "send with immediate data", SEND, IBV_WR_SEND_WITH_IMM, \
        HAS_IMMEDIATE, OF_SENDS, BY_RC | BY_UC, "IMMEDIATE_DATA", "") \
    ROW(WRITE_WITH_IMMEDIATE, 18, "write with immediate data", WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, \
        NAMES_REMOTE | HAS_IMMEDIATE, OF_SENDS, BY_RC | BY_UC, "IMMEDIATE_DATA", "REMOTE_WRITE") \
    ROW(SEND_TO, 19, "send", SEND, IBV_WR_SEND, \
        TO_DESTINATION, OF_SENDS, BY_UD | BY_XRC, "", "") \
    ROW(SEND_TO_WITH_IMMEDIATE, 20, "send with immediate data", SEND, IBV_WR_SEND_WITH_IMM, \
        TO_DESTINATION | HAS_IMMEDIATE, OF_SENDS, BY_UD | BY_XRC, "", "") \
    ROW(WRITE_TO_WITH_IMMEDIATE, 21, "write with immediate data", WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, \
        NAMES_REMOTE | TO_DESTINATION | HAS_IMMEDIATE, OF_SENDS, BY_XRC, "", "REMOTE_WRITE")

/* CALL(name, operation, with_immediate, arguments, batch_doc)

   The methods that post them, of QueuePair and of Batch. bind() and invalidate() are in ndpy/objects/queue_pair.py,
   because they change a window too. with_immediate: the operation of a call with immediate data.
   arguments: as Python writes them. Each name is one of enum argument (cdefs/core/calls.h).
   batch_doc: the docstring of Batch's method. That of QueuePair's is DOC_name below. */
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

#define DOC_send \
    "Send a message to the peer's oldest posted receive, and return as soon as it is queued.\n" \
    "\n" \
    "Without INLINE the memory belongs to the adapter until the completion is taken. After the " \
        "connection has ended the\n" \
    "request completes CANCELED.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges: a region, a slice of one, or a sequence of them. At most limits.max_initiator_sge elements and\n" \
    "        info.max_transfer_length bytes in total. With INLINE also buffers that are not registered, and at most\n" \
    "        limits.inline_data_size bytes.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "    flags: SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE.\n" \
    "    immediate: 0 to 2**32 - 1, which the peer gets as the `immediate` of its completion, beside the " \
        "message. None for no\n" \
    "        such number. It needs Capability.IMMEDIATE_DATA.\n" \
    "Raises:\n" \
    "    NotConnectedError: there was no connection yet.\n" \
    "    QueueFullError: no initiator slot is free. Take completions, then try again.\n" \
    "    LimitExceededError: there are too many elements or bytes.\n" \
    "    InvalidFlagsError: a flag is not one of these.\n" \
    "    ForeignObjectError: a region belongs to another adapter.\n" \
    "    ClosedError: the queue pair or a region is closed.\n" \
    "    UnsupportedError: the adapter has no immediate data.\n" \
    "Source: IND2QueuePair::Send (contract F.3); ibv_post_send(3) with IBV_WR_SEND and IBV_WR_SEND_WITH_IMM.\n"

#define DOC_receive \
    "Post memory for one message of the peer. This is possible at any time, also before connecting.\n" \
    "\n" \
    "A message that is longer than the memory completes BUFFER_OVERFLOW and ends the connection.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges: a region, a slice of one, or a sequence of them; at most limits.max_receive_sge elements. " \
        "The regions need\n" \
    "        Access.LOCAL_WRITE.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "Raises:\n" \
    "    QueueFullError: no receive slot is free. Take completions, then try again.\n" \
    "    UnsupportedError: the queue pair takes its receives from a shared receive queue.\n" \
    "    LimitExceededError, ForeignObjectError, ClosedError: as for send().\n" \
    "Source: IND2QueuePair::Receive; ibv_post_recv(3).\n"

#define DOC_read \
    "Start an RDMA read of the first bytes of `remote` into `sges`, and return as soon as it is queued.\n" \
    "\n" \
    "The elements are filled in order, and decide how much is read.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges: a region, a slice of one, or a sequence of them; at most remote.length bytes in total. At most\n" \
    "        limits.max_initiator_sge elements, and not more than info.max_read_sge. The regions need " \
        "Access.LOCAL_WRITE, and\n" \
    "        Access.READ_SINK where info.capabilities has READ_SINK_REQUIRED.\n" \
    "    remote: memory of the peer that it has given the right to read.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "    flags: SILENT_SUCCESS and READ_FENCE.\n" \
    "Raises:\n" \
    "    ElementRangeError: there are more bytes than `remote` has.\n" \
    "    NotConnectedError, QueueFullError and so on: as for send().\n" \
    "Source: IND2QueuePair::Read; ibv_post_send(3) with IBV_WR_RDMA_READ.\n"

#define DOC_write \
    "Start an RDMA write of `sges` into the first bytes of `remote`, and return as soon as it is queued.\n" \
    "\n" \
    "The peer takes no part in it and sees no completion, unless there is immediate data. Then the write " \
        "ends the peer's\n" \
    "oldest receive, whose memory stays as it is: its completion is a RECEIVE_RDMA_WITH_IMMEDIATE, and " \
        "comes after the bytes.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges: as for send(); at most remote.length bytes in total.\n" \
    "    remote: memory of the peer that it has given the right to write.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "    flags: SILENT_SUCCESS, READ_FENCE, INLINE and, with immediate data, SOLICITED.\n" \
    "    immediate: as for send().\n" \
    "Raises:\n" \
    "    ElementRangeError: there are more bytes than `remote` has.\n" \
    "    NotConnectedError, QueueFullError and so on: as for send().\n" \
    "Source: IND2QueuePair::Write; ibv_post_send(3) with IBV_WR_RDMA_WRITE and IBV_WR_RDMA_WRITE_WITH_IMM.\n"

#define DOC_send_to \
    "Send a message to a shared receive queue, and return as soon as it is queued.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges, context, flags, immediate: as for QueuePair.send().\n" \
    "    destination: the queue.\n" \
    "Raises:\n" \
    "    TypeError: destination is not an XrcDestination.\n" \
    "    NotConnectedError, QueueFullError and so on: as for QueuePair.send().\n" \
    "Source: ibv_post_send(3) with IBV_WR_SEND.\n"

#define DOC_write_to \
    "Write to memory of the peer, and give a receive of a shared receive queue the immediate data. " \
        "Return as soon as it is queued.\n" \
    "\n" \
    "A write without immediate data goes to no queue: that is write().\n" \
    "\n" \
    "Parameters:\n" \
    "    sges, remote, context, flags, immediate: as for QueuePair.write().\n" \
    "    destination: the queue.\n" \
    "Raises:\n" \
    "    TypeError: destination is not an XrcDestination.\n" \
    "    NotConnectedError, QueueFullError and so on: as for QueuePair.write().\n" \
    "Source: ibv_post_send(3) with IBV_WR_RDMA_WRITE_WITH_IMM.\n"

#define DOC_send_and_invalidate \
    "Send a message, and have the peer's adapter invalidate a window when the message arrives.\n" \
    "\n" \
    "The window has to be bound to the peer's end of this connection. On the peer's side, is_bound is " \
        "False as soon as the\n" \
    "completion of the message's receive was taken. The request completes as a SEND.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges, context, flags: as for send().\n" \
    "    remote: memory that the window gives access to.\n" \
    "Raises:\n" \
    "    UnsupportedError: info.capabilities lacks SEND_INVALIDATE, or the provider refuses it all the same.\n" \
    "    NotConnectedError, QueueFullError and so on: as for send().\n" \
    "Source: INDEndpoint::SendAndInvalidate (contract I.4.2); ibv_post_send(3) with IBV_WR_SEND_WITH_INV.\n"

#define DOC_compare_and_swap \
    "Start an atomic operation: read 8 bytes of the peer's memory and, if they are `compare`, write `swap` there.\n" \
    "\n" \
    "`sges` gets the 8 bytes as they were before, even if they differ from `compare`. They are an " \
        "integer in host order. Among\n" \
    "the atomic operations of the peer's adapter no other one comes between. Neither do those of the " \
        "peer's processors and\n" \
    "of its other adapters, if the peer's adapter has Capability.GLOBAL_ATOMICS.\n" \
    "\n" \
    "Parameters:\n" \
    "    sges: 8 bytes of a region with Access.LOCAL_WRITE.\n" \
    "    remote: memory of a peer that was registered with Access.REMOTE_ATOMIC. The operation is on its " \
        "first 8 bytes, whose\n" \
    "        address is a multiple of 8.\n" \
    "    compare, swap: integers of 64 bits, signed or unsigned.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "    flags: SILENT_SUCCESS and READ_FENCE.\n" \
    "Raises:\n" \
    "    UnsupportedError: info.capabilities lacks ATOMICS.\n" \
    "    ElementRangeError: `sges` are not 8 bytes, `remote` has less, or its address is not a multiple of 8.\n" \
    "    AccessViolationError: the region of `sges` has no LOCAL_WRITE.\n" \
    "    LimitExceededError: the connection's outbound read limit is 0. It counts atomic operations too.\n" \
    "    NotConnectedError, QueueFullError and so on: as for send().\n" \
    "Source: ibv_post_send(3) with IBV_WR_ATOMIC_CMP_AND_SWP.\n"

#define DOC_fetch_and_add \
    "Start an atomic operation: add `add` to 8 bytes of the peer's memory. The sum wraps at 2**64.\n" \
    "\n" \
    "`sges` gets the 8 bytes as they were before.\n" \
    "\n" \
    "Parameters:\n" \
    "    add: an integer of 64 bits, signed or unsigned.\n" \
    "    sges, remote, context, flags: as for compare_and_swap().\n" \
    "Raises: as for compare_and_swap().\n" \
    "Source: ibv_post_send(3) with IBV_WR_ATOMIC_FETCH_AND_ADD.\n"

#define DOC_atomic_write \
    "Write 8 bytes to the peer at once, so that nobody sees a part of them. Return as soon as the " \
        "request is queued.\n" \
    "\n" \
    "Parameters:\n" \
    "    remote: where the first 8 bytes go. The address must be a multiple of 8. The peer's memory " \
        "needs REMOTE_WRITE.\n" \
    "    value: an integer of 64 bits, signed or unsigned, written in this host's byte order.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "    flags: SILENT_SUCCESS and READ_FENCE.\n" \
    "Raises:\n" \
    "    UnsupportedError: info.capabilities lacks ATOMIC_WRITE.\n" \
    "    ElementRangeError: the address is not a multiple of 8, or there are fewer than 8 bytes.\n" \
    "    NotConnectedError, QueueFullError and so on: as for write().\n" \
    "Source: ibv_wr_post(3), ibv_wr_atomic_write().\n"

#define DOC_flush_memory \
    "Have the peer's adapter finish the earlier writes of this queue pair. Return as soon as the request is queued.\n" \
    "\n" \
    "Its completion says that they are where `kind` wants them. Without it, the completion of a write " \
        "says only that the peer's\n" \
    "adapter has the bytes.\n" \
    "\n" \
    "Parameters:\n" \
    "    remote: the memory that was written to. It needs Access.FLUSH_GLOBAL or FLUSH_PERSISTENT.\n" \
    "    kind: GLOBAL, PERSISTENT, or both.\n" \
    "    whole_region: flush all of the region that the token of `remote` stands for.\n" \
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n" \
    "    flags: SILENT_SUCCESS and READ_FENCE.\n" \
    "Raises:\n" \
    "    UnsupportedError: info.capabilities lacks FLUSH.\n" \
    "    NotConnectedError, QueueFullError and so on: as for write().\n" \
    "Source: ibv_wr_post(3), ibv_wr_flush().\n"

#define DOC_post \
    "post($self, batch, /)\n" \
    "--\n" \
    "\n" \
    "Post the requests of a batch, in one call of the provider where that has such a call, and return as " \
        "soon as they are\n" \
    "queued.\n" \
    "\n" \
    "All of them are posted, or none if the queue has too little room for them. If the provider refuses " \
        "one of them, those\n" \
    "before it are posted, and the error says how many. So it is too where the provider has no such " \
        "call, if another thread\n" \
    "posts single requests meanwhile and takes the last room.\n" \
    "\n" \
    "Parameters:\n" \
    "    batch: a Batch with at least one request. It may be changed and posted again as soon as the call returns.\n" \
    "Raises:\n" \
    "    ElementRangeError: a number in a column is outside of the memory that the request was made for.\n" \
    "    LimitExceededError: there are more requests than the queue has slots, or a request exceeds a limit.\n" \
    "    QueueFullError, NotConnectedError, ForeignObjectError and so on: as for send().\n" \
    "Source: ibv_post_send(3) and ibv_post_recv(3) with a list. Providers of NetworkDirect get each " \
        "request by itself.\n"
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
