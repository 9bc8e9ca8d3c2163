/* The interface of all shims to Python. It has plain declarations only, because cffi reads this file without a
   preprocessor. The numbers are those of ndpy/vocabulary/flags.py. A test compares the two.
   enum ndpy_operation is in operations.h. */

enum ndpy_status {
    NDPY_SUCCESS = 0,
    NDPY_CANCELED = 1,
    NDPY_ACCESS_VIOLATION = 2,
    NDPY_BUFFER_OVERFLOW = 3,
    NDPY_DATA_OVERRUN = 4,
    NDPY_IO_TIMEOUT = 5,
    NDPY_REMOTE_ERROR = 6,
    NDPY_INVALID_REQUEST = 7,
    NDPY_INTERNAL_ERROR = 8,
    NDPY_UNKNOWN = 9
};

enum ndpy_flag { NDPY_SILENT_SUCCESS = 0x1, NDPY_READ_FENCE = 0x2, NDPY_SOLICITED = 0x4, NDPY_INLINE = 0x20 };

/* Flags of a slot beside enum ndpy_flag. NDPY_UNWRITABLE: the memory of a receive or of an atomic operation may not be
   written to. */
enum ndpy_internal_flag {
    NDPY_UNWRITABLE = 0x100,
    NDPY_MARKER = 0x200, /* ndpy posted this request. Its completion is internal. With SILENT_SUCCESS the
                            program gets its failure. */
    NDPY_LISTED = 0x400, /* the slot belongs to a struct ndpy_list, not to a ring */
    NDPY_HEADED = 0x800  /* a receive of a datagram, whose header goes to memory of its own */
};

/* Why a post was refused before the provider saw it. Any other number except 0 is the provider's own. */
enum ndpy_refusal {
    NDPY_QUEUE_FULL = -1,
    NDPY_NOT_CONNECTED = -2,
    NDPY_TOO_MANY_ELEMENTS = -3,
    NDPY_TOO_LONG = -4,
    NDPY_INLINE_TOO_LONG = -5,
    NDPY_BAD_FLAGS = -6,
    NDPY_NO_READS = -7,
    NDPY_BAD_TOKEN = -8,    /* larger than the provider's tokens; only ndpy._core returns it */
    NDPY_POST_SINGLY = -9,  /* only for lists: post the rest one by one */
    NDPY_UNSUPPORTED = -10, /* see ndpy_queue_pair_offer() */
    NDPY_NOT_ATOMIC = -11,  /* an atomic operation has one element of 8 bytes */
    NDPY_UNALIGNED = -12,   /* an atomic operation is on 8 bytes at a multiple of 8 */
    NDPY_NOT_WRITABLE = -13 /* the result of an atomic operation is written there */
};

enum ndpy_connection {
    NDPY_NEVER_CONNECTED = 0,
    NDPY_CONNECTED = 1,
    NDPY_ENDED = 2,
    NDPY_ENDED_UNPOSTED = 3 /* ENDED, and the provider would never complete a new request */
};

enum ndpy_completion_flag {
    NDPY_INTERNAL = 1,          /* not for the program: it only retires requests */
    NDPY_FROM_SHARED_QUEUE = 2, /* queue_pair is the provider's number, slot the shared queue's slot, and retired the
                                   name that ndpy_shared_queue_name() gave the shared queue, or 0 */
    NDPY_INVALIDATED = 4,       /* the peer has invalidated a window; vendor_status is its token. With INTERNAL and
                                   FROM_SHARED_QUEUE there is no queue pair, and slot is the window's number. */
    NDPY_IMMEDIATE = 8,         /* a receive with immediate data; vendor_status is this data */
    NDPY_WRITTEN = 16,          /* with IMMEDIATE: the peer wrote elsewhere, not to the receive's own memory */
    NDPY_DETAILED = 32 /* context is the address of a struct ndpy_details. Whoever takes the completion frees it. */
};

/* What a completion can bring besides. */
enum ndpy_detail {
    NDPY_SOURCE = 1,     /* where a datagram came from */
    NDPY_TIMESTAMP = 2,  /* when the request ended, by the clock of the device */
    NDPY_WALL_CLOCK = 4, /* the same, in nanoseconds since 1970 */
    NDPY_FLOW_TAG = 8    /* the tag of the rule that steered the packet here */
};

/* The details of a completion. context: that of its request. kinds: which of enum ndpy_detail there are. header: the
   GRH of a datagram, or on RoCE v2 with IPv4 the IP header in its last 20 bytes; nothing unless has_header. */
struct ndpy_details {
    uint64_t context;
    uint64_t timestamp;
    uint64_t wall_clock;
    uint32_t flow_tag;
    uint32_t source_number;
    uint16_t source_lid;
    uint16_t pkey_index;
    uint8_t service_level;
    uint8_t path_bits;
    uint8_t has_header;
    uint8_t kinds;
    uint8_t header[40];
};

