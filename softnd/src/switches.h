/* Switches for tests, read from the environment when an adapter is opened. */
#ifndef SOFTND_SWITCHES_H
#define SOFTND_SWITCHES_H

#include <stdbool.h>
#include <stdint.h>

#define SWITCH_OFF UINT64_MAX

struct switches {
    /* SOFTND_DELAY_COMPLETIONS_MS: overlapped requests complete this much later */
    uint32_t delay_completions_ms;
    uint32_t delay_cancel_ms;             /* SOFTND_DELAY_CANCEL_MS: canceled requests complete this much later */
    uint32_t delay_registration_ms;       /* SOFTND_DELAY_REGISTRATION_MS: Register completes this much later */
    /* SOFTND_START_UP_MS: the time to connect or to complete a frame; 0: the usual one */
    uint32_t start_up_ms;
    /* SOFTND_CUT_AFTER_BYTES: a connection is aborted after this many sent bytes */
    uint64_t cut_after_bytes;
    uint64_t remove_after_requests;       /* SOFTND_REMOVE_AFTER_REQUESTS: the adapter is gone after this many */
    /* SOFTND_REFUSE_REGISTRATIONS_AFTER: later ones get ND_INSUFFICIENT_RESOURCES */
    uint64_t refuse_registrations_after;
    uint64_t connect_timeouts;            /* SOFTND_CONNECT_TIMEOUTS: this many Connects of version 1 give ND_TIMEOUT */
    bool strict_read_sink;                /* SOFTND_READ_SINK=strict: D.3.6 is enforced */
    bool require_crc;                     /* SOFTND_CRC=required */
    bool exact_sge;                       /* SOFTND_SGE=exact: no more elements than asked for */
};

struct switches switches_read(void);

/* Whether this version of NetworkDirect is served. SOFTND_VERSION can name the only one. */
bool switches_version(unsigned version);

/* Copies the value of an environment variable to `buffer`. False if it is not set or does not fit. */
bool switches_text(const char *name, char *buffer, uint32_t size);

#endif
