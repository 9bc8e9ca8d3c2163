/* The data path of version 1: functions that call the provider. The other functions are those of ndpy_abi.h. */

/* A native endpoint belongs to one connector, but ndpy's queue pair belongs to no connector until it is connected.
   So this structure stands for the endpoint before there is one. It keeps the receives that are posted until then,
   and posts them. */
struct version1_endpoint *version1_endpoint_new(uint32_t initiator_depth, uint32_t receive_depth,
                                                uint32_t max_receive_sge);
void version1_endpoint_free(struct version1_endpoint *endpoint);
/* Frees both the queue pair and its struct version1_endpoint. */
void version1_queue_pair_free(struct ndpy_queue_pair *qp);
/* From now on the queue pair works through this native endpoint, or through none if it is NULL. The kept receives stay
   here. */
void version1_endpoint_use(struct version1_endpoint *endpoint, struct INDEndpoint *native);
/* Posts the kept receives to the native endpoint. Returns 0, or the provider's number for the first receive that it
   refused. Then the queue pair cannot be used. */
int version1_endpoint_post_kept(struct ndpy_queue_pair *qp);

/* The memory of a window. The provider writes the window's descriptor here, and reports here that the peer has
   invalidated the window. number: the slot in the completion of such a report. */
struct version1_window *version1_window_new(uint32_t number);
void version1_window_free(struct version1_window *window);
struct nd_result *version1_window_result(struct version1_window *window);
unsigned char *version1_window_descriptor(struct version1_window *window);

/* Writes the descriptor of the window that a peer's memory lies in (20 bytes), and returns the offset into the window.
   A slice lies in the window that it was sliced from (contract I.4.1). */
uint64_t version1_window_of(const struct ndpy_remote *remote, unsigned char *descriptor);

/* As ndpy_post and the others. */
int version1_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
                  const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote);
int version1_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *region, void *window,
                       unsigned char *descriptor, uint64_t address, uint64_t length, uint32_t access);
int version1_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, void *window);
int version1_post_marker(struct ndpy_queue_pair *qp);
int version1_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, uint32_t *alike);
int version1_drain(struct ndpy_completion_queue *cq);
const struct ndpy_provider *version1_provider_table(void);
