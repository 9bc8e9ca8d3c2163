/* What loader.c, requests.c and data_path.c offer to Python. A Win32 error number is returned where nothing else is said. */

/* The Winsock catalogue, hidden entries included: how many entries there are, of which up to `count` were written, or
   minus the Winsock error. Source: WSCEnumProtocols. */
int ndpy_protocols(struct nd_protocol *out, int count);
/* The path of a catalogue entry's DLL, environment variables expanded, in a buffer of `size` characters. */
uint32_t ndpy_provider_path(const unsigned char *provider_id, wchar_t *path, uint32_t size);
/* Adds or removes a catalogue entry. For administrators. Source: WSCInstallProvider, WSCDeinstallProvider. */
uint32_t ndpy_install_provider(const unsigned char *provider_id, const wchar_t *path, const struct nd_protocol *protocol);
uint32_t ndpy_deinstall_provider(const unsigned char *provider_id);

/* A provider's DLL. NULL: see *error; with *error 0 the export named by *missing is not there. */
struct ndpy_library *ndpy_load_provider(const wchar_t *path, uint32_t *error, const char **missing);
int32_t ndpy_get_class_object(struct ndpy_library *library, const unsigned char *class_id, const void *iid, void **object);
/* What DllCanUnloadNow says; S_OK is 0. */
int32_t ndpy_can_unload(struct ndpy_library *library);
void ndpy_unload_provider(struct ndpy_library *library);

/* The identifier of an interface by its name, NULL for a name that is none. */
const void *ndpy_iid(const char *name);

/* One overlapped request. It outlives both its owner and the provider's use: whoever is last frees it.

   key: handed back with the packet. forward: a completion port that gets the packet instead of the adapter's thread, or
   NULL. quiet: completion sets the event and queues no packet. region: where a provider of version 1 writes the handle of
   what it registers, at any time until the request has ended (contract I.2.2). */
struct ndpy_request {
    struct nd_overlapped overlapped;
    void *region;
    uint64_t key;
    void *event;
    void *forward;
    volatile long references;
    uint32_t quiet;
};
struct ndpy_request *ndpy_request_new(uint64_t key, void *forward, int quiet);
/* Before it is given to a provider: the provider's use counts until its packet is taken. */
void ndpy_request_start(struct ndpy_request *request);
/* No packet will come: it was refused, or ended inline, or its event was waited for. */
void ndpy_request_stop(struct ndpy_request *request);
void ndpy_request_drop(struct ndpy_request *request);
/* Its result, STATUS_PENDING while it runs. Asked after it ended, a provider may start another phase and say STATUS_PENDING
   once more (contract C.4.5): then another packet comes, and counts as another use. */
int32_t ndpy_request_result(struct IND2Overlapped *target, struct ndpy_request *request);
int32_t version1_request_result(struct INDOverlapped *target, struct ndpy_request *request);
/* The port in `forward` is going to be closed. */
void ndpy_request_detach(struct ndpy_request *request);

struct ndpy_packet {
    uint64_t key;
    struct ndpy_request *request;   /* NULL: posted by ndpy_post_packet */
};
/* Up to `count` packets of a port, waiting up to timeout_ms (0xFFFFFFFF: for ever). Packets that are to be forwarded
   elsewhere are, without returning. Returns their number, 0 after the time, or minus an error. */
int ndpy_take_packets(void *port, struct ndpy_packet *out, uint32_t count, uint32_t timeout_ms);
int32_t ndpy_post_packet(void *port, uint64_t key);

/* What the common data path has not (ndpy_abi.h). access: ND_OP_FLAG_ALLOW_READ and ND_OP_FLAG_ALLOW_WRITE. */
int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *region, void *window,
    uint64_t address, uint64_t length, uint32_t access);
int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *window);

/* Remote tokens as numbers, which to_bytes() puts into network order. */
uint32_t ndpy_region_remote_token(struct IND2MemoryRegion *region);
uint32_t ndpy_window_remote_token(struct IND2MemoryWindow *window);
