/* What loader.c, events.c and data_path.c offer to Python. */

/* Opens both libraries and looks the symbols of ibverbs.h and rdmacm.h up in them. Returns 0, or 1 (libibverbs) or
   2 (librdmacm) for the one that cannot be used, with the reason in `failed`. */
int ndpy_load(const char *verbs_path, const char *rdmacm_path, char *failed, size_t failed_size);
int ndpy_has_symbol(const char *name);

/* Memory windows: static inline in the header, so not symbols of the library. NULL with errno, or an errno. */
struct ibv_mw *ndpy_alloc_window(struct ibv_pd *pd);
int ndpy_free_window(struct ibv_mw *window);
int ndpy_arm(struct ibv_cq *cq, int solicited_only);

/* One asynchronous event, taken and acknowledged; key is the context of the queue pair, completion queue or
   shared receive queue that it is for, 0 for the device. Returns 0, or an errno (EAGAIN: none). */
struct ndpy_async_event {
    uint64_t key;
    uint32_t type;
    uint32_t port;
};
int ndpy_next_async_event(struct ibv_context *context, struct ndpy_async_event *out);

/* All events of a channel, acknowledged; returns how many. */
int ndpy_take_cq_events(struct ibv_comp_channel *channel);

/* One connection event, copied and acknowledged. key is the context that the connection was created with;
   a CONNECT_REQUEST has the listener's key in `listener`, and its new connection gets new_key. */
struct ndpy_cm_event {
    uint64_t key;
    uint64_t listener;
    struct rdma_cm_id *id;
    uint32_t type;
    int32_t status;
    uint32_t qp_num;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t srq;
    uint8_t private_data_length;
    uint8_t private_data[256];
};
int ndpy_next_cm_event(struct rdma_event_channel *channel, uint64_t new_key, struct ndpy_cm_event *out);

/* The device name that a connection is bound to, or "". */
const char *ndpy_cm_device(struct rdma_cm_id *id);
/* Let go of a removed device: librdmacm keeps its own context of every device open for the life of the process, and
   some drivers (rxe) cannot remove a device that is open. Returns 0 or an errno. */
int ndpy_cm_let_go(struct rdma_cm_id *id);
/* Copy a socket address of a connection (peer != 0: the other end's) into out; returns its length. */
int ndpy_cm_address(struct rdma_cm_id *id, int peer, unsigned char *out, int size);
int ndpy_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out);

/* The data path. */
struct ndpy_queue_pair *ndpy_queue_pair_new(struct ibv_qp *native, uint32_t number, uint32_t initiator_depth,
    uint32_t receive_depth, uint32_t max_initiator_sge, uint32_t max_receive_sge, uint32_t inline_size,
    uint64_t max_length);
void ndpy_queue_pair_free(struct ndpy_queue_pair *qp);
void ndpy_queue_pair_set_connection(struct ndpy_queue_pair *qp, int connection);
/* Refuse reads: the peer serves none. */
void ndpy_queue_pair_refuse_reads(struct ndpy_queue_pair *qp);
/* Silent requests that succeeded leave no trace until a later completion. In the error state, post one that is flushed
   behind them; returns whether it was posted, which takes a place in the initiator queue. */
int ndpy_post_marker(struct ndpy_queue_pair *qp);
/* Fence all that can follow a read, for providers that complete it ahead of the read otherwise. */
void ndpy_queue_pair_fence_all(struct ndpy_queue_pair *qp);
uint32_t ndpy_queue_pair_in_flight(struct ndpy_queue_pair *qp, int receive);

struct ndpy_shared_queue *ndpy_shared_queue_new(struct ibv_srq *native, uint32_t depth, uint32_t max_sge,
    uint64_t max_length);
void ndpy_shared_queue_free(struct ndpy_shared_queue *queue);

struct ndpy_completion_queue *ndpy_completion_queue_new(struct ibv_cq *native);
void ndpy_completion_queue_free(struct ndpy_completion_queue *cq);

/* 0, one of enum ndpy_refusal, or the provider's errno. */
int ndpy_post_one(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context, uint64_t address,
    uint32_t length, uint32_t token, uint64_t remote_address, uint32_t remote_token);
int ndpy_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    const struct ndpy_element *elements, uint32_t count, uint64_t remote_address, uint32_t remote_token);
int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, struct ibv_mw *window,
    struct ibv_mr *region, uint64_t address, uint64_t length, uint32_t access, uint32_t token);
int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, uint32_t token);
int ndpy_post_shared(struct ndpy_shared_queue *queue, uint32_t slot, uint64_t context,
    const struct ndpy_element *elements, uint32_t count);

/* Up to `count` completions, oldest first; their number, or minus an errno. */
int ndpy_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count);
/* Take everything that the provider has into the queue's own memory, where ndpy_poll finds it.
   Returns how many visible ones were added, or minus an errno. */
int ndpy_drain(struct ndpy_completion_queue *cq);
/* How many visible completions wait in the queue's own memory, and how many of queue pair `number`. */
uint32_t ndpy_kept(struct ndpy_completion_queue *cq);
uint32_t ndpy_kept_of(struct ndpy_completion_queue *cq, uint32_t number);
/* Renumber kept completions of a shared receive queue, so that the provider may reuse its number; how many. */
uint32_t ndpy_claim_kept(struct ndpy_completion_queue *cq, uint32_t native_number, uint32_t number);
/* End what is left in one direction of a queue pair with NDPY_CANCELED. Only after the provider let go of it.
   A silent request that has left no completion by then has succeeded. Returns how many, or minus an errno. */
int ndpy_cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq);
