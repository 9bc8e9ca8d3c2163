/* A scenario: which faults happen, where and when. It is read from a file in the plain form (README.md), and the
 * executors ask it at each place of the program. It knows no provider and no system but for files and the clock.
 *
 * All counts belong to this process, but for those of the file of `count`. A child that is forked goes on with its own
 * copy of them. scenario_at() may be called on any thread, and takes no lock.
 */
#ifndef FAULTS_SCENARIO_H
#define FAULTS_SCENARIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SCENARIO_VARIABLE "NDPY_FAULTS" /* names the file */

enum fault_at { AT_CALL, AT_REQUEST, AT_MESSAGE, AT_CONNECTION, AT_ADAPTER, FAULT_ATS };

/* The calls of a program. Their names are those of verbs without ibv_, those of the connection manager with rdma_.
 * `cancel` is NetworkDirect's alone. */
enum fault_call {
    ANY_CALL,
    PLACE_CALL_OPEN_DEVICE,
    PLACE_CALL_QUERY_DEVICE,
    PLACE_CALL_QUERY_PORT,
    PLACE_CALL_QUERY_GID,
    PLACE_CALL_ALLOC_PD,
    PLACE_CALL_REG_MR,
    PLACE_CALL_DEREG_MR,
    PLACE_CALL_ALLOC_MW,
    PLACE_CALL_CREATE_COMP_CHANNEL,
    PLACE_CALL_CREATE_CQ,
    PLACE_CALL_RESIZE_CQ,
    PLACE_CALL_CREATE_SRQ,
    PLACE_CALL_CREATE_QP,
    PLACE_CALL_MODIFY_QP,
    PLACE_CALL_QUERY_QP,
    PLACE_CALL_CREATE_AH,
    PLACE_CALL_POST_SEND,
    PLACE_CALL_POST_RECV,
    PLACE_CALL_POST_SRQ_RECV,
    PLACE_CALL_POLL_CQ,
    PLACE_CALL_REQ_NOTIFY_CQ,
    PLACE_CALL_GET_CQ_EVENT,
    PLACE_CALL_GET_ASYNC_EVENT,
    PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL,
    PLACE_CALL_RDMA_CREATE_ID,
    PLACE_CALL_RDMA_BIND_ADDR,
    PLACE_CALL_RDMA_RESOLVE_ADDR,
    PLACE_CALL_RDMA_RESOLVE_ROUTE,
    PLACE_CALL_RDMA_CREATE_QP,
    PLACE_CALL_RDMA_LISTEN,
    PLACE_CALL_RDMA_GET_REQUEST,
    PLACE_CALL_RDMA_CONNECT,
    PLACE_CALL_RDMA_ACCEPT,
    PLACE_CALL_RDMA_REJECT,
    PLACE_CALL_RDMA_DISCONNECT,
    PLACE_CALL_RDMA_GET_CM_EVENT,
    PLACE_CALL_CANCEL,
    PLACE_CALL_RDMA_ESTABLISH,
    FAULT_CALLS
};

enum fault_operation {
    ANY_OPERATION,
    PLACE_SEND,
    PLACE_SEND_INVALIDATE,
    PLACE_WRITE,
    PLACE_READ,
    PLACE_COMPARE_SWAP,
    PLACE_FETCH_ADD,
    PLACE_BIND_WINDOW,
    PLACE_INVALIDATE,
    PLACE_RECEIVE,
    FAULT_OPERATIONS
};

enum fault_kind {
    FAULT_ERRNO,
    FAULT_SLOW,
    FAULT_LIMIT,
    FAULT_STATUS,
    FAULT_DELAY,
    FAULT_SILENT,
    FAULT_HOLD,
    FAULT_LATE_RECEIVE,
    FAULT_SPLIT,
    FAULT_CORRUPT,
    FAULT_DUPLICATE,
    FAULT_REORDER,
    FAULT_REFUSE,
    FAULT_TIME_OUT,
    FAULT_REJECT,
    FAULT_LOSE,
    FAULT_DISCONNECT,
    FAULT_MUTE,
    FAULT_PORT_DOWN,
    FAULT_PORT_UP,
    FAULT_GID_CHANGE,
    FAULT_QUEUE_PAIR_FATAL,
    FAULT_COMPLETION_QUEUE_ERROR,
    FAULT_REMOVE,
    FAULT_PATH_MIGRATED,
    FAULT_FULL_EVENT_QUEUE,
    FAULT_KINDS
};

/* The numbers are those of enum ibv_wc_status. */
enum fault_status {
    STATUS_LOC_LEN_ERR = 1,
    STATUS_LOC_QP_OP_ERR = 2,
    STATUS_LOC_PROT_ERR = 4,
    STATUS_MW_BIND_ERR = 6,
    STATUS_BAD_RESP_ERR = 7,
    STATUS_LOC_ACCESS_ERR = 8,
    STATUS_REM_INV_REQ_ERR = 9,
    STATUS_REM_ACCESS_ERR = 10,
    STATUS_REM_OP_ERR = 11,
    STATUS_RETRY_EXC_ERR = 12,
    STATUS_RNR_RETRY_EXC_ERR = 13
};

