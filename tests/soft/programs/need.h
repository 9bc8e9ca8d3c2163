/* What programs share that open any adapter, by libibverbs alone: failing, and the time. */

#ifndef NEED_H
#define NEED_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline void fail(const char *what, int error)
{
    printf("%s failed: %s\n", what, strerror(error));
    exit(1);
}

static inline void *need(void *made, const char *what)
{
    if (made == NULL)
        fail(what, errno);
    return made;
}

static inline double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

#endif
