/* What established connections do, in an order that threads seldom come to. The peer is this program. */
#include "ends.h"
#include "stream_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Shared receive queues ---- */

static void post_shared(struct shared_queue *srq)
{
    world_require(srq_receive(srq, NULL, NULL, 0) == ND_SUCCESS, "takes no Receive");
}

enum how { DISCONNECTS, PEER_LEAVES, PEER_IS_LOST, CLOSES, BREAKS, FAILS };

static void ends_by(struct end *end, enum how how)
{
    bool notify = false;

    switch (how) {
    case DISCONNECTS:
        disconnect(end);
        break;
    case PEER_LEAVES:
    case PEER_IS_LOST:
        stream_lock(end->stream);
        stream_connection_lost(end->stream, how == PEER_IS_LOST ? ND_CONNECTION_ABORTED : ND_SUCCESS);
        stream_unlock(end->stream);
        break;
    case CLOSES:
        object_hold(&end->qp->object);
        object_close(&end->qp->object);
        break;
    case BREAKS:
        while (cq_put(end->cq, &(struct cq_entry){.result = {.Status = ND_SUCCESS}}, 1, &notify)) {}
        cq_notify(end->cq);
        break;
    case FAILS:
        stream_lock(end->stream);
        lock_acquire(&end->qp->lock);
        responder_stop(end->qp, end->stream, RDMAP_LOCAL_CATASTROPHIC, NULL);
        lock_release(&end->qp->lock);
        stream_unlock(end->stream);
        break;
    }
}

/* Two messages wait. The Receive wakes the first connection, which ends before it looks. */
static void a_receive_reaches_the_next_message_if_the_first_connection_ends(enum how how)
{
    struct shared_queue *srq = new_shared_queue();
    struct end first = connected(srq), second = connected(srq);

    message_arrives(&first, 0);
    message_arrives(&second, 0);
    post_shared(srq);
    world_require(srq->woken == 1, "wakes another number of queue pairs");
    ends_by(&first, how);
    world_run();
    world_require(completed(&second, ND_SUCCESS) == 1, "lets a message wait although a Receive is there");
    world_require(srq->woken == 0, "counts a queue pair that has looked");
    if (how == CLOSES)
        object_drop(&first.qp->object);
    else
        object_close(&first.qp->object);
    first.qp = NULL;
    world_end(first.socket, false);
    world_run();
    stream_drop(first.stream);
    struct cq_entry entries[DEPTH];
    cq_take(first.cq, entries, DEPTH);
    object_close(&first.cq->object);
    end_connection(&second);
    object_close(&srq->object);
}

/* The Receive wakes the first connection, and a message of the second takes it. */
static void a_receive_that_another_message_took_leaves_the_first_waiting(void)
{
    struct shared_queue *srq = new_shared_queue();
    struct end first = connected(srq), second = connected(srq);

    message_arrives(&first, 0);
    post_shared(srq);
    struct receive receive;
    world_require(srq_take(srq, second.qp, &receive), "has no Receive");
    world_run();
    world_require(completed(&first, ND_SUCCESS) == 0 && srq->woken == 0, "has a Receive twice");
    post_shared(srq);
    world_run();
    world_require(completed(&first, ND_SUCCESS) == 1, "does not wait again");
    end_connection(&first);
    end_connection(&second);
    object_close(&srq->object);
}

/* Each of them wakes one, whoever ends. */
static void as_many_are_woken_as_there_are_receives(void)
{
    struct shared_queue *srq = new_shared_queue();
    struct end ends[3];

    for (int i = 0; i < 3; i++) {
        ends[i] = connected(srq);
        message_arrives(&ends[i], 0);
    }
    post_shared(srq);
    post_shared(srq);
    world_require(srq->woken == 2, "wakes another number of queue pairs");
    disconnect(&ends[0]);
    world_run();
    world_require(completed(&ends[1], ND_SUCCESS) == 1 && completed(&ends[2], ND_SUCCESS) == 1,
                  "lets a message wait although a Receive is there");
    for (int i = 0; i < 3; i++)
        end_connection(&ends[i]);
    object_close(&srq->object);
}

/* ---- Messages without a Receive ---- */

static void a_message_waits_for_a_receive_as_long_as_its_sender_wants(uint64_t patience, bool lets_wait,
                                                                      bool without_limit)
{
    struct end end = connected(NULL);

    end.qp->lets_wait = lets_wait;
    if (patience != PATIENCE_LIMITED)
        tell(&end, PATIENCE_TOKEN, patience);
    message_arrives(&end, 0);
    world_pass(2900);
    world_require(end.qp->ending == QP_GOES_ON, "lets no message wait");
    world_pass(200);
    world_require((end.qp->ending != QP_GOES_ON) == !without_limit, "has another limit");
    if (without_limit) {
        world_pass(600000);
        receive(&end);
        world_require(completed(&end, ND_SUCCESS) == 1, "loses a message that has waited");
    }
    end_connection(&end);
}

