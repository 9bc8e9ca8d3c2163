#ifdef _WIN32
#include <winsock2.h>
#include <io.h>
#include <process.h>
#include <ws2tcpip.h>
#else
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif

#include "scenario.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE  (1u << 20)
#define MAX_PATH_ 1024u
#define MAX_MS    86400000u

/* ---- Names ---- */

static const char *const at_names[] = {"call", "request", "message", "connection", "adapter"};

static const char *const call_names[] = {
    [PLACE_CALL_OPEN_DEVICE] = "open_device",
    [PLACE_CALL_QUERY_DEVICE] = "query_device",
    [PLACE_CALL_QUERY_PORT] = "query_port",
    [PLACE_CALL_QUERY_GID] = "query_gid",
    [PLACE_CALL_ALLOC_PD] = "alloc_pd",
    [PLACE_CALL_REG_MR] = "reg_mr",
    [PLACE_CALL_DEREG_MR] = "dereg_mr",
    [PLACE_CALL_ALLOC_MW] = "alloc_mw",
    [PLACE_CALL_CREATE_COMP_CHANNEL] = "create_comp_channel",
    [PLACE_CALL_CREATE_CQ] = "create_cq",
    [PLACE_CALL_RESIZE_CQ] = "resize_cq",
    [PLACE_CALL_CREATE_SRQ] = "create_srq",
    [PLACE_CALL_CREATE_QP] = "create_qp",
    [PLACE_CALL_MODIFY_QP] = "modify_qp",
    [PLACE_CALL_QUERY_QP] = "query_qp",
    [PLACE_CALL_CREATE_AH] = "create_ah",
    [PLACE_CALL_POST_SEND] = "post_send",
    [PLACE_CALL_POST_RECV] = "post_recv",
    [PLACE_CALL_POST_SRQ_RECV] = "post_srq_recv",
    [PLACE_CALL_POLL_CQ] = "poll_cq",
    [PLACE_CALL_REQ_NOTIFY_CQ] = "req_notify_cq",
    [PLACE_CALL_GET_CQ_EVENT] = "get_cq_event",
    [PLACE_CALL_GET_ASYNC_EVENT] = "get_async_event",
    [PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL] = "rdma_create_event_channel",
    [PLACE_CALL_RDMA_CREATE_ID] = "rdma_create_id",
    [PLACE_CALL_RDMA_BIND_ADDR] = "rdma_bind_addr",
    [PLACE_CALL_RDMA_RESOLVE_ADDR] = "rdma_resolve_addr",
    [PLACE_CALL_RDMA_RESOLVE_ROUTE] = "rdma_resolve_route",
    [PLACE_CALL_RDMA_CREATE_QP] = "rdma_create_qp",
    [PLACE_CALL_RDMA_LISTEN] = "rdma_listen",
    [PLACE_CALL_RDMA_GET_REQUEST] = "rdma_get_request",
    [PLACE_CALL_RDMA_CONNECT] = "rdma_connect",
    [PLACE_CALL_RDMA_ACCEPT] = "rdma_accept",
    [PLACE_CALL_RDMA_REJECT] = "rdma_reject",
    [PLACE_CALL_RDMA_DISCONNECT] = "rdma_disconnect",
    [PLACE_CALL_RDMA_GET_CM_EVENT] = "rdma_get_cm_event",
    [PLACE_CALL_CANCEL] = "cancel",
    [PLACE_CALL_RDMA_ESTABLISH] = "rdma_establish",
};

static const char *const operation_names[] = {
    [PLACE_SEND] = "send",
    [PLACE_SEND_INVALIDATE] = "send_invalidate",
    [PLACE_WRITE] = "write",
    [PLACE_READ] = "read",
    [PLACE_COMPARE_SWAP] = "compare_swap",
    [PLACE_FETCH_ADD] = "fetch_add",
    [PLACE_BIND_WINDOW] = "bind_window",
    [PLACE_INVALIDATE] = "invalidate",
    [PLACE_RECEIVE] = "receive",
};

static const struct {
    const char *name;
    int number;
} errors[] = {
    {"EPERM", EPERM},
    {"EINTR", EINTR},
    {"EIO", EIO},
    {"EAGAIN", EAGAIN},
    {"ENOMEM", ENOMEM},
    {"EACCES", EACCES},
    {"EFAULT", EFAULT},
    {"EBUSY", EBUSY},
    {"ENODEV", ENODEV},
    {"EINVAL", EINVAL},
    {"ENFILE", ENFILE},
    {"EMFILE", EMFILE},
    {"ENOSPC", ENOSPC},
    {"ENOSYS", ENOSYS},
    {"EOPNOTSUPP", EOPNOTSUPP},
    {"ENOBUFS", ENOBUFS},
    {"EADDRINUSE", EADDRINUSE},
    {"EADDRNOTAVAIL", EADDRNOTAVAIL},
    {"ENETDOWN", ENETDOWN},
    {"ENETUNREACH", ENETUNREACH},
    {"EHOSTUNREACH", EHOSTUNREACH},
    {"ECONNREFUSED", ECONNREFUSED},
    {"ECONNRESET", ECONNRESET},
    {"ETIMEDOUT", ETIMEDOUT},
};

