/* For libFuzzer: a program with one queue pair over the whole engine, and a peer that sends what the input says.
 *
 * An input is a little program: a byte of options, then steps of one byte and its arguments. Steps of the peer send a
 * start-up frame, an FPDU whose length and CRC are made right, or any bytes. Steps of the program post requests, take
 * completions and end things. Others move the clock, or let sends and receives come in pieces.
 *
 * What must hold, besides what the sanitizers see: memory that is granted to nobody keeps its bytes, and so does memory
 * whose registration has ended; each request completes once; in the end nothing is left; what the engine sends is well
 * formed (world.c).
 *
 * One file, because each kind of step is a function on the same program.
 */
#include "address.h"
#include "connector.h"
#include "face_of_tests.h"
#include "listener.h"
#include "soft_connector.h"
#include "world.h"
#include "wire/bytes.h"

#include <stdlib.h>
#include <string.h>

#define PASSIVE     1u
#define SHARED      2u  /* receives come from a shared receive queue */
#define SMALL_QUEUE 4u  /* the completion queue overruns soon */
#define STRICT      8u  /* the adapter's settings: CRCs are required, sinks of Reads need the right */
#define PIECES      16u /* start with short receives and little room to send */

#define BY_HAND 32u  /* requests come before the connection, and nobody tells of its end */
#define REJECTS 64u  /* the program rejects what it is offered */
#define ODDLY   128u /* a byte says how the attempts to connect go; they are made again */

#define REQUESTS   4096u
#define LOCAL_SIZE 3000u
#define BIG_SIZE   150000u /* several segments */
#define MOST_BIG   4u
#define READS      64u
#define SEEN       16u
#define OLD_STEPS  14u
#define NEW_STEPS  12u
#define FILL       0xA5

/* SECRET is registered without any right. READABLE is for the peer to read. The window is bound within BINDABLE. */
enum { SECRET, READABLE, WRITABLE, LOCAL, BINDABLE, REGIONS };
static const size_t sizes[REGIONS] = {256, 300, 5000, LOCAL_SIZE, 512};
static const uint32_t rights[REGIONS] = {
    0,
    ND_MR_FLAG_ALLOW_REMOTE_READ,
    ND_MR_FLAG_ALLOW_REMOTE_WRITE | ND_MR_FLAG_ALLOW_REMOTE_READ | ND_MR_FLAG_RDMA_READ_SINK,
    ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_RDMA_READ_SINK,
    ND_MR_FLAG_ALLOW_LOCAL_WRITE,
};

struct input {
    const uint8_t *data;
    size_t left;
};

/* A Read Request of the engine, which the peer has not answered completely. */
struct asked {
    uint32_t stag, left;
    uint64_t offset;
};

struct program {
    uint8_t options;
    struct adapter *adapter;
    struct completion_queue *cq;
    struct shared_queue *srq;
    struct queue_pair *qp;
    struct region *regions[REGIONS];
    uint8_t *memory[REGIONS];
    uint32_t local[REGIONS], remote[REGIONS]; /* their tokens, which are used after their registration has ended too */
    struct window *window;
    bool bound[512]; /* the bytes of BINDABLE that a window has ever let the peer write */
    struct listener *listener;
    struct connector *connector;
    socket_handle peer;
    bool established;
    uint32_t msn[QUEUE_COUNT]; /* of the peer's next messages */
    uint32_t posted;
    uint8_t outcome[REQUESTS]; /* completions of each request */
    bool silent[REQUESTS];
    ND2_REQUEST_TYPE type[REQUESTS];
    bool lent[LOCAL_SIZE];   /* the bytes of LOCAL that a Receive or a Read may write */
    uint8_t *ended[REGIONS]; /* what a region held when its registration ended */
    struct region *big;      /* made when it is needed */
    uint8_t *big_memory;
    unsigned big_uses;

    /* What the peer has read of the engine's output. */
    socket_handle read_from;
    size_t read_to;
    bool revision_known;
    struct asked asked[READS];
    unsigned asked_first, asked_end;
    size_t seen[SEEN]; /* where the latest FPDUs begin */
    unsigned seen_count;
};

