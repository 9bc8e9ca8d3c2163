/* Orders of calls that two threads seldom come to, made by one. */
#include "completion_queue.h"
#include "face_of_tests.h"
#include "queue_pair.h"
#include "world.h"

#include <stdio.h>
#include <stdlib.h>

static struct adapter *adapter;

static struct completion_queue *new_queue(void)
{
    struct completion_queue *cq;

    world_require(cq_create(adapter, 8, NULL, &cq) == ND_SUCCESS, "has no queue");
    face_notifications = 0;
    return cq;
}

/* What a worker does. The second half is the caller's. */
static bool put(struct completion_queue *cq, bool solicited)
{
    struct cq_entry entry = {.solicited = solicited};
    bool notify = false;

    world_require(cq_put(cq, &entry, 1, &notify), "does not add an entry");
    return notify;
}

static void take(struct completion_queue *cq, uint32_t expected)
{
    struct cq_entry entries[8];

    world_require(cq_take(cq, entries, 8) == expected, "gives another number of entries");
}

/* What the faces do for a program that arms. */
static void arm(struct completion_queue *cq, uint32_t type)
{
    cq_notify(cq);
    cq_arm(cq, type);
}

static void told(unsigned times)
{
    world_require(face_notifications == times, "tells another number of times");
}

/* G.2.9. The program polls before the worker that added the entry has told of it. */
static void an_entry_that_was_fetched_satisfies_no_later_arming(void)
{
    struct completion_queue *cq = new_queue();

    arm(cq, ND_CQ_NOTIFY_ANY);
    world_require(put(cq, false), "does not ask to be told of");
    take(cq, 1);
    arm(cq, ND_CQ_NOTIFY_SOLICITED);
    told(1);
    cq_notify(cq);
    told(1);
    world_require(!put(cq, false), "asks to be told of a plain message");
    world_require(put(cq, true), "does not ask to be told of a solicited message");
    cq_notify(cq);
    told(2);
    object_close(&cq->object);
}

/* G.2.7 and G.2.5. */
static void an_entry_that_waits_satisfies_one_arming(void)
{
    struct completion_queue *cq = new_queue();

    world_require(!put(cq, false), "asks to be told of without an arming");
    arm(cq, ND_CQ_NOTIFY_ANY);
    told(1);
    arm(cq, ND_CQ_NOTIFY_ANY);
    told(1);
    world_require(put(cq, false), "does not ask to be told of");
    cq_notify(cq);
    told(2);
    take(cq, 2);
    object_close(&cq->object);
}

/* The program arms again while a worker is between adding an entry and telling of it. */
static void no_entry_is_lost_between_two_armings(void)
{
    struct completion_queue *cq = new_queue();

    arm(cq, ND_CQ_NOTIFY_ANY);
    put(cq, false);
    arm(cq, ND_CQ_NOTIFY_ANY);
    told(1);
    world_require(put(cq, false), "does not ask to be told of");
    cq_notify(cq);
    cq_notify(cq);
    told(2);
    take(cq, 2);
    object_close(&cq->object);
}

static void a_canceled_arming_is_told_of_no_more(void)
{
    struct completion_queue *cq = new_queue();

    arm(cq, ND_CQ_NOTIFY_ANY);
    put(cq, false);
    cq_disarm(cq);
    cq_notify(cq);
    told(0);
    take(cq, 1);
    object_close(&cq->object);
}

/* What a Bind needs. The queue pair is connected by hand: it takes requests before it is connected. */
struct binding {
    uint8_t memory[64];
    struct completion_queue *cq;
    struct region *region;
    struct window *window;
    struct queue_pair *qp;
    struct operation operation;
};

static void begin_binding(struct binding *binding)
{
    struct queue_pair_limits limits = {.receive_depth = 1, .initiator_depth = 2, .receive_sge = 1, .initiator_sge = 1};

    binding->cq = new_queue();
    world_require(region_create(adapter, adapter, NULL, &binding->region) == ND_SUCCESS &&
                      region_begin(binding->region, binding->memory, sizeof binding->memory, (uintptr_t)binding->memory,
                                   0) == ND_SUCCESS,
                  "does not register");
    world_require(window_create(adapter, adapter, NULL, &binding->window) == ND_SUCCESS, "has no window");
    world_require(qp_create(adapter, adapter, binding->cq, binding->cq, NULL, NULL, &limits, NULL, NULL,
                            &binding->qp) == ND_SUCCESS,
                  "has no queue pair");
    binding->qp->early = true;
    operation_begin(&binding->operation, NULL, Nd2RequestTypeBind, ND_OP_FLAG_ALLOW_READ);
}

static void post_bind(struct binding *binding, uint64_t size)
{
    world_require(qp_post_bind(binding->qp, &binding->operation, binding->region, binding->window,
                               (uintptr_t)binding->memory, size) == ND_SUCCESS,
                  "takes no Bind");
}

static void end_binding(struct binding *binding)
{
    object_close(&binding->qp->object);
    take(binding->cq, 1);
    world_require(binding->region->object.references == 1 && binding->window->object.references == 1,
                  "keeps what a request held");
    object_close(&binding->window->object);
    object_close(&binding->region->object);
    object_close(&binding->cq->object);
}

static void a_bind_of_nothing_can_be_refused_late(void)
{
    struct binding binding;

    begin_binding(&binding);
    binding.operation.refuses_late = true;
    post_bind(&binding, 0);
    world_require(binding.operation.refusal == ND_INVALID_PARAMETER_5, "has another reason");
    qp_fail(binding.qp, ND_CANCELED);
    end_binding(&binding);
}

static void requests_before_a_connection_end_with_the_queue_pair(void)
{
    struct binding binding;

    begin_binding(&binding);
    post_bind(&binding, 8);
    end_binding(&binding);
}

int main(void)
{
    world_reset();
    adapter = calloc(1, sizeof *adapter);
    world_require(adapter_start(adapter, &face_adapter_class, NULL) == ND_SUCCESS, "does not start");
    an_entry_that_was_fetched_satisfies_no_later_arming();
    an_entry_that_waits_satisfies_one_arming();
    no_entry_is_lost_between_two_armings();
    a_canceled_arming_is_told_of_no_more();
    requests_before_a_connection_end_with_the_queue_pair();
    a_bind_of_nothing_can_be_refused_late();
    object_close(&adapter->object);
    puts("orders: 6 passed");
    return 0;
}
