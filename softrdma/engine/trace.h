/* Writes a line per event to the file that the face's ..._TRACE names. Without that variable it does nothing. */
#ifndef ENGINE_TRACE_H
#define ENGINE_TRACE_H

#include "compat.h"

#include <stdbool.h>

extern bool trace_on;

void trace_open(void);
void trace_close(void);
void trace_line(const char *format, ...) PRINTF_LIKE(1, 2);

#define TRACE(...)                   \
    do {                             \
        if (trace_on)                \
            trace_line(__VA_ARGS__); \
    } while (0)

#endif