static struct program *program;

/* ---- The input ---- */

static uint8_t byte(struct input *input)
{
    if (input->left == 0)
        return 0;
    input->left--;
    return *input->data++;
}

static uint32_t word(struct input *input)
{
    uint32_t high = byte(input);

    return high << 8 | byte(input);
}

/* ---- The program ---- */

static void connected(void *owner, struct connector *connector, enum connector_news news, nd_status status)
{
    (void)owner, (void)status;
    if (news == NEWS_OFFERED && (program->options & REJECTS) != 0)
        connector_reject(connector, "no", 2);
    else if (news == NEWS_OFFERED)
        program->established = connector_complete(connector, NULL) == ND_SUCCESS;
    else
        program->established = news == NEWS_ESTABLISHED;
}

static const struct connector_owner owner = {.tell = connected, .make_socket = soft_make_socket};

static void arrived(void *listener_owner, struct connector *connector)
{
    struct connection_arguments arguments = {.inbound = 4, .outbound = 4, .private_data = "hello", .private_size = 5};

    (void)listener_owner;
    if (program->connector != NULL) {
        connector_close(connector);
        return;
    }
    program->connector = connector;
    connector_set_owner(connector, &owner, NULL);
    if ((program->options & REJECTS) != 0 || program->qp == NULL ||
        connector_accept(connector, program->qp, &arguments, NULL) != ND_SUCCESS)
        connector_reject(connector, NULL, 0);
}

static void take(void)
{
    struct cq_entry entries[8];
    uint32_t count;

    while ((count = cq_take(program->cq, entries, COUNT_OF(entries))) > 0)
        for (uint32_t i = 0; i < count; i++) {
            uintptr_t number = (uintptr_t)entries[i].result.RequestContext;
            if (entries[i].result.RequestType == REQUEST_PEER_INVALIDATED) {
                world_require(entries[i].result.RequestContext == face_invalidation, "names another window");
                continue;
            }
            world_require(number < program->posted && program->outcome[number]++ == 0, "completes a request twice");
            world_require(entries[i].result.RequestType == program->type[number], "completes another kind of request");
        }
}

static void *next_context(void)
{
    return (void *)(uintptr_t)program->posted;
}

static void was_posted(nd_status status, ND2_REQUEST_TYPE type, bool silent)
{
    if (status != ND_SUCCESS)
        return;
    program->type[program->posted] = type;
    program->silent[program->posted] = silent;
    program->posted++;
}

/* Up to two elements within the region, or beyond it. */
static uint32_t elements(struct input *input, unsigned which, ND2_SGE *sge)
{
    uint32_t count = byte(input) % 3;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t offset = word(input) % ((uint32_t)sizes[which] + 1);
        uint32_t length = word(input) % ((uint32_t)sizes[which] + 8);
        sge[i] = (ND2_SGE){program->memory[which] + offset, length, program->local[which]};
    }
    return count;
}

/* Before a request: from now on these bytes of LOCAL may be written. */
static void lend(const ND2_SGE *sge, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        size_t offset = (size_t)((uint8_t *)sge[i].Buffer - program->memory[LOCAL]);
        for (size_t at = offset; at < offset + sge[i].BufferLength && at < LOCAL_SIZE; at++)
            program->lent[at] = true;
    }
}

/* The context of a request counts as used only after it was accepted. An element that is refused is not lent. */
static void post_receive(struct input *input)
{
    ND2_SGE sge[MAX_SGE];
    uint32_t count = elements(input, LOCAL, sge);
    nd_status status = ND_INVALID_DEVICE_REQUEST;

    if (program->srq != NULL)
        status = srq_receive(program->srq, next_context(), sge, count);
    else if (program->qp != NULL)
        status = qp_receive(program->qp, next_context(), sge, count);
    if (status == ND_SUCCESS)
        lend(sge, count);
    was_posted(status, Nd2RequestTypeReceive, false);
}

