/* Protection domains, memory regions and memory windows. */
#include "soft.h"
#include "cuda.h"
#include "guarded.h"

#include <errno.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

/* The device has no atomics, so their right changes nothing. Programs ask for it all the same. */
#define KNOWN_ACCESS                                                                                  \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND | \
     IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_OPTIONAL_RANGE)
/* Of a dma-buf the kernel grants less. */
#define DMABUF_ACCESS (KNOWN_ACCESS & ~(IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED))

#ifndef DMA_BUF_MAGIC
#define DMA_BUF_MAGIC 0x444d4142
#endif
/* The kernel's own, which NVIDIA's driver gives to programs. */
#define ENOTSUPP 524

/* How far into its page an address or an offset is. */
#define PAGE_OFFSET(where) ((size_t)((where) & ((uint64_t)sysconf(_SC_PAGESIZE) - 1)))

/* ---- Protection domains ---- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    if (soft_inherited(context))
        return NULL;
    if (adapter_gone(adapter_of(context)))
        return soft_null(ENODEV);
    if (SOFT_FAULT(context, PLACE_CALL_ALLOC_PD, 0) != 0)
        return NULL;
    struct soft_pd *pd = calloc(1, sizeof *pd);
    if (pd == NULL)
        return NULL;
    pd->ibv.context = context;
    soft_live[PLACE_CALL_ALLOC_PD] += soft_own_calls == 0;
    return &pd->ibv;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *ibv)
{
    struct soft_pd *pd = (struct soft_pd *)ibv;

    if (soft_inherited(ibv->context))
        return 0;
    if (pd->users > 0)
        return errno = EBUSY;
    soft_live[PLACE_CALL_ALLOC_PD] -= soft_own_calls == 0;
    free(pd);
    return 0;
}

/* ---- Regions ---- */

static uint32_t flags_of(unsigned access)
{
    uint32_t flags = 0;

    if ((access & IBV_ACCESS_LOCAL_WRITE) != 0)
        flags |= ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_RDMA_READ_SINK;
    if ((access & IBV_ACCESS_REMOTE_READ) != 0)
        flags |= ND_MR_FLAG_ALLOW_REMOTE_READ;
    if ((access & IBV_ACCESS_REMOTE_WRITE) != 0)
        flags |= ND_MR_FLAG_ALLOW_REMOTE_WRITE;
    return flags;
}

/* 0, or an errno. */
static int check_access(unsigned access)
{
    if ((access & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB)) != 0)
        return EOPNOTSUPP;
    if ((access & ~(unsigned)KNOWN_ACCESS) != 0)
        return EINVAL;
    bool peer_writes = (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
    return peer_writes && (access & IBV_ACCESS_LOCAL_WRITE) == 0 ? EINVAL : 0;
}

static int begin(struct soft_mr *mr, void *address, size_t length, uint64_t iova, unsigned access)
{
    guarded_copy_refresh();
    nd_status status = region_begin(mr->region, address, length, iova, flags_of(access));
    if (status != ND_SUCCESS)
        return soft_errno(status);
    mr->region->may_bind = (access & IBV_ACCESS_MW_BIND) != 0;
    mr->ibv.addr = address;
    mr->ibv.length = length;
    mr->ibv.lkey = ntohl(region_local_token(mr->region));
    mr->ibv.rkey = ntohl(region_remote_token(mr->region));
    return 0;
}

/* Takes `device` over if it succeeds. */
static struct ibv_mr *reg(struct ibv_pd *ibv, void *address, size_t length, uint64_t iova, unsigned access, int fault,
                          struct device_memory *device)
{
    struct soft_pd *pd = (struct soft_pd *)ibv;
    struct adapter *adapter = adapter_of(ibv->context);
    struct soft_mr *mr = NULL;

    int error = soft_inherited(ibv->context) ? EIO
                : adapter_gone(adapter)      ? ENODEV
                : fault != 0                 ? fault
                                             : check_access(access);
    if (error == 0 && (mr = calloc(1, sizeof *mr)) == NULL)
        error = ENOMEM;
    if (error == 0)
        error = soft_errno(region_create(adapter, pd, mr, &mr->region));
    if (error == 0) {
        if ((access & IBV_ACCESS_ZERO_BASED) != 0)
            iova = 0;
        mr->region->device = device;
        error = begin(mr, address, length, iova, access);
        if (error != 0)
            object_close(&mr->region->object);
    }
    if (error != 0) {
        free(mr);
        return soft_null(error);
    }
    mr->ibv.context = ibv->context;
    mr->ibv.pd = ibv;
    mr->device = device;
    pd->users++;
    registration_made();
    return &mr->ibv;
}

