/* The calls for what soft0 does not have or need.
 *
 * They exist because the dynamic loader refuses a program if a call that it might make is missing.
 */
#include "soft.h"

#include <errno.h>
#include <fcntl.h>
#include <infiniband/sa.h>
#include <poll.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>
#include <stdio.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>

/* No queue pair of soft0 has the calls that post one request at a time (ibv_wr_*). */
EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
    UNUSED(qp);
    return soft_null(EOPNOTSUPP);
}

/* ---- Fork ---- */

/* Registered memory is ordinary memory, which a fork does not harm. */
EXPORT int ibv_fork_init(void)
{
    return 0;
}

EXPORT enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}

EXPORT int ibv_dontfork_range(void *base, size_t size);
EXPORT int ibv_dontfork_range(void *base, size_t size)
{
    UNUSED(base);
    UNUSED(size);
    return 0;
}

EXPORT int ibv_dofork_range(void *base, size_t size);
EXPORT int ibv_dofork_range(void *base, size_t size)
{
    UNUSED(base);
    UNUSED(size);
    return 0;
}

/* ---- Files of /sys ---- */

EXPORT const char *ibv_get_sysfs_path(void);
EXPORT const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

/* The first bytes of the file as text, without the newline at the end. Returns their number, or -1. */
EXPORT int ibv_read_sysfs_file(const char *folder, const char *name, char *out, size_t size);
EXPORT int ibv_read_sysfs_file(const char *folder, const char *name, char *out, size_t size)
{
    char path[512];

    /* soft0 has no folder there. */
    if (*folder == '\0' || size == 0 || snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, out, size - 1);
    close(fd);
    if (length < 0)
        return -1;
    if (length > 0 && out[length - 1] == '\n')
        length--;
    out[length] = '\0';
    return (int)length;
}

/* ---- Absent ---- */

#define ABSENT_ERRNO(name, parameters) \
    EXPORT int name parameters;        \
    EXPORT int name parameters         \
    {                                  \
        return errno = EOPNOTSUPP;     \
    }

#define ABSENT_POINTER(type, name, parameters) \
    EXPORT type *name parameters;              \
    EXPORT type *name parameters               \
    {                                          \
        errno = EOPNOTSUPP;                    \
        return NULL;                           \
    }

#define ABSENT_NOTHING(name, parameters) \
    EXPORT void name parameters;         \
    EXPORT void name parameters {}

#define ABSENT_NUMBER(type, name, parameters, error) \
    EXPORT type name parameters;                     \
    EXPORT type name parameters                      \
    {                                                \
        errno = error;                               \
        return (type) - 1;                           \
    }

#define ABSENT_ANSWER(type, name, parameters) \
    EXPORT void name parameters;              \
    EXPORT void name parameters               \
    {                                         \
        memset(out, 0, sizeof(type));         \
    }

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif

ABSENT_POINTER(struct ibv_ah, ibv_create_ah, (struct ibv_pd * pd, struct ibv_ah_attr *attributes))
ABSENT_POINTER(struct ibv_ah, ibv_create_ah_from_wc,
               (struct ibv_pd * pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port))
ABSENT_ERRNO(ibv_init_ah_from_wc, (struct ibv_context * context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
                                   struct ibv_ah_attr *out))
ABSENT_ERRNO(ibv_destroy_ah, (struct ibv_ah * ah))
ABSENT_ERRNO(ibv_resolve_eth_l2_from_gid, (struct ibv_context * context, struct ibv_ah_attr *attributes,
                                           uint8_t mac[ETHERNET_LL_SIZE], uint16_t *vlan))
ABSENT_ERRNO(ibv_attach_mcast, (struct ibv_qp * qp, const union ibv_gid *gid, uint16_t lid))
ABSENT_ERRNO(ibv_detach_mcast, (struct ibv_qp * qp, const union ibv_gid *gid, uint16_t lid))

ABSENT_ERRNO(ibv_set_ece, (struct ibv_qp * qp, struct ibv_ece *ece))
ABSENT_ERRNO(ibv_query_ece, (struct ibv_qp * qp, struct ibv_ece *ece))

ABSENT_POINTER(struct ibv_context, ibv_import_device, (int fd))
ABSENT_POINTER(struct ibv_pd, ibv_import_pd, (struct ibv_context * context, uint32_t handle))
ABSENT_NOTHING(ibv_unimport_pd, (struct ibv_pd * pd))
ABSENT_POINTER(struct ibv_mr, ibv_import_mr, (struct ibv_pd * pd, uint32_t handle))
ABSENT_NOTHING(ibv_unimport_mr, (struct ibv_mr * mr))
ABSENT_POINTER(struct ibv_dm, ibv_import_dm, (struct ibv_context * context, uint32_t handle))
ABSENT_NOTHING(ibv_unimport_dm, (struct ibv_dm * dm))

/* rdma-core's own librdmacm makes these calls for what the kernel's RDMA device says. They cannot fail. */
ABSENT_ANSWER(struct ibv_ah_attr, ibv_copy_ah_attr_from_kern,
              (struct ibv_ah_attr * out, struct ib_uverbs_ah_attr *from))
ABSENT_ANSWER(struct ibv_qp_attr, ibv_copy_qp_attr_from_kern,
              (struct ibv_qp_attr * out, struct ib_uverbs_qp_attr *from))
