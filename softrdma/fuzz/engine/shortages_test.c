/* What connections do without memory, and when their program ends its requests. The peer is this program. */
#include "ends.h"
#include "stream_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Memory that is missing ---- */

#define LARGE 100000u

static uint8_t memory[LARGE];
static struct region *region;

static ND2_SGE all_memory(void)
{
    return (ND2_SGE){memory, LARGE, region_local_token(region)};
}

static void receive_large(struct end *end)
{
    ND2_SGE sge = all_memory();

    world_require(qp_receive(end->qp, NULL, &sge, 1) == ND_SUCCESS, "takes no Receive");
}

static void send_large(struct end *end)
{
    ND2_SGE sge = all_memory();
    struct operation operation;

    operation_begin(&operation, NULL, Nd2RequestTypeSend, 0);
    world_require(qp_post_data(end->qp, &operation, &sge, 1) == ND_SUCCESS, "takes no Send");
    world_run();
}

static bool all_sent(const struct end *end)
{
    size_t size;

    world_output(end->socket, &size);
    return size > LARGE;
}

static void lack(bool pages, bool lacks)
{
    if (pages)
        world_lacks(lacks, false);
    else
        world_lacks_buffers(lacks);
}

/* Pages for a buffer, or memory of the system. */
static void a_large_message_waits_for_memory(bool pages)
{
    struct end end = connected(NULL);

    receive_large(&end);
    lack(pages, true);
    message_arrives(&end, 50000);
    world_pass(600000);
    world_require(end.stream->phase == STREAM_ESTABLISHED && completed(&end, ND_SUCCESS) == 0,
                  "does not wait for memory");
    lack(pages, false);
    world_pass(100);
    world_require(completed(&end, ND_SUCCESS) == 1, "does not try again");
    end_connection(&end);
}

static void a_large_send_waits_for_memory(bool pages)
{
    struct end end = connected(NULL);

    lack(pages, true);
    send_large(&end);
    world_pass(600000);
    world_require(end.stream->phase == STREAM_ESTABLISHED && !all_sent(&end), "does not wait for memory");
    message_arrives(&end, 0);
    lack(pages, false);
    world_pass(100);
    world_require(all_sent(&end), "does not try again");
    receive(&end);
    world_require(completed(&end, ND_SUCCESS) == 1, "loses a message that has waited");
    end_connection(&end);
}

/* The first part is on the wire, and the rest is in the buffer. */
static void a_send_goes_on_where_memory_failed(void)
{
    struct end end = connected(NULL);
    size_t before, between, after;

    world_limit(SIZE_MAX / 2, 1000);
    send_large(&end);
    world_output(end.socket, &before);
    world_lacks_buffers(true);
    world_limit(SIZE_MAX / 2, SIZE_MAX / 2);
    world_pass(1000);
    world_output(end.socket, &between);
    world_lacks_buffers(false);
    world_pass(100);
    world_output(end.socket, &after);
    world_require(before == between && after > LARGE, "does not go on");
    end_connection(&end);
}

/* One connection has rested with large buffers. Another one needs memory. */
static void who_has_rested_gives_back_its_buffers_for_others(void)
{
    struct end rests = connected(NULL), needs = connected(NULL);

    receive_large(&rests);
    message_arrives(&rests, 50000);
    send_large(&rests);
    world_require(rests.stream->in.size > STREAM_SMALL_BUFFER, "needs no large buffer");
    world_pass(100);
    world_lacks(true, false);
    message_arrives(&needs, 5000);
    world_pass(100);
    world_require(rests.stream->in.size == STREAM_SMALL_BUFFER, "keeps a buffer that others need");
    world_lacks(false, false);
    receive_large(&needs);
    world_pass(100);
    world_require(completed(&needs, ND_SUCCESS) == 1, "does not try again");
    end_connection(&rests);
    end_connection(&needs);
}

/* On Windows, a receive that is pending keeps its memory. */
static void a_receive_that_keeps_its_buffer_is_begun_anew(bool data_come)
{
    struct end end = connected(NULL);

    receive_large(&end);
    receive_large(&end);
    message_arrives(&end, 50000);
    world_receives_stay();
    world_pass(900);
    if (data_come)
        message_arrives(&end, 100);
    world_pass(3000);
    world_require(end.stream->in.size == STREAM_SMALL_BUFFER, "keeps a buffer that it does not need");
    if (!data_come)
        message_arrives(&end, 100);
    world_require(completed(&end, ND_SUCCESS) == 2 && end.stream->phase == STREAM_ESTABLISHED, "loses a message");
    end_connection(&end);
}

