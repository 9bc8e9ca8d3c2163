/* Orders of calls that two threads seldom come to, made by one. */
#include "completion_queue.h"
#include "face_of_tests.h"
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

int main(void)
{
    world_reset();
    adapter = calloc(1, sizeof *adapter);
    world_require(adapter_start(adapter, &face_adapter_class, NULL), "does not start");
    an_entry_that_was_fetched_satisfies_no_later_arming();
    an_entry_that_waits_satisfies_one_arming();
    no_entry_is_lost_between_two_armings();
    a_canceled_arming_is_told_of_no_more();
    object_close(&adapter->object);
    puts("orders: 4 passed");
    return 0;
}
