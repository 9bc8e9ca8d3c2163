/* Settings, read from the environment when an adapter is opened. The names of the variables begin with the
 * face's prefix: SOFTND_ or SOFTVERBS_. */
#ifndef ENGINE_SETTINGS_H
#define ENGINE_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

struct settings {
    uint32_t start_up_ms;  /* START_UP_MS: the time for each step of the start-up that is limited; 0: the usual ones */
    bool strict_read_sink; /* READ_SINK=strict: D.3.6 is enforced */
    bool require_crc;      /* CRC=required */
    bool exact_sge;        /* SGE=exact: no more elements than asked for */
};

struct settings settings_read(void);

/* The value of a variable, named without its prefix. False if it is not set or does not fit. */
bool settings_text(const char *name, char *buffer, uint32_t size);
uint64_t settings_number(const char *name, uint64_t otherwise);

#endif
