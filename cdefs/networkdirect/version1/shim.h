/* The data path of version 1, beside that of ndpy_abi.h: the functions that call the provider. The rest is common. */

/* An element: the layout of ND_SGE. region: the registration's handle. */
struct version1_element {
    uint64_t address;
    uint64_t length;
    uint64_t region;
};

/* The native endpoint belongs to one connector, and ndpy's queue pair to none until it is connected. So this stands for
   the endpoint before there is one: it keeps the receives that are posted meanwhile, and then posts them. */
struct version1_endpoint *version1_endpoint_new(uint32_t initiator_depth, uint32_t receive_depth, uint32_t max_receive_sge);
void version1_endpoint_free(struct version1_endpoint *endpoint);
/* Both the queue pair and what stands for its endpoint. */
void version1_queue_pair_free(struct ndpy_queue_pair *qp);
/* The queue pair works through this native endpoint, or through none; the receives that it keeps stay here. */
void version1_endpoint_use(struct version1_endpoint *endpoint, struct INDEndpoint *native);
/* Post to the native endpoint the receives that are kept: 0, or the provider's number for the first that it refused, with
   which the queue pair is lost. */
int version1_endpoint_post_kept(struct ndpy_queue_pair *qp);

/* A window's result of the peer's invalidation, and where its descriptor is written. number: what a completion of it has
   as its slot. */
struct version1_window *version1_window_new(uint32_t number);
void version1_window_free(struct version1_window *window);
struct nd_result *version1_window_result(struct version1_window *window);
const unsigned char *version1_window_descriptor(struct version1_window *window);

/* As ndpy_post and so on. descriptor: 20 bytes of a window of the peer, or NULL; offset: into that window. */
int version1_post_one(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context, uint64_t address,
    uint32_t length, uint64_t region, uint64_t offset, const unsigned char *descriptor);
int version1_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    const struct version1_element *elements, uint32_t count, uint64_t offset, const unsigned char *descriptor);
int version1_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *region, void *native,
    struct version1_window *window, uint64_t address, uint64_t length, uint32_t access);
int version1_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *native);
int version1_post_marker(struct ndpy_queue_pair *qp);
int version1_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count);
int version1_drain(struct ndpy_completion_queue *cq);
