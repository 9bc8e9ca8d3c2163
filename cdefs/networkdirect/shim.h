/* The functions of loader.c, requests.c and data_path.c that Python calls. They return a Win32 error number unless a
   comment says otherwise. */

/* Writes up to `count` entries of the Winsock catalogue, including hidden ones. Returns how many entries there are,
   or minus the Winsock error. Source: WSCEnumProtocols. */
int ndpy_protocols(struct nd_protocol *out, int count);
/* Writes the path of a catalogue entry's DLL to a buffer of `size` characters. Expands environment variables. */
uint32_t ndpy_provider_path(const unsigned char *provider_id, wchar_t *path, uint32_t size);
/* Adds or removes a catalogue entry. Only administrators may. Source: WSCInstallProvider, WSCDeinstallProvider. */
uint32_t ndpy_install_provider(const unsigned char *provider_id, const wchar_t *path,
                               const struct nd_protocol *protocol);
uint32_t ndpy_deinstall_provider(const unsigned char *provider_id);

/* Loads a provider's DLL. Returns NULL on failure. Then *error has the reason. If *error is 0, the DLL lacks the
   export that *missing names. */
struct ndpy_library *ndpy_load_provider(const wchar_t *path, uint32_t *error, const char **missing);
int32_t ndpy_get_class_object(struct ndpy_library *library, const unsigned char *class_id, const void *iid,
                              void **object);
/* Returns the result of DllCanUnloadNow. S_OK is 0. */
int32_t ndpy_can_unload(struct ndpy_library *library);
void ndpy_unload_provider(struct ndpy_library *library);

/* The identifier of an interface by its name. NULL if no interface has this name. */
const void *ndpy_iid(const char *name);

/* One overlapped request. Its owner and the provider use it. Whoever finishes last frees it.

   key: comes back with the packet.
   forward: a completion port that gets the packet instead of the adapter's thread, or NULL.
   quiet: completion sets the event and queues no packet.
   region: a provider of version 1 writes the handle of a new registration here, at any time until the request has ended
   (contract I.2.2). */
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
/* Call this before the request is given to a provider. The provider counts as a user until the packet is taken. */
void ndpy_request_start(struct ndpy_request *request);
/* Call this when no packet will come: the request was refused, it ended inline, or somebody waited for its event. */
void ndpy_request_stop(struct ndpy_request *request);
void ndpy_request_drop(struct ndpy_request *request);
/* The request's result, STATUS_PENDING while it runs. A provider that is asked after the end may start another
   phase, and return STATUS_PENDING once more (contract C.4.5). Then another packet comes, and counts as another use. */
int32_t ndpy_request_result(struct IND2Overlapped *target, struct ndpy_request *request);
int32_t version1_request_result(struct INDOverlapped *target, struct ndpy_request *request);
/* Call this before the port in `forward` is closed. */
void ndpy_request_forward(struct ndpy_request *request, void *port);

struct ndpy_packet {
    uint64_t key;
    struct ndpy_request *request; /* NULL: posted by ndpy_post_packet */
};
/* Takes up to `count` packets of a port, waiting up to timeout_ms (0xFFFFFFFF: for ever). Passes a packet that has a
   `forward` on to that port, and goes on waiting. Returns the number of packets, 0 after the timeout, or minus an
   error. */
int ndpy_take_packets(void *port, struct ndpy_packet *out, uint32_t count, uint32_t timeout_ms);
int32_t ndpy_post_packet(void *port, uint64_t key);

/* The data path for windows. access: ND_OP_FLAG_ALLOW_READ and ND_OP_FLAG_ALLOW_WRITE.
   descriptor: version 1 writes the window's descriptor there; NULL in version 2. */
int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *region, void *window,
                   unsigned char *descriptor, uint64_t address, uint64_t length, uint32_t access);
int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *window);

/* Remote tokens as numbers, which to_bytes() puts into network order. */
uint32_t ndpy_region_remote_token(struct IND2MemoryRegion *region);
uint32_t ndpy_window_remote_token(struct IND2MemoryWindow *window);
