/* The names of places, calls, operations, errors and statuses. */
#include "scenario_parts.h"

#include <errno.h>
#include <string.h>

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

const char *fault_at_name(enum fault_at at)
{
    return at_names[at];
}

const char *fault_what_name(enum fault_at at, unsigned what)
{
    if (at == AT_CALL && what > ANY_CALL && what < FAULT_CALLS)
        return call_names[what];
    if ((at == AT_REQUEST || at == AT_MESSAGE) && what > ANY_OPERATION && what < FAULT_OPERATIONS)
        return operation_names[what];
    return at_names[at];
}

unsigned find_name(const char *const *names, size_t count, unsigned first, const char *name)
{
    unsigned i = first;

    while (i < count && strcmp(names[i], name) != 0)
        i++;
    return i;
}

enum fault_at fault_at_named(const char *name)
{
    return (enum fault_at)find_name(at_names, FAULT_ATS, 0, name);
}

enum fault_call fault_call_named(const char *name)
{
    return (enum fault_call)find_name(call_names, COUNT_OF(call_names), 1, name);
}

enum fault_operation fault_operation_named(const char *name)
{
    return (enum fault_operation)find_name(operation_names, COUNT_OF(operation_names), 1, name);
}

int fault_error_named(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(errors); i++)
        if (strcmp(errors[i].name, name) == 0)
            return errors[i].number;
    return 0;
}

enum fault_status fault_status_named(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(statuses); i++)
        if (statuses[i].name != NULL && strcmp(statuses[i].name, name) == 0)
            return (enum fault_status)i;
    return 0;
}

const char *fault_status_name(enum fault_status status)
{
    return statuses[status].name;
}

bool fault_status_fits(enum fault_operation operation, enum fault_status status)
{
    return (unsigned)status < COUNT_OF(statuses) && (statuses[status].operations & OPERATION_BIT(operation)) != 0;
}