#define OPERATION_BIT(operation) (1u << (operation))
#define SENDS                    (OPERATION_BIT(PLACE_SEND) | OPERATION_BIT(PLACE_SEND_INVALIDATE))
#define ATOMICS                  (OPERATION_BIT(PLACE_COMPARE_SWAP) | OPERATION_BIT(PLACE_FETCH_ADD))
#define TAGGED                   (OPERATION_BIT(PLACE_WRITE) | OPERATION_BIT(PLACE_READ) | ATOMICS)
#define WINDOWS                  (OPERATION_BIT(PLACE_BIND_WINDOW) | OPERATION_BIT(PLACE_INVALIDATE))
#define RECEIVES                 OPERATION_BIT(PLACE_RECEIVE)

/* IBTA 1.4, 11.6.2, "Completion Return Status": which operations end with which status. */
static const struct {
    const char *name;
    unsigned operations;
} statuses[] = {
    [STATUS_LOC_LEN_ERR] = {"LOC_LEN_ERR", SENDS | TAGGED | RECEIVES},
    [STATUS_LOC_QP_OP_ERR] = {"LOC_QP_OP_ERR", SENDS | TAGGED | WINDOWS | RECEIVES},
    [STATUS_LOC_PROT_ERR] = {"LOC_PROT_ERR", SENDS | TAGGED | RECEIVES},
    [STATUS_MW_BIND_ERR] = {"MW_BIND_ERR", WINDOWS},
    [STATUS_BAD_RESP_ERR] = {"BAD_RESP_ERR", SENDS | TAGGED},
    [STATUS_LOC_ACCESS_ERR] = {"LOC_ACCESS_ERR", RECEIVES},
    [STATUS_REM_INV_REQ_ERR] = {"REM_INV_REQ_ERR", SENDS | TAGGED},
    [STATUS_REM_ACCESS_ERR] = {"REM_ACCESS_ERR", OPERATION_BIT(PLACE_SEND_INVALIDATE) | TAGGED},
    [STATUS_REM_OP_ERR] = {"REM_OP_ERR", SENDS | TAGGED},
    [STATUS_RETRY_EXC_ERR] = {"RETRY_EXC_ERR", SENDS | TAGGED},
    [STATUS_RNR_RETRY_EXC_ERR] = {"RNR_RETRY_EXC_ERR", SENDS},
};

/* The words of a fault. */
enum key {
    KEY_AT,
    KEY_DO,
    KEY_CALL,
    KEY_OPERATION,
    KEY_QUEUE_PAIR,
    KEY_PEER,
    KEY_MIN_SIZE,
    KEY_MAX_SIZE,
    KEY_CONTENT,
    KEY_NTH,
    KEY_EVERY,
    KEY_PROBABILITY,
    KEY_AFTER_MS,
    KEY_UNTIL_MS,
    KEY_TIMES,
    KEY_ERRNO,
    KEY_STATUS,
    KEY_MS,
    KEY_BYTES,
    KEY_LIMIT,
    KEY_DATA,
    KEYS
};
#define KEY_BIT(key) (1u << (key))
static const char *const key_names[KEYS] = {
    "at",       "do",      "call",   "operation", "queue_pair",  "peer",     "min_size",
    "max_size", "content", "nth",    "every",     "probability", "after_ms", "until_ms",
    "times",    "errno",   "status", "ms",        "bytes",       "limit",    "data",
};

#define WHEN                                                                                    \
    (KEY_BIT(KEY_NTH) | KEY_BIT(KEY_EVERY) | KEY_BIT(KEY_PROBABILITY) | KEY_BIT(KEY_AFTER_MS) | \
     KEY_BIT(KEY_UNTIL_MS) | KEY_BIT(KEY_TIMES))
#define OF_MESSAGES (KEY_BIT(KEY_MIN_SIZE) | KEY_BIT(KEY_MAX_SIZE) | KEY_BIT(KEY_CONTENT))
#define ALWAYS      (KEY_BIT(KEY_AT) | KEY_BIT(KEY_DO) | KEY_BIT(KEY_QUEUE_PAIR) | WHEN)

static const unsigned keys_at[FAULT_ATS] = {
    [AT_CALL] = ALWAYS | KEY_BIT(KEY_CALL),
    [AT_REQUEST] = ALWAYS | KEY_BIT(KEY_OPERATION) | KEY_BIT(KEY_PEER) | OF_MESSAGES,
    [AT_MESSAGE] = ALWAYS | KEY_BIT(KEY_OPERATION) | KEY_BIT(KEY_PEER) | OF_MESSAGES,
    [AT_CONNECTION] = ALWAYS | KEY_BIT(KEY_PEER),
    [AT_ADAPTER] = ALWAYS,
};

