/* The data path of NetworkDirect. Both versions share this file.

   A version's data_path.c includes this file after its own functions of the provider. struct native_request then has
   the fields that ndpy_post_bind() below fills in. */

/* Results of NetworkDirect have no details of an error. */
static uint32_t native_vendor_status(const struct native_result *result)
{
    (void)result;
    return 0;
}

/* The result of a receive has only a length. */
static void native_received(const struct native_result *result, struct ndpy_completion *out)
{
    (void)result;
    (void)out;
}

#include "../data_path.c"

int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *region, void *window,
    unsigned char *descriptor, uint64_t address, uint64_t length, uint32_t access)
{
    struct native_request request = {
        .region = region,
        .window = window,
        .granted = descriptor,
        .address = address,
        .length = length,
        .access = access,
    };

    return post_initiator(qp, NDPY_BIND, flags, context, length, &request);
}

int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *window)
{
    struct native_request request = {.window = window};

    return post_initiator(qp, NDPY_INVALIDATE, flags, context, 0, &request);
}
