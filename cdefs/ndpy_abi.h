/* What both shims and the Python side agree on. Plain declarations only: cffi reads this file as it is.
   Numbers are those of ndpy/flags.py; a test compares the two. */

enum ndpy_operation {
    NDPY_RECEIVE = 0,
    NDPY_SEND = 1,
    NDPY_BIND = 2,
    NDPY_INVALIDATE = 3,
    NDPY_READ = 4,
    NDPY_WRITE = 5
};

enum ndpy_status {
    NDPY_SUCCESS = 0,
    NDPY_CANCELED = 1,
    NDPY_ACCESS_VIOLATION = 2,
    NDPY_BUFFER_OVERFLOW = 3,
    NDPY_DATA_OVERRUN = 4,
    NDPY_IO_TIMEOUT = 5,
    NDPY_REMOTE_ERROR = 6,
    NDPY_INVALID_REQUEST = 7,
    NDPY_INTERNAL_ERROR = 8,
    NDPY_UNKNOWN = 9
};

enum ndpy_flag {
    NDPY_SILENT_SUCCESS = 0x1,
    NDPY_READ_FENCE = 0x2,
    NDPY_SOLICITED = 0x4,
    NDPY_INLINE = 0x20
};

/* Beside enum ndpy_flag in a slot. NDPY_UNWRITABLE: a receive's memory that may not be written. */
enum ndpy_internal_flag {
    NDPY_UNWRITABLE = 0x100,
    NDPY_MARKER = 0x200         /* a request of ndpy's own; its completion is hidden */
};

/* Why a post was refused before the provider saw it; a positive result is the provider's own number. */
enum ndpy_refusal {
    NDPY_QUEUE_FULL = -1,
    NDPY_NOT_CONNECTED = -2,
    NDPY_TOO_MANY_ELEMENTS = -3,
    NDPY_TOO_LONG = -4,
    NDPY_INLINE_TOO_LONG = -5,
    NDPY_BAD_FLAGS = -6,
    NDPY_NO_READS = -7
};

enum ndpy_connection {
    NDPY_NEVER_CONNECTED = 0,
    NDPY_CONNECTED = 1,
    NDPY_ENDED = 2,
    NDPY_ENDED_UNPOSTED = 3     /* as ENDED, for a provider that would never complete what is posted now */
};

enum ndpy_completion_flag {
    NDPY_HIDDEN = 1,            /* a silent success: it only retires requests */
    NDPY_FROM_SHARED_QUEUE = 2  /* queue_pair is the provider's number, slot the shared queue's slot */
};

/* A scatter/gather element: the layout of ibv_sge and of ND2_SGE. */
struct ndpy_element {
    uint64_t address;
    uint32_t length;
    uint32_t token;
};

/* 48 bytes. retired: how many requests of this queue, oldest first, this one ends (silent ones before it too). */
struct ndpy_completion {
    uint64_t context;
    uint64_t nbytes;
    uint32_t operation;
    uint32_t status;
    uint32_t native_status;
    uint32_t vendor_status;
    uint32_t queue_pair;
    uint32_t retired;
    uint32_t slot;
    uint32_t flags;
};
