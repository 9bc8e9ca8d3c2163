/* What both versions of NetworkDirect have in common. */

#include "../data_path.h"

/* Flags have the same numbers in NetworkDirect and in ndpy. */
_Static_assert((int)ND_OP_FLAG_SILENT_SUCCESS == (int)NDPY_SILENT_SUCCESS, "flags");
_Static_assert((int)ND_OP_FLAG_READ_FENCE == (int)NDPY_READ_FENCE, "flags");
_Static_assert((int)ND_OP_FLAG_SEND_AND_SOLICIT_EVENT == (int)NDPY_SOLICITED, "flags");
_Static_assert((int)ND_OP_FLAG_INLINE == (int)NDPY_INLINE, "flags");

#define ND_BUFFER_OVERFLOW        0x80000005u
#define ND_NO_MORE_ENTRIES        0x8000001Au
#define ND_ACCESS_VIOLATION       0xC0000005u
#define ND_INVALID_DEVICE_REQUEST 0xC0000010u
#define ND_DATA_OVERRUN           0xC000003Cu
#define ND_DATA_ERROR             0xC000003Eu
#define ND_INSUFFICIENT_RESOURCES 0xC000009Au
#define ND_IO_TIMEOUT             0xC00000B5u
#define ND_INTERNAL_ERROR         0xC00000E5u
#define ND_CANCELED               0xC0000120u
#define ND_REMOTE_ERROR           0xC000013Du
#define ND_CONNECTION_INVALID     0xC000023Au

/* Translate a provider's refusal to enum ndpy_refusal, if that has the same reason. */
static inline int refusal(int32_t status)
{
    switch ((uint32_t)status) {
    case ND_NO_MORE_ENTRIES:
        return NDPY_QUEUE_FULL;
    case ND_CONNECTION_INVALID:
        return NDPY_NOT_CONNECTED;
    default:
        return status;
    }
}

static uint32_t translate_status(uint32_t status, uint32_t operation, uint32_t flags)
{
    (void)operation;
    (void)flags;
    switch (status) {
    case 0:
        return NDPY_SUCCESS;
    case ND_CANCELED:
        return NDPY_CANCELED;
    case ND_ACCESS_VIOLATION:
        return NDPY_ACCESS_VIOLATION;
    case ND_BUFFER_OVERFLOW:
        return NDPY_BUFFER_OVERFLOW;
    case ND_DATA_OVERRUN:
    case ND_DATA_ERROR:
        return NDPY_DATA_OVERRUN;
    case ND_IO_TIMEOUT:
        return NDPY_IO_TIMEOUT;
    case ND_REMOTE_ERROR:
        return NDPY_REMOTE_ERROR;
    case ND_INVALID_DEVICE_REQUEST:
        return NDPY_INVALID_REQUEST;
    case ND_INTERNAL_ERROR:
        return NDPY_INTERNAL_ERROR;
    default:
        return NDPY_UNKNOWN;
    }
}

/* Results have no details of an error. */
static uint32_t no_vendor_status(const void *result)
{
    (void)result;
    return 0;
}

/* The result of a receive has only a length. */
static void nothing_received(const void *result, struct ndpy_completion *out)
{
    (void)result;
    (void)out;
}

static uint64_t native_time_ns(void)
{
    LARGE_INTEGER ticks, frequency;

    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return (uint64_t)((double)ticks.QuadPart * 1e9 / (double)frequency.QuadPart);
}

/* A bind, or an invalidation, which has a window only. granted: where version 1 writes the window's descriptor. */
struct window_request {
    void *region;
    void *window;
    unsigned char *granted;
    uint64_t address;
    uint64_t length;
    uint32_t access;
};

int ndpy_cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq)
{
    return cancel_rest(qp, receive, cq, ND_CANCELED);
}
