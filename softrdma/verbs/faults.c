/* What a scenario of faults does at the calls of verbs and of the connection manager, and at the adapter. */
#include "cm/cm.h"
#include "face.h"
#include "soft.h"

#include <dlfcn.h>
#include <errno.h>
#include <time.h>

const char face_name[] = "softverbs";

_Atomic int32_t soft_live[FAULT_CALLS];
_Thread_local unsigned soft_own_calls;
_Atomic bool soft_events_are_lost;

/* What a creating call makes, if the engine counts that. */
static enum object_kind made_by(enum fault_call call)
{
    switch (call) {
    case PLACE_CALL_REG_MR:
        return KIND_REGION;
    case PLACE_CALL_ALLOC_MW:
        return KIND_WINDOW;
    case PLACE_CALL_CREATE_CQ:
        return KIND_COMPLETION_QUEUE;
    case PLACE_CALL_CREATE_SRQ:
        return KIND_SHARED_QUEUE;
    case PLACE_CALL_CREATE_QP:
    case PLACE_CALL_RDMA_CREATE_QP:
        return KIND_QUEUE_PAIR;
    default:
        return KIND_COUNT;
    }
}

/* The shim executes it for every provider, if it is preloaded, or if the program has opened it for this scenario. */
bool face_executes_faults(void)
{
    bool (*by_shim)(void);

    *(void **)&by_shim = dlsym(RTLD_DEFAULT, "ndpy_faults_shim");
    if (by_shim == NULL) {
        void *shim = dlopen("libndpyfaults.so", RTLD_LAZY | RTLD_NOLOAD);
        if (shim == NULL)
            return true;
        *(void **)&by_shim = dlsym(shim, "ndpy_faults_shim");
        dlclose(shim);
    }
    return by_shim == NULL || !by_shim();
}

bool face_can(const struct fault *fault)
{
    if (fault->at != AT_CALL)
        return true;
    return fault->what != PLACE_CALL_CANCEL && fault->what != PLACE_CALL_CREATE_AH;
}

static int happens(struct faults *faults, enum fault_call call, uint32_t queue_pair, const void *caller)
{
    if (soft_own_calls > 0)
        return 0;
    enum object_kind kind = made_by(call);
    const struct place place = {
        .at = AT_CALL,
        .what = call,
        .queue_pair = queue_pair,
        .live = (uint64_t)(kind == KIND_COUNT ? soft_live[call] : object_live(kind)),
        .caller = caller,
    };
    const struct fault *fault = faults_ask(faults, &place);

    if (fault == NULL)
        return 0;
    if (fault->kind == FAULT_SLOW) {
        struct timespec left = {(time_t)(fault->ms / 1000), (long)(fault->ms % 1000) * 1000000};
        while (nanosleep(&left, &left) != 0 && errno == EINTR)
            ;
        return 0;
    }
    return errno = fault->kind == FAULT_LIMIT ? ENOMEM : fault->error;
}

int soft_fault(const struct adapter *adapter, enum fault_call call, uint32_t queue_pair, const void *caller)
{
    return happens(adapter->faults, call, queue_pair, caller);
}

int cm_fault(const struct cm_id *id, enum fault_call call, const void *caller)
{
    const struct soft_qp *qp = id != NULL ? (const struct soft_qp *)id->rdma.qp : NULL;
    struct faults *faults;
    nd_status status = faults_use(&faults);

    if (status != ND_SUCCESS)
        return errno = soft_errno(status);
    return faults != NULL ? happens(faults, call, qp != NULL ? qp->qp->number : 0, caller) : 0;
}

void face_fault(struct adapter *adapter, const struct fault *fault, struct queue_pair *queue_pair)
{
    UNUSED(adapter);
    switch (fault->kind) {
    case FAULT_PORT_DOWN:
        soft_async_to_all(IBV_EVENT_PORT_ERR);
        break;
    case FAULT_PORT_UP:
        soft_async_to_all(IBV_EVENT_PORT_ACTIVE);
        break;
    case FAULT_GID_CHANGE:
        soft_async_to_all(IBV_EVENT_GID_CHANGE);
        break;
    case FAULT_FULL_EVENT_QUEUE:
        soft_events_are_lost = true;
        break;
    case FAULT_QUEUE_PAIR_FATAL:
        if (queue_pair != NULL) {
            struct soft_qp *qp = queue_pair->object.face;
            soft_async(soft_context(qp->ibv.context), IBV_EVENT_QP_FATAL, &qp->ibv);
            soft_qp_fail(qp);
        }
        break;
    default:
        break;
    }
}
