/* The functions of verbs that ndpy._core calls by itself. */

#include <time.h>

static uint64_t native_time_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int ndpy_spin(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count,
                     const volatile int *stop, uint64_t nanoseconds)
{
    return native_spin(ndpy_poll, native_time_ns, cq, out, count, stop, nanoseconds);
}

const struct ndpy_provider *ndpy_provider_table(void)
{
    static const struct ndpy_provider provider = {
        .post = ndpy_post,
        .post_shared = ndpy_post_shared,
        .poll = ndpy_poll,
        .poll_internal = ndpy_poll_internal,
        .spin = ndpy_spin,
        .largest_token = LARGEST_TOKEN,
        .list_new = verbs_list_new,
        .list_free = verbs_list_free,
        .post_list = verbs_post_list,
        .arm = arm,
        .sleep = sleep_on_channel,
        .take_event = take_event,
        .renew = renew,
    };

    return &provider;
}