static void post_data(struct input *input)
{
    static const ND2_REQUEST_TYPE types[] = {Nd2RequestTypeSend, Nd2RequestTypeWrite, Nd2RequestTypeRead};
    ND2_REQUEST_TYPE type = types[byte(input) % COUNT_OF(types)];
    uint32_t flags =
        byte(input) & (ND_OP_FLAG_SILENT_SUCCESS | ND_OP_FLAG_READ_FENCE | ND_OP_FLAG_SEND_AND_SOLICIT_EVENT);
    struct operation operation;
    ND2_SGE sge[MAX_SGE];

    operation_begin(&operation, next_context(), type, flags);
    if (type != Nd2RequestTypeSend) {
        operation.remote_address = word(input);
        operation.remote_token = htonl(word(input));
    } else if ((byte(input) & 1) != 0) {
        operation.invalidates = true;
        operation.remote_token = htonl(word(input));
    }
    uint32_t count = elements(input, type == Nd2RequestTypeRead ? LOCAL : READABLE, sge);
    nd_status status = qp_post_data(program->qp, &operation, sge, count);
    if (status == ND_SUCCESS && type == Nd2RequestTypeRead)
        lend(sge, count);
    was_posted(status, type, (flags & ND_OP_FLAG_SILENT_SUCCESS) != 0);
}

static void post_inline(struct input *input)
{
    uint8_t how = byte(input);
    struct operation operation;
    ND2_REQUEST_TYPE type = (how & 1) != 0 ? Nd2RequestTypeWrite : Nd2RequestTypeSend;
    ND2_SGE sge[] = {{program->memory[READABLE], how / 2 % 72, 0}, {program->memory[SECRET], 4, 0}};

    operation_begin(&operation, next_context(), type, ND_OP_FLAG_INLINE);
    operation.remote_address = word(input);
    operation.remote_token = type == Nd2RequestTypeWrite ? htonl(word(input)) : 0;
    was_posted(qp_post_data(program->qp, &operation, sge, 1 + (how >> 7)), type, false);
}

static bool has_big(void)
{
    if (program->big_uses++ >= MOST_BIG)
        return false;
    if (program->big != NULL)
        return true;
    program->big_memory = malloc(BIG_SIZE);
    memset(program->big_memory, FILL, BIG_SIZE);
    world_require(region_create(program->adapter, program, NULL, &program->big) == 0, "has no region");
    nd_status status = region_begin(program->big, program->big_memory, BIG_SIZE, (uintptr_t)program->big_memory,
                                    ND_MR_FLAG_ALLOW_REMOTE_READ);
    world_require(status == ND_SUCCESS, "does not register");
    return true;
}

static void post_big(struct input *input)
{
    uint8_t how = byte(input);
    struct operation operation;
    ND2_REQUEST_TYPE type = (how & 1) != 0 ? Nd2RequestTypeWrite : Nd2RequestTypeSend;

    operation_begin(&operation, next_context(), type, 0);
    operation.remote_address = word(input);
    operation.remote_token = htonl(7 << 8);
    ND2_SGE sge = {program->big_memory, word(input) * 3 % BIG_SIZE, region_local_token(program->big)};
    was_posted(qp_post_data(program->qp, &operation, &sge, 1), type, false);
}

/* Ways to bind and to invalidate that only verbs have. */
static void post_window_of_verbs(struct input *input)
{
    uint8_t what = byte(input);
    struct operation operation;
    uint64_t offset = byte(input) * 4u, size = byte(input);

    if ((what & 1) != 0) {
        operation_begin(&operation, next_context(), Nd2RequestTypeInvalidate, 0);
        operation.invalidates = true;
        operation.remote_token = window_token(program->window);
        was_posted(qp_post_invalidate(program->qp, &operation, NULL), Nd2RequestTypeInvalidate, false);
        return;
    }
    operation_begin(&operation, next_context(), Nd2RequestTypeBind,
                    what & (ND_OP_FLAG_ALLOW_READ | ND_OP_FLAG_ALLOW_WRITE));
    operation.refuses_late = true;
    operation.bind.has_key = (what & 2) != 0;
    operation.bind.key = byte(input) | 1;
    program->regions[BINDABLE]->may_bind = (what & 4) == 0;
    nd_status status = qp_post_bind(program->qp, &operation, program->regions[BINDABLE], program->window,
                                    (uintptr_t)program->memory[BINDABLE] + offset, size);
    bool writes = status == ND_SUCCESS && operation.refusal == ND_SUCCESS && (what & ND_OP_FLAG_ALLOW_WRITE) != 0;
    for (uint64_t i = offset; writes && i < offset + size; i++)
        program->bound[i] = true;
    was_posted(status, Nd2RequestTypeBind, false);
}

