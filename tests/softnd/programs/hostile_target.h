/* The body of both programs hostile_target, this folder's for softnd and that of tests/soft/programs for softverbs: a
 * listener for the hostile peers. Everybody may connect. It reports what was done to its memory.
 *
 * It prints JSON lines: {"port": ...} first, a report on request, and one at the end. SECRET, eight characters, fills
 * all memory around what is granted, so that the test finds it in anything that was read.
 *
 * Each connection has a slot with 64 KiB of its own. Everybody may use a region of 4 KiB through its remote token. The
 * connection may use a window to write and a window to read, 512 bytes each, in a region of 8 KiB without remote
 * rights. After the connection, all other bytes must be unchanged, and those of the window to read as well.
 *
 * "own": each queue pair has its own receives. "shared": all queue pairs use one shared receive queue, and a
 * connection's messages may lie in the memory of any slot.
 *
 * The target sends the first message on a connection: what is granted. The peer may then send up to 64 bytes.
 * "invalidate" ends the window to write; the answer is the message "invalidated". "echo..." is sent back. "report
 * SECRET" prints a report. "quit SECRET" ends the program. Any other message is taken and ignored.
 *
 * The program first defines struct native: what a connection consists of.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define SLOTS        6
#define RECEIVES     16
#define RECEIVE_SIZE 64
#define SENDS        8
#define SEND_SIZE    64

#define SECRET_SIZE   8
#define SLOT_SIZE     0x10000u
#define OPEN_AT       0x1000u /* the region for everybody */
#define OPEN_SIZE     0x1000u
#define HIDDEN_AT     0x3000u /* the region behind the windows */
#define HIDDEN_SIZE   0x2000u
#define WRITABLE_AT   (HIDDEN_AT + 0x400)
#define READABLE_AT   (HIDDEN_AT + 0x1000)
#define WINDOW_SIZE   0x200u
#define RECEIVE_AT    0x8000u /* at multiples of 2 * RECEIVE_SIZE */
#define RECEIVE_STEP  (2u * RECEIVE_SIZE)
#define SEND_AT       0xC000u
#define READABLE_FILL 'r'

struct slot {
    unsigned number;
    struct native native;
    bool writable_bound;
    unsigned sends;
    unsigned char *memory;
};

static struct slot slots[SLOTS];
static char secret[SECRET_SIZE + 1];
static unsigned long long connections, refused, violations, messages, failures;
static bool with_shared, quitting;

/* ---- What the program supplies ---- */

/* Posts a receive to the shared queue, or to that of the slot. False: its connection is gone. */
static bool post_receive(struct slot *slot, unsigned char *buffer);
static void post_send(struct slot *slot, unsigned char *buffer, uint32_t size);
/* Invalidates the window to write. */
static void invalidate(struct slot *slot);
/* The number that a new handle gets. */
static unsigned long long next_handle(void);
static unsigned long long memory_used(void);

/* ---- Memory ---- */

static void report(const char *event)
{
    printf("{\"event\": \"%s\", \"connections\": %llu, \"refused\": %llu, \"violations\": %llu, \"messages\": %llu, "
           "\"failures\": %llu, \"next_handle\": %llu, \"resident\": %llu}\n",
           event, connections, refused, violations, messages, failures, next_handle(), memory_used());
    fflush(stdout);
}

/* The bytes that may have changed: the open region, the window to write, the receive buffers. */
static bool may_change(unsigned at)
{
    if (at >= OPEN_AT && at < OPEN_AT + OPEN_SIZE)
        return true;
    if (at >= WRITABLE_AT && at < WRITABLE_AT + WINDOW_SIZE)
        return true;
    if (at >= RECEIVE_AT && at < RECEIVE_AT + RECEIVES * RECEIVE_STEP)
        return (at - RECEIVE_AT) % RECEIVE_STEP < RECEIVE_SIZE;
    return at >= SEND_AT && at < SEND_AT + SENDS * SEND_SIZE;
}

static unsigned char expected_at(unsigned at)
{
    if (at >= READABLE_AT && at < READABLE_AT + WINDOW_SIZE)
        return READABLE_FILL;
    return (unsigned char)secret[at % SECRET_SIZE];
}

static void fill(struct slot *slot)
{
    for (unsigned at = 0; at < SLOT_SIZE; at++)
        slot->memory[at] = may_change(at) ? 0 : expected_at(at);
}

static void check_memory(struct slot *slot)
{
    unsigned bad = 0, first = 0;

    for (unsigned at = 0; at < SLOT_SIZE; at++)
        if (slot->memory[at] != expected_at(at) && !may_change(at) && !bad++)
            first = at;
    if (bad == 0)
        return;
    violations++;
    printf("{\"event\": \"violation\", \"slot\": %u, \"first\": %u, \"bytes\": %u}\n", slot->number, first, bad);
    fflush(stdout);
    fill(slot);
}

/* ---- Messages ---- */

/* False: a receive could not be posted. */
static bool post_receives(struct slot *slot)
{
    for (unsigned i = 0; i < RECEIVES; i++)
        if (!post_receive(slot, slot->memory + RECEIVE_AT + i * RECEIVE_STEP))
            return false;
    return true;
}

/* Drops a message if there is no room for it: peers that do not take their messages have no claim to more. */
static void send_message(struct slot *slot, const void *data, uint32_t size)
{
    unsigned char *buffer = slot->memory + SEND_AT + slot->sends++ % SENDS * SEND_SIZE;

    memcpy(buffer, data, size);
    post_send(slot, buffer, size);
}

/* Tells the peer what it may use. Tokens are in network order. */
static void grant(struct slot *slot, uint32_t open_token, uint32_t writable_token, uint32_t readable_token)
{
    uintptr_t memory = (uintptr_t)slot->memory;
    struct {
        uint64_t open, writable, readable;
        uint32_t open_token, writable_token, readable_token;
    } grant = {memory + OPEN_AT, memory + WRITABLE_AT, memory + READABLE_AT,
               open_token,       writable_token,       readable_token};

    send_message(slot, &grant, sizeof grant - 4);
}

static bool is_command(const char *message, uint32_t size, const char *word)
{
    size_t length = strlen(word);

    return size == length + SECRET_SIZE && memcmp(message, word, length) == 0 &&
           memcmp(message + length, secret, SECRET_SIZE) == 0;
}

static void received(struct slot *slot, const char *message, uint32_t size)
{
    messages++;
    if (size > RECEIVE_SIZE) {
        failures++;
        return;
    }
    if (size == 10 && memcmp(message, "invalidate", 10) == 0 && slot->writable_bound) {
        slot->writable_bound = false;
        invalidate(slot);
        send_message(slot, "invalidated", 11);
    } else if (size >= 4 && memcmp(message, "echo", 4) == 0) {
        send_message(slot, message, size);
    } else if (is_command(message, size, "report ")) {
        report("report");
    } else if (is_command(message, size, "quit ")) {
        quitting = true;
    }
}

/* A receive has ended. slot: that of its connection, NULL if that has ended too. A receive of the shared queue returns
   there, whatever has become of it. */
static void take_receive(struct slot *slot, unsigned char *buffer, bool succeeded, uint32_t size)
{
    bool posted = true;

    if (slot != NULL && succeeded)
        received(slot, (const char *)buffer, size);
    for (unsigned i = 0; with_shared && i < SLOTS; i++)
        if ((uintptr_t)buffer - (uintptr_t)slots[i].memory < SLOT_SIZE)
            posted = post_receive(&slots[i], buffer);
    failures += !posted;
    if (!with_shared && slot != NULL && succeeded)
        (void)!post_receive(slot, buffer);
}
