/* Functions of libibverbs that are newer than the headers which ndpy is built with; see ibverbs.h. */

struct ibv_context;

/* The speed of a port, in units of 100 Mbit/s. Returns 0 or an errno. */
int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed); /* optional */