static void post_window(struct input *input)
{
    uint8_t what = byte(input);
    struct operation operation;

    if ((what & 1) == 0) {
        uint32_t flags = what & BIND_FLAGS & ~(uint32_t)ND_OP_FLAG_SILENT_SUCCESS;
        uint64_t offset = byte(input) * 2u, size = byte(input);
        operation_begin(&operation, next_context(), Nd2RequestTypeBind, flags);
        uint32_t before = program->posted;
        was_posted(qp_post_bind(program->qp, &operation, program->regions[BINDABLE], program->window,
                                (uintptr_t)program->memory[BINDABLE] + offset, size),
                   Nd2RequestTypeBind, false);
        for (uint64_t i = offset;
             program->posted > before && (flags & ND_OP_FLAG_ALLOW_WRITE) != 0 && i < offset + size; i++)
            program->bound[i] = true;
    } else {
        operation_begin(&operation, next_context(), Nd2RequestTypeInvalidate, what & ND_OP_FLAG_READ_FENCE);
        was_posted(qp_post_invalidate(program->qp, &operation, program->window), Nd2RequestTypeInvalidate, false);
    }
}

static void end_registration(unsigned which)
{
    if (program->ended[which] != NULL || region_end(program->regions[which], true) != ND_SUCCESS)
        return;
    program->ended[which] = malloc(sizes[which]);
    memcpy(program->ended[which], program->memory[which], sizes[which]);
}

static void close_queue_pair(void)
{
    if (program->qp != NULL)
        object_close(&program->qp->object);
    program->qp = NULL;
}

static void change_sizes(struct input *input)
{
    uint8_t what = byte(input), size = byte(input);

    switch (what % 4) {
    case 0:
        cq_resize(program->cq, 1 + size);
        break;
    case 1:
        if (program->srq != NULL)
            srq_modify(program->srq, size % 32, what / 4 % 8);
        break;
    case 2:
        cq_disarm(program->cq);
        break;
    case 3:
        face_invalidation = face_invalidation == NULL ? &face_invalidation : NULL;
        take(); /* what was put with the other context */
        break;
    }
}

static void change_queue_pair(struct input *input)
{
    uint8_t what = byte(input);

    switch (what % 4) {
    case 0:
        program->qp->refuses_reads = (what & 4) != 0;
        break;
    case 1:
        program->qp->refuses_writes = (what & 4) != 0;
        break;
    case 2:
        qp_start_batch(program->qp);
        break;
    case 3:
        qp_submit_batch(program->qp);
        break;
    }
}

static void end_something(uint8_t what)
{
    switch (what % 6) {
    case 0:
        if (program->connector != NULL)
            connector_disconnect(program->connector, NULL);
        break;
    case 1:
        if (program->qp != NULL)
            qp_flush(program->qp);
        break;
    case 2:
        end_registration(what / 6 % REGIONS);
        break;
    case 3:
        connector_close(program->connector);
        program->connector = NULL;
        break;
    case 4:
        adapter_remove(program->adapter);
        break;
    case 5:
        if (program->qp != NULL)
            qp_finish_now(program->qp);
        break;
    }
}

/* ---- The peer ---- */