/* ---- A queue pair that its program ends ---- */

static uint8_t read_sink;

static void read_into_sink(struct end *end, struct region *sink)
{
    const ND2_SGE sge = {&read_sink, 1, region_local_token(sink)};
    struct operation operation;

    operation_begin(&operation, NULL, Nd2RequestTypeRead, 0);
    world_require(qp_post_data(end->qp, &operation, &sge, 1) == ND_SUCCESS, "takes no Read");
    world_run();
}

/* Ways of a program to have its requests back. */
enum way { FINISHES, DISCONNECTS_AND_FINISHES, FLUSHES, DISCONNECTS_AND_FLUSHES };

static void ends_its_requests(struct end *end, enum way way)
{
    if (way == DISCONNECTS_AND_FINISHES || way == DISCONNECTS_AND_FLUSHES)
        disconnect(end);
    if (way == FINISHES || way == DISCONNECTS_AND_FINISHES)
        qp_finish_now(end->qp);
    else
        world_require(qp_flush(end->qp) == ND_SUCCESS, "does not flush");
}

/* The peer is frozen: it takes nothing and says nothing. What it says later reaches no memory. */
static void requests_come_back_at_once_whatever_the_peer_does(enum way way, bool receipts)
{
    struct end end = connected(NULL);
    struct region *sink;

    world_require(region_create(adapter, adapter, NULL, &sink) == ND_SUCCESS &&
                      region_begin(sink, &read_sink, 1, (uintptr_t)&read_sink, ND_MR_FLAG_ALLOW_LOCAL_WRITE) ==
                          ND_SUCCESS,
                  "does not register");
    read_sink = 1;
    if (receipts)
        tell(&end, RECEIPT_TOKEN, 0);
    read_into_sink(&end, sink);
    send_nothing(&end);
    receive(&end);
    world_require(completed(&end, ND_SUCCESS) == 0, "completes what nobody has taken");
    ends_its_requests(&end, way);
    world_require(completed(&end, ND_CANCELED) == 3, "keeps requests of a program that has ended its queue pair");
    send_nothing(&end);
    receive(&end);
    world_require(completed(&end, ND_CANCELED) == 2, "keeps requests that come later");
    while (end.answered < reads_sent(&end).all)
        answer_read(&end);
    world_require(read_sink == 1, "writes to memory of a request that was given back");
    world_pass(5000);
    world_require(completed(&end, ND_CANCELED) == 0, "gives a request back twice");
    object_close(&sink->object);
    end_connection(&end);
}

/* TCP takes 1,000 bytes of a message. What was copied is sent later, and nothing else. */
static void what_was_copied_is_sent_and_memory_is_left_alone(enum way way)
{
    struct end end = connected(NULL);
    size_t size;

    tell(&end, RECEIPT_TOKEN, 0);
    memset(memory, 0x11, LARGE);
    world_limit(SIZE_MAX / 2, 1000);
    send_large(&end);
    ends_its_requests(&end, way);
    world_require(completed(&end, ND_CANCELED) == 1, "keeps a request whose bytes are under way");
    memset(memory, 0x22, LARGE);
    world_limit(SIZE_MAX / 2, SIZE_MAX / 2);
    world_pass(100);
    const uint8_t *sent = world_output(end.socket, &size);
    world_require(size > 20000 && size < 2 * LARGE, "does not send what it has copied");
    for (size_t i = 0, run = 0; i < size; i++) {
        run = sent[i] == 0x22 ? run + 1 : 0;
        world_require(run < 16, "reads memory of a request that was given back");
    }
    end_connection(&end);
}

/* A message of the peer was too long, and the Terminate waits for the outcome of a Send. The refused Receive comes
 * first, with its status. */
