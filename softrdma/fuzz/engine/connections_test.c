/* What established connections do, in an order that threads seldom come to. The peer is this program. */
#include "completion_queue.h"
#include "face_of_tests.h"
#include "queue_pair.h"
#include "stream_internal.h"
#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 8u

static struct adapter *adapter;

/* One end of a connection. The other one is fed and read by the test. */
struct end {
    struct stream *stream;
    struct completion_queue *cq;
    struct queue_pair *qp;
    socket_handle socket;
    uint32_t msn;      /* of the peer's next message */
    unsigned answered; /* Reads that the peer has answered */
};

/* What the program asks for, and what the peer agrees to. */
struct read_limits {
    uint16_t outbound, peer_inbound;
};
static const struct read_limits usual_limits = {4, 4};

static struct shared_queue *new_shared_queue(void)
{
    struct shared_queue *srq;

    world_require(srq_create(adapter, adapter, DEPTH, 1, 0, NULL, &srq) == ND_SUCCESS, "has no shared queue");
    return srq;
}

/* A connection that this end has made. */
static struct end connected_with(struct shared_queue *srq, struct read_limits read_limits)
{
    const struct queue_pair_limits limits = {
        .receive_depth = srq != NULL ? 0 : DEPTH, .initiator_depth = DEPTH, .receive_sge = 1, .initiator_sge = 1};
    const struct sockaddr_storage any = {.ss_family = AF_INET};
    const struct mpa_frame reply = {.revision = 2,
                                    .reply = true,
                                    .enhanced = true,
                                    .peer_to_peer = true,
                                    .rtr_read = true,
                                    .ird = read_limits.peer_inbound,
                                    .ord = 4};
    uint8_t frame[MPA_MAX_FRAME];
    struct end end = {.socket = NO_SOCKET};
    nd_status status;

    world_require(cq_create(adapter, DEPTH, NULL, &end.cq) == ND_SUCCESS, "has no queue");
    world_require(qp_create(adapter, adapter, end.cq, end.cq, srq, NULL, &limits, NULL, NULL, &end.qp) == ND_SUCCESS,
                  "has no queue pair");
    end.socket = socket_bound(&any, false, &status);
    end.stream = stream_create(adapter, end.socket);
    end.stream->revision = 2;
    end.stream->own_inbound = 4;
    end.stream->own_outbound = read_limits.outbound;
    world_require(qp_attach(end.qp, end.stream), "does not attach");
    stream_lock(end.stream);
    stream_connect(end.stream);
    stream_unlock(end.stream);
    world_run();
    world_feed(end.socket, frame, mpa_encode(frame, &reply));
    world_run();
    stream_lock(end.stream);
    world_require(stream_complete(end.stream), "does not connect");
    stream_unlock(end.stream);
    world_run();
    return end;
}

static struct end connected(struct shared_queue *srq)
{
    return connected_with(srq, usual_limits);
}

static void end_connection(struct end *end)
{
    struct cq_entry entries[DEPTH];

    object_close(&end->qp->object);
    world_end(end->socket, false);
    world_run();
    stream_drop(end->stream);
    cq_take(end->cq, entries, DEPTH);
    object_close(&end->cq->object);
}

/* The peer sends a message of zeros. */
static void message_arrives(struct end *end, uint32_t size)
{
    static uint8_t frame[WIRE_MAX_FPDU];
    size_t header = wire_put_send(frame, RDMAP_SEND, 0, ++end->msn, 0, true, size);

    memset(frame + header, 0, size);
    size_t whole = header + size;
    world_feed(end->socket, frame, wire_finish(frame, whole, false));
    world_run();
}

/* The peer says something by a Write of no bytes. */
static void tell(struct end *end, uint32_t token, uint64_t what)
{
    uint8_t frame[WIRE_TAGGED_SIZE + WIRE_MAX_TRAILER_SIZE];
    size_t size = wire_put_tagged(frame, RDMAP_WRITE, token, what, true, 0);

    world_feed(end->socket, frame, wire_finish(frame, size, false));
}

/* Regions of the test's requests. */
static struct region *kept[2 * DEPTH];
static unsigned kept_count;