/* A scatter/gather element. token: a number of 32 bits, except in version 1 of NetworkDirect. */
struct ndpy_element {
    uint64_t address;
    uint64_t token;
    uint32_t length;
};

/* What a request says to the peer: memory of it, immediate data, and operands. Those of an atomic operation: what is
   compared and then swapped in, or what is added. Those of a datagram: the provider's address handle, and the peer's
   number with its Q_Key in the upper half. Those of a request to a shared receive queue of XRC: 0, and the queue's
   number. window_address and window_length: the memory that the memory is a slice of. */
struct ndpy_remote {
    uint64_t address;
    uint64_t length;
    uint64_t window_address;
    uint64_t window_length;
    uint32_t token;
    uint32_t immediate;
    uint64_t operands[2];
};

/* 48 bytes. retired: how many requests this completion ends, including the silent ones before it. */
struct ndpy_completion {
    uint64_t context;
    uint64_t nbytes;
    uint32_t operation;
    uint32_t status;
    uint32_t native_status;
    uint32_t vendor_status;
    uint32_t queue_pair;
    uint32_t retired;
    uint32_t slot;
    uint32_t flags;
};

/* The request of an initiator queue that failed first, and the peer's memory that it named. */
struct ndpy_failed_request {
    uint64_t context;
    uint64_t address;
    uint64_t length;
    uint32_t token;
    uint32_t operation;
};

/* The data path. Each provider has these functions, made of those in data_path.h. */
struct ndpy_queue_pair *ndpy_queue_pair_new(void *native, uint32_t number, uint32_t initiator_depth,
                                            uint32_t receive_depth, uint32_t max_initiator_sge,
                                            uint32_t max_receive_sge, uint32_t inline_size, uint64_t max_length);
void ndpy_queue_pair_free(struct ndpy_queue_pair *qp);
void ndpy_queue_pair_set_connection(struct ndpy_queue_pair *qp, int connection);
/* Take these operations, each as the bit of its number. Without this call it takes those up to NDPY_WRITE. */
void ndpy_queue_pair_offer(struct ndpy_queue_pair *qp, uint32_t operations);
/* A read has at most this many elements. Without this call it has as many as any other request. */
void ndpy_queue_pair_limit_reads(struct ndpy_queue_pair *qp, uint32_t max_read_sge);
/* Refuse to post reads and atomic operations, because the peer does not serve them. */
void ndpy_queue_pair_refuse_reads(struct ndpy_queue_pair *qp);
/* It is a queue pair for datagrams. Each receive of index i gets its header at headers + 40 * i. */
void ndpy_queue_pair_take_headers(struct ndpy_queue_pair *qp, void *headers, uint64_t token);
/* The queue pair is as if it was new. All of its requests have ended. */
void ndpy_queue_pair_restart(struct ndpy_queue_pair *qp);
/* Silent requests that succeeded leave no trace until a later completion. So in the error state, post a request that
   the provider flushes behind them. Returns whether it was posted. It takes a place in the initiator queue. */
int ndpy_post_marker(struct ndpy_queue_pair *qp);
uint32_t ndpy_queue_pair_in_flight(struct ndpy_queue_pair *qp, int receive);
/* Returns whether a request of the initiator queue has failed since the last restart. */
int ndpy_first_failure(struct ndpy_queue_pair *qp, struct ndpy_failed_request *out);
/* How many initiator requests were posted, modulo 2**32. */
uint32_t ndpy_queue_pair_posted(struct ndpy_queue_pair *qp);
/* Whether the first `count` of these have ended. 0: not yet. 1: all of them have succeeded. -1: some request has
   failed. */
int ndpy_queue_pair_ended(struct ndpy_queue_pair *qp, uint32_t count);

struct ndpy_shared_queue *ndpy_shared_queue_new(void *native, uint32_t depth, uint32_t max_sge, uint64_t max_length);
void ndpy_shared_queue_free(struct ndpy_shared_queue *queue);
/* Its completions carry this name. Without it, their queue pairs lead to the shared queue. */
void ndpy_shared_queue_name(struct ndpy_shared_queue *queue, uint32_t name);

struct ndpy_completion_queue *ndpy_completion_queue_new(void *native);
void ndpy_completion_queue_free(struct ndpy_completion_queue *cq);

/* 0, one of enum ndpy_refusal, or the provider's own number. */
int ndpy_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
              const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote);
int ndpy_post_shared(struct ndpy_shared_queue *queue, uint32_t slot, uint64_t context,
                     const struct ndpy_element *elements, uint32_t count);

/* Take up to `count` completions, oldest first. Returns their number, or minus an errno. *alike: so many of them, from
   the first one on, are receives of one queue pair that brought nothing but data. */
