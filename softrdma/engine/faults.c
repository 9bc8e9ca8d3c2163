#include "faults.h"
#include "address.h"
#include "adapter.h"
#include "face.h"
#include "queue_pair.h"
#include "stream.h"
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct faults {
    struct faults *next;
    struct scenario *scenario;
    char path[512];
    _Atomic uint32_t queue_pairs;
    _Atomic bool fired[SCENARIO_MAX_FAULTS]; /* of those that happen at a time */
};

static struct lock list_lock = LOCK_INIT;
static struct faults *list;

/* ---- The scenario ---- */

/* Whether the engine gives this status (completion.c of verbs translates them). */
static bool gives(enum fault_status status)
{
    return status != STATUS_BAD_RESP_ERR && status != STATUS_LOC_ACCESS_ERR;
}

static bool can(const struct fault *fault)
{
    switch (fault->kind) {
    case FAULT_STATUS:
        return gives(fault->status);
    case FAULT_DUPLICATE:
    case FAULT_REORDER:
    case FAULT_PATH_MIGRATED:
        return false;
    default:
        return face_can(fault);
    }
}

static struct scenario *read_scenario(const char *path)
{
    char error[700];
    struct scenario *scenario = scenario_read(path, error, sizeof error);

    if (scenario != NULL && scenario_suits(scenario, face_name, can, error, sizeof error))
        return scenario;
    fprintf(stderr, "%s: %s: %s\n", face_name, SCENARIO_VARIABLE, error);
    scenario_free(scenario);
    return NULL;
}

nd_status faults_use(struct faults **out)
{
    char path[sizeof list->path];
    nd_status status = ND_SUCCESS;

    *out = NULL;
    if (!environment_text(SCENARIO_VARIABLE, path, sizeof path) || path[0] == '\0' || !face_executes_faults())
        return ND_SUCCESS;
    lock_acquire(&list_lock);
    struct faults *faults = list;
    while (faults != NULL && strcmp(faults->path, path) != 0)
        faults = faults->next;
    if (faults == NULL && (faults = calloc(1, sizeof *faults)) == NULL) {
        status = ND_NO_MEMORY;
    } else if (faults->scenario == NULL && (faults->scenario = read_scenario(path)) == NULL) {
        status = ND_INVALID_PARAMETER;
        free(faults);
    } else if (faults->path[0] == '\0') {
        strcpy(faults->path, path);
        faults->next = list;
        list = faults;
    }
    lock_release(&list_lock);
    if (status == ND_SUCCESS)
        *out = faults;
    return status;
}

/* A scenario without faults, for adapters that had one with: what has tested the pointer uses it. */
static struct faults *no_faults(void)
{
    static const char text[] = "scenario 1\n";
    static struct faults *none;
    char error[100];

    lock_acquire(&list_lock);
    if (none == NULL && (none = calloc(1, sizeof *none)) != NULL) {
        none->scenario = scenario_parse("", text, sizeof text - 1, error, sizeof error);
        if (none->scenario != NULL) {
            none->next = list;
            list = none;
        } else {
            free(none);
            none = NULL;
        }
    }
    lock_release(&list_lock);
    return none;
}

nd_status faults_follow(struct adapter *adapter)
{
    struct faults *now;
    nd_status status = faults_use(&now);

    if (status != ND_SUCCESS)
        return status;
    if (now == NULL && adapter->faults != NULL && (now = no_faults()) == NULL)
        return ND_NO_MEMORY;
    if (now == adapter->faults)
        return ND_SUCCESS;
    faults_stop_timed(adapter);
    adapter->faults = now;
    adapter->timed_ms = 0;
    adapter->timed_number = 0;
    adapter->removed = 0;
    adapter->port_down = false;
    faults_start_timed(adapter);
    return ND_SUCCESS;
}

void faults_end(void)
{
    while (list != NULL) {
        struct faults *next = list->next;
        scenario_free(list->scenario);
        free(list);
        list = next;
    }
}

uint32_t faults_number_queue_pair(struct faults *faults)
{
    return faults != NULL ? ++faults->queue_pairs : 0;
}

/* ---- Places ---- */

const struct fault *faults_ask(struct faults *faults, const struct place *place)
{
    const struct fault *fault = scenario_at(faults->scenario, place);

    if (fault != NULL)
        TRACE("fault %u: %s at %s of queue pair %u", fault->number, fault_kind_name(fault->kind),
              fault_what_name(place->at, place->what), place->queue_pair);
    return fault;
}

