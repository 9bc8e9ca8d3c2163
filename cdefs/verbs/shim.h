/* The functions of loader.c, events.c, connecting.c, extended.c, data_path.c and userfaultfd.c that Python calls. */

/* Which libraries: the system's libibverbs and librdmacm (or those that the environment names), or softverbs. With
   NDPY_FAULTY, through the shim. */
enum ndpy_library_number { NDPY_SYSTEM, NDPY_SOFTVERBS, NDPY_FAULTY, NDPY_LIBRARY_COUNT = 4 };

/* Opens both libraries and looks up the symbols of ibverbs.h, rdmacm.h and softverbs.h in them. Returns 0 on success.
   Otherwise 1 (libibverbs) or 2 (librdmacm) says which one cannot be used, and `failed` has the reason. With
   NDPY_FAULTY the shim has been opened. */
int ndpy_load(int library, const char *verbs_path, const char *rdmacm_path, char *failed, size_t failed_size);
int ndpy_has_symbol(int library, const char *name);
/* The shim, which stays open. Both return 0, or an errno with the reason in `failed`. A scenario begins with the
   second, and ends with the third. */
int ndpy_load_shim(const char *path, char *failed, size_t failed_size);
int ndpy_begin_faults(const char *path, char *failed, size_t failed_size);
void ndpy_end_faults(void);

/* The functions without an object that leads to its library. The library has been loaded. */
struct ibv_device **ndpy_get_device_list(int library, int *count);
void ndpy_free_device_list(int library, struct ibv_device **list);
struct ibv_context *ndpy_open_device(int library, struct ibv_device *device);
struct rdma_event_channel *ndpy_create_event_channel(int library);
void ndpy_destroy_event_channel(struct rdma_event_channel *channel);
/* Only of a library that has the symbol softverbs_addresses. The element of the array is a struct sockaddr_storage. */
struct ndpy_socket_address {
    uint8_t raw[128];
};
int ndpy_softverbs_addresses(int library, struct ndpy_socket_address *out, int count);

/* These wrap static inline functions of the header, which are not symbols of the library. ndpy_alloc_window()
   returns NULL and sets errno on failure. ndpy_free_window() and ndpy_arm() return an errno. */
struct ibv_mw *ndpy_alloc_window(struct ibv_pd *pd, int type);
int ndpy_free_window(struct ibv_mw *window);
int ndpy_arm(struct ibv_cq *cq, int solicited_only);

/* Takes and acknowledges one asynchronous event. key: the context of the queue pair, completion queue or shared receive
   queue that the event is about; 0 for the device. Returns 0 or an errno: EAGAIN if there is no event. */
struct ndpy_async_event {
    uint64_t key;
    uint32_t type;
    uint32_t port;
};
int ndpy_next_async_event(struct ibv_context *context, struct ndpy_async_event *out);

/* extended.c. details: some of enum ndpy_detail except NDPY_SOURCE, which datagrams bring in any case. The first
   returns NULL and sets errno on failure. polls_singly: see Quirk.RXE_NEXT_POLL_GOES_TOO_FAR. The third has the
   functions for such a queue; queue pairs have those of ndpy_provider_table(). */
struct ibv_cq *ndpy_create_extended_queue(struct ibv_context *context, uint32_t depth, void *own,
                                          struct ibv_comp_channel *channel, uint32_t details, int single_threaded);
struct ndpy_completion_queue *ndpy_extended_queue_new(struct ibv_cq *native, uint32_t details, int polls_singly);
const struct ndpy_provider *ndpy_extended_provider_table(void);
/* As ibv_create_qp(). operations: those of enum ndpy_newer_operation that the queue pair takes besides those of
 * ibv_post_send(). */
enum ndpy_newer_operation { NDPY_WITH_FLUSH = 0x800, NDPY_WITH_ATOMIC_WRITE = 0x1000 };
struct ibv_qp *ndpy_create_queue_pair(struct ibv_pd *pd, const struct ibv_qp_init_attr *plain, uint64_t operations);
/* XRC. Those that make something return NULL and set errno on failure, and the second returns an errno. fd: a file
   whose domain all processes share, or -1. number: by which senders name the queue. */