int ndpy_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, uint32_t *alike);
/* Store everything that the provider has in the queue's own memory, where ndpy_poll looks first.
   Returns how many completions for the program were added, or minus an errno. */
int ndpy_drain(struct ndpy_completion_queue *cq);
/* Take the stored completions before the first one that is for the program. Returns how many. */
int ndpy_poll_internal(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count);
/* How many stored completions are for the program. */
uint32_t ndpy_undelivered(struct ndpy_completion_queue *cq);
/* Skip the first `first` of these, and find the first one that failed. Returns its place among all of these, counted
   from 1, or 0 if none failed. */
uint32_t ndpy_undelivered_failure(struct ndpy_completion_queue *cq, uint32_t first);
/* How many stored completions belong to queue pair `number`, including internal ones. */
uint32_t ndpy_stored_of(struct ndpy_completion_queue *cq, uint32_t number);
/* Give stored completions of a shared receive queue another queue pair number, because the provider may reuse the
   old one. Returns how many. */
uint32_t ndpy_renumber_stored(struct ndpy_completion_queue *cq, uint32_t native_number, uint32_t number);
/* End the remaining requests of one direction of a queue pair with NDPY_CANCELED. Call this only after the provider
   has let go of the queue pair. A silent request without a completion has succeeded by then. Returns how many
   requests ended, or minus an errno. */
int ndpy_cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq);

/* One request of a list. first and count: its elements. */
struct ndpy_list_request {
    struct ndpy_remote remote;
    uint64_t context;
    uint32_t operation;
    uint32_t flags;
    uint32_t first;
    uint32_t count;
};

/* Of the provider. */
struct ndpy_list;

/* What has ended a sleep: a notification that nobody has taken yet, or another thread. Both can be. */
enum ndpy_woken { NDPY_NOTIFIED = 1, NDPY_WOKEN = 2 };

/* The functions that ndpy._core calls by itself. post_shared is NULL if there are no shared receive queues.
   largest_token: of an element.

   poll_internal and spin are as poll. spin polls until there is a completion, *stop is not 0, or so many nanoseconds
   have passed. Its completions count as not alike.

   A list has requests in the provider's own layout, all of one direction. It is made for one queue pair, and may be
   posted again while it is posted. A provider without lists has NULL in these places:
     list_new    returns 0, or a refusal with the number of the refused request in *bad
     list_free   call this when all requests have ended, and before the queue pair is freed
     post_list   returns 0, or a refusal with the number of requests that were posted all the same

   A provider whose threads sleep on a descriptor has
     arm           asks for a notification of any completion, and then looks. Returns how many completions are stored
                   for the program, or minus an errno. 4096 less: asking has failed
     sleep         waits until a notification has come, the eventfd `waiter` was written to, which it resets, or the
                   time is over. Returns enum ndpy_woken, or minus an errno. Is called without locks
     take_event    takes and acknowledges one notification, if one has come
     renew         does the same, and asks for the next one. Returns 0 or an errno */
struct ndpy_provider {
    int (*post)(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
                const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote);
    int (*post_shared)(struct ndpy_shared_queue *queue, uint32_t slot, uint64_t context,
                       const struct ndpy_element *elements, uint32_t count);
    int (*poll)(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, uint32_t *alike);
    int (*poll_internal)(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count);
    int (*spin)(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, const volatile int *stop,
                uint64_t nanoseconds);
    uint64_t largest_token;
    int (*list_new)(struct ndpy_queue_pair *qp, const struct ndpy_list_request *requests, uint32_t count,
                    const struct ndpy_element *elements, struct ndpy_list **out, uint32_t *bad);
    void (*list_free)(struct ndpy_list *list);
    int (*post_list)(struct ndpy_queue_pair *qp, struct ndpy_list *list, uint32_t *posted);
    int (*arm)(struct ndpy_completion_queue *cq);
    int (*sleep)(struct ndpy_completion_queue *cq, int waiter, int milliseconds);
    void (*take_event)(struct ndpy_completion_queue *cq);
    int (*renew)(struct ndpy_completion_queue *cq);
};
const struct ndpy_provider *ndpy_provider_table(void);

/* Those members of Access that ndpy._core looks at. */
enum ndpy_access { NDPY_LOCAL_WRITE = 0x1, NDPY_READ_SINK = 0x8 };

/* What registering memory gives. native: the provider's own object. */
struct ndpy_memory {
    void *native;
    uint64_t local_token;
    uint64_t remote_token;
};

/* The functions by which ndpy._core registers memory by itself, if the provider's calls block. domain: the provider's
   own, of an adapter. rights: the provider's own. Each returns 0 or an errno. */
struct ndpy_registrar {
    int (*register_memory)(void *domain, void *address, size_t length, uint32_t rights, struct ndpy_memory *out);
    int (*deregister_memory)(void *native);
};
