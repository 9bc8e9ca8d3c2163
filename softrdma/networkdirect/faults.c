/* What a scenario of faults does at the calls of NetworkDirect. They have the names of verbs' calls that do the same.
 */
#include "face.h"
#include "nd_objects.h"
#include "overlapped.h"

#include <errno.h>

const char face_name[] = "softnd";

static const struct {
    enum fault_call call;
    enum request_kind kind;
} overlapped_calls[] = {
    {PLACE_CALL_REG_MR, REQUEST_REGION},
    {PLACE_CALL_DEREG_MR, REQUEST_REGION},
    {PLACE_CALL_REQ_NOTIFY_CQ, REQUEST_NOTIFY},
    {PLACE_CALL_RDMA_CONNECT, REQUEST_CONNECT},
    {PLACE_CALL_RDMA_ESTABLISH, REQUEST_COMPLETE_CONNECT},
    {PLACE_CALL_RDMA_ACCEPT, REQUEST_ACCEPT},
    {PLACE_CALL_RDMA_GET_CM_EVENT, REQUEST_NOTIFY_DISCONNECT},
    {PLACE_CALL_RDMA_DISCONNECT, REQUEST_DISCONNECT},
    {PLACE_CALL_RDMA_GET_REQUEST, REQUEST_CONNECTION},
};

/* The requests of a call; REQUEST_ANY: it is not overlapped. */
static enum request_kind request_of(unsigned call)
{
    for (size_t i = 0; i < COUNT_OF(overlapped_calls); i++)
        if ((unsigned)overlapped_calls[i].call == call)
            return overlapped_calls[i].kind;
    return REQUEST_ANY;
}

bool face_executes_faults(void)
{
    return true;
}

bool face_can(const struct fault *fault)
{
    switch (fault->kind) {
    case FAULT_ERRNO:
        return fault->what == PLACE_CALL_REG_MR && fault->error == ENOMEM;
    case FAULT_SLOW:
        return fault->what == ANY_CALL || fault->what == PLACE_CALL_CANCEL || request_of(fault->what) != REQUEST_ANY;
    case FAULT_LIMIT:
    case FAULT_GID_CHANGE:
    case FAULT_FULL_EVENT_QUEUE:
    case FAULT_QUEUE_PAIR_FATAL:
        return false;
    default:
        return true;
    }
}

/* NetworkDirect tells a program nothing of the port. */
void face_fault(struct adapter *adapter, const struct fault *fault, struct queue_pair *queue_pair)
{
    UNUSED(adapter);
    UNUSED(fault);
    UNUSED(queue_pair);
}

static const struct fault *ask(const struct adapter *adapter, enum fault_call call, enum fault_kind kind)
{
    const struct place place = {.at = AT_CALL,
                                .what = call,
                                .kinds = FAULT_BIT(kind),
                                .again = call == PLACE_CALL_REG_MR && kind == FAULT_SLOW};

    return adapter->faults != NULL ? faults_ask(adapter->faults, &place) : NULL;
}

HRESULT nd_registration_fault(const struct adapter *adapter)
{
    return ask(adapter, PLACE_CALL_REG_MR, FAULT_ERRNO) != NULL ? ND_INSUFFICIENT_RESOURCES : ND_SUCCESS;
}

uint32_t nd_request_delay_ms(const struct adapter *adapter, const struct request *request)
{
    enum fault_call call = ANY_CALL;

    if (adapter->faults == NULL)
        return 0;
    for (size_t i = 0; i < COUNT_OF(overlapped_calls) && call == ANY_CALL; i++)
        if (overlapped_calls[i].kind == request->kind)
            call = overlapped_calls[i].call;
    if (request->kind == REQUEST_REGION && request->subject == NULL)
        call = PLACE_CALL_DEREG_MR;
    const struct fault *fault = ask(adapter, call, FAULT_SLOW);
    return fault != NULL ? (uint32_t)fault->ms : 0;
}

uint32_t nd_cancel_delay_ms(const struct adapter *adapter)
{
    const struct fault *fault = ask(adapter, PLACE_CALL_CANCEL, FAULT_SLOW);
    return fault != NULL ? (uint32_t)fault->ms : 0;
}