static void send_frame(struct input *input)
{
    uint8_t options = byte(input), private_data[512] = {0}, out[MPA_MAX_FRAME];
    struct mpa_frame frame = {
        .revision = (options & 1) != 0 ? 1 : 2,
        .reply = program->listener == NULL,
        .markers = (options & 2) != 0,
        .crc = (options & 4) != 0,
        .reject = (options & 8) != 0,
        .enhanced = (options & 1) == 0,
        .peer_to_peer = (options & 16) != 0,
        .rtr_send = (options & 32) != 0,
        .rtr_write = (options & 64) != 0,
        .rtr_read = (options & 128) != 0,
        .ird = (uint16_t)word(input) & 0x3FFF,
        .ord = (uint16_t)word(input) & 0x3FFF,
        .private_size = (uint16_t)(byte(input) * 2u),
        .private_data = private_data,
    };

    world_feed(program->peer, out, mpa_encode(out, &frame));
}

/* A token of the peer's choice: mostly one that exists. */
static uint32_t token(struct input *input)
{
    uint8_t which = byte(input) % (REGIONS + 5);

    if (which < REGIONS)
        return program->remote[which];
    switch (which - REGIONS) {
    case 0:
    case 1:
        return window_token(program->window);
    case 2:
        return RECEIPT_TOKEN;
    case 3:
        return FINAL_RECEIPT_TOKEN;
    }
    return htonl((uint32_t)byte(input) << 16 | word(input));
}

/* Mostly within or close to some memory. */
static uint64_t address(struct input *input)
{
    uint8_t which = byte(input) % (REGIONS + 3);
    uint32_t offset = word(input);

    if (which < REGIONS)
        return (uintptr_t)program->memory[which] + offset % (sizes[which] + 32) - 8;
    return which == REGIONS ? SOFTND_READ_OFFSET : which == REGIONS + 1 ? UINT64_MAX - offset : offset;
}

/* Adds padding and CRC. */
static void feed(uint8_t *out, size_t size, bool with_crc)
{
    size_t whole = wire_finish(out, size, false);

    /* The CRC covers the padding. */
    uint32_t crc = with_crc ? wire_crc32c(0, out, whole - 4) : 0;
    for (unsigned i = 0; i < 4; i++)
        out[whole - 4 + i] = (uint8_t)(crc >> (8 * i));
    world_feed(program->peer, out, whole);
}

/* Reads what the engine has sent, as far as that is complete. */
static void read_output(void)
{
    size_t size, used = 0;
    struct mpa_frame frame;
    struct wire_segment segment;

    if (program->read_from != program->peer) {
        program->read_from = program->peer;
        program->read_to = program->asked_first = program->asked_end = program->seen_count = 0;
        program->revision_known = false;
    }
    const uint8_t *output = world_output(program->peer, &size);
    if (!program->revision_known && size > 0) {
        if (mpa_decode(output, size, program->listener != NULL, &frame, &used) != WIRE_OK)
            return;
        program->revision_known = true;
        program->read_to = used;
    }
    while (program->read_to < size &&
           wire_parse(output + program->read_to, size - program->read_to, false, &segment, &used) == WIRE_OK) {
        program->seen[program->seen_count++ % SEEN] = program->read_to;
        if (segment.opcode == RDMAP_READ_REQUEST && program->asked_end - program->asked_first < READS)
            program->asked[program->asked_end++ % READS] =
                (struct asked){segment.request.sink_stag, segment.request.size, segment.request.sink_offset};
        program->read_to += used;
    }
}

/* Answers the oldest Read Request: mostly as it should be, with as much as the input says. */
static void send_answer(struct input *input)
{
    uint8_t how = byte(input), out[4096];

    read_output();
    if (program->asked_first == program->asked_end)
        return;
    struct asked *asked = &program->asked[program->asked_first % READS];
    uint32_t most = asked->left < 2048 ? asked->left : 2048;
    uint32_t payload = (how & 3) == 0 ? word(input) % (most + 1) : most;
    bool last = payload == asked->left;
    uint64_t offset = asked->offset;
    if ((how & 0xF0) == 0xF0)
        offset += word(input);
    else if ((how & 0xF0) == 0xE0)
        last = !last;
    else if ((how & 0xF0) == 0xD0)
        payload++;
    size_t size = wire_put_tagged(out, RDMAP_READ_RESPONSE, asked->stag, offset, last, payload);
    memset(out + size, 0x6C, payload);
    feed(out, size + payload, true);
    asked->left -= payload < asked->left ? payload : asked->left;
    asked->offset += payload;
    if (asked->left == 0)
        program->asked_first++;
}