/* Memory of this process, or else of a device, which has other addresses. */
static struct ibv_mr *reg_address(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access,
                                  int fault)
{
    struct ibv_mr *mr = reg(pd, address, length, iova, access, fault, NULL);

    if (mr != NULL || fault != 0 || errno != EFAULT)
        return mr;
    struct device_memory *device = cuda_memory_find((uintptr_t)address, length);
    if (device == NULL)
        return soft_null(EFAULT);
    mr = reg(pd, address, length, iova, access, fault, device);
    if (mr == NULL) {
        int error = errno;
        cuda_memory_free(device);
        errno = error;
    }
    return mr;
}

#undef ibv_reg_mr
EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
    return reg_address(pd, address, length, (uintptr_t)address, (unsigned)access,
                       SOFT_FAULT(pd->context, PLACE_CALL_REG_MR, 0));
}

#undef ibv_reg_mr_iova
EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access)
{
    return reg_address(pd, address, length, iova, (unsigned)access, SOFT_FAULT(pd->context, PLACE_CALL_REG_MR, 0));
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access)
{
    return reg_address(pd, address, length, iova, access, SOFT_FAULT(pd->context, PLACE_CALL_REG_MR, 0));
}

/* Whether a file has memory that this process can share: a dma-buf, or a memfd, which stands for one in tests. */
static bool has_memory(int fd, int *error)
{
    struct statfs system;

    if (fstatfs(fd, &system) != 0) {
        *error = errno;
        return false;
    }
    *error = EINVAL;
    return (uint32_t)system.f_type == DMA_BUF_MAGIC || (uint32_t)system.f_type == TMPFS_MAGIC;
}

/* Maps the pages that have these bytes. Returns the first of the bytes, or NULL with an errno in *error. */
static void *map_part(int fd, uint64_t offset, size_t length, bool write, int *error)
{
    struct stat file;

    if (!has_memory(fd, error))
        return NULL;
    if (fstat(fd, &file) != 0) {
        *error = errno;
        return NULL;
    }
    uint64_t size = (uint64_t)file.st_size;
    if (length == 0 || offset > size || length > size - offset)
        return NULL;
    size_t before = PAGE_OFFSET(offset);
    void *pages = mmap(NULL, before + length, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd,
                       (off_t)(offset - before));
    if (pages == MAP_FAILED) {
        /* The driver of a dma-buf may refuse to map it at all. */
        *error = errno == EINVAL || errno == ENODEV || errno == ENOTSUP || errno == ENOTSUPP ? EOPNOTSUPP : errno;
        return NULL;
    }
    return (uint8_t *)pages + before;
}

static void unmap_part(void *part, size_t length)
{
    size_t before = PAGE_OFFSET((uintptr_t)part);

    munmap((uint8_t *)part - before, before + length);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                        int access)
{
    int error = EINVAL;

    if ((access & ~DMABUF_ACCESS) != 0 || PAGE_OFFSET(offset) != PAGE_OFFSET(iova))
        return soft_null(EINVAL);
    void *part = map_part(fd, offset, length, (access & IBV_ACCESS_LOCAL_WRITE) != 0, &error);
    /* It cannot be mapped. The descriptor does not tell where its memory is, but programs give that address. */
    bool is_memory = part == NULL && error != EINVAL && error != EBADF;
    struct device_memory *device = is_memory ? cuda_memory_find(iova, length) : NULL;
    if (part == NULL && device == NULL)
        return soft_null(error);
    struct ibv_mr *mr = reg(pd, part != NULL ? part : (void *)(uintptr_t)iova, length, iova, (unsigned)access,
                            SOFT_FAULT(pd->context, PLACE_CALL_REG_MR, 0), device);
    if (mr == NULL) {
        error = errno;
        if (part != NULL)
            unmap_part(part, length);
        cuda_memory_free(device);
        return soft_null(error);
    }
    ((struct soft_mr *)mr)->part = part;
    mr->addr = (void *)(uintptr_t)offset;
    return mr;
}

