/* The functions of ndpy_abi.h and shim.h for one version of NetworkDirect. The file that includes this defines

     NAME(function)    the name of a function
     STEPS             the struct native_steps
     REQUEST, RESULT   the types of a request and of a result
     LARGEST_TOKEN     of an element
     POST_SHARED       see struct ndpy_provider */

APART uint32_t NAME(translate_all)(const void *results, int got, struct ndpy_completion *out)
{
    return translate_all(&STEPS, results, got, out);
}

APART void NAME(translate_other)(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out)
{
    translate_rest(&STEPS, result, slot, out);
}

int NAME(post)(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
               const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote)
{
    REQUEST request;

    return post_request(&STEPS, qp, operation, flags, context, elements, count, remote, &request);
}

int NAME(post_marker)(struct ndpy_queue_pair *qp)
{
    REQUEST request;

    return post_marker(&STEPS, qp, &request);
}

int NAME(post_bind)(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *region, void *window,
                    unsigned char *descriptor, uint64_t address, uint64_t length, uint32_t access)
{
    REQUEST request = {.bind = {region, window, descriptor, address, length, access}};

    return post_window_request(&STEPS, qp, NDPY_BIND, flags, context, length, &request);
}

int NAME(post_invalidate)(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *window)
{
    REQUEST request = {.bind = {.window = window}};

    return post_window_request(&STEPS, qp, NDPY_INVALIDATE, flags, context, 0, &request);
}

int NAME(poll)(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, uint32_t *alike)
{
    RESULT results[NDPY_POLL_BATCH];

    return poll_results(&STEPS, cq, out, count, alike, results);
}

int NAME(drain)(struct ndpy_completion_queue *cq)
{
    RESULT results[NDPY_POLL_BATCH];

    return drain_results(&STEPS, cq, results);
}

static int NAME(spin)(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count,
                      const volatile int *stop, uint64_t nanoseconds)
{
    return native_spin(NAME(poll), native_time_ns, cq, out, count, stop, nanoseconds);
}

const struct ndpy_provider *NAME(provider_table)(void)
{
    static const struct ndpy_provider provider = {
        .post = NAME(post),
        .post_shared = POST_SHARED,
        .poll = NAME(poll),
        .poll_internal = ndpy_poll_internal,
        .spin = NAME(spin),
        .largest_token = LARGEST_TOKEN,
    };

    return &provider;
}

#undef NAME
#undef STEPS
#undef REQUEST
#undef RESULT
#undef LARGEST_TOKEN
#undef POST_SHARED
