/* Words for enumerators. */
#include "soft.h"

static const char *text(const char *const *table, size_t count, int value)
{
    return value >= 0 && (size_t)value < count && table[value] != NULL ? table[value] : "unknown";
}

EXPORT const char *ibv_node_type_str(enum ibv_node_type type)
{
    static const char *const table[] = {
        [IBV_NODE_CA] = "channel adapter (InfiniBand or RoCE)",
        [IBV_NODE_SWITCH] = "InfiniBand switch",
        [IBV_NODE_ROUTER] = "InfiniBand router",
        [IBV_NODE_RNIC] = "iWARP NIC",
        [IBV_NODE_USNIC] = "usNIC",
        [IBV_NODE_USNIC_UDP] = "usNIC over UDP",
        [IBV_NODE_UNSPECIFIED] = "unspecified",
    };
    return text(table, COUNT_OF(table), type);
}

EXPORT const char *ibv_port_state_str(enum ibv_port_state state)
{
    static const char *const table[] = {
        [IBV_PORT_NOP] = "unchanged", [IBV_PORT_DOWN] = "down",     [IBV_PORT_INIT] = "initializing",
        [IBV_PORT_ARMED] = "armed",   [IBV_PORT_ACTIVE] = "active", [IBV_PORT_ACTIVE_DEFER] = "active, deferred",
    };
    return text(table, COUNT_OF(table), (int)state);
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type type)
{
    static const char *const table[] = {
        [IBV_EVENT_CQ_ERR] = "completion queue failed",
        [IBV_EVENT_QP_FATAL] = "queue pair failed",
        [IBV_EVENT_QP_REQ_ERR] = "queue pair got an invalid request",
        [IBV_EVENT_QP_ACCESS_ERR] = "queue pair got a request for memory that it does not allow",
        [IBV_EVENT_COMM_EST] = "first message arrived before the queue pair could send",
        [IBV_EVENT_SQ_DRAINED] = "send queue is drained",
        [IBV_EVENT_PATH_MIG] = "connection moved to its alternate path",
        [IBV_EVENT_PATH_MIG_ERR] = "connection could not move to its alternate path",
        [IBV_EVENT_DEVICE_FATAL] = "device failed",
        [IBV_EVENT_PORT_ACTIVE] = "port is active",
        [IBV_EVENT_PORT_ERR] = "port is down",
        [IBV_EVENT_LID_CHANGE] = "LID changed",
        [IBV_EVENT_PKEY_CHANGE] = "P_Key table changed",
        [IBV_EVENT_SM_CHANGE] = "subnet manager changed",
        [IBV_EVENT_SRQ_ERR] = "shared receive queue failed",
        [IBV_EVENT_SRQ_LIMIT_REACHED] = "shared receive queue is below its limit",
        [IBV_EVENT_QP_LAST_WQE_REACHED] = "queue pair took its last shared receive",
        [IBV_EVENT_CLIENT_REREGISTER] = "subnet manager asks for new registrations",
        [IBV_EVENT_GID_CHANGE] = "GID table changed",
        [IBV_EVENT_WQ_FATAL] = "work queue failed",
    };
    return text(table, COUNT_OF(table), (int)type);
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    static const char *const table[] = {
        [IBV_WC_SUCCESS] = "success",
        [IBV_WC_LOC_LEN_ERR] = "local length error: message and buffers do not fit",
        [IBV_WC_LOC_QP_OP_ERR] = "local operation error: the queue pair cannot do this request",
        [IBV_WC_LOC_EEC_OP_ERR] = "local operation error of an end-to-end context",
        [IBV_WC_LOC_PROT_ERR] = "local protection error: an element is not in a region that allows it",
        [IBV_WC_WR_FLUSH_ERR] = "flushed: the queue pair had failed or was closed before",
        [IBV_WC_MW_BIND_ERR] = "memory window error: the window could not be bound or invalidated",
        [IBV_WC_BAD_RESP_ERR] = "the peer's response made no sense",
        [IBV_WC_LOC_ACCESS_ERR] = "local access error: a region does not allow what the peer sent",
        [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request: the peer could not take this message",
        [IBV_WC_REM_ACCESS_ERR] = "remote access error: the peer's memory does not allow this request",
        [IBV_WC_REM_OP_ERR] = "remote operation error: the peer could not finish this request",
        [IBV_WC_RETRY_EXC_ERR] = "retries exceeded: the peer did not answer",
        [IBV_WC_RNR_RETRY_EXC_ERR] = "retries exceeded: the peer had no receive posted",
        [IBV_WC_LOC_RDD_VIOL_ERR] = "local violation of a reliable datagram domain",
        [IBV_WC_REM_INV_RD_REQ_ERR] = "remote invalid request for a reliable datagram",
        [IBV_WC_REM_ABORT_ERR] = "the peer aborted the request",
        [IBV_WC_INV_EECN_ERR] = "invalid number of an end-to-end context",
        [IBV_WC_INV_EEC_STATE_ERR] = "invalid state of an end-to-end context",
        [IBV_WC_FATAL_ERR] = "fatal error of the device",
        [IBV_WC_RESP_TIMEOUT_ERR] = "the response took too long",
        [IBV_WC_GENERAL_ERR] = "general error",
        [IBV_WC_TM_ERR] = "tag matching error",
        [IBV_WC_TM_RNDV_INCOMPLETE] = "tag matching: software has to complete the rendezvous",
    };
    return text(table, COUNT_OF(table), (int)status);
}