#define AT_BIT(at) (1u << (at))
static const struct {
    const char *name;
    unsigned ats;
    unsigned needs, takes; /* values */
} kinds[FAULT_KINDS] = {
    [FAULT_ERRNO] = {"errno", AT_BIT(AT_CALL), KEY_BIT(KEY_ERRNO), 0},
    [FAULT_SLOW] = {"slow", AT_BIT(AT_CALL), KEY_BIT(KEY_MS), 0},
    [FAULT_LIMIT] = {"limit", AT_BIT(AT_CALL), KEY_BIT(KEY_LIMIT), 0},
    [FAULT_STATUS] = {"status", AT_BIT(AT_REQUEST), KEY_BIT(KEY_STATUS), 0},
    [FAULT_DELAY] = {"delay", AT_BIT(AT_REQUEST) | AT_BIT(AT_MESSAGE), KEY_BIT(KEY_MS), 0},
    [FAULT_SILENT] = {"silent", AT_BIT(AT_REQUEST), 0, 0},
    [FAULT_HOLD] = {"hold", AT_BIT(AT_REQUEST), 0, KEY_BIT(KEY_MS)},
    [FAULT_LATE_RECEIVE] = {"late_receive", AT_BIT(AT_REQUEST), KEY_BIT(KEY_MS), 0},
    [FAULT_SPLIT] = {"split", AT_BIT(AT_MESSAGE), 0, 0},
    [FAULT_CORRUPT] = {"corrupt", AT_BIT(AT_MESSAGE), 0, 0},
    [FAULT_REFUSE] = {"refuse", AT_BIT(AT_CONNECTION), 0, 0},
    [FAULT_TIME_OUT] = {"time_out", AT_BIT(AT_CONNECTION), 0, 0},
    [FAULT_REJECT] = {"reject", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_DATA)},
    [FAULT_LOSE] = {"lose", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_BYTES)},
    [FAULT_DISCONNECT] = {"disconnect", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_BYTES)},
    [FAULT_MUTE] = {"mute", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_BYTES)},
    [FAULT_DUPLICATE] = {"duplicate", AT_BIT(AT_CONNECTION), 0, 0},
    [FAULT_REORDER] = {"reorder", AT_BIT(AT_CONNECTION), 0, 0},
    [FAULT_PORT_DOWN] = {"port_down", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_PORT_UP] = {"port_up", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_GID_CHANGE] = {"gid_change", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_QUEUE_PAIR_FATAL] = {"queue_pair_fatal", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_COMPLETION_QUEUE_ERROR] = {"completion_queue_error", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_REMOVE] = {"remove", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_PATH_MIGRATED] = {"path_migrated", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_FULL_EVENT_QUEUE] = {"full_event_queue", AT_BIT(AT_ADAPTER), 0, 0},
};
#define VALUES                                                                                              \
    (KEY_BIT(KEY_ERRNO) | KEY_BIT(KEY_STATUS) | KEY_BIT(KEY_MS) | KEY_BIT(KEY_BYTES) | KEY_BIT(KEY_LIMIT) | \
     KEY_BIT(KEY_DATA))

/* Calls that make an object, and so have a limit. */
static const enum fault_call creations[] = {
    PLACE_CALL_ALLOC_PD,
    PLACE_CALL_REG_MR,
    PLACE_CALL_ALLOC_MW,
    PLACE_CALL_CREATE_COMP_CHANNEL,
    PLACE_CALL_CREATE_CQ,
    PLACE_CALL_CREATE_SRQ,
    PLACE_CALL_CREATE_QP,
    PLACE_CALL_CREATE_AH,
    PLACE_CALL_RDMA_CREATE_ID,
    PLACE_CALL_RDMA_CREATE_QP,
    PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL,
};

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

const char *fault_at_name(enum fault_at at)
{
    return at_names[at];
}

const char *fault_kind_name(enum fault_kind kind)
{
    return kinds[kind].name;
}

const char *fault_what_name(enum fault_at at, unsigned what)
{
    if (at == AT_CALL && what > ANY_CALL && what < FAULT_CALLS)
        return call_names[what];
    if ((at == AT_REQUEST || at == AT_MESSAGE) && what > ANY_OPERATION && what < FAULT_OPERATIONS)
        return operation_names[what];
    return at_names[at];
}

/* `first` is the first index that has a name. The array's size: no such name. */
static unsigned find(const char *const *names, size_t count, unsigned first, const char *name)
{
    unsigned i = first;

    while (i < count && strcmp(names[i], name) != 0)
        i++;
    return i;
}

enum fault_call fault_call_named(const char *name)
{
    return (enum fault_call)find(call_names, COUNT_OF(call_names), 1, name);
}

bool fault_status_fits(enum fault_operation operation, enum fault_status status)
{
    return (unsigned)status < COUNT_OF(statuses) && (statuses[status].operations & OPERATION_BIT(operation)) != 0;
}

/* ---- Counts ---- */

/* What is counted for each queue pair, or for each call. Tables are added, never moved, so no lock is needed. */
#define TABLE_SLOTS 256u
#define PROBES      8u
struct fault_counts {
    struct fault_counts *_Atomic next;
    struct tally {
        _Atomic uint64_t key; /* COUNT_KEY(); 0: free */
        _Atomic uint64_t count, fired;
    } slots[TABLE_SLOTS];
};

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static bool has_key(_Atomic uint64_t *slot, uint64_t key)
{
    uint64_t found = 0;

    return atomic_load(slot) == key || atomic_compare_exchange_strong(slot, &found, key) || found == key;
}

/* NULL: there is no memory. */
static struct tally *tally_of(struct fault_counts *counts, uint64_t key)
{
    for (;;) {
        for (unsigned i = 0; i < PROBES; i++) {
            struct tally *tally = &counts->slots[(mix(key) + i) % TABLE_SLOTS];
            if (has_key(&tally->key, key))
                return tally;
        }
        struct fault_counts *next = atomic_load(&counts->next);
        if (next == NULL) {
            struct fault_counts *made = calloc(1, sizeof *made);
            if (made == NULL)
                return NULL;
            if (atomic_compare_exchange_strong(&counts->next, &next, made))
                next = made;
            else
                free(made);
        }
        counts = next;
    }
}

