#include "face_of_tests.h"
#include "world.h"

#include <stdlib.h>
#include <sys/socket.h>

unsigned face_notifications;
void *face_invalidation;
const char face_name[] = "fuzz";
const char face_prefix[] = "FUZZ_";
const uint32_t face_patience_ms = 60000;
const bool face_gathers = true;

void face_free(struct object *object)
{
    (void)object;
}

void face_notified(struct completion_queue *cq, nd_status status)
{
    (void)cq, (void)status;
    world_require(world_locks() == 0, "reports a completion under a lock");
    face_notifications++;
}

void face_below_threshold(struct shared_queue *srq)
{
    (void)srq;
    world_require(world_locks() == 0, "reports a shared queue under a lock");
}

void *face_window_invalidated(struct window *window)
{
    (void)window;
    return face_invalidation;
}

void face_adapter_removed(struct adapter *adapter)
{
    (void)adapter;
}

bool face_executes_faults(void)
{
    return true;
}

bool face_can(const struct fault *fault)
{
    (void)fault;
    return true;
}

void face_fault(struct adapter *adapter, const struct fault *fault, struct queue_pair *queue_pair)
{
    (void)adapter, (void)fault, (void)queue_pair;
}

void face_stopping(void) {}

/* In place of verbs/addresses.c, for verbs/listener.c. */
bool soft_serves(const struct sockaddr *address)
{
    (void)address;
    return true;
}

static void destroy(struct object *object)
{
    struct adapter *adapter = (struct adapter *)object;

    adapter_end(adapter);
    free(adapter);
}

const struct object_class face_adapter_class = {.kind = KIND_ADAPTER, .closed = adapter_closed, .destroy = destroy};