/* With 400 messages the end of the connection is behind what can be received. */
static void messages_without_a_limit_do_not_outlive_their_sender(unsigned messages)
{
    struct end end = connected(NULL);

    tell(&end, PATIENCE_TOKEN, PATIENCE_ENDLESS);
    for (unsigned i = 0; i < messages; i++)
        message_arrives(&end, 1000);
    world_pass(600000);
    world_require(end.qp->ending == QP_GOES_ON, "lets no message wait");
    world_end(end.socket, false);
    world_run();
    world_pass(500);
    world_require(end.qp->ending != QP_GOES_ON, "waits for a sender that has gone");
    end_connection(&end);
}

/* A connection that has just begun has a timer for a silent peer. */
static void a_message_for_a_shared_queue_waits_at_the_beginning_too(void)
{
    struct shared_queue *srq = new_shared_queue();
    struct end end = connected(srq);

    message_arrives(&end, 0);
    world_pass(600000);
    world_require(end.qp->ending == QP_GOES_ON, "ends a connection that may wait");
    post_shared(srq);
    world_run();
    world_require(completed(&end, ND_SUCCESS) == 1, "loses a message that has waited");
    end_connection(&end);
    object_close(&srq->object);
}

/* How often it has told the peer so, ahead of a Send. */
static unsigned told(const struct end *end, uint64_t patience)
{
    size_t size, used;
    const uint8_t *at = world_output(end->socket, &size), *last = at + size;
    struct wire_segment segment;
    struct mpa_frame frame;
    bool told = false;
    unsigned count = 0;

    world_require(mpa_decode(at, size, false, &frame, &used) == WIRE_OK, "sends no request");
    for (at += used; wire_parse(at, (size_t)(last - at), false, &segment, &used) == WIRE_OK; at += used) {
        if (segment.opcode == RDMAP_WRITE && segment.stag == PATIENCE_TOKEN && segment.offset == patience)
            told = true;
        else if (segment.opcode == RDMAP_SEND && told)
            count++, told = false;
    }
    return count;
}

static void a_peer_is_told_once_how_long_messages_wait(void)
{
    struct end end = connected(NULL);

    tell(&end, RECEIPT_TOKEN, 0); /* a peer that need not answer Reads */
    send_nothing(&end);
    world_require(told(&end, PATIENCE_LIMITED) == 0, "tells what every peer believes");
    end.qp->patience = PATIENCE_ENDLESS;
    send_nothing(&end);
    send_nothing(&end);
    world_require(told(&end, PATIENCE_ENDLESS) == 1, "does not tell it once");
    end.qp->patience = PATIENCE_LIMITED;
    send_nothing(&end);
    world_require(told(&end, PATIENCE_LIMITED) == 1, "does not report a change");
    end_connection(&end);
}

/* How often this end has said that a message waits. */
static unsigned complained(const struct end *end)
{
    size_t size, used;
    const uint8_t *at = world_output(end->socket, &size), *last = at + size;
    struct wire_segment segment;
    struct mpa_frame frame;
    unsigned count = 0;

    world_require(mpa_decode(at, size, false, &frame, &used) == WIRE_OK, "sends no request");
    for (at += used; wire_parse(at, (size_t)(last - at), false, &segment, &used) == WIRE_OK; at += used)
        count += segment.opcode == RDMAP_WRITE && segment.stag == NOT_READY_TOKEN && segment.size == 0;
    return count;
}

static void a_peer_is_told_while_its_message_waits(void)
{
    struct end end = connected(NULL);

    tell(&end, PATIENCE_TOKEN, PATIENCE_ENDLESS);
    message_arrives(&end, 0);
    world_pass(499);
    world_require(complained(&end) == 0, "complains at once");
    world_pass(1);
    world_require(complained(&end) == 1, "says nothing");
    world_pass(1000);
    world_require(complained(&end) == 3, "says it another number of times");
    receive(&end);
    world_pass(10000);
    world_require(complained(&end) == 3 && completed(&end, ND_SUCCESS) == 1,
                  "complains about a message that it has taken");
    end_connection(&end);
}

/* Otherwise the FIN would stay behind messages that nobody takes. */
static void an_end_that_finishes_leaves_a_peer_without_a_receive(bool told_before)
{
    struct end end = connected(NULL);

    tell(&end, RECEIPT_TOKEN, 0);
    send_nothing(&end);
    if (told_before)
        tell(&end, NOT_READY_TOKEN, 0);
    world_run();
    world_require(end.stream->open && end.qp->ending == QP_GOES_ON, "does not let its message wait");
    disconnect(&end);
    world_run();
    world_require(end.stream->open == !told_before, "waits for another time");
    tell(&end, NOT_READY_TOKEN, 0);
    world_run();
    world_require(!end.stream->open && completed(&end, ND_CANCELED) == 1, "waits in vain");
    end_connection(&end);
}

static void a_peer_that_has_taken_a_message_since_is_waited_for(void)
{
    struct end end = connected(NULL);

    tell(&end, RECEIPT_TOKEN, 0);
    send_nothing(&end);
    uint64_t first = end.stream->sent_bytes;
    send_nothing(&end);
    tell(&end, NOT_READY_TOKEN, 0);
    tell(&end, RECEIPT_TOKEN, first);
    world_run();
    world_require(completed(&end, ND_SUCCESS) == 1, "overlooks a receipt");
    disconnect(&end);
    world_pass(FINISH_MS - 100);
    world_require(end.stream->open, "does not wait for the peer");
    end_connection(&end);
}

