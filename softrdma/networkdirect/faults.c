/* What a scenario of faults does at the calls of NetworkDirect. They have the names of verbs' calls that do the same.
 */
#include "face.h"
#include "nd_objects.h"
#include "overlapped.h"

#include <errno.h>

const char face_name[] = "softnd";

#define NO_REQUEST REQUEST_ANY /* the call is not overlapped */

static const struct {
    enum fault_call call;
    enum request_kind request;
    nd_status full;              /* how it fails if the adapter or the queue is full; ND_SUCCESS: it does not */
    enum object_kind made, also; /* what it makes; KIND_COUNT: nothing */
} calls[] = {
    {PLACE_CALL_REG_MR, REQUEST_REGION, ND_INSUFFICIENT_RESOURCES, KIND_REGISTRATION, KIND_COUNT},
    {PLACE_CALL_ALLOC_MW, NO_REQUEST, ND_INSUFFICIENT_RESOURCES, KIND_WINDOW, KIND_COUNT},
    {PLACE_CALL_CREATE_CQ, NO_REQUEST, ND_INSUFFICIENT_RESOURCES, KIND_COMPLETION_QUEUE, KIND_COUNT},
    {PLACE_CALL_RESIZE_CQ, NO_REQUEST, ND_INSUFFICIENT_RESOURCES, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_CREATE_SRQ, NO_REQUEST, ND_INSUFFICIENT_RESOURCES, KIND_SHARED_QUEUE, KIND_COUNT},
    {PLACE_CALL_CREATE_QP, NO_REQUEST, ND_INSUFFICIENT_RESOURCES, KIND_QUEUE_PAIR, KIND_COUNT},
    {PLACE_CALL_RDMA_CREATE_ID, NO_REQUEST, ND_INSUFFICIENT_RESOURCES, KIND_CONNECTOR, KIND_LISTENER},
    {PLACE_CALL_POST_SEND, NO_REQUEST, ND_NO_MORE_ENTRIES, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_POST_RECV, NO_REQUEST, ND_NO_MORE_ENTRIES, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_POST_SRQ_RECV, NO_REQUEST, ND_NO_MORE_ENTRIES, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_CANCEL, NO_REQUEST, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_DEREG_MR, REQUEST_REGION, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_REQ_NOTIFY_CQ, REQUEST_NOTIFY, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_RDMA_CONNECT, REQUEST_CONNECT, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_RDMA_ESTABLISH, REQUEST_COMPLETE_CONNECT, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_RDMA_ACCEPT, REQUEST_ACCEPT, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_RDMA_GET_CM_EVENT, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_RDMA_DISCONNECT, REQUEST_DISCONNECT, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
    {PLACE_CALL_RDMA_GET_REQUEST, REQUEST_CONNECTION, ND_SUCCESS, KIND_COUNT, KIND_COUNT},
};

/* COUNT_OF(calls): softnd has no such call. */
static size_t row_of(unsigned call)
{
    size_t row = 0;

    while (row < COUNT_OF(calls) && (unsigned)calls[row].call != call)
        row++;
    return row;
}

bool face_executes_faults(void)
{
    return true;
}

bool face_can(const struct fault *fault)
{
    size_t row = row_of(fault->what);
    bool any = fault->what == ANY_CALL, known = row < COUNT_OF(calls);

    switch (fault->kind) {
    case FAULT_ERRNO:
        return fault->error == ENOMEM && (any || (known && calls[row].full != ND_SUCCESS));
    case FAULT_SLOW:
        return any || known;
    case FAULT_LIMIT:
        return known && calls[row].made != KIND_COUNT;
    case FAULT_GID_CHANGE:
    case FAULT_FULL_EVENT_QUEUE:
        return false;
    default:
        return true;
    }
}

/* NetworkDirect tells a program nothing of the port, and of a queue pair only what its requests end with. */
void face_fault(struct adapter *adapter, const struct fault *fault, struct queue_pair *queue_pair)
{
    UNUSED(adapter);
    if (fault->kind == FAULT_QUEUE_PAIR_FATAL && queue_pair != NULL)
        qp_finish_now(queue_pair);
}

HRESULT nd_ask_fault(const struct adapter *adapter, enum fault_call call, uint32_t queue_pair)
{
    size_t row = row_of(call);
    int64_t live = 0;

    if (calls[row].made != KIND_COUNT)
        live = object_live(calls[row].made) + (calls[row].also != KIND_COUNT ? object_live(calls[row].also) : 0);
    const struct place place = {
        .at = AT_CALL,
        .what = call,
        .queue_pair = queue_pair,
        /* An overlapped request is slow when it completes. */
        .kinds = calls[row].request == NO_REQUEST ? 0 : ~FAULT_BIT(FAULT_SLOW),
        .live = (uint64_t)live,
    };
    const struct fault *fault = faults_ask(adapter->faults, &place);
    if (fault == NULL)
        return ND_SUCCESS;
    if (fault->kind != FAULT_SLOW)
        return calls[row].full;
    Sleep((DWORD)fault->ms);
    return ND_SUCCESS;
}

static uint32_t slow_ms(const struct adapter *adapter, enum fault_call call)
{
    const struct place place = {
        .at = AT_CALL,
        .what = call,
        .kinds = FAULT_BIT(FAULT_SLOW),
        .again = call == PLACE_CALL_REG_MR,
    };
    const struct fault *fault = adapter->faults != NULL ? faults_ask(adapter->faults, &place) : NULL;

    return fault != NULL ? (uint32_t)fault->ms : 0;
}

uint32_t nd_request_delay_ms(const struct adapter *adapter, const struct request *request)
{
    size_t row = 0;

    if (adapter->faults == NULL)
        return 0;
    if (request->kind == REQUEST_REGION)
        return slow_ms(adapter, request->subject != NULL ? PLACE_CALL_REG_MR : PLACE_CALL_DEREG_MR);
    while (row < COUNT_OF(calls) && calls[row].request != request->kind)
        row++;
    return slow_ms(adapter, row < COUNT_OF(calls) ? calls[row].call : ANY_CALL);
}

uint32_t nd_cancel_delay_ms(const struct adapter *adapter)
{
    return slow_ms(adapter, PLACE_CALL_CANCEL);
}
