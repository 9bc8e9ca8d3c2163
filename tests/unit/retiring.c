/* When does the data path give the slot of an ended request back? A provider's functions that read a result run before
   that: each of them tries to post with the slot, and is refused. Prints what is wrong. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ndpy_abi.h"
#include "rings.c"
#include "data_path.h"

struct result {
    struct ndpy_slot *slot;
    uint32_t status;
};

static struct ndpy_queue_pair *qp;
static struct result completed;
static int is_completed, posts_receives, calls, given_back;
static unsigned char headers[HEADER_SIZE];

static int post_again(void);

/* Called in the middle of a translation. */
static void try_to_post(void)
{
    if (!is_completed)
        return;
    calls++;
    given_back += post_again() != NDPY_QUEUE_FULL;
}

static void *elements(void *out, const struct ndpy_element *all, uint32_t count)
{
    return out;
}

static void data_request(void *out, uint32_t operation, void *all, uint32_t count, const struct ndpy_remote *remote) {}

static int post(struct ndpy_queue_pair *to, struct ndpy_slot *slot, void *request, int signaled)
{
    completed.slot = slot;
    return 0;
}

static int receive(struct ndpy_queue_pair *to, struct ndpy_slot *slot, void *all, uint32_t count)
{
    return post(to, slot, all, 1);
}

static int poll_one(struct ndpy_completion_queue *cq, void *results, uint32_t count)
{
    *(struct result *)results = completed;
    return 1;
}

static struct ndpy_slot *slot_of(const void *result)
{
    return ((const struct result *)result)->slot;
}

static uint32_t none(const void *result)
{
    try_to_post();
    return 0;
}

static uint32_t status_of(const void *result)
{
    try_to_post();
    return ((const struct result *)result)->status;
}

static uint64_t bytes_of(const void *result)
{
    try_to_post();
    return 100 + HEADER_SIZE;
}

static void received(const void *result, struct ndpy_completion *out)
{
    try_to_post();
}

static void datagram(const void *result, const struct ndpy_slot *slot, struct ndpy_completion *out)
{
    try_to_post();
    out->nbytes -= HEADER_SIZE;
}

static uint32_t translate_status(uint32_t status, uint32_t operation, uint32_t flags)
{
    try_to_post();
    return status;
}

static uint32_t all_translated(const void *results, int got, struct ndpy_completion *out);
static void translate_other(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out);

static const struct native_steps provider = {
    .elements = elements,
    .data_request = data_request,
    .post = post,
    .receive = receive,
    .no_memory = ENOMEM,
    .result_size = sizeof(struct result),
    .poll = poll_one,
    .slot = slot_of,
    .queue_pair = none,
    .status = status_of,
    .vendor_status = none,
    .bytes = bytes_of,
    .received = received,
    .datagram = datagram,
    .translate_status = translate_status,
    .translate_all = all_translated,
    .translate_other = translate_other,
};

static uint32_t all_translated(const void *results, int got, struct ndpy_completion *out)
{
    return translate_all(&provider, results, got, out);
}

static void translate_other(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out)
{
    translate_rest(&provider, result, slot, out);
}

static int post_with(uint32_t flags)
{
    static const struct ndpy_element element = {1, 1, 100};
    static const struct ndpy_remote nowhere;
    uint64_t request[64];

    return post_request(&provider, qp, posts_receives ? NDPY_RECEIVE : NDPY_SEND, flags, 7, &element, 1, &nowhere,
                        request);
}

static int post_again(void)
{
    return post_with(0);
}

/* One request, whose slot is the only one. Returns whether the slot was free before everything was read. */
static int run(const char *name, int receives, int has_header, uint32_t flags, uint32_t status)
{
    struct result results[NDPY_POLL_BATCH];
    struct ndpy_completion out;
    struct ndpy_completion_queue *cq = ndpy_completion_queue_new(NULL);
    uint32_t alike;
    int is_wrong;

    qp = ndpy_queue_pair_new(NULL, 1, 1, 1, 1, 1, 0, 4096);
    if (has_header)
        ndpy_queue_pair_take_headers(qp, headers, 7);
    ndpy_queue_pair_set_connection(qp, NDPY_CONNECTED);
    posts_receives = receives;
    calls = given_back = 0;
    if (post_with(flags) || post_again() != NDPY_QUEUE_FULL)
        return printf("%s: the ring does not have one slot\n", name);
    completed.status = status;
    is_completed = 1;
    poll_results(&provider, cq, &out, 1, &alike, results);
    is_completed = 0;
    is_wrong = !calls || given_back || post_again();
    if (is_wrong)
        printf("%s: in %d of %d calls the slot was free before it was read, or it was not afterwards\n", name,
               given_back, calls);
    ndpy_completion_queue_free(cq);
    ndpy_queue_pair_free(qp);
    return is_wrong;
}

int main(void)
{
    int wrong = 0;

    (void)cancel_rest;
    wrong += run("a send", 0, 0, 0, 0);
    wrong += run("a silent send", 0, 0, NDPY_SILENT_SUCCESS, 0);
    wrong += run("a failed send", 0, 0, 0, 3);
    wrong += run("a receive", 1, 0, 0, 0);
    wrong += run("a failed receive", 1, 0, 0, 3);
    wrong += run("a receive of a datagram", 1, 1, 0, 0);
    wrong += run("a cancelled receive of a datagram", 1, 1, 0, 3);
    return wrong != 0;
}
