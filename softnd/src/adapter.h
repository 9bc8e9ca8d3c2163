/* The adapter: limits, switches, the token table of its memory, and the creation of all other objects. */
#ifndef SOFTND_ADAPTER_H
#define SOFTND_ADAPTER_H

#include "object.h"
#include "switches.h"
#include "memory.h"

#define SOFTND_ADAPTER_ID UINT64_C(0x736F66746E640001)

#define MAX_REGISTRATION_SIZE ((SIZE_T)1 << 36)
#define MAX_SGE 16u
#define MAX_TRANSFER_LENGTH (1u << 30)
#define MAX_INLINE_DATA 236u
#define MAX_READ_LIMIT 64u
/* Odd, so one less than this is even. Some programs use that depth, and return credits for half of it at a time. */
#define MAX_QUEUE_DEPTH 1025u
#define MAX_SHARED_QUEUE_DEPTH 4096u
#define MAX_CQ_DEPTH 65536u
#define MAX_PRIVATE_DATA 508u /* what an enhanced MPA frame can carry */
#define MIN_GRANTED_SGE 4u
#define LARGE_REQUEST 32768u

#define SOFTND_VENDOR_ID 0x736Eu
#define SOFTND_DEVICE_ID 0x0002u

struct adapter {
    struct object object;
    struct switches switches;
    struct token_table tokens;
    SRWLOCK sources_lock; /* taken only outside of other locks or under a listener's or connector's */
    struct source *sources;
    volatile LONG64 requests;      /* counted for SOFTND_REMOVE_AFTER_REQUESTS */
    volatile LONG64 registrations; /* counted for SOFTND_REFUSE_REGISTRATIONS_AFTER */
    volatile LONG removed;
};

/* The number of elements that a request may have if the program asked for this many. Some programs ask for 1 and use
 * 2. */
static inline ULONG granted_sge(const struct adapter *adapter, ULONG asked)
{
    return adapter->switches.exact_sge || asked > MIN_GRANTED_SGE ? asked : MIN_GRANTED_SGE;
}

HRESULT adapter_create(REFIID iid, void **out);
/* For the adapter objects of both versions. adapter_start needs zeroed memory and returns false if the workers cannot
 * be started. adapter_end does not free the memory. */
bool adapter_start(struct adapter *adapter, const struct object_class *class, const struct object_view *as);
void adapter_end(struct adapter *adapter);
/* Counts a request. False if the adapter is gone. */
bool adapter_request(struct adapter *adapter);
static inline bool adapter_gone(const struct adapter *adapter)
{
    return adapter->removed != 0;
}

void adapter_count_registration(LONG made, LONG leaked);
LONG adapter_registrations_made(void);
LONG adapter_registrations_leaked(void);

#endif