#define SCENARIO_MAX_FAULTS 1024u
#define FAULT_FOREVER       UINT64_MAX
#define FAULT_MAX_CONTENT   64u
#define FAULT_MAX_DATA      256u

struct fault_counts;

/* Only scenario.c changes one. */
struct fault {
    unsigned number, line; /* its number among the scenario's faults, from 0; its line in the file */
    enum fault_at at;
    enum fault_kind kind;
    unsigned what;       /* an enum fault_call or fault_operation; 0: any */
    uint32_t queue_pair; /* 0: any */
    bool has_peer;
    uint8_t peer[16]; /* an address of IPv6; one of IPv4 as ::ffff:a.b.c.d */
    uint64_t min_size, max_size;
    uint8_t content[FAULT_MAX_CONTENT];
    size_t content_size;
    uint64_t nth, every; /* 0: not given */
    double probability;  /* below 0: not given */
    uint64_t after_ms, until_ms;
    uint64_t times;
    int error; /* of errno.h */
    enum fault_status status;
    uint64_t ms; /* FAULT_FOREVER: not given, for hold */
    uint64_t bytes, limit;
    uint8_t data[FAULT_MAX_DATA];
    size_t data_size;
    struct fault_counts *counts;
};

#define FAULT_BIT(kind) (1u << (kind))
#define ANY_KIND        (~0u)

/* Where a program is. */
struct place {
    enum fault_at at;
    unsigned what;       /* an enum fault_call or fault_operation */
    uint32_t queue_pair; /* by order of creation in the process, from 1; 0: none */
    unsigned kinds;      /* FAULT_BITs of what can be done here; 0: anything */
    bool again;          /* it was asked about before with other kinds, so the file of `count` has it */
    const uint8_t *peer; /* 16 bytes; NULL: not known */
    uint64_t size;
    const void *content; /* the beginning of the message; NULL: not at hand */
    size_t content_size;
    uint64_t live;      /* of a call that creates: how many such objects there are */
    const void *caller; /* an address in the program; NULL: not known */
};

struct scenario;

/* NULL: the file cannot be used, and `error` says why. */
struct scenario *scenario_read(const char *path, char *error, size_t size);
/* The same from memory. `name` is for errors. */
struct scenario *scenario_parse(const char *name, const char *text, size_t length, char *error, size_t size);
/* No thread uses it any more. NULL: does nothing. */
void scenario_free(struct scenario *scenario);

/* False, and says so in `error`: the executor cannot do one of the faults. */
bool scenario_suits(const struct scenario *scenario, const char *executor, bool (*can)(const struct fault *),
                    char *error, size_t size);

/* The fault that fires at this place; NULL: none. Counts the place and reports what fires. If several faults fire at
 * one place, the first of the file does. */
const struct fault *scenario_at(struct scenario *scenario, const struct place *place);
/* A number that is the same in every run, for a fault that fired last at this place. */
uint64_t scenario_random(struct scenario *scenario, const struct fault *fault, const struct place *place);

unsigned scenario_faults(const struct scenario *scenario);
const struct fault *scenario_fault(const struct scenario *scenario, unsigned number);
/* A fault at the adapter that neither counts nor draws: it happens at a time, after_ms since the scenario was read. The
 * executor sets a timer and calls scenario_fire(). */
bool fault_is_timed(const struct fault *fault);
uint64_t scenario_age_ms(const struct scenario *scenario);
/* Reports it. */
void scenario_fire(struct scenario *scenario, const struct fault *fault, const struct place *place);

const char *fault_at_name(enum fault_at at);
const char *fault_kind_name(enum fault_kind kind);
const char *fault_what_name(enum fault_at at, unsigned what);
/* FAULT_CALLS: no such call. */
enum fault_call fault_call_named(const char *name);
/* Whether an operation can end with this status. */
bool fault_status_fits(enum fault_operation operation, enum fault_status status);

/* ---- The file of `count` ---- */

/* It begins with the header. `slots` slots follow. A slot whose key is 0 is free. A key is made by COUNT_KEY(). The
 * count is the greatest that any process has. */
#define COUNT_MAGIC   "ndpcount"
#define COUNT_VERSION 1u
#define COUNT_SLOTS   65536u
#define COUNT_KEY(at, what, queue_pair) \
    ((uint64_t)1 << 63 | (uint64_t)(at) << 48 | (uint64_t)(what) << 32 | (uint32_t)(queue_pair))
struct count_header {
    char magic[8];
    uint32_t version, slots;
};
struct count_slot {
    _Atomic uint64_t key, count;
};

#endif
