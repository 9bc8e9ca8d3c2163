/* The scenario, and what it says of calls and requests. */
#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

bool shim_on, is_hosted;
static struct scenario *_Atomic scenario;
static bool is_wrong;
_Thread_local const void *caller;
_Thread_local unsigned inside;
static pthread_once_t once = PTHREAD_ONCE_INIT;

__attribute__((constructor)) static void load(void)
{
    const char *path = getenv(SCENARIO_VARIABLE);

    shim_on = path != NULL && *path != '\0';
}

/* softverbs asks whether the shim executes the scenario of the environment. */
EXPORT bool ndpy_faults_shim(void)
{
    return !is_hosted || scenario != NULL;
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

static struct scenario *read_suitable(const char *path, char *error, size_t size)
{
    struct scenario *made = scenario_read(path, error, size);

    if (made == NULL || scenario_suits(made, "the shim", can, error, size))
        return made;
    scenario_free(made);
    return NULL;
}

static void read_scenario(void)
{
    char error[512];
    const char *path = getenv(SCENARIO_VARIABLE);

    /* A child of the process that loaded this may have removed it. A program that has opened the shim itself says when
     * a scenario begins. */
    if (path == NULL || *path == '\0' || is_hosted)
        return;
    struct scenario *made = read_suitable(path, error, sizeof error);
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

struct scenario *scenario_now(void)
{
    pthread_once(&once, read_scenario);
    return scenario;
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

    struct scenario *now = inside == 0 ? scenario_now() : NULL;
    return now != NULL ? scenario_at(now, &place) : NULL;
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

    struct scenario *now = scenario_now();
    return now != NULL ? scenario_at(now, &place) : NULL;
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
    struct scenario *now = scenario_now();
    const struct fault *fault = now != NULL ? scenario_at(now, &place) : NULL;

    *random = fault != NULL ? scenario_random(now, fault, &place) : 0;
    return fault;
}

bool has_faults_of(enum fault_kind kind)
{
    const struct scenario *now = scenario_now();

    if (now == NULL)
        return false;
    for (unsigned i = 0; i < scenario_faults(now); i++)
        if (scenario_fault(now, i)->kind == kind)
            return true;
    return false;
}

bool has_faults_at(enum fault_at at)
{
    const struct scenario *now = scenario_now();

    if (now == NULL)
        return false;
    for (unsigned i = 0; i < scenario_faults(now); i++)
        if (scenario_fault(now, i)->at == at)
            return true;
    return false;
}

/* ---- A program that has opened the shim itself ---- */

/* All scenarios. Another thread may still look at one that has ended. */
static struct begun {
    struct begun *next;
    struct scenario *scenario;
} *begun;

/* Before the others. The thread starts, and its descriptors stay from now on. */
EXPORT void ndpy_faults_host(void)
{
    is_hosted = true;
    lock();
    thread_wake();
    unlock();
}

/* The function that stands in for the one of this name that the program has found in a library. */
EXPORT void *ndpy_faults_function(const char *name, void *found)
{
    return library_replacement(name, found);
}

/* Ends the scenario. What it did to completions and connections takes its course. */
EXPORT void ndpy_faults_end(void)
{
    lock();
    adapter_renew();
    scenario = NULL;
    unlock();
}

/* Begins a scenario: all counts begin, and queue pairs that are there have no number. Returns 0, or an errno with the
 * reason in `error`. */
EXPORT int ndpy_faults_begin(const char *path, char *error, size_t size)
{
    struct begun *kept = malloc(sizeof *kept);
    struct scenario *made = kept != NULL ? read_suitable(path, error, size) : NULL;

    if (made == NULL) {
        int number = kept != NULL ? EINVAL : ENOMEM;
        if (kept == NULL)
            snprintf(error, size, "no memory");
        free(kept);
        return number;
    }
    lock();
    *kept = (struct begun){begun, made};
    begun = kept;
    adapter_renew();
    qps_renumber();
    scenario = made;
    thread_wake();
    unlock();
    return 0;
}
