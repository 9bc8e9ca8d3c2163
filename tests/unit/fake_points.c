/* Points before and after native calls, faults, and pipes of pointers. See fake_verbs.h. */

#include "fake_verbs.h"

void (*fake_on_point)(const char *call, int after);

struct fake_counts fake_counts;
pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char fault[200];

void fake_point(const char *call, int after)
{
    int number = errno;

    if (fake_on_point)
        fake_on_point(call, after);
    errno = number;
}

void fake_fault(const char *call, const char *what)
{
    if (!fault[0])
        snprintf(fault, sizeof fault, "%s: %s", call, what);
}

/* The first fault since the last call of this, or "" if there was none. */
void fake_take_fault(char *out, size_t size)
{
    snprintf(out, size, "%s", fault);
    fault[0] = 0;
}

int fake_check(const char *call, int alive)
{
    if (!alive)
        fake_fault(call, "the object was destroyed before");
    return alive;
}

void fake_begin(const char *call)
{
    fake_point(call, 0);
    pthread_mutex_lock(&fake_lock);
}

int fake_end(const char *call, int result)
{
    pthread_mutex_unlock(&fake_lock);
    fake_point(call, 1);
    return result;
}

int fake_failure(int32_t *number)
{
    int error = *number;

    *number = 0;
    return error;
}

void fake_pipe(int *read_end, int *write_end)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC))
        abort();
    *read_end = ends[0];
    *write_end = ends[1];
}

void fake_push(int write_end, void *pointer)
{
    if (write(write_end, &pointer, sizeof pointer) != sizeof pointer)
        abort();
}

void *fake_pull(int read_end)
{
    void *pointer;

    return read(read_end, &pointer, sizeof pointer) == sizeof pointer ? pointer : NULL;
}

void fake_wait_for(const char *call, const int *left)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    while (*left)
        if (pthread_cond_timedwait(&changed, &fake_lock, &until)) {
            fake_fault(call, "an event is never acknowledged");
            return;
        }
}

void fake_changed(void)
{
    pthread_cond_broadcast(&changed);
}