/* ---- Read limits ---- */

static void no_more_reads_are_under_way_than_both_ends_allow(uint16_t outbound, uint16_t peer_inbound, unsigned limit)
{
    struct end end = connected_with(NULL, (struct read_limits){outbound, peer_inbound});

    for (int i = 0; i < 4; i++)
        read_byte(&end, 0);
    send_nothing(&end);
    for (unsigned step = 0; reads_sent(&end).all > end.answered; step++) {
        world_require(step < 20, "does not come to an end");
        world_require(reads_sent(&end).all - end.answered <= limit, "has more Reads under way than the peer takes");
        answer_read(&end);
    }
    world_require(reads_sent(&end).of_program == 4 && completed(&end, ND_SUCCESS) == 5, "leaves a request behind");
    end_connection(&end);
    while (kept_count > 0)
        object_close(&kept[--kept_count]->object);
}

/* ---- Silent hosts ---- */

#define WAITING 11
#define SILENT  7

static void hosts_are_asked_by_turns(void)
{
    struct end ends[WAITING];

    for (int i = 0; i < WAITING; i++) {
        ends[i] = connected(NULL);
        read_byte(&ends[i], 0);
    }
    for (int second = 0; second < 12; second++) {
        unsigned count = 0;
        world_pass(1000);
        for (int i = 0; i < WAITING; i++) {
            bool now;
            unsigned times = world_asked(ends[i].socket, &now);
            count += now;
            world_require(second < 6 || times > 0, "leaves a host unasked");
        }
        world_require(count <= ASK_AT_ONCE, "asks too many hosts at a time");
    }
    for (int i = 0; i < SILENT; i++)
        world_falls_silent(ends[i].socket);
    world_pass(9000);
    for (int i = 0; i < WAITING; i++)
        world_require(ends[i].qp->ending == QP_GOES_ON, "takes a host for silent too early");
    world_pass(9000);
    for (int i = 0; i < WAITING; i++) {
        world_require((ends[i].qp->ending == QP_GOES_ON) == (i >= SILENT), "takes the wrong hosts for silent");
        world_require(completed(&ends[i], ND_IO_TIMEOUT) == (i < SILENT), "does not complete what was asked of it");
        end_connection(&ends[i]);
    }
    while (kept_count > 0)
        object_close(&kept[--kept_count]->object);
}

static void a_host_that_nobody_asked_gets_the_usual_time(void)
{
    struct end end = connected(NULL);

    world_falls_silent(end.socket);
    world_pass(60000);
    read_byte(&end, 0);
    world_pass(9000);
    world_require(end.qp->ending == QP_GOES_ON, "takes a host for silent that it has just begun to ask");
    world_pass(9000);
    world_require(end.qp->ending != QP_GOES_ON, "waits for a silent host");
    end_connection(&end);
    object_close(&kept[--kept_count]->object);
}

int main(void)
{
    world_reset();
    adapter = calloc(1, sizeof *adapter);
    world_require(adapter_start(adapter, &face_adapter_class, NULL) == ND_SUCCESS, "does not start");
    for (enum how how = DISCONNECTS; how <= FAILS; how++)
        a_receive_reaches_the_next_message_if_the_first_connection_ends(how);
    a_receive_that_another_message_took_leaves_the_first_waiting();
    as_many_are_woken_as_there_are_receives();
    a_message_waits_for_a_receive_as_long_as_its_sender_wants(PATIENCE_LIMITED, true, false);
    a_message_waits_for_a_receive_as_long_as_its_sender_wants(PATIENCE_ENDLESS, false, true);
    a_message_waits_for_a_receive_as_long_as_its_sender_wants(PATIENCE_OF_PEER, false, false);
    a_message_waits_for_a_receive_as_long_as_its_sender_wants(PATIENCE_OF_PEER, true, true);
    a_message_waits_for_a_receive_as_long_as_its_sender_wants(1000, true, false);
    messages_without_a_limit_do_not_outlive_their_sender(1);
    messages_without_a_limit_do_not_outlive_their_sender(400);
    a_message_for_a_shared_queue_waits_at_the_beginning_too();
    a_peer_is_told_once_how_long_messages_wait();
    a_peer_is_told_while_its_message_waits();
    an_end_that_finishes_leaves_a_peer_without_a_receive(false);
    an_end_that_finishes_leaves_a_peer_without_a_receive(true);
    a_peer_that_has_taken_a_message_since_is_waited_for();
    no_more_reads_are_under_way_than_both_ends_allow(16, 1, 1);
    no_more_reads_are_under_way_than_both_ends_allow(1, 16, 1);
    no_more_reads_are_under_way_than_both_ends_allow(2, 3, 2);
    no_more_reads_are_under_way_than_both_ends_allow(3, 2, 2);
    hosts_are_asked_by_turns();
    a_host_that_nobody_asked_gets_the_usual_time();
    object_close(&adapter->object);
    puts("connections: passed");
    return 0;
}