static void counts_free(struct fault_counts *counts)
{
    while (counts != NULL) {
        struct fault_counts *next = atomic_load(&counts->next);
        free(counts);
        counts = next;
    }
}

/* ---- The scenario ---- */

struct scenario {
    uint64_t seed;
    char report[MAX_PATH_], count[MAX_PATH_];
    struct count_slot *shared; /* in the file of `count`; NULL: none */
    struct fault_counts *places;
    uint64_t began_ms;
    struct fault *faults;
    unsigned fault_count;
};

static uint64_t clock_ms(void)
{
#ifdef _WIN32
    return GetTickCount64();
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
#endif
}

struct reader {
    const char *name; /* of the file */
    unsigned line;
    char *error;
    size_t size;
    struct scenario *scenario;
    bool has_version, has_seed;
};

/* Returns false. */
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
static bool wrong(const struct reader *reader, const char *format, ...)
{
    va_list arguments;

    int length = snprintf(reader->error, reader->size, "%s:%u: ", reader->name, reader->line);
    if (length < 0 || (size_t)length >= reader->size)
        return false;
    va_start(arguments, format);
    vsnprintf(reader->error + length, reader->size - (size_t)length, format, arguments);
    va_end(arguments);
    return false;
}

static bool number(const char *text, uint64_t least, uint64_t most, uint64_t *out)
{
    uint64_t value = 0;

    if (*text == '\0')
        return false;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9')
            return false;
        unsigned digit = (unsigned)(*text - '0');
        if (value > (UINT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return value >= least && value <= most;
}

/* 0 to 1 with up to 15 digits behind the point, in every locale. */
static bool fraction(const char *text, double *out)
{
    double value = 0, unit = 1;
    unsigned digits = 0;

    if ((text[0] != '0' && text[0] != '1') || (text[1] != '\0' && text[1] != '.'))
        return false;
    if (text[1] == '.') {
        for (const char *at = text + 2; *at != '\0'; at++) {
            if (*at < '0' || *at > '9' || ++digits > 15)
                return false;
            unit /= 10;
            value += (*at - '0') * unit;
        }
        if (digits == 0)
            return false;
    }
    *out = (text[0] - '0') + value;
    return *out <= 1;
}

static int nibble(char digit)
{
    return digit >= '0' && digit <= '9'   ? digit - '0'
           : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
           : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                          : -1;
}

static bool bytes_of(const char *hex, uint8_t *out, size_t room, size_t *size)
{
    *size = 0;
    for (; *hex != '\0'; hex += 2) {
        if (hex[1] == '\0' || *size == room)
            return false;
        int high = nibble(hex[0]), low = nibble(hex[1]);
        if (high < 0 || low < 0)
            return false;
        out[(*size)++] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool address_of(const char *text, uint8_t *out)
{
    static const uint8_t prefix[12] = {[10] = 0xFF, [11] = 0xFF};

    if (inet_pton(AF_INET6, text, out) == 1)
        return true;
    memcpy(out, prefix, sizeof prefix);
    return inet_pton(AF_INET, text, out + sizeof prefix) == 1;
}

static bool take_value(const struct reader *reader, struct fault *fault, enum key key, const char *text)
{
    uint64_t value = 0;
    bool fits;

    switch (key) {
    case KEY_AT:
        fault->at = (enum fault_at)find(at_names, FAULT_ATS, 0, text);
        fits = fault->at < FAULT_ATS;
        break;
    case KEY_DO:
        for (fault->kind = 0; fault->kind < FAULT_KINDS && strcmp(kinds[fault->kind].name, text) != 0;)
            fault->kind++;
        fits = fault->kind < FAULT_KINDS;
        break;
    case KEY_CALL:
        fault->what = fault_call_named(text);
        fits = fault->what < FAULT_CALLS;
        break;
    case KEY_OPERATION:
        fault->what = find(operation_names, COUNT_OF(operation_names), 1, text);
        fits = fault->what < FAULT_OPERATIONS;
        break;
    case KEY_QUEUE_PAIR:
        fits = number(text, 1, UINT32_MAX, &value);
        fault->queue_pair = (uint32_t)value;
        break;
    case KEY_PEER:
        fits = fault->has_peer = address_of(text, fault->peer);
        break;
    case KEY_MIN_SIZE:
        fits = number(text, 0, UINT32_MAX, &fault->min_size);
        break;
    case KEY_MAX_SIZE:
        fits = number(text, 0, UINT32_MAX, &fault->max_size);
        break;
    case KEY_CONTENT:
        fits = bytes_of(text, fault->content, sizeof fault->content, &fault->content_size) && fault->content_size > 0;
        break;
    case KEY_NTH:
        fits = number(text, 1, INT64_MAX, &fault->nth);
        break;
    case KEY_EVERY:
        fits = number(text, 1, INT64_MAX, &fault->every);
        break;
    case KEY_PROBABILITY:
        fits = fraction(text, &fault->probability);
        break;
    case KEY_AFTER_MS:
        fits = number(text, 0, MAX_MS, &fault->after_ms);
        break;
    case KEY_UNTIL_MS:
        fits = number(text, 1, MAX_MS, &fault->until_ms);
        break;
    case KEY_TIMES:
        fits = number(text, 1, INT64_MAX, &fault->times);
        break;
    case KEY_ERRNO: {
        size_t i = 0;
        while (i < COUNT_OF(errors) && strcmp(errors[i].name, text) != 0)
            i++;
        fits = i < COUNT_OF(errors);
        fault->error = fits ? errors[i].number : 0;
        break;
    }
    case KEY_STATUS: {
        size_t i = 0;
        while (i < COUNT_OF(statuses) && (statuses[i].name == NULL || strcmp(statuses[i].name, text) != 0))
            i++;
        fits = i < COUNT_OF(statuses);
        fault->status = (enum fault_status)i;
        break;
    }
    case KEY_MS:
        fits = number(text, 0, MAX_MS, &fault->ms);
        break;
    case KEY_BYTES:
        fits = number(text, 0, INT64_MAX, &fault->bytes);
        break;
    case KEY_LIMIT:
        fits = number(text, 0, INT64_MAX, &fault->limit);
        break;
    default:
        fits = bytes_of(text, fault->data, sizeof fault->data, &fault->data_size);
        break;
    }
    return fits || wrong(reader, "%s=%s: not a value of %s, or out of range", key_names[key], text, key_names[key]);
}

/* Whether the words of a fault go together. */
static bool check(const struct reader *reader, struct fault *fault, unsigned given)
{
    if ((given & KEY_BIT(KEY_AT)) == 0)
        return wrong(reader, "a fault needs at=");
    if ((given & KEY_BIT(KEY_DO)) == 0)
        return wrong(reader, "a fault needs do=");
    const char *kind = kinds[fault->kind].name, *at = at_names[fault->at];
    if ((kinds[fault->kind].ats & AT_BIT(fault->at)) == 0)
        return wrong(reader, "do=%s is not one of at=%s", kind, at);
    unsigned values = kinds[fault->kind].needs | kinds[fault->kind].takes;
    for (enum key key = 0; key < KEYS; key++) {
        bool has = (given & KEY_BIT(key)) != 0;
        if (has && (VALUES & KEY_BIT(key)) != 0 && (values & KEY_BIT(key)) == 0)
            return wrong(reader, "do=%s takes no %s=", kind, key_names[key]);
        if (has && (VALUES & KEY_BIT(key)) == 0 && (keys_at[fault->at] & KEY_BIT(key)) == 0)
            return wrong(reader, "at=%s takes no %s=", at, key_names[key]);
        if (!has && (kinds[fault->kind].needs & KEY_BIT(key)) != 0)
            return wrong(reader, "do=%s needs %s=", kind, key_names[key]);
    }
    if ((fault->nth != 0) + (fault->every != 0) + (fault->probability >= 0) > 1)
        return wrong(reader, "nth=, every= and probability= exclude each other");
    if (fault->after_ms >= fault->until_ms)
        return wrong(reader, "until_ms= has to be above after_ms=");
    if (fault->min_size > fault->max_size)
        return wrong(reader, "min_size= is above max_size=");
    if (fault->kind == FAULT_STATUS && fault->what != ANY_OPERATION &&
        !fault_status_fits((enum fault_operation)fault->what, fault->status))
        return wrong(reader, "status=%s: operation=%s does not end with it", statuses[fault->status].name,
                     operation_names[fault->what]);
    if (fault->kind == FAULT_LATE_RECEIVE && fault->what != PLACE_RECEIVE)
        return wrong(reader, "do=late_receive needs operation=receive");
    if (fault->kind == FAULT_LIMIT) {
        size_t i = 0;
        while (i < COUNT_OF(creations) && (unsigned)creations[i] != fault->what)
            i++;
        if (i == COUNT_OF(creations))
            return wrong(reader, "do=limit needs call= with a call that makes an object");
    }
    if ((given & KEY_BIT(KEY_TIMES)) == 0)
        fault->times = fault->nth != 0 || fault->at == AT_ADAPTER ? 1 : UINT64_MAX;
    return true;
}

static bool read_fault(struct reader *reader, char **words, size_t count)
{
    struct scenario *scenario = reader->scenario;
    unsigned given = 0;

    if (scenario->fault_count == SCENARIO_MAX_FAULTS)
        return wrong(reader, "more than %u faults", SCENARIO_MAX_FAULTS);
    struct fault *faults = realloc(scenario->faults, (scenario->fault_count + 1) * sizeof *faults);
    if (faults == NULL)
        return wrong(reader, "no memory");
    scenario->faults = faults;
    struct fault *fault = &faults[scenario->fault_count];
    *fault = (struct fault){.number = scenario->fault_count,
                            .line = reader->line,
                            .max_size = UINT64_MAX,
                            .probability = -1,
                            .until_ms = UINT64_MAX,
                            .ms = FAULT_FOREVER};
    for (size_t i = 0; i < count; i++) {
        char *value = strchr(words[i], '=');
        if (value == NULL)
            return wrong(reader, "%s: not of the form name=value", words[i]);
        *value++ = '\0';
        enum key key = (enum key)find(key_names, KEYS, 0, words[i]);
        if (key == KEYS)
            return wrong(reader, "%s=: unknown word", words[i]);
        if ((given & KEY_BIT(key)) != 0)
            return wrong(reader, "%s=: given twice", words[i]);
        given |= KEY_BIT(key);
        if (!take_value(reader, fault, key, value))
            return false;
    }
    if (!check(reader, fault, given))
        return false;
    fault->counts = calloc(1, sizeof *fault->counts);
    if (fault->counts == NULL)
        return wrong(reader, "no memory");
    scenario->fault_count++;
    return true;
}

static bool blank(char c)
{
    return c == ' ' || c == '\t';
}

/* The words of a line, each ended by a NUL. A word that begins with # ends them. */
static size_t split(char *line, char **words, size_t room)
{
    size_t count = 0;

    for (;;) {
        while (blank(*line))
            *line++ = '\0';
        if (*line == '\0' || *line == '#')
            return count;
        if (count == room)
            return room + 1;
        words[count++] = line;
        while (*line != '\0' && !blank(*line))
            line++;
    }
}

static bool take_path(const struct reader *reader, const char *word, char *line, char *out)
{
    line += strspn(line, " \t") + strlen(word);
    line += strspn(line, " \t");
    size_t length = strlen(line);
    while (length > 0 && blank(line[length - 1]))
        length--;
    if (out[0] != '\0')
        return wrong(reader, "%s: given twice", word);
    if (length == 0 || length >= MAX_PATH_)
        return wrong(reader, "%s: a path is missing, or too long", word);
    memcpy(out, line, length);
    out[length] = '\0';
    return true;
}

static bool read_line(struct reader *reader, char *line)
{
    struct scenario *scenario = reader->scenario;
    char *words[KEYS + 2];
    uint64_t version;
    char *text = line + strspn(line, " \t");

    /* A path may have blanks and #. */
    size_t first = strcspn(text, " \t");
    if (first == 6 && memcmp(text, "report", 6) == 0 && reader->has_version)
        return take_path(reader, "report", line, scenario->report);
    if (first == 5 && memcmp(text, "count", 5) == 0 && reader->has_version)
        return take_path(reader, "count", line, scenario->count);

    size_t count = split(line, words, COUNT_OF(words));
    if (count == 0)
        return true;
    if (count > COUNT_OF(words))
        return wrong(reader, "too many words");
    if (!reader->has_version) {
        if (strcmp(words[0], "scenario") != 0 || count != 2 || !number(words[1], 1, 1, &version))
            return wrong(reader, "%s: the first line has to be: scenario 1", words[0]);
        reader->has_version = true;
        return true;
    }
    if (strcmp(words[0], "seed") == 0) {
        if (reader->has_seed)
            return wrong(reader, "seed: given twice");
        if (count != 2 || !number(words[1], 0, UINT64_MAX, &scenario->seed))
            return wrong(reader, "seed: needs one number below 2^64");
        reader->has_seed = true;
        return true;
    }
    if (strcmp(words[0], "fault") == 0)
        return read_fault(reader, words + 1, count - 1);
    return wrong(reader, "%s: unknown word", words[0]);
}

static bool read_lines(struct reader *reader, char *text, size_t length)
{
    char *end = text + length;

    if (memchr(text, '\0', length) != NULL) {
        reader->line = 1;
        return wrong(reader, "there is a NUL in the file");
    }
    while (text < end) {
        char *newline = memchr(text, '\n', (size_t)(end - text));
        char *next = newline != NULL ? newline + 1 : end;
        if (newline != NULL)
            *newline = '\0';
        size_t size = strlen(text);
        if (size > 0 && text[size - 1] == '\r')
            text[size - 1] = '\0';
        reader->line++;
        if (!read_line(reader, text))
            return false;
        text = next;
    }
    return reader->has_version || wrong(reader, "the file is empty; its first line has to be: scenario 1");
}

/* ---- Its files ---- */

static int open_report(const char *path)
{
#ifdef _WIN32
    return _open(path, _O_WRONLY | _O_APPEND | _O_CREAT | _O_BINARY, 0666);
#else
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
#endif
}

#ifdef _WIN32
static struct count_slot *map_counts(const char *path, bool *unsupported)
{
    (void)path;
    *unsupported = true;
    return NULL;
}

static void unmap_counts(struct count_slot *slots)
{
    (void)slots;
}
#else
#define MAPPED (sizeof(struct count_header) + COUNT_SLOTS * sizeof(struct count_slot))

static struct count_slot *map_counts(const char *path, bool *unsupported)
{
    static const struct count_header header = {COUNT_MAGIC, COUNT_VERSION, COUNT_SLOTS};

    *unsupported = false;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return NULL;
    void *memory = MAP_FAILED;
    if (ftruncate(fd, MAPPED) == 0)
        memory = mmap(NULL, MAPPED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return NULL;
    /* Several processes write the same. */
    memcpy(memory, &header, sizeof header);
    return (struct count_slot *)((char *)memory + sizeof header);
}

static void unmap_counts(struct count_slot *slots)
{
    if (slots != NULL)
        munmap((char *)slots - sizeof(struct count_header), MAPPED);
}
#endif

static bool open_files(struct reader *reader)
{
    struct scenario *scenario = reader->scenario;
    bool unsupported = false;

    if (scenario->report[0] != '\0') {
        int fd = open_report(scenario->report);
        if (fd < 0)
            return wrong(reader, "report %s: %s", scenario->report, strerror(errno));
        close(fd);
    }
    if (scenario->count[0] == '\0')
        return true;
    scenario->shared = map_counts(scenario->count, &unsupported);
    return scenario->shared != NULL ||
           wrong(reader, "count %s: %s", scenario->count, unsupported ? "not on this system" : strerror(errno));
}

struct scenario *scenario_parse(const char *name, const char *text, size_t length, char *error, size_t size)
{
    struct scenario *scenario = calloc(1, sizeof *scenario);
    char *copy = malloc(length + 1);
    struct reader reader = {.name = name, .error = error, .size = size, .scenario = scenario};

    if (scenario != NULL) {
        scenario->places = calloc(1, sizeof *scenario->places);
    }
    bool good = false;
    if (scenario == NULL || copy == NULL || scenario->places == NULL) {
        wrong(&reader, "no memory");
    } else {
        memcpy(copy, text, length);
        copy[length] = '\0';
        good = read_lines(&reader, copy, length) && open_files(&reader);
        scenario->began_ms = clock_ms();
    }
    free(copy);
    if (!good) {
        scenario_free(scenario);
        return NULL;
    }
    return scenario;
}

struct scenario *scenario_read(const char *path, char *error, size_t size)
{
    struct scenario *scenario = NULL;
    FILE *file = fopen(path, "rb");
    char *text = file != NULL ? malloc(MAX_FILE + 1) : NULL;

    if (text == NULL) {
        snprintf(error, size, "%s: %s", path, strerror(errno));
    } else {
        size_t length = fread(text, 1, MAX_FILE + 1, file);
        if (ferror(file))
            snprintf(error, size, "%s: %s", path, strerror(errno));
        else if (length > MAX_FILE)
            snprintf(error, size, "%s: larger than %u bytes", path, MAX_FILE);
        else
            scenario = scenario_parse(path, text, length, error, size);
    }
    free(text);
    if (file != NULL)
        fclose(file);
    return scenario;
}

void scenario_free(struct scenario *scenario)
{
    if (scenario == NULL)
        return;
    for (unsigned i = 0; i < scenario->fault_count; i++)
        counts_free(scenario->faults[i].counts);
    counts_free(scenario->places);
    unmap_counts(scenario->shared);
    free(scenario->faults);
    free(scenario);
}

bool scenario_suits(const struct scenario *scenario, const char *executor, bool (*can)(const struct fault *),
                    char *error, size_t size)
{
    for (unsigned i = 0; i < scenario->fault_count; i++) {
        const struct fault *fault = &scenario->faults[i];
        if (!can(fault)) {
            snprintf(error, size, "line %u: %s cannot do=%s at %s", fault->line, executor, kinds[fault->kind].name,
                     fault_what_name(fault->at, fault->what));
            return false;
        }
    }
    return true;
}

/* ---- A place ---- */

static void append(char *line, size_t size, size_t *used, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    int more = vsnprintf(line + *used, size - *used, format, arguments);
    va_end(arguments);
    if (more > 0)
        *used = *used + (size_t)more < size ? *used + (size_t)more : size - 1;
}

#ifndef _WIN32
/* What JSON allows in a text; other characters become question marks. */
static const char *plain(char *out, size_t size, const char *text)
{
    size_t i = 0;

    for (; text != NULL && text[i] != '\0' && i + 1 < size; i++)
        out[i] = text[i] >= ' ' && text[i] < 127 && text[i] != '"' && text[i] != '\\' ? text[i] : '?';
    out[i] = '\0';
    return out;
}
#endif

static void describe_caller(char *line, size_t size, size_t *used, const void *caller)
{
#ifdef _WIN32
    append(line, size, used, ",\"caller\":\"0x%llx\"", (unsigned long long)(uintptr_t)caller);
#else
    char file[256], symbol[128];
    Dl_info info;

    if (dladdr(caller, &info) == 0 || info.dli_fname == NULL) {
        append(line, size, used, ",\"caller\":\"0x%llx\"", (unsigned long long)(uintptr_t)caller);
        return;
    }
    const char *base = strrchr(info.dli_fname, '/');
    append(line, size, used, ",\"caller\":\"%s+0x%llx",
           plain(file, sizeof file, base != NULL ? base + 1 : info.dli_fname),
           (unsigned long long)((uintptr_t)caller - (uintptr_t)info.dli_fbase));
    if (info.dli_sname != NULL)
        append(line, size, used, " (%s)", plain(symbol, sizeof symbol, info.dli_sname));
    append(line, size, used, "\"");
#endif
}

static void report(const struct scenario *scenario, const struct fault *fault, const struct place *place,
                   uint64_t count)
{
    char line[1024];
    size_t used = 0;

    if (scenario->report[0] == '\0')
        return;
    append(line, sizeof line, &used,
           "{\"fault\":%u,\"pid\":%d,\"at\":\"%s\",\"place\":\"%s\",\"queue_pair\":%lu,\"count\":%llu,\"does\":\"%s\","
           "\"time\":%llu",
           fault->number, (int)getpid(), at_names[fault->at], fault_what_name(place->at, place->what),
           (unsigned long)place->queue_pair, (unsigned long long)count, kinds[fault->kind].name,
           (unsigned long long)scenario_age_ms(scenario));
    if (place->caller != NULL)
        describe_caller(line, sizeof line - 3, &used, place->caller);
    append(line, sizeof line, &used, "}\n");
    /* It is not kept open: a program that closes all descriptors would give its number to another file. */
    int fd = open_report(scenario->report);
    if (fd < 0)
        return;
    /* One call, so lines of several processes do not mix. */
    int written = (int)write(fd, line, (unsigned)used);
    (void)written;
    close(fd);
}

/* Counts of connections, and of the adapter, are those of the process, unless the fault is one queue pair's. */
static uint64_t key_for(const struct fault *fault, const struct place *place)
{
    bool of_process = (place->at == AT_CONNECTION || place->at == AT_ADAPTER) && fault->queue_pair == 0;
    return COUNT_KEY(place->at, place->at == AT_CALL ? place->what : 0, of_process ? 0 : place->queue_pair);
}

static void count_place(struct scenario *scenario, const struct place *place)
{
    uint64_t key = COUNT_KEY(place->at, place->what, place->queue_pair);
    struct tally *tally = tally_of(scenario->places, key);

    if (tally == NULL)
        return;
    uint64_t count = ++tally->count;
    for (unsigned i = 0; i < COUNT_SLOTS; i++) {
        struct count_slot *slot = &scenario->shared[(mix(key) + i) % COUNT_SLOTS];
        if (!has_key(&slot->key, key))
            continue;
        uint64_t known = atomic_load(&slot->count);
        while (known < count && !atomic_compare_exchange_weak(&slot->count, &known, count))
            ;
        return;
    }
}

static bool matches(const struct scenario *scenario, const struct fault *fault, const struct place *place)
{
    if (fault->at != place->at || (place->kinds != 0 && (place->kinds & FAULT_BIT(fault->kind)) == 0) ||
        (fault->what != 0 && fault->what != place->what) ||
        (fault->queue_pair != 0 && fault->queue_pair != place->queue_pair))
        return false;
    if (fault->kind == FAULT_STATUS && !fault_status_fits((enum fault_operation)place->what, fault->status))
        return false;
    if (fault->kind == FAULT_LIMIT && place->live < fault->limit)
        return false;
    if (fault->has_peer && (place->peer == NULL || memcmp(fault->peer, place->peer, sizeof fault->peer) != 0))
        return false;
    if (place->size < fault->min_size || place->size > fault->max_size)
        return false;
    if (fault->content_size > 0 && (place->content == NULL || place->content_size < fault->content_size ||
                                    memcmp(place->content, fault->content, fault->content_size) != 0))
        return false;
    if (fault->after_ms == 0 && fault->until_ms == UINT64_MAX)
        return true;
    uint64_t age = scenario_age_ms(scenario);
    return age >= fault->after_ms && age < fault->until_ms;
}

static uint64_t draw(const struct scenario *scenario, const struct fault *fault, uint64_t key, uint64_t count)
{
    return mix(mix(mix(mix(scenario->seed) ^ fault->number) ^ key) ^ count);
}

/* Whether the fault, which matches, fires at this count of its places. */
static bool fires(const struct scenario *scenario, const struct fault *fault, struct tally *tally, uint64_t key,
                  uint64_t count)
{
    if (fault->nth != 0)
        return count >= fault->nth && count - fault->nth < fault->times;
    if (fault->every != 0)
        return count % fault->every == 0 && count / fault->every <= fault->times;
    if (fault->probability >= 0 && (double)(draw(scenario, fault, key, count) >> 11) * 0x1p-53 >= fault->probability)
        return false;
    return fault->times == UINT64_MAX || atomic_fetch_add(&tally->fired, 1) < fault->times;
}

const struct fault *scenario_at(struct scenario *scenario, const struct place *place)
{
    const struct fault *fired = NULL;
    uint64_t count_of_fired = 0;

    if (scenario->shared != NULL && !place->again)
        count_place(scenario, place);
    for (unsigned i = 0; i < scenario->fault_count; i++) {
        const struct fault *fault = &scenario->faults[i];
        if (!matches(scenario, fault, place) || fault_is_timed(fault))
            continue;
        uint64_t key = key_for(fault, place);
        struct tally *tally = tally_of(fault->counts, key);
        if (tally == NULL)
            continue;
        uint64_t count = ++tally->count;
        if (fired == NULL && fires(scenario, fault, tally, key, count)) {
            fired = fault;
            count_of_fired = count;
        }
    }
    if (fired != NULL)
        report(scenario, fired, place, count_of_fired);
    return fired;
}

uint64_t scenario_random(struct scenario *scenario, const struct fault *fault, const struct place *place)
{
    uint64_t key = key_for(fault, place);
    struct tally *tally = tally_of(fault->counts, key);

    return mix(draw(scenario, fault, key, tally != NULL ? atomic_load(&tally->count) : 0));
}

unsigned scenario_faults(const struct scenario *scenario)
{
    return scenario->fault_count;
}

const struct fault *scenario_fault(const struct scenario *scenario, unsigned number)
{
    return &scenario->faults[number];
}

bool fault_is_timed(const struct fault *fault)
{
    return fault->at == AT_ADAPTER && fault->nth == 0 && fault->every == 0 && fault->probability < 0;
}

uint64_t scenario_age_ms(const struct scenario *scenario)
{
    return clock_ms() - scenario->began_ms;
}

void scenario_fire(struct scenario *scenario, const struct fault *fault, const struct place *place)
{
    report(scenario, fault, place, 1);
}
