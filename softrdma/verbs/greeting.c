/* See greeting.h. */
#include "greeting.h"
#include "forking.h"
#include "numbers.h"
#include "wire/bytes.h"

#include <stdlib.h>
#include <string.h>

/* How long a connection waits for its queue pair. */
#define WAIT_MS 10000
/* One queue pair has one peer. Others may be attempts that the peer has given up, or a stranger's. */
#define WAITING_EACH 4u
#define WAITING_ALL  256u

static const uint8_t magic[8] = {'s', 'o', 'f', 't', 'q', 'p', 0, 2};

static struct waiting *waiting; /* the newest first */
static struct timer sweep;

void greeting_write(uint8_t out[static GREETING_SIZE], const struct greeting *greeting)
{
    memcpy(out, magic, sizeof magic);
    put32(out + 8, greeting->to);
    put32(out + 12, greeting->from);
    put32(out + 16, greeting->to_psn);
    put32(out + 20, greeting->from_psn);
}

bool greeting_read(const struct connector_offer *offer, struct greeting *out)
{
    const uint8_t *data = offer->private_data;

    if (offer->private_size < GREETING_SIZE || memcmp(data, magic, sizeof magic) != 0)
        return false;
    *out = (struct greeting){get32(data + 8), get32(data + 12), get32(data + 16), get32(data + 20)};
    return true;
}

/* ---- Waiting connections ---- */

struct waiting *waiting_take(bool (*matches)(const struct waiting *entry, const void *what), const void *what)
{
    struct waiting *taken = NULL;

    for (struct waiting **at = &waiting; *at != NULL;) {
        struct waiting *entry = *at;
        if (!matches(entry, what)) {
            at = &entry->next;
            continue;
        }
        *at = entry->next;
        entry->next = taken;
        taken = entry;
    }
    return taken;
}

static bool is_late(const struct waiting *entry, const void *now)
{
    return entry->until_ms <= *(const uint64_t *)now;
}

static bool is_for(const struct waiting *entry, const void *number)
{
    return entry->greeting.to == *(const uint32_t *)number;
}

static void sweep_out(struct timer *timer)
{
    uint64_t now = now_ms();

    pthread_mutex_lock(&numbers_lock);
    struct waiting *late = waiting_take(is_late, &now);
    if (waiting != NULL && !timer->set)
        timer_set(timer, WAIT_MS / 2, sweep_out);
    pthread_mutex_unlock(&numbers_lock);
    waiting_drop(late);
}

struct waiting *waiting_keep(struct waiting *entry)
{
    unsigned each = 0, all = 0;
    struct waiting *surplus = NULL;

    entry->until_ms = now_ms() + WAIT_MS;
    entry->next = waiting;
    waiting = entry;
    for (struct waiting **at = &waiting; *at != NULL;) {
        struct waiting *other = *at;
        each += other->greeting.to == entry->greeting.to;
        all++;
        if (all <= WAITING_ALL && (each <= WAITING_EACH || other->greeting.to != entry->greeting.to)) {
            at = &other->next;
            continue;
        }
        *at = other->next;
        other->next = surplus;
        surplus = other;
    }
    if (!sweep.set)
        timer_set(&sweep, WAIT_MS, sweep_out);
    return surplus;
}

void waiting_drop(struct waiting *list)
{
    for (struct waiting *next; list != NULL; list = next) {
        next = list->next;
        connector_close(list->connector);
        free(list);
    }
}

void waiting_drop_for(uint32_t number)
{
    pthread_mutex_lock(&numbers_lock);
    struct waiting *theirs = waiting_take(is_for, &number);
    pthread_mutex_unlock(&numbers_lock);
    waiting_drop(theirs);
}

void waiting_forget(void)
{
    system_keep(waiting);
    waiting = NULL;
    sweep.set = false;
}
