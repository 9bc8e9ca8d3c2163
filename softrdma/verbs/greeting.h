/* What the two ends of a pairing say to each other, and the connections whose queue pair is not ready yet.
 *
 * The private data of the start-up frame of the end that connects, all numbers in network order:
 *
 *    0   8   "softqp", 0, 2: the format and its version
 *    8   4   the number of the queue pair that it is for
 *   12   4   the number of the queue pair that connects
 *   16   4   the PSN that the other end was told to begin with (its sq_psn, this end's rq_psn)
 *   20   4   the PSN that this end begins with (its sq_psn, the other end's rq_psn), 0xFFFFFFFF before it is in RTS
 *
 * The answer has no private data. Other versions are refused.
 */
#ifndef SOFTVERBS_GREETING_H
#define SOFTVERBS_GREETING_H

#include "connector.h"

#define GREETING_SIZE 24u
/* A PSN has 24 bits. */
#define PSN_MASK 0xFFFFFFu
#define NO_PSN   UINT32_MAX

struct greeting {
    uint32_t to, from;
    uint32_t to_psn, from_psn;
};

void greeting_write(uint8_t out[static GREETING_SIZE], const struct greeting *greeting);
/* False: it is none. */
bool greeting_read(const struct connector_offer *offer, struct greeting *out);

/* A connection whose queue pair's program has not named its peer yet, or has not said with which PSN it begins. */
struct waiting {
    struct waiting *next;
    struct connector *connector;
    struct greeting greeting;
    struct sockaddr_storage peer;
    uint64_t until_ms;
};

/* All of these but the last two are called under numbers_lock. The caller drops what they return, without the lock.
 *
 * Keeps a connection for a while. If there are too many, the oldest are returned. */
struct waiting *waiting_keep(struct waiting *entry);
/* Takes out those for which `matches` is true. */
struct waiting *waiting_take(bool (*matches)(const struct waiting *entry, const void *what), const void *what);
/* In a forked child. */
void waiting_forget(void);
/* Refuses them. */
void waiting_drop(struct waiting *list);
/* The number is not in use any more: they are not for the next queue pair that has it. */
void waiting_drop_for(uint32_t number);

#endif
