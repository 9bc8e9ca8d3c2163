/* When messages wait for others, and what sends them. The peer is this program. */
#include "ends.h"

#include <stdio.h>
#include <stdlib.h>

/* So many are sent one by one before others wait. */
#define WINDOW 8u
#define LARGE  4096u

static struct end sending_to_softnd(void)
{
    struct end end = connected(NULL);

    tell(&end, RECEIPT_TOKEN, 0);
    world_run();
    return end;
}

/* The Sends among what was sent. */
static unsigned sent(const struct end *end)
{
    size_t size, used;
    const uint8_t *at = world_output(end->socket, &size), *last = at + size;
    struct wire_segment segment;
    struct mpa_frame frame;
    unsigned count = 0;

    world_require(mpa_decode(at, size, false, &frame, &used) == WIRE_OK, "sends no request");
    for (at += used; wire_parse(at, (size_t)(last - at), false, &segment, &used) == WIRE_OK; at += used)
        count += segment.opcode == RDMAP_SEND;
    return count;
}

static void send_many(struct end *end, unsigned count)
{
    while (count-- > 0)
        send_nothing(end);
}

static void answer_all(struct end *end)
{
    tell(end, RECEIPT_TOKEN, end->stream->sent_bytes);
    world_run();
}

static void requires_sent(const struct end *end, unsigned count, const char *otherwise)
{
    world_require(sent(end) == count, otherwise);
}

static void few_are_sent_at_once(void)
{
    struct end end = sending_to_softnd();

    for (unsigned i = 1; i <= WINDOW; i++) {
        send_nothing(&end);
        requires_sent(&end, i, "delays a message of few");
    }
    send_many(&end, 3);
    requires_sent(&end, WINDOW, "sends a message of many by itself");
    end_connection(&end);
}

static void what_waits_is_sent_when_the_peer_answers(void)
{
    struct end end = sending_to_softnd();

    send_many(&end, WINDOW + 3);
    answer_all(&end);
    requires_sent(&end, WINDOW + 3, "holds back what waited for an answer");
    world_require(completed(&end, ND_SUCCESS) == WINDOW, "completes what was not answered");
    answer_all(&end);
    world_require(completed(&end, ND_SUCCESS) == 3, "loses what has waited");
    send_nothing(&end);
    requires_sent(&end, WINDOW + 4, "delays a lone message");
    end_connection(&end);
}

static void what_waits_is_sent_when_the_program_looks(void)
{
    struct end first = sending_to_softnd(), second = sending_to_softnd(), third = sending_to_softnd();

    send_many(&first, WINDOW + 1);
    send_many(&second, WINDOW + 2);
    send_many(&third, WINDOW + 3);
    end_connection(&second);
    streams_push();
    requires_sent(&first, WINDOW + 1, "holds back what the program waits for");
    requires_sent(&third, WINDOW + 3, "holds back what the program waits for on another connection");
    send_nothing(&first);
    requires_sent(&first, WINDOW + 1, "sends a message of many by itself");
    streams_push();
    streams_push();
    requires_sent(&first, WINDOW + 2, "pushes once only");
    end_connection(&first);
    end_connection(&third);
}

static void a_list_takes_along_what_waits(void)
{
    struct end end = sending_to_softnd();

    send_many(&end, WINDOW + 1);
    qp_start_batch(end.qp);
    send_many(&end, 2);
    qp_submit_batch(end.qp);
    requires_sent(&end, WINDOW + 3, "lets a list wait");
    end_connection(&end);
}

static void what_waits_is_sent_before_the_end(void)
{
    struct end end = sending_to_softnd();

    send_many(&end, WINDOW + 3);
    disconnect(&end);
    world_run();
    requires_sent(&end, WINDOW + 3, "disconnects before it sends");
    end_connection(&end);
}

static void enough_bytes_wait_for_nothing(void)
{
    static uint8_t memory[LARGE];
    struct end end = sending_to_softnd();
    struct region *region;
    struct operation operation;

    world_require(region_create(adapter, adapter, NULL, &region) == ND_SUCCESS &&
                      region_begin(region, memory, LARGE, (uintptr_t)memory, 0) == ND_SUCCESS,
                  "does not register");
    const ND2_SGE sge = {memory, LARGE, region_local_token(region)};
    send_many(&end, WINDOW);
    for (unsigned i = 1; i <= 2; i++) {
        requires_sent(&end, WINDOW, "sends a message of many by itself");
        operation_begin(&operation, NULL, Nd2RequestTypeSend, 0);
        world_require(qp_post_data(end.qp, &operation, &sge, 1) == ND_SUCCESS, "takes no Send");
        world_run();
    }
    requires_sent(&end, WINDOW + 2, "holds back many bytes");
    end_connection(&end);
    object_close(&region->object);
}

static void what_waits_ends_with_a_connection_that_is_reset(void)
{
    struct end end = sending_to_softnd();
    struct cq_entry entries[DEPTH];

    send_many(&end, WINDOW + 3);
    world_end(end.socket, true);
    world_run();
    world_require(cq_take(end.cq, entries, DEPTH) == WINDOW + 3, "loses what has waited");
    end_connection(&end);
    streams_push();
}

/* Such a peer answers Reads, and is asked by one behind each message. */
static void a_peer_without_receipts_gets_each_at_once(void)
{
    struct end end = connected_with(NULL, (struct read_limits){DEPTH, DEPTH});

    for (unsigned i = 1; i <= WINDOW + 3; i++) {
        send_nothing(&end);
        requires_sent(&end, i, "delays a message to a peer without receipts");
    }
    end_connection(&end);
}

int main(void)
{
    world_reset();
    adapter = calloc(1, sizeof *adapter);
    world_require(adapter_start(adapter, &face_adapter_class, NULL) == ND_SUCCESS, "does not start");
    few_are_sent_at_once();
    what_waits_is_sent_when_the_peer_answers();
    what_waits_is_sent_when_the_program_looks();
    a_list_takes_along_what_waits();
    what_waits_is_sent_before_the_end();
    enough_bytes_wait_for_nothing();
    what_waits_ends_with_a_connection_that_is_reset();
    a_peer_without_receipts_gets_each_at_once();
    object_close(&adapter->object);
    puts("gathering: 8 passed");
    return 0;
}