/* Or that a message finds no Receive. */
static void send_receipt(struct input *input)
{
    uint8_t how = byte(input), out[64];

    read_output();
    uint64_t position = program->read_to;
    if ((how & 2) != 0)
        position -= byte(input);
    if ((how & 0xF0) == 0xF0)
        position += 1 + byte(input);
    uint32_t what = (how & 1) != 0 ? FINAL_RECEIPT_TOKEN : RECEIPT_TOKEN;
    if ((how & 0x0C) == 0x0C)
        what = NOT_READY_TOKEN;
    feed(out, wire_put_tagged(out, RDMAP_WRITE, what, position, true, 0), true);
}

/* A Terminate that complains of something that the engine has sent. */
static void send_complaint(struct input *input)
{
    static const int errors[] = {DDP_TOO_LONG,     DDP_NO_BUFFER,           DDP_BOUNDS,
                                 RDMAP_ACCESS,     RDMAP_CANNOT_INVALIDATE, RDMAP_INVALID_STAG,
                                 DDP_INVALID_STAG, RDMAP_LOCAL_CATASTROPHIC};
    uint8_t which = byte(input), error = byte(input), out[128];
    struct wire_segment offender;
    size_t size, used;

    read_output();
    if (program->seen_count == 0)
        return;
    unsigned back = which % (program->seen_count < SEEN ? program->seen_count : SEEN);
    const uint8_t *output = world_output(program->peer, &size);
    size_t at = program->seen[(program->seen_count - 1 - back) % SEEN];
    world_require(wire_parse(output + at, size - at, false, &offender, &used) == WIRE_OK, "has changed its output");
    feed(out, wire_put_terminate(out, errors[error % COUNT_OF(errors)], &offender), true);
}

/* Asks for more than a segment, of memory that allows it. */
static void ask_for_much(struct input *input)
{
    uint8_t out[128];
    struct wire_read_request request = {.sink_stag = htonl(9 << 8), .source_offset = (uintptr_t)program->big_memory};

    request.source_stag = region_remote_token(program->big);
    request.size = word(input) * 3 % BIG_SIZE;
    feed(out, wire_put_read_request(out, ++program->msn[QUEUE_READ_REQUEST], &request), true);
}

static void send_fpdu(struct input *input)
{
    uint8_t kind = byte(input), out[4096];
    uint32_t payload = word(input) % 2048;
    bool last = (kind & 0x80) == 0;
    size_t size = 0;

    switch (kind & 7) {
    case RDMAP_WRITE:
    case RDMAP_READ_RESPONSE: {
        uint32_t stag = token(input);
        size = wire_put_tagged(out, kind & 7, stag, address(input), last, payload);
        break;
    }
    case RDMAP_READ_REQUEST: {
        struct wire_read_request request = {.sink_stag = token(input), .sink_offset = address(input)};
        request.source_stag = token(input);
        request.source_offset = address(input);
        request.size = payload;
        payload = 0;
        size = wire_put_read_request(out, ++program->msn[QUEUE_READ_REQUEST], &request);
        break;
    }
    case RDMAP_TERMINATE:
        payload = 0;
        size = wire_put_terminate(out, 0x10000 | (int)(word(input) & 0xFFFF), NULL);
        break;
    default: {
        uint32_t invalidated =
            (kind & 7) == RDMAP_SEND_INVALIDATE || (kind & 7) == RDMAP_SEND_SOLICITED_INVALIDATE ? token(input) : 0;
        uint32_t offset = (kind & 0x40) != 0 ? word(input) : 0;
        size = wire_put_send(out, kind & 7, invalidated, program->msn[QUEUE_SEND] + 1, offset, last, payload);
        program->msn[QUEUE_SEND] += last;
    }
    }
    memset(out + size, 0x5B, payload);
    size += payload;
    if ((kind & 0x20) != 0 && size > 4)
        out[2 + byte(input) % (size - 2)] ^= byte(input); /* one wrong byte behind the length */
    feed(out, size, (kind & 0x10) == 0);
}

