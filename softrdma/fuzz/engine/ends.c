#include "ends.h"
#include "stream_internal.h"

#include <string.h>

struct adapter *adapter;

const struct read_limits usual_limits = {4, 4};

struct shared_queue *new_shared_queue(void)
{
    struct shared_queue *srq;

    world_require(srq_create(adapter, adapter, DEPTH, 1, 0, NULL, &srq) == ND_SUCCESS, "has no shared queue");
    return srq;
}

/* A connection that this end has made. */
struct end connected_with(struct shared_queue *srq, struct read_limits read_limits)
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
    end.stream = stream_create(adapter, end.socket, false);
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

struct end connected(struct shared_queue *srq)
{
    return connected_with(srq, usual_limits);
}

void end_connection(struct end *end)
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
void message_arrives(struct end *end, uint32_t size)
{
    static uint8_t frame[WIRE_MAX_FPDU];
    size_t header = wire_put_send(frame, RDMAP_SEND, 0, ++end->msn, 0, true, size);

    memset(frame + header, 0, size);
    size_t whole = header + size;
    world_feed(end->socket, frame, wire_finish(frame, whole, false));
    world_run();
}

/* The peer says something by a Write of no bytes. */
void tell(struct end *end, uint32_t token, uint64_t what)
{
    uint8_t frame[WIRE_TAGGED_SIZE + WIRE_MAX_TRAILER_SIZE];
    size_t size = wire_put_tagged(frame, RDMAP_WRITE, token, what, true, 0);

    world_feed(end->socket, frame, wire_finish(frame, size, false));
}

/* Regions of the test's requests. */
struct region *kept[2 * DEPTH];
unsigned kept_count;

void disconnect(struct end *end)
{
    stream_lock(end->stream);
    stream_disconnect(end->stream);
    stream_unlock(end->stream);
}

/* The completions that came since the last call; all have this status. */
uint32_t completed(struct end *end, nd_status status)
{
    struct cq_entry entries[DEPTH];
    uint32_t count = cq_take(end->cq, entries, DEPTH);

    for (uint32_t i = 0; i < count; i++)
        world_require(entries[i].result.Status == status, "completes with another status");
    return count;
}

void receive(struct end *end)
{
    world_require(qp_receive(end->qp, NULL, NULL, 0) == ND_SUCCESS, "takes no Receive");
    world_run();
}

/* F.3.5 has the limit. Verbs programs may ask for none. */
void send_nothing(struct end *end)
{
    struct operation operation;

    operation_begin(&operation, NULL, Nd2RequestTypeSend, 0);
    world_require(qp_post_data(end->qp, &operation, NULL, 0) == ND_SUCCESS, "takes no Send");
    world_run();
}

struct reads reads_sent(const struct end *end)
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

void answer_read(struct end *end)
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

void read_byte(struct end *end, uint32_t flags)
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