EXPORT int ibv_rereg_mr(struct ibv_mr *ibv, int flags, struct ibv_pd *pd, void *address, size_t length, int access)
{
    struct soft_mr *mr = (struct soft_mr *)ibv;

    if (soft_inherited(ibv->context))
        return IBV_REREG_MR_ERR_INPUT;
    if (flags == 0 || (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED) != 0 || mr->part != NULL || mr->device != NULL) {
        errno = EINVAL;
        return IBV_REREG_MR_ERR_INPUT;
    }
    /* Rights and domain alone keep the range, and the range keeps the rights. */
    if ((flags & IBV_REREG_MR_CHANGE_TRANSLATION) == 0) {
        address = ibv->addr;
        length = ibv->length;
    }
    uint32_t kept = mr->region->flags;
    unsigned rights = (unsigned)access;
    if ((flags & IBV_REREG_MR_CHANGE_ACCESS) == 0) {
        rights = (kept & ND_MR_FLAG_ALLOW_LOCAL_WRITE) != 0 ? IBV_ACCESS_LOCAL_WRITE : 0;
        rights |= (kept & ND_MR_FLAG_ALLOW_REMOTE_READ) != 0 ? IBV_ACCESS_REMOTE_READ : 0;
        rights |= (kept & 4) != 0 ? IBV_ACCESS_REMOTE_WRITE : 0;
        rights |= mr->region->may_bind ? IBV_ACCESS_MW_BIND : 0;
    }
    int error = check_access(rights);
    if (error == 0)
        error = soft_errno(region_end(mr->region, false));
    if (error != 0) {
        errno = error;
        return IBV_REREG_MR_ERR_INPUT;
    }
    if ((flags & IBV_REREG_MR_CHANGE_PD) != 0) {
        ((struct soft_pd *)ibv->pd)->users--;
        ((struct soft_pd *)pd)->users++;
        ibv->pd = pd;
        mr->region->domain = pd;
    }
    error = begin(mr, address, length, (uintptr_t)address, rights);
    if (error == 0)
        return 0;
    ibv->lkey = ibv->rkey = 0;
    errno = error;
    return IBV_REREG_MR_ERR_CMD;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *ibv)
{
    struct soft_mr *mr = (struct soft_mr *)ibv;

    if (soft_inherited(ibv->context))
        return 0;
    if (SOFT_FAULT(ibv->context, PLACE_CALL_DEREG_MR, 0) != 0)
        return errno;
    nd_status status = region_end(mr->region, false);

    if (status == ND_DEVICE_BUSY)
        return errno = EBUSY;
    if (status == ND_SUCCESS)
        registration_ended();
    ((struct soft_pd *)ibv->pd)->users--;
    object_close(&mr->region->object);
    if (mr->part != NULL)
        unmap_part(mr->part, ibv->length);
    cuda_memory_free(mr->device);
    free(mr);
    return 0;
}

/* ---- Windows ---- */

struct ibv_mw *soft_alloc_mw(struct ibv_pd *ibv, enum ibv_mw_type type)
{
    struct soft_pd *pd = (struct soft_pd *)ibv;
    struct adapter *adapter = adapter_of(ibv->context);
    struct soft_mw *mw = NULL;
    int error = soft_inherited(ibv->context) ? EIO
                : type != IBV_MW_TYPE_2      ? EOPNOTSUPP
                : adapter_gone(adapter)      ? ENODEV
                                             : SOFT_FAULT(ibv->context, PLACE_CALL_ALLOC_MW, 0);

    if (error == 0 && (mw = calloc(1, sizeof *mw)) == NULL)
        error = ENOMEM;
    if (error == 0)
        error = soft_errno(window_create(adapter, pd, mw, &mw->window));
    if (error != 0) {
        free(mw);
        return soft_null(error);
    }
    mw->ibv.context = ibv->context;
    mw->ibv.pd = ibv;
    mw->ibv.type = type;
    mw->ibv.rkey = ntohl(window_token(mw->window));
    pd->users++;
    return &mw->ibv;
}

int soft_dealloc_mw(struct ibv_mw *ibv)
{
    struct soft_mw *mw = (struct soft_mw *)ibv;

    if (soft_inherited(ibv->context))
        return 0;
    ((struct soft_pd *)ibv->pd)->users--;
    object_close(&mw->window->object);
    free(mw);
    return 0;
}

/* ibv_bind_mw() is for windows of type 1, which soft0 does not have. */
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    UNUSED(qp);
    UNUSED(mw);
    UNUSED(bind);
    return EOPNOTSUPP;
}

/* A window of verbs has no completion of its own when the peer invalidates it. */
void *face_window_invalidated(struct window *window)
{
    UNUSED(window);
    return NULL;
}
