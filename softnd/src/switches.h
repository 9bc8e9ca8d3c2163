/* Switches for tests, read from the environment when an adapter is opened. */
#ifndef SOFTND_SWITCHES_H
#define SOFTND_SWITCHES_H

#include <stdbool.h>
#include <stdint.h>

#define SWITCH_OFF UINT64_MAX

struct switches {
    uint32_t delay_completions_ms;        /* SOFTND_DELAY_COMPLETIONS_MS: overlapped requests complete later */
    uint32_t delay_cancel_ms;             /* SOFTND_DELAY_CANCEL_MS: cancelled requests complete later */
    uint32_t delay_registration_ms;       /* SOFTND_DELAY_REGISTRATION_MS: Register completes later */
    uint32_t start_up_ms;                 /* SOFTND_START_UP_MS: a peer's time to connect and for a frame; 0: the usual */
    uint64_t cut_after_bytes;             /* SOFTND_CUT_AFTER_BYTES: a connection is cut after so many bytes sent */
    uint64_t remove_after_requests;       /* SOFTND_REMOVE_AFTER_REQUESTS: the adapter is gone after so many */
    uint64_t refuse_registrations_after;  /* SOFTND_REFUSE_REGISTRATIONS_AFTER: ND_INSUFFICIENT_RESOURCES then */
    uint64_t connect_timeouts;            /* SOFTND_CONNECT_TIMEOUTS: so many Connects of version 1 give ND_TIMEOUT */
    bool strict_read_sink;                /* SOFTND_READ_SINK=strict: D.3.6 enforced */
    bool require_crc;                     /* SOFTND_CRC=required */
    bool exact_sge;                       /* SOFTND_SGE=exact: no more elements are granted than were asked for */
};

struct switches switches_read(void);

/* Whether this version of NetworkDirect is served: SOFTND_VERSION names the only one. */
bool switches_version(unsigned version);

/* The value of an environment variable in `buffer`, false when it is not set or does not fit. */
bool switches_text(const char *name, char *buffer, uint32_t size);

#endif
