/* The scenario, and what it says of calls and requests. */
#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

bool shim_on;
struct scenario *scenario;
static bool is_wrong;
_Thread_local const void *caller;
_Thread_local unsigned inside;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* softverbs looks for it: the shim is then the one that executes the scenario. */
EXPORT const char ndpy_faults_shim[] = "shim";

__attribute__((constructor)) static void load(void)
{
    const char *path = getenv(SCENARIO_VARIABLE);

    shim_on = path != NULL && *path != '\0';
}

uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static bool can(const struct fault *fault)
{
    switch (fault->kind) {
    case FAULT_ERRNO:
    case FAULT_SLOW:
    case FAULT_LIMIT:
        return fault->what != PLACE_CALL_CANCEL;
    case FAULT_STATUS:
    case FAULT_DELAY:
    case FAULT_SILENT:
    case FAULT_HOLD:
    case FAULT_LATE_RECEIVE:
        return fault->at == AT_REQUEST;
    case FAULT_CORRUPT:
    case FAULT_DUPLICATE:
    case FAULT_REORDER:
    case FAULT_REFUSE:
    case FAULT_TIME_OUT:
    case FAULT_REJECT:
    case FAULT_DISCONNECT:
    case FAULT_PORT_DOWN:
    case FAULT_PORT_UP:
    case FAULT_GID_CHANGE:
    case FAULT_QUEUE_PAIR_FATAL:
    case FAULT_COMPLETION_QUEUE_ERROR:
    case FAULT_REMOVE:
    case FAULT_PATH_MIGRATED:
    case FAULT_FULL_EVENT_QUEUE:
        return true;
    default:
        return false;
    }
}

static void read_scenario(void)
{
    char error[512];
    const char *path = getenv(SCENARIO_VARIABLE);

    /* A child of the process that loaded this may have removed it. */
    if (path == NULL || *path == '\0')
        return;
    struct scenario *made = scenario_read(path, error, sizeof error);
    if (made != NULL && !scenario_suits(made, "the shim", can, error, sizeof error)) {
        scenario_free(made);
        made = NULL;
    }
    if (made == NULL)
        fprintf(stderr, "%s\n", error);
    scenario = made;
    is_wrong = made == NULL;
}

bool may_open(void)
{
    pthread_once(&once, read_scenario);
    return !is_wrong;
}

bool scenario_usable(void)
{
    pthread_once(&once, read_scenario);
    return scenario != NULL;
}

static void wait_ms(uint64_t ms)
{
    struct timespec left = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};

    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static const struct fault *fault_of_call(enum fault_call call, const struct qp *qp, uint64_t count)
{
    struct place place = {
        .at = AT_CALL,
        .what = call,
        .queue_pair = qp != NULL ? qp->number : 0,
        .live = count,
        .caller = caller,
    };

    return inside == 0 && scenario_usable() ? scenario_at(scenario, &place) : NULL;
}

/* What a program can do after the adapter has gone: take what has happened, and give back what it has. */
static bool outlives(enum fault_call call)
{
    switch (call) {
    case PLACE_CALL_DEREG_MR:
    case PLACE_CALL_MODIFY_QP:
    case PLACE_CALL_POLL_CQ:
    case PLACE_CALL_REQ_NOTIFY_CQ:
    case PLACE_CALL_GET_CQ_EVENT:
    case PLACE_CALL_GET_ASYNC_EVENT:
    case PLACE_CALL_QUERY_PORT:
    case PLACE_CALL_RDMA_GET_CM_EVENT:
    case PLACE_CALL_RDMA_DISCONNECT:
        return true;
    default:
        return false;
    }
}

static int errno_of(const struct fault *fault)
{
    if (fault->kind == FAULT_SLOW)
        return 0;
    return fault->error != 0 ? fault->error : ENOMEM;
}

int call_fault(enum fault_call call, const struct qp *qp, uint64_t count)
{
    const struct fault *fault = fault_of_call(call, qp, count);

    if (inside == 0 && adapter_gone() && !outlives(call))
        return EIO;
    if (fault == NULL)
        return 0;
    if (fault->kind == FAULT_SLOW)
        wait_ms(fault->ms);
    return errno_of(fault);
}

int call_fault_locked(enum fault_call call, const struct qp *qp, uint64_t count)
{
    const struct fault *fault = fault_of_call(call, qp, count);

    if (inside == 0 && adapter_gone() && !outlives(call))
        return EIO;
    if (fault == NULL)
        return 0;
    if (fault->kind == FAULT_SLOW) {
        unlock();
        wait_ms(fault->ms);
        lock();
    }
    return errno_of(fault);
}

const struct fault *request_fault(struct qp *qp, enum fault_operation operation, unsigned kinds, bool again,
                                  uint64_t size, const void *content, size_t content_size)
{
    struct place place = {
        .at = AT_REQUEST,
        .what = operation,
        .queue_pair = qp->number,
        .kinds = kinds,
        .again = again,
        .size = size,
        .content = content,
        .content_size = content_size,
        .caller = caller,
    };

    return scenario_usable() ? scenario_at(scenario, &place) : NULL;
}

const struct fault *message_fault(const struct qp *qp, enum fault_operation operation, unsigned kinds, uint64_t size,
                                  const void *content, size_t content_size, uint64_t *random)
{
    const struct place place = {
        .at = AT_MESSAGE,
        .what = operation,
        .queue_pair = qp->number,
        .kinds = kinds,
        .size = size,
        .content = content,
        .content_size = content_size,
        .caller = caller,
    };
    const struct fault *fault = scenario_usable() ? scenario_at(scenario, &place) : NULL;

    *random = fault != NULL ? scenario_random(scenario, fault, &place) : 0;
    return fault;
}

bool has_faults_of(enum fault_kind kind)
{
    if (!scenario_usable())
        return false;
    for (unsigned i = 0; i < scenario_faults(scenario); i++)
        if (scenario_fault(scenario, i)->kind == kind)
            return true;
    return false;
}

bool has_faults_at(enum fault_at at)
{
    if (!scenario_usable())
        return false;
    for (unsigned i = 0; i < scenario_faults(scenario); i++)
        if (scenario_fault(scenario, i)->at == at)
            return true;
    return false;
}