static enum fault_operation operation_of(const struct operation *operation)
{
    switch (operation->type) {
    case Nd2RequestTypeSend:
        return operation->invalidates ? PLACE_SEND_INVALIDATE : PLACE_SEND;
    case Nd2RequestTypeWrite:
        return PLACE_WRITE;
    case Nd2RequestTypeRead:
        return PLACE_READ;
    case Nd2RequestTypeBind:
        return PLACE_BIND_WINDOW;
    default:
        return PLACE_INVALIDATE;
    }
}

static struct place place_of(enum fault_at at, unsigned what, const struct queue_pair *qp, const struct stream *stream,
                             uint8_t *peer)
{
    address_mapped(&stream->peer, peer);
    return (struct place){.at = at, .what = what, .queue_pair = qp->number, .peer = peer};
}

/* `kinds`: those that can happen there; 0: any. */
static const struct fault *at_message_of(enum fault_at at, unsigned what, unsigned kinds, struct queue_pair *qp,
                                         struct stream *stream, uint64_t size, const void *content, size_t content_size)
{
    uint8_t peer[16];
    struct place place = place_of(at, what, qp, stream, peer);

    place.kinds = kinds;
    place.again = at == AT_REQUEST && kinds == FAULT_BIT(FAULT_LATE_RECEIVE);
    place.size = size;
    place.content = content;
    place.content_size = content_size;
    return faults_ask(qp->object.adapter->faults, &place);
}

const struct fault *faults_at_request(struct queue_pair *qp, struct stream *stream, const struct operation *operation,
                                      const void *content, size_t size)
{
    return at_message_of(AT_REQUEST, operation_of(operation), 0, qp, stream, operation->length, content, size);
}

const struct fault *faults_at_message(struct queue_pair *qp, struct stream *stream, const struct operation *operation,
                                      const void *content, size_t size)
{
    unsigned kinds = operation->type == Nd2RequestTypeRead ? ~FAULT_BIT(FAULT_SPLIT) : 0;
    return at_message_of(AT_MESSAGE, operation_of(operation), kinds, qp, stream, operation->length, content, size);
}

void faults_corrupt(const struct queue_pair *qp, const struct fault *fault, uint8_t *data, size_t size)
{
    const struct place place = {.at = AT_MESSAGE, .queue_pair = qp->number};
    uint64_t random = scenario_random(qp->object.adapter->faults->scenario, fault, &place);

    if (size > 0)
        data[random % size] ^= (uint8_t)(1 + (random >> 32) % 255);
}

const struct fault *faults_at_arrival(struct queue_pair *qp, struct stream *stream, uint64_t size, const void *content,
                                      size_t content_size)
{
    return at_message_of(AT_REQUEST, PLACE_RECEIVE, FAULT_BIT(FAULT_LATE_RECEIVE), qp, stream, size, content,
                         content_size);
}

const struct fault *faults_at_receive(struct queue_pair *qp, struct stream *stream, uint64_t size, const void *content,
                                      size_t content_size)
{
    return at_message_of(AT_REQUEST, PLACE_RECEIVE, ~FAULT_BIT(FAULT_LATE_RECEIVE), qp, stream, size, content,
                         content_size);
}

const struct fault *faults_at_connection(struct queue_pair *qp, const struct stream *stream, bool passive)
{
    uint8_t peer[16];
    struct place place = place_of(AT_CONNECTION, 0, qp, stream, peer);

    if (passive)
        place.kinds = FAULT_BIT(FAULT_LOSE) | FAULT_BIT(FAULT_DISCONNECT) | FAULT_BIT(FAULT_MUTE);
    return faults_ask(qp->object.adapter->faults, &place);
}

struct failure fault_failure(const struct fault *fault, ND2_REQUEST_TYPE type)
{
    bool of_window = type == Nd2RequestTypeBind || type == Nd2RequestTypeInvalidate;