static void disconnect(struct end *end)
{
    stream_lock(end->stream);
    stream_disconnect(end->stream);
    stream_unlock(end->stream);
}

/* The completions that came since the last call; all have this status. */
static uint32_t completed(struct end *end, nd_status status)
{
    struct cq_entry entries[DEPTH];
    uint32_t count = cq_take(end->cq, entries, DEPTH);

    for (uint32_t i = 0; i < count; i++)
        world_require(entries[i].result.Status == status, "completes with another status");
    return count;
}

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

static void receive(struct end *end)
{
    world_require(qp_receive(end->qp, NULL, NULL, 0) == ND_SUCCESS, "takes no Receive");
    world_run();
}

/* F.3.5 has the limit. Verbs programs may ask for none. */
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
    world_pass(3100);
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

static void send_nothing(struct end *end)
{
    struct operation operation;

    operation_begin(&operation, NULL, Nd2RequestTypeSend, 0);
    world_require(qp_post_data(end->qp, &operation, NULL, 0) == ND_SUCCESS, "takes no Send");
    world_run();
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
    world_require(told(&end, PATIENCE_LIMITED) == 1, "does not tell of a change");
    end_connection(&end);
}

/* ---- Read limits ---- */

struct reads {
    unsigned all, of_program;        /* Read Requests that this end has sent; those of more than no bytes */
    struct wire_read_request oldest; /* that is not answered; valid if there is one */
};

static struct reads reads_sent(const struct end *end)
{
    size_t size, used;
    const uint8_t *at = world_output(end->socket, &size), *last = at + size;
    struct reads reads = {0};
    struct wire_segment segment;
    struct mpa_frame frame;

    world_require(mpa_decode(at, size, false, &frame, &used) == WIRE_OK, "sends no request");
    for (at += used; wire_parse(at, (size_t)(last - at), false, &segment, &used) == WIRE_OK; at += used) {
        if (segment.opcode != RDMAP_READ_REQUEST)
            continue;
        if (reads.all++ == end->answered)
            reads.oldest = segment.request;
        reads.of_program += segment.request.size > 0;
    }
    return reads;
}

static void answer_read(struct end *end)
{
    static uint8_t frame[WIRE_MAX_FPDU];
    struct reads reads = reads_sent(end);

    world_require(reads.all > end->answered, "has sent no Read");
    end->answered++;
    size_t size = wire_put_tagged(frame, RDMAP_READ_RESPONSE, reads.oldest.sink_stag, reads.oldest.sink_offset, true,
                                  reads.oldest.size);
    memset(frame + size, 0, reads.oldest.size);
    size += reads.oldest.size;
    world_feed(end->socket, frame, wire_finish(frame, size, false));
    world_run();
}

static void read_byte(struct end *end, uint32_t flags)
{
    static uint8_t sink;
    static struct region *region;
    struct operation operation;

    world_require(region_create(adapter, adapter, NULL, &region) == ND_SUCCESS &&
                      region_begin(region, &sink, 1, (uintptr_t)&sink, ND_MR_FLAG_ALLOW_LOCAL_WRITE) == ND_SUCCESS,
                  "does not register");
    const ND2_SGE sge = {&sink, 1, region_local_token(region)};
    operation_begin(&operation, NULL, Nd2RequestTypeRead, flags);
    world_require(qp_post_data(end->qp, &operation, &sge, 1) == ND_SUCCESS, "takes no Read");
    kept[kept_count++] = region;
    world_run();
}

/* F.3.13. The smaller of both ends' limits counts, also for the Reads of no bytes that ask what was taken. */
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
    world_require(adapter_start(adapter, &face_adapter_class, NULL), "does not start");
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
    no_more_reads_are_under_way_than_both_ends_allow(16, 1, 1);
    no_more_reads_are_under_way_than_both_ends_allow(1, 16, 1);
    no_more_reads_are_under_way_than_both_ends_allow(2, 3, 2);
    no_more_reads_are_under_way_than_both_ends_allow(3, 2, 2);
    hosts_are_asked_by_turns();
    a_host_that_nobody_asked_gets_the_usual_time();
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
    puts("connections: passed");
    return 0;
}