static void send_raw(struct input *input)
{
    size_t size = byte(input);

    size = size < input->left ? size : input->left;
    world_feed(program->peer, input->data, size);
    input->data += size;
    input->left -= size;
}

/* ---- All of it ---- */

/* The steps of the program that need a queue pair. */
static bool needs_queue_pair(unsigned kind)
{
    return (kind >= 6 && kind <= 8) || (kind >= 17 && kind <= 19);
}

static void step(struct input *input)
{
    uint8_t value = byte(input);
    unsigned kind = value < 12 * OLD_STEPS ? value % OLD_STEPS : OLD_STEPS + (value - 12 * OLD_STEPS) % NEW_STEPS;

    if (program->qp == NULL && needs_queue_pair(kind))
        return;
    switch (kind) {
    case 0:
        send_frame(input);
        break;
    case 1:
    case 2:
    case 3:
        send_fpdu(input);
        break;
    case 4:
        send_raw(input);
        break;
    case 5:
        post_receive(input);
        break;
    case 6:
    case 7:
        post_data(input);
        break;
    case 8:
        post_window(input);
        break;
    case 9:
        cq_arm(program->cq, byte(input) & 1 ? ND_CQ_NOTIFY_ANY : ND_CQ_NOTIFY_SOLICITED);
        take();
        break;
    case 10:
        world_pass(byte(input) * 40u);
        break;
    case 11: {
        size_t chunk = byte(input), room = byte(input);
        world_limit(chunk == 255 ? SIZE_MAX / 2 : chunk, room == 255 ? SIZE_MAX / 2 : room * 16u);
        break;
    }
    case 12:
        world_end(program->peer, byte(input) & 1);
        break;
    case 13:
        end_something(byte(input));
        break;
    case 14:
    case 15:
        send_answer(input);
        break;
    case 16:
        send_receipt(input);
        break;
    case 17:
        post_inline(input);
        break;
    case 18:
        post_window_of_verbs(input);
        break;
    case 19:
        change_queue_pair(input);
        break;
    case 20:
        send_complaint(input);
        break;
    case 21:
        if (byte(input) < 32)
            close_queue_pair();
        break;
    case 22:
        if (program->qp != NULL && has_big())
            post_big(input);
        break;
    case 23:
        if (has_big())
            ask_for_much(input);
        break;
    case 24: {
        uint8_t what = byte(input);
        world_lacks((what & 3) == 3, (what & 12) == 12);
        break;
    }
    case 25:
        change_sizes(input);
        break;
    }
    world_run();
    /* An attempt may have been made again. */
    if (program->listener == NULL && world_newest() != NO_SOCKET)
        program->peer = world_newest();
}

static void begin(uint8_t options, uint8_t connects)
{
    struct queue_pair_limits limits = {
        .receive_depth = 16, .initiator_depth = 16, .receive_sge = 2, .initiator_sge = 2, .inline_size = 64};
    nd_status status;

    program->adapter = calloc(1, sizeof *program->adapter);
    world_require(adapter_start(program->adapter, &face_adapter_class, NULL) == ND_SUCCESS, "does not start");
    program->adapter->settings.require_crc = program->adapter->settings.strict_read_sink = (options & STRICT) != 0;
    world_require(cq_create(program->adapter, (options & SMALL_QUEUE) != 0 ? 3 : 200, NULL, &program->cq) == 0,
                  "has no queue");
    for (int i = 0; i < REGIONS; i++) {
        program->memory[i] = malloc(sizes[i]);
        memset(program->memory[i], FILL, sizes[i]);
        world_require(region_create(program->adapter, program, NULL, &program->regions[i]) == 0 &&
                          region_begin(program->regions[i], program->memory[i], sizes[i], (uintptr_t)program->memory[i],
                                       rights[i]) == 0,
                      "does not register");
        program->local[i] = region_local_token(program->regions[i]);
        program->remote[i] = region_remote_token(program->regions[i]);
    }
    program->regions[BINDABLE]->may_bind = true;
    world_require(window_create(program->adapter, program, NULL, &program->window) == 0, "has no window");
    if ((options & SHARED) != 0)
        world_require(srq_create(program->adapter, program, 16, 2, 0, NULL, &program->srq) == 0, "has no shared queue");
    world_require(qp_create(program->adapter, program, program->cq, program->cq, program->srq, NULL, &limits, NULL,
                            NULL, &program->qp) == 0,
                  "has no queue pair");
    program->qp->unaware = (options & BY_HAND) != 0;
    program->qp->early = (options & BY_HAND) != 0;
    struct sockaddr_storage here = {.ss_family = AF_INET};
    if ((options & PASSIVE) != 0) {
        socket_handle handle = socket_bound(&here, true, &status);
        world_require(listener_create(program->adapter, handle, arrived, NULL, &program->listener) == 0,
                      "cannot listen");
        program->peer = world_knock();
    } else {
        struct connection_arguments arguments = {.inbound = 4, .outbound = 4, .private_data = "hi", .private_size = 2};
        socket_handle handle = socket_bound(&here, false, &status);
        arguments.insists = (options & ODDLY) != 0;
        world_connects(connects % 4);
        socket_address(handle, &here);
        world_require(soft_connector_create(program->adapter, &owner, NULL, handle, &program->connector) == 0 &&
                          connector_connect(program->connector, program->qp, &here, &arguments, NULL) == 0,
                      "cannot connect");
        world_run();
        program->peer = world_newest();
    }
}