struct ibv_xrcd *ndpy_open_xrc_domain(struct ibv_context *context, int fd);
int ndpy_close_xrc_domain(struct ibv_xrcd *domain);
struct ibv_srq *ndpy_create_xrc_queue(struct ibv_pd *pd, struct ibv_xrcd *domain, struct ibv_cq *cq,
                                      const struct ibv_srq_init_attr *plain, uint32_t *number);
struct ibv_qp *ndpy_create_xrc_receiver(struct ibv_context *context, struct ibv_xrcd *domain, void *own);
/* What the device says that it can do of this. */
enum ndpy_newer_capability {
    NDPY_CAN_WRITE_ATOMICALLY = 1,
    NDPY_CAN_FLUSH_GLOBALLY = 2,
    NDPY_CAN_FLUSH_PERSISTENTLY = 4
};
uint32_t ndpy_newer_operations(struct ibv_context *context);
/* Reads the device's clock, between two times of the system's clock. mask: the bits that timestamps have. Returns 0 or
   an errno: EOPNOTSUPP if the device tells none. */
struct ndpy_clock {
    uint64_t ticks;
    uint64_t mask;
    uint64_t frequency_khz;
    uint64_t before_ns;
    uint64_t after_ns;
};
int ndpy_query_clock(struct ibv_context *context, struct ndpy_clock *out);

/* Takes and acknowledges all events of a channel. Returns how many there were. */
int ndpy_take_cq_events(struct ibv_comp_channel *channel);

/* Copies and acknowledges one connection event. key: the context that the connection was created with. A
   CONNECT_REQUEST has the listener's key in `listener`, and its new connection gets new_key. qkey and path: where
   datagrams go, of an ESTABLISHED for datagrams and a MULTICAST_JOIN. */
struct ndpy_cm_event {
    uint64_t key;
    uint64_t listener;
    struct rdma_cm_id *id;
    uint32_t type;
    int32_t status;
    uint32_t qp_num;
    uint32_t qkey;
    struct ibv_ah_attr path;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t srq;
    uint8_t private_data_length;
    uint8_t private_data[256];
};
int ndpy_next_cm_event(struct rdma_event_channel *channel, uint64_t new_key, struct ndpy_cm_event *out);

/* The name of the device that a connection is bound to, or "". */
const char *ndpy_cm_device(struct rdma_cm_id *id);
/* Closes librdmacm's own context of a removed device. librdmacm keeps one of every device open for the life of the
   process, and some drivers (rxe) cannot remove a device that is open. Returns 0 or an errno. */
int ndpy_cm_let_go(struct rdma_cm_id *id);
/* Copies a socket address of a connection into out: its own, or the peer's if `peer` is not 0. Returns its length. */
int ndpy_cm_address(struct rdma_cm_id *id, int peer, unsigned char *out, int size);
/* connecting.c: rdma_connect() in a thread that can be made to give up. run() waits for the call and returns 0 or an
   errno. That is ECANCELED if the call gave up. Any thread may call give_up(), before, during and after the run. The
   parameters must exist until run() has returned. new() returns NULL if there is no memory. */
struct ndpy_connecting;
struct ndpy_connecting *ndpy_connecting_new(struct rdma_cm_id *id, struct rdma_conn_param *parameters);
int ndpy_connecting_run(struct ndpy_connecting *connecting);
void ndpy_connecting_give_up(struct ndpy_connecting *connecting);
void ndpy_connecting_free(struct ndpy_connecting *connecting);
int ndpy_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out);
/* ibv_reg_mr(). It writes the address of the ibv_mr to `out`, because a returned region would be lost if a signal
   handler raised as the call returns. Returns 0 or an errno. */