ABSENT_ANSWER(struct ibv_sa_path_rec, ibv_copy_path_rec_from_kern,
              (struct ibv_sa_path_rec * out, struct ib_user_path_rec *from))
ABSENT_ANSWER(struct ib_user_path_rec, ibv_copy_path_rec_to_kern,
              (struct ib_user_path_rec * out, struct ibv_sa_path_rec *from))

/* Calls of rdma-core 59 and later. They may be newer than the header, and their arguments are not looked at. */
ABSENT_POINTER(void, ibv_alloc_dmah, (void))
ABSENT_ERRNO(ibv_dealloc_dmah, (void))
ABSENT_POINTER(void, ibv_reg_mr_ex, (void))
ABSENT_NUMBER(int, ibv_dm_export_dmabuf_fd, (void), EOPNOTSUPP)
ABSENT_ERRNO(ibv_query_port_speed, (void))
ABSENT_POINTER(void, ibv_alloc_buf, (void))
ABSENT_NOTHING(ibv_free_buf, (void))
ABSENT_POINTER(void, ibv_reg_buf_mr, (void))
ABSENT_NUMBER(int, ibv_export_buf_dmabuf_fd, (void), EOPNOTSUPP)
ABSENT_ERRNO(_ibv_query_comp_cntr_caps, (void))
ABSENT_POINTER(void, ibv_create_comp_cntr, (void))
ABSENT_ERRNO(ibv_destroy_comp_cntr, (void))
ABSENT_ERRNO(ibv_set_comp_cntr, (void))
ABSENT_ERRNO(ibv_set_err_comp_cntr, (void))
ABSENT_ERRNO(ibv_inc_comp_cntr, (void))
ABSENT_ERRNO(ibv_inc_err_comp_cntr, (void))
ABSENT_ERRNO(ibv_read_comp_cntr, (void))
ABSENT_ERRNO(ibv_read_err_comp_cntr, (void))
ABSENT_ERRNO(ibv_qp_attach_comp_cntr, (void))

/* Those of librdmacm. The newer ones ask InfiniBand's subnet administrator for services, or queue events of the
 * program's own. */
ABSENT_NUMBER(int, rdma_join_multicast, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, rdma_join_multicast_ex, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, rdma_leave_multicast, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, rdma_resolve_addrinfo, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, rdma_query_addrinfo, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, rdma_write_cm_event, (void), EOPNOTSUPP)

/* ---- Absent: sockets of librdmacm ---- */

/* rsocket() gives a program none, so no descriptor is one. rpoll() and rselect() also wait for other descriptors. */
ABSENT_NUMBER(int, rsocket, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, rbind, (void), EBADF)
ABSENT_NUMBER(int, rlisten, (void), EBADF)
ABSENT_NUMBER(int, raccept, (void), EBADF)
ABSENT_NUMBER(int, rconnect, (void), EBADF)
ABSENT_NUMBER(int, rshutdown, (void), EBADF)
ABSENT_NUMBER(int, rclose, (void), EBADF)
ABSENT_NUMBER(ssize_t, rrecv, (void), EBADF)
ABSENT_NUMBER(ssize_t, rrecvfrom, (void), EBADF)
ABSENT_NUMBER(ssize_t, rrecvmsg, (void), EBADF)
ABSENT_NUMBER(ssize_t, rsend, (void), EBADF)
ABSENT_NUMBER(ssize_t, rsendto, (void), EBADF)
ABSENT_NUMBER(ssize_t, rsendmsg, (void), EBADF)
ABSENT_NUMBER(ssize_t, rread, (void), EBADF)
ABSENT_NUMBER(ssize_t, rreadv, (void), EBADF)
ABSENT_NUMBER(ssize_t, rwrite, (void), EBADF)
ABSENT_NUMBER(ssize_t, rwritev, (void), EBADF)
ABSENT_NUMBER(int, rgetpeername, (void), EBADF)
ABSENT_NUMBER(int, rgetsockname, (void), EBADF)
ABSENT_NUMBER(int, rsetsockopt, (void), EBADF)
ABSENT_NUMBER(int, rgetsockopt, (void), EBADF)
ABSENT_NUMBER(int, rfcntl, (void), EBADF)
ABSENT_NUMBER(off_t, riomap, (void), EBADF)
ABSENT_NUMBER(int, riounmap, (void), EBADF)
ABSENT_NUMBER(size_t, riowrite, (void), EBADF)
ABSENT_NUMBER(int, repoll_create, (void), EOPNOTSUPP)
ABSENT_NUMBER(int, repoll_ctl, (void), EBADF)
ABSENT_NUMBER(int, repoll_wait, (void), EBADF)

EXPORT int rpoll(struct pollfd *fds, nfds_t count, int timeout);
EXPORT int rpoll(struct pollfd *fds, nfds_t count, int timeout)
{
    return poll(fds, count, timeout);
}

EXPORT int rselect(int count, fd_set *reading, fd_set *writing, fd_set *failing, struct timeval *timeout);
EXPORT int rselect(int count, fd_set *reading, fd_set *writing, fd_set *failing, struct timeval *timeout)
{
    return select(count, reading, writing, failing, timeout);
}
