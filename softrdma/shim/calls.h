/* The functions that the shim stands in for: NAMES(X) has X(type, name, ...) for each. */
#ifndef SHIM_CALLS_H
#define SHIM_CALLS_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>

/* Macros of the header that choose a function. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define P(...) (__VA_ARGS__)
#define A(...) __VA_ARGS__

#define VERBS_NAMES(X)                                                                                                 \
    X(struct ibv_context *, ibv_open_device, P(struct ibv_device *device), A(device))                                  \
    X(struct ibv_context *, ibv_import_device, P(int fd), A(fd))                                                       \
    X(int, ibv_close_device, P(struct ibv_context *context), A(context))                                               \
    X(int, ibv_query_device, P(struct ibv_context *context, struct ibv_device_attr *out), A(context, out))             \
    X(int, ibv_query_port, P(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *out),            \
      A(context, port, out))                                                                                           \
    X(int, ibv_query_gid, P(struct ibv_context *context, uint8_t port, int index, union ibv_gid *out),                 \
      A(context, port, index, out))                                                                                    \
    X(int, ibv_get_async_event, P(struct ibv_context *context, struct ibv_async_event *event), A(context, event))      \
    X(void, ibv_ack_async_event, P(struct ibv_async_event *event), A(event))                                           \
    X(struct ibv_pd *, ibv_alloc_pd, P(struct ibv_context *context), A(context))                                       \
    X(int, ibv_dealloc_pd, P(struct ibv_pd *pd), A(pd))                                                                \
    X(struct ibv_mr *, ibv_reg_mr, P(struct ibv_pd *pd, void *address, size_t length, int access),                     \
      A(pd, address, length, access))                                                                                  \
    X(struct ibv_mr *, ibv_reg_mr_iova, P(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access), \
      A(pd, address, length, iova, access))                                                                            \
    X(struct ibv_mr *, ibv_reg_mr_iova2,                                                                               \
      P(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access),                              \
      A(pd, address, length, iova, access))                                                                            \
    X(struct ibv_mr *, ibv_reg_dmabuf_mr,                                                                              \
      P(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access),                         \
      A(pd, offset, length, iova, fd, access))                                                                         \
    X(int, ibv_dereg_mr, P(struct ibv_mr *mr), A(mr))                                                                  \
    X(struct ibv_comp_channel *, ibv_create_comp_channel, P(struct ibv_context *context), A(context))                  \
    X(int, ibv_destroy_comp_channel, P(struct ibv_comp_channel *channel), A(channel))                                  \
    X(struct ibv_cq *, ibv_create_cq,                                                                                  \
      P(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector),         \
      A(context, cqe, cq_context, channel, vector))                                                                    \
    X(int, ibv_resize_cq, P(struct ibv_cq *cq, int cqe), A(cq, cqe))                                                   \
    X(int, ibv_destroy_cq, P(struct ibv_cq *cq), A(cq))                                                                \
    X(int, ibv_get_cq_event, P(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context),               \
      A(channel, cq, cq_context))                                                                                      \
    X(void, ibv_ack_cq_events, P(struct ibv_cq *cq, unsigned count), A(cq, count))                                     \
    X(struct ibv_srq *, ibv_create_srq, P(struct ibv_pd *pd, struct ibv_srq_init_attr *attributes), A(pd, attributes)) \
    X(int, ibv_destroy_srq, P(struct ibv_srq *srq), A(srq))                                                            \
    X(struct ibv_qp *, ibv_create_qp, P(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes), A(pd, attributes))    \
    X(struct ibv_qp_ex *, ibv_qp_to_qp_ex, P(struct ibv_qp *qp), A(qp))                                                \
    X(int, ibv_modify_qp, P(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask), A(qp, attributes, mask))     \
    X(int, ibv_query_qp,                                                                                               \
      P(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *initial),                \
      A(qp, attributes, mask, initial))                                                                                \
    X(int, ibv_destroy_qp, P(struct ibv_qp *qp), A(qp))                                                                \
    X(struct ibv_ah *, ibv_create_ah, P(struct ibv_pd *pd, struct ibv_ah_attr *attributes), A(pd, attributes))         \
    X(int, ibv_destroy_ah, P(struct ibv_ah *ah), A(ah))

#define RDMA_NAMES(X)                                                                                                 \
    X(struct rdma_event_channel *, rdma_create_event_channel, P(void), A())                                           \
    X(void, rdma_destroy_event_channel, P(struct rdma_event_channel *channel), A(channel))                            \
    X(int, rdma_create_id,                                                                                            \
      P(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, enum rdma_port_space space),       \
      A(channel, id, context, space))                                                                                 \
    X(int, rdma_destroy_id, P(struct rdma_cm_id *id), A(id))                                                          \
    X(int, rdma_create_ep,                                                                                            \
      P(struct rdma_cm_id **id, struct rdma_addrinfo *info, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes),  \
      A(id, info, pd, attributes))                                                                                    \
    X(void, rdma_destroy_ep, P(struct rdma_cm_id *id), A(id))                                                         \
    X(int, rdma_bind_addr, P(struct rdma_cm_id *id, struct sockaddr *address), A(id, address))                        \
    X(int, rdma_resolve_addr, P(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout_ms),   \
      A(id, from, to, timeout_ms))                                                                                    \
    X(int, rdma_resolve_route, P(struct rdma_cm_id *id, int timeout_ms), A(id, timeout_ms))                           \
    X(int, rdma_create_qp, P(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes),          \
      A(id, pd, attributes))                                                                                          \
    X(int, rdma_create_qp_ex, P(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attributes), A(id, attributes))    \
    X(void, rdma_destroy_qp, P(struct rdma_cm_id *id), A(id))                                                         \
    X(int, rdma_listen, P(struct rdma_cm_id *id, int backlog), A(id, backlog))                                        \
    X(int, rdma_get_request, P(struct rdma_cm_id *listener, struct rdma_cm_id **id), A(listener, id))                 \
    X(int, rdma_connect, P(struct rdma_cm_id *id, struct rdma_conn_param *parameters), A(id, parameters))             \
    X(int, rdma_accept, P(struct rdma_cm_id *id, struct rdma_conn_param *parameters), A(id, parameters))              \
    X(int, rdma_establish, P(struct rdma_cm_id *id), A(id))                                                           \
    X(int, rdma_reject, P(struct rdma_cm_id *id, const void *data, uint8_t size), A(id, data, size))                  \
    X(int, rdma_disconnect, P(struct rdma_cm_id *id), A(id))                                                          \
    X(int, rdma_get_cm_event, P(struct rdma_event_channel *channel, struct rdma_cm_event **event), A(channel, event)) \
    X(int, rdma_ack_cm_event, P(struct rdma_cm_event *event), A(event))

#define NAMES(X) VERBS_NAMES(X) RDMA_NAMES(X)

#define NAME_INDEX(type, name, ...) INDEX_##name,
enum name_index { NAMES(NAME_INDEX) NAME_COUNT };
#undef NAME_INDEX

/* A process can have several libraries of verbs: the one that it is linked with, 0, and those that it found by
 * dlsym(3).
 */
#define MAX_LIBRARIES 3u

extern bool shim_on; /* there is a scenario */
/* The function of a library. Finds it if need be. */
void *library_function(unsigned library, enum name_index index);
#define REAL(library, name) ((__typeof__(name) *)library_function(library, INDEX_##name))

/* What stands in for the function that a program found, or what it found. */
void *library_replacement(const char *name, void *found);
/* By name and library: those for libibverbs (calls.c), and those for librdmacm (manager_calls.c). */
extern void *const verbs_stand_ins[][MAX_LIBRARIES], *const manager_stand_ins[][MAX_LIBRARIES];

typedef void *dlsym_function(void *, const char *);
typedef void *dlvsym_function(void *, const char *, const char *);
dlsym_function *real_dlsym(void);
dlvsym_function *real_dlvsym(void);

#endif