struct ndpy_registration {
    uint64_t region;
};
int ndpy_register(struct ibv_pd *pd, void *address, size_t length, int access, struct ndpy_registration *out);
/* ibv_reg_mr_iova2(): elements and peers use the address iova. */
int ndpy_register_at(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access,
                     struct ndpy_registration *out);
int ndpy_register_dmabuf(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
                         struct ndpy_registration *out);
/* ibv_alloc_null_mr(). As ndpy_register(). */
int ndpy_register_null(struct ibv_pd *pd, struct ndpy_registration *out);
/* Memory of the device, by ibv_alloc_dm(3) and so on. The size is 0 if there is none. The first call for memory returns
   NULL and sets errno on failure, and the others return an errno. registering: as ndpy_register(), and elements and
   peers use addresses from 0. */
uint64_t ndpy_device_memory_size(struct ibv_context *context);
struct ibv_dm *ndpy_alloc_device_memory(struct ibv_context *context, uint64_t length, uint32_t log_alignment);
int ndpy_free_device_memory(struct ibv_dm *memory);
int ndpy_copy_to_device(struct ibv_dm *memory, uint64_t offset, const void *from, size_t length);
int ndpy_copy_from_device(void *to, struct ibv_dm *memory, uint64_t offset, size_t length);
int ndpy_register_device_memory(struct ibv_pd *pd, struct ibv_dm *memory, uint64_t offset, size_t length, int access,
                                struct ndpy_registration *out);
/* ibv_advise_mr(): faults in pages of memory on demand, and waits. Returns 0 or an errno: EOPNOTSUPP if the driver
 * cannot do it. */
int ndpy_prefetch(struct ibv_mr *region, uint64_t address, uint64_t length, int write);
/* The functions by which ndpy._core registers by itself. The domain is an ibv_pd. */
const struct ndpy_registrar *ndpy_registrar(void);
/* Asks what a device supports of on-demand paging: ibv_odp_general_caps, and ibv_odp_transport_cap_bits of RC.
   Returns 0 or an errno. */
int ndpy_query_on_demand(struct ibv_context *context, uint64_t *general, uint32_t *connected);

/* The part of the data path that is not in ndpy_abi.h. */
int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, struct ibv_mw *window,
                   struct ibv_mr *region, uint64_t address, uint64_t length, uint32_t access, uint32_t token);
/* The same for a window of type 1, whose new token is the window's rkey afterwards. A length of 0 unbinds it.
   operation: NDPY_BIND or NDPY_INVALIDATE. */
int ndpy_post_bind_of_type_1(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, struct ibv_mw *window,
                             struct ibv_mr *region, uint64_t address, uint64_t length, uint32_t access,
                             uint32_t operation);
int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, uint32_t token);
/* Post as siw needs it: fence every request except reads, which it would otherwise complete ahead of a read that was
   posted before, and leave out elements of no bytes. */
void ndpy_queue_pair_work_around_siw(struct ndpy_queue_pair *qp);

/* userfaultfd.c: tells when watched memory has been unmapped, moved or emptied. Returns 0 or an errno: EPERM (not
   allowed), ENOSYS (not in this kernel), EOPNOTSUPP (kernel too old). */
int ndpy_monitor_start(void);
int ndpy_monitor_takes_shared_memory(void);
/* Watch whole pages. notify: an eventfd that hears of the first change, or -1. Returns NULL and sets errno on failure:
   EINVAL for a kind of memory that cannot be watched, EBUSY for memory that another userfaultfd has. */
struct ndpy_watch;
struct ndpy_watch *ndpy_watch(uint64_t start, uint64_t end, int notify);
/* Whether any of the memory has changed, or may have. Waits for a change that another thread has begun. */
int ndpy_watch_changed(struct ndpy_watch *watch);
void ndpy_unwatch(struct ndpy_watch *watch);
/* Call this after unwatching. When it returns, nobody writes to the eventfds of those watches any more. */
void ndpy_monitor_wait_for_reader(void);
