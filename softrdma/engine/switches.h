/* Switches for tests, read from the environment when an adapter is opened. The names of the variables begin with the
 * face's prefix: SOFTND_ or SOFTVERBS_. */
#ifndef ENGINE_SWITCHES_H
#define ENGINE_SWITCHES_H

#include <stdbool.h>
#include <stdint.h>

#define SWITCH_OFF UINT64_MAX

struct switches {
    uint32_t delay_completions_ms;  /* DELAY_COMPLETIONS_MS: the face's requests complete this much later */
    uint32_t delay_cancel_ms;       /* DELAY_CANCEL_MS: canceled ones also complete this much later */
    uint32_t delay_registration_ms; /* DELAY_REGISTRATION_MS: a registration completes this much later */
    uint32_t start_up_ms; /* START_UP_MS: the time for each step of the start-up that is limited; 0: the usual ones */
    uint64_t cut_after_bytes;            /* CUT_AFTER_BYTES: a connection is aborted after this many sent bytes */
    uint64_t remove_after_requests;      /* REMOVE_AFTER_REQUESTS: the adapter is gone after this many */
    uint64_t refuse_registrations_after; /* REFUSE_REGISTRATIONS_AFTER: later ones get ND_INSUFFICIENT_RESOURCES */
    uint64_t connect_timeouts;           /* CONNECT_TIMEOUTS: this many first connection attempts time out at once */
    bool strict_read_sink;               /* READ_SINK=strict: D.3.6 is enforced */
    bool require_crc;                    /* CRC=required */
    bool exact_sge;                      /* SGE=exact: no more elements than asked for */
};

struct switches switches_read(void);

/* The value of a variable, named without its prefix. False if it is not set or does not fit. */
bool switches_text(const char *name, char *buffer, uint32_t size);
uint64_t switches_number(const char *name, uint64_t otherwise);

#endif