    switch (fault->status) {
    case STATUS_LOC_LEN_ERR:
        return (struct failure){ND_BUFFER_OVERFLOW, 0};
    case STATUS_LOC_QP_OP_ERR:
        return (struct failure){of_window ? ND_INVALID_DEVICE_STATE : ND_INVALID_DEVICE_REQUEST, 0};
    case STATUS_LOC_PROT_ERR:
        return (struct failure){ND_ACCESS_VIOLATION, 0};
    case STATUS_MW_BIND_ERR:
        return (struct failure){ND_INVALID_DEVICE_REQUEST, 0};
    case STATUS_REM_INV_REQ_ERR:
        return (struct failure){ND_DATA_OVERRUN, DDP_TOO_LONG};
    case STATUS_REM_ACCESS_ERR:
        return (struct failure){ND_ACCESS_VIOLATION, RDMAP_ACCESS};
    case STATUS_RNR_RETRY_EXC_ERR:
        return (struct failure){ND_IO_TIMEOUT, DDP_NO_BUFFER};
    case STATUS_RETRY_EXC_ERR:
        return (struct failure){ND_IO_TIMEOUT, 0};
    default:
        return (struct failure){ND_REMOTE_ERROR, RDMAP_OPERATION};
    }
}

/* ---- The adapter ---- */

static void happens(struct adapter *adapter, const struct fault *fault, struct queue_pair *qp)
{
    switch (fault->kind) {
    case FAULT_REMOVE:
        adapter_remove(adapter);
        break;
    case FAULT_COMPLETION_QUEUE_ERROR:
        if (qp != NULL)
            cq_fail(qp->initiator_cq);
        break;
    case FAULT_PORT_DOWN:
    case FAULT_PORT_UP:
        adapter->port_down = fault->kind == FAULT_PORT_DOWN;
        streams_mute(adapter, adapter->port_down);
        face_fault(adapter, fault, qp);
        break;
    default:
        face_fault(adapter, fault, qp);
    }
}

void faults_at_adapter(struct adapter *adapter, struct queue_pair *qp)
{
    const struct place place = {.at = AT_ADAPTER, .queue_pair = qp != NULL ? qp->number : 0};

    if (adapter_gone(adapter))
        return;
    const struct fault *fault = faults_ask(adapter->faults, &place);
    if (fault != NULL)
        happens(adapter, fault, qp);
}

/* The next one that is due; NULL: no more. */
static const struct fault *next_timed(const struct adapter *adapter)
{
    const struct scenario *scenario = adapter->faults->scenario;
    const struct fault *next = NULL;

    for (unsigned i = 0; i < scenario_faults(scenario); i++) {
        const struct fault *fault = scenario_fault(scenario, i);
        bool later = fault_is_timed(fault) && (fault->after_ms > adapter->timed_ms ||
                                               (fault->after_ms == adapter->timed_ms && i >= adapter->timed_number));
        if (later && (next == NULL || fault->after_ms < next->after_ms))
            next = fault;
    }
    return next;
}

static void timed_fault_is_due(struct timer *timer);

/* The timer holds a reference. */
static void wait_for_timed(struct adapter *adapter)
{
    const struct fault *fault = next_timed(adapter);
    uint64_t age = scenario_age_ms(adapter->faults->scenario);

    if (fault == NULL)
        return;
    object_hold(&adapter->object);
    timer_set(&adapter->timed, fault->after_ms > age ? (uint32_t)(fault->after_ms - age) : 0, timed_fault_is_due);
}

static void timed_fault_is_due(struct timer *timer)
{
    struct adapter *adapter = CONTAINER_OF(timer, struct adapter, timed);
    const struct fault *fault = next_timed(adapter);
    const struct place place = {.at = AT_ADAPTER};

    if (fault == NULL) { /* the adapter has another scenario by now */
        object_drop(&adapter->object);
        return;
    }
    adapter->timed_ms = fault->after_ms;
    adapter->timed_number = fault->number + 1;
    /* An adapter that is opened later has its port as it is by then, and the rest happened once. */
    bool first = !atomic_exchange(&adapter->faults->fired[fault->number], true);
    if (first)
        scenario_fire(adapter->faults->scenario, fault, &place);
    if (first || fault->kind == FAULT_PORT_DOWN || fault->kind == FAULT_PORT_UP)
        happens(adapter, fault, NULL);
    wait_for_timed(adapter);
    object_drop(&adapter->object);
}

void faults_start_timed(struct adapter *adapter)
{
    if (adapter->faults != NULL)
        wait_for_timed(adapter);
}

void faults_stop_timed(struct adapter *adapter)
{
    if (timer_cancel(&adapter->timed))
        object_drop(&adapter->object);
}