static void a_refused_receive_precedes_those_that_are_cancelled(enum way way)
{
    struct end end = connected(NULL);
    struct cq_entry entries[DEPTH];

    answer_read(&end); /* of the start-up */
    send_nothing(&end);
    receive(&end);
    receive(&end);
    message_arrives(&end, 10);
    world_require(cq_take(end.cq, entries, DEPTH) == 0, "shows a refusal of which the peer knows nothing");
    ends_its_requests(&end, way);
    uint32_t count = cq_take(end.cq, entries, DEPTH), receives = 0;
    for (uint32_t i = 0; i < count; i++) {
        nd_status expected = entries[i].result.RequestType == Nd2RequestTypeReceive && receives++ == 0
                                 ? ND_BUFFER_OVERFLOW
                                 : ND_CANCELED;
        world_require(entries[i].result.Status == expected, "has another order");
    }
    world_require(count == 3 && receives == 2, "keeps requests");
    end_connection(&end);
}

/* F.6.1: a request that failed behind one that the peer has not taken ends the connection, though Flush gives both
 * back. */
static void a_flush_behind_a_failed_request_ends_the_connection(void)
{
    const ND2_SGE nowhere = {&read_sink, 1, 0};
    struct end end = connected(NULL);
    struct cq_entry entries[DEPTH];
    struct operation operation;

    answer_read(&end); /* of the start-up */
    send_nothing(&end);
    operation_begin(&operation, NULL, Nd2RequestTypeSend, 0);
    world_require(qp_post_data(end.qp, &operation, &nowhere, 1) == ND_SUCCESS, "takes no Send");
    world_run();
    world_require(cq_take(end.cq, entries, DEPTH) == 0, "completes what nobody has taken");
    ends_its_requests(&end, FLUSHES);
    world_require(cq_take(end.cq, entries, DEPTH) == 2 && entries[0].result.Status == ND_CANCELED &&
                      entries[1].result.Status == ND_ACCESS_VIOLATION,
                  "gives requests back in another way");
    answer_read(&end);
    world_require(end.stream->phase >= STREAM_CLOSING, "goes on after a request has failed");
    end_connection(&end);
}

/* A peer without receipts may leave as soon as it sees the end of the connection. It is not told before it has taken
 * what was sent, or FINISH_MS have passed. */
static void a_peer_that_is_asked_sees_the_end_after_it_has_answered(bool answers)
{
    struct end end = connected(NULL);

    answer_read(&end); /* of the start-up */
    send_nothing(&end);
    ends_its_requests(&end, FINISHES);
    world_require(completed(&end, ND_CANCELED) == 1, "keeps a request");
    world_pass(FINISH_MS - 100);
    world_require(!end.stream->fin_sent && end.stream->open,
                  "ends the connection before the peer has taken what was sent");
    if (answers)
        answer_read(&end);
    else
        world_pass(200);
    world_require(end.stream->fin_sent || !end.stream->open, "waits for nothing");
    end_connection(&end);
}

int main(void)
{
    world_reset();
    adapter = calloc(1, sizeof *adapter);
    world_require(adapter_start(adapter, &face_adapter_class, NULL) == ND_SUCCESS, "does not start");
    world_require(region_create(adapter, adapter, NULL, &region) == ND_SUCCESS &&
                      region_begin(region, memory, LARGE, (uintptr_t)memory, ND_MR_FLAG_ALLOW_LOCAL_WRITE) ==
                          ND_SUCCESS,
                  "does not register");
    for (int pages = 0; pages < 2; pages++) {
        a_large_message_waits_for_memory(pages);
        a_large_send_waits_for_memory(pages);
    }
    a_send_goes_on_where_memory_failed();
    who_has_rested_gives_back_its_buffers_for_others();
    a_receive_that_keeps_its_buffer_is_begun_anew(false);
    a_receive_that_keeps_its_buffer_is_begun_anew(true);
    for (enum way way = FINISHES; way <= DISCONNECTS_AND_FLUSHES; way++) {
        requests_come_back_at_once_whatever_the_peer_does(way, false);
        requests_come_back_at_once_whatever_the_peer_does(way, true);
        what_was_copied_is_sent_and_memory_is_left_alone(way);
        a_refused_receive_precedes_those_that_are_cancelled(way);
    }
    a_flush_behind_a_failed_request_ends_the_connection();
    a_peer_that_is_asked_sees_the_end_after_it_has_answered(true);
    a_peer_that_is_asked_sees_the_end_after_it_has_answered(false);
    object_close(&region->object);
    object_close(&adapter->object);
    puts("shortages: passed");
    return 0;
}
