/* Faults of the adapter. Some happen at a request, others at a time. All with the lock. */
#include "shim.h"

#include <string.h>

static uint64_t fired[1024 / 64]; /* of the faults that happen at a time, by number */
static bool gone, events_lost;

bool adapter_gone(void)
{
    return gone;
}

bool adapter_loses_events(void)
{
    return events_lost;
}

static void renew(struct object *object, void *what)
{
    struct context *context = (struct context *)object;

    (void)what;
    context->port_down = context->gone = false;
}

void adapter_renew(void)
{
    memset(fired, 0, sizeof fired);
    gone = events_lost = false;
    each_object(OBJECT_CONTEXT, renew, NULL);
}

struct event_for_all {
    enum ibv_event_type type;
    int port_down; /* -1: as it is */
};

static void tell(struct object *object, void *what)
{
    const struct event_for_all *event = what;
    struct context *context = (struct context *)object;

    if (event->port_down >= 0)
        context->port_down = event->port_down != 0;
    context->gone = gone;
    async_raise(context, event->type, NULL);
}

static void tell_all(enum ibv_event_type type, int port_down)
{
    struct event_for_all event = {type, port_down};

    each_object(OBJECT_CONTEXT, tell, &event);
}

static void fail_qp(struct object *object, void *what)
{
    struct qp *qp = (struct qp *)object;

    if (what == NULL || qp->send_cq == what || qp->recv_cq == what) {
        qp_fail(qp);
        queue_deliver(qp, &qp->sends);
        queue_deliver(qp, &qp->receives);
    }
}

static void happens(const struct fault *fault, struct qp *qp)
{
    switch (fault->kind) {
    case FAULT_PORT_DOWN:
        tell_all(IBV_EVENT_PORT_ERR, 1);
        break;
    case FAULT_PORT_UP:
        tell_all(IBV_EVENT_PORT_ACTIVE, 0);
        break;
    case FAULT_GID_CHANGE:
        tell_all(IBV_EVENT_GID_CHANGE, -1);
        break;
    case FAULT_REMOVE:
        if (gone)
            break;
        gone = true;
        tell_all(IBV_EVENT_DEVICE_FATAL, -1);
        each_object(OBJECT_QP, fail_qp, NULL);
        connections_on_removal();
        break;
    case FAULT_FULL_EVENT_QUEUE:
        events_lost = true;
        break;
    case FAULT_QUEUE_PAIR_FATAL:
        if (qp == NULL)
            break;
        async_raise(qp->context, IBV_EVENT_QP_FATAL, qp->ibv);
        fail_qp(&qp->object, NULL);
        break;
    case FAULT_PATH_MIGRATED:
        if (qp != NULL)
            async_raise(qp->context, IBV_EVENT_PATH_MIG, qp->ibv);
        break;
    case FAULT_COMPLETION_QUEUE_ERROR:
        if (qp == NULL || qp->send_cq == NULL || qp->send_cq->failed)
            break;
        async_raise(qp->context, IBV_EVENT_CQ_ERR, qp->send_cq->ibv);
        qp->send_cq->failed = true;
        each_object(OBJECT_QP, fail_qp, qp->send_cq);
        break;
    default:
        break;
    }
}

void adapter_at_request(struct qp *qp)
{
    const struct place place = {.at = AT_ADAPTER, .queue_pair = qp != NULL ? qp->number : 0, .caller = caller};

    struct scenario *now = gone ? NULL : scenario_now();
    const struct fault *fault = now != NULL ? scenario_at(now, &place) : NULL;
    if (fault != NULL)
        happens(fault, qp);
}

struct choice {
    uint32_t number; /* 0: the oldest */
    struct qp *found;
};

static void choose(struct object *object, void *what)
{
    struct choice *choice = what;
    struct qp *qp = (struct qp *)object;

    if (choice->number != 0 ? qp->number == choice->number
                            : choice->found == NULL || qp->number < choice->found->number)
        choice->found = qp;
}

uint64_t adapter_on_time(uint64_t now)
{
    struct scenario *scenario = scenario_now();
    uint64_t next = NEVER;

    if (scenario == NULL)
        return NEVER;
    uint64_t age = scenario_age_ms(scenario);
    for (unsigned i = 0; i < scenario_faults(scenario); i++) {
        const struct fault *fault = scenario_fault(scenario, i);
        if (!fault_is_timed(fault) || (fired[i / 64] >> i % 64 & 1) != 0)
            continue;
        if (fault->after_ms > age) {
            uint64_t due = now + (fault->after_ms - age) * 1000000;
            next = due < next ? due : next;
            continue;
        }
        struct choice choice = {fault->queue_pair, NULL};
        each_object(OBJECT_QP, choose, &choice);
        const struct place place = {
            .at = AT_ADAPTER,
            .queue_pair = choice.found != NULL && fault->queue_pair != 0 ? choice.found->number : 0,
        };
        fired[i / 64] |= (uint64_t)1 << i % 64;
        scenario_fire(scenario, fault, &place);
        happens(fault, choice.found);
    }
    return next;
}