static void end(void)
{
    world_limit(SIZE_MAX / 2, SIZE_MAX / 2);
    world_lacks(false, false);
    world_run();
    connector_close(program->connector);
    if (program->listener != NULL)
        listener_close(program->listener);
    if (program->qp != NULL)
        qp_finish_now(program->qp);
    world_pass(10000);
    bool overrun = program->cq->failure != ND_SUCCESS;
    take();
    /* Receives of a shared queue stay there. */
    for (uint32_t i = 0; i < program->posted && !overrun && program->srq == NULL; i++)
        world_require(program->outcome[i] == 1 || (program->silent[i] && program->outcome[i] == 0),
                      "does not complete a request");
    for (size_t i = 0; i < sizes[SECRET]; i++)
        world_require(program->memory[SECRET][i] == FILL, "wrote into memory without rights");
    for (size_t i = 0; i < sizes[READABLE]; i++)
        world_require(program->memory[READABLE][i] == FILL, "wrote into memory that can only be read");
    for (size_t i = 0; i < sizes[BINDABLE]; i++)
        world_require(program->bound[i] || program->memory[BINDABLE][i] == FILL, "wrote beside a window");
    for (size_t i = 0; i < LOCAL_SIZE; i++)
        world_require(program->lent[i] || program->memory[LOCAL][i] == FILL, "wrote where nothing was asked for");
    for (int i = 0; i < REGIONS; i++)
        world_require(program->ended[i] == NULL || memcmp(program->ended[i], program->memory[i], sizes[i]) == 0,
                      "wrote into memory whose registration had ended");
    close_queue_pair();
    world_run();
    if (program->srq != NULL)
        object_close(&program->srq->object);
    object_close(&program->window->object);
    for (int i = 0; i < REGIONS; i++) {
        region_end(program->regions[i], true);
        object_close(&program->regions[i]->object);
        free(program->memory[i]);
        free(program->ended[i]);
    }
    if (program->big != NULL)
        object_close(&program->big->object);
    free(program->big_memory);
    object_close(&program->cq->object);
    object_close(&program->adapter->object);
    world_require(object_live_count() == 0 && transport_stopped(), "keeps objects");
    world_require(world_open_sockets() == 0, "keeps sockets");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, size};

    world_reset();
    program = calloc(1, sizeof *program);
    uint8_t options = program->options = byte(&input);
    program->read_from = NO_SOCKET;
    face_invalidation = NULL;
    if ((options & PIECES) != 0)
        world_limit(3, 40);
    begin(options, (options & ODDLY) != 0 ? byte(&input) : CONNECTS_LATER);
    while (input.left > 0 && program->posted < REQUESTS - 1)
        step(&input);
    end();
    free(program);
    world_reset();
    return 0;
}
