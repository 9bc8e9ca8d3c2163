/* A verbs provider without a device, for features that Linux's software adapters lack. It stands in for libibverbs and
   librdmacm and registers without pinning. The test sets what it claims and what it refuses. It is linked with the
   system's libraries, which provide everything that it does not define. This file has the device and its memory. Queues
   and queue pairs are in fake_completions.c and fake_queues.c, connections in fake_connections.c, and the points
   between native calls in fake_points.c. */

#include "fake_verbs.h"

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

/* The test sets these. */
struct fake_settings {
    int32_t odp_general;
    int32_t odp_connected;
    int32_t fork_status;
    int32_t rereg_result; /* ibv_rereg_mr() returns this, with rereg_errno */
    int32_t rereg_errno;
    int32_t reg_errno;         /* if not 0, ibv_reg_mr() fails with this */
    int32_t reg_errno_windows; /* the same, for registrations that windows can be bound to */
    int32_t dereg_errno;       /* if not 0, ibv_dereg_mr() fails with this */
    int32_t signal;            /* if not 0, the next ibv_reg_mr() or ibv_dereg_mr() raises this signal at its end */
    int32_t dmabuf_errno;      /* if not 0, ibv_reg_dmabuf_mr() fails with this; a descriptor below 0 gives EBADF */
    int32_t iova_errno;        /* if not 0, ibv_reg_mr_iova2() fails with this */
    int32_t advise_errno;      /* if not 0, ibv_advise_mr() fails with this */
    int32_t null_regions;      /* whether ibv_alloc_null_mr() works */
    int32_t device_memory;     /* how much there is of it */
    int32_t delay_us;          /* how long each registration takes */
    int32_t windows;           /* 1: of type 2; 2: of type 1 only */
    int32_t read_sge;          /* maximum elements of a read; 0: the driver does not say */
    int32_t port_down;
    int32_t speed;       /* of the port, in units of 100 Mbit/s */
    int32_t in_order;    /* which enum ibv_wr_opcode write in order, as bits */
    int32_t ports;       /* how many; 0 is one */
    int32_t unconnected; /* whether there are datagrams only */
    int32_t gids;        /* how many of fake_gids there are */
    int32_t places;      /* how many entries the GID table of each port can have; 0: as many as fake_gids */
} fake_settings = {.fork_status = IBV_FORK_UNNEEDED,
                   .rereg_result = IBV_REREG_MR_ERR_INPUT,
                   .rereg_errno = EOPNOTSUPP,
                   .dmabuf_errno = EOPNOTSUPP,
                   .iova_errno = EOPNOTSUPP};

/* The test sets these, for ports other than plain active ones of Ethernet. 0 is the default; a link layer of -1 is
 * unspecified. */
struct fake_port {
    int32_t state;
    int32_t link_layer;
    int32_t mtu;
    int32_t lid;
    int32_t longest; /* message; 0 is a GiB, below 0 the port does not tell */
} fake_ports[8];

struct ibv_gid_entry fake_gids[1024];

/* The test reads these: the arguments of the last call, and the number of regions. */
struct fake_seen {
    uint64_t address;
    uint64_t length;
    uint64_t offset;
    int32_t access;
    int32_t flags;
    int32_t fd;
    int32_t registered;
    int32_t calls;
    int32_t at_once;
    int32_t most_at_once;
    int32_t moved; /* whether ibv_rereg_mr() got another protection domain */
    int32_t gid_tables;
    int32_t gids;
} fake_seen;

int fake_is_unconnected(void)
{
    return fake_settings.unconnected;
}

static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static int held;
static uint32_t last_key;

/* While hold is set, registrations wait. */
void fake_hold(int hold)
{
    pthread_mutex_lock(&fake_lock);
    held = hold;
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&fake_lock);
}

struct ibv_device fake_device = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fake0"};
static struct ibv_device *devices[] = {&fake_device, NULL};

int ibv_query_port_speed(struct ibv_context *context, uint32_t port, uint64_t *speed);

struct ibv_device **ibv_get_device_list(int *count)
{
    *count = 1;
    return devices;
}

void ibv_free_device_list(struct ibv_device **list) {}

const char *ibv_get_device_name(struct ibv_device *of)
{
    return of->name;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *out, size_t size)
{
    memset(out, 0, size);
    out->odp_caps.general_caps = (uint64_t)fake_settings.odp_general;
    out->odp_caps.per_transport_caps.rc_odp_caps = (uint32_t)fake_settings.odp_connected;
    out->device_cap_flags_ex =
        (uint64_t)(fake_extended.capabilities & 1) << 40 | (uint64_t)(fake_extended.capabilities >> 1 & 3) << 38;
    out->max_dm_size = (uint64_t)fake_settings.device_memory;
    out->hca_core_clock = (uint64_t)fake_extended.clock_khz;
    out->completion_timestamp_mask = (1ull << fake_extended.clock_bits) - 1;
    return 0;
}

static int advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sges,
                     uint32_t count)
{
    if (fake_settings.advise_errno)
        return fake_settings.advise_errno;
    fake_seen.address = sges[0].addr;
    fake_seen.length += sges[0].length;
    fake_seen.access = (int)advice;
    fake_seen.flags = (int)flags;
    return 0;
}

static struct ibv_mr *new_region(struct ibv_pd *pd, void *address, size_t length);

static struct ibv_mr *alloc_null_mr(struct ibv_pd *pd)
{
    struct ibv_mr *region;

    if (!fake_settings.null_regions) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    pthread_mutex_lock(&fake_lock);
    region = new_region(pd, NULL, SIZE_MAX);
    pthread_mutex_unlock(&fake_lock);
    return region;
}

/* ---- memory of the device ---- */

struct device_memory {
    struct ibv_dm ibv;
    int alive;
    size_t length;
    unsigned char bytes[];
};

/* It copies 4 bytes at a time. */
static int check_copy(struct device_memory *memory, const char *call, uint64_t offset, size_t length)
{
    if (!fake_check(call, memory->alive))
        return EINVAL;
    return offset % 4 || length % 4 || offset + length > memory->length ? EINVAL : 0;
}

static int memcpy_to_dm(struct ibv_dm *ibv, uint64_t offset, const void *from, size_t length)
{
    struct device_memory *memory = (struct device_memory *)ibv;
    int error = check_copy(memory, "ibv_memcpy_to_dm", offset, length);

    if (!error)
        memcpy(memory->bytes + offset, from, length);
    return error;
}

static int memcpy_from_dm(void *to, struct ibv_dm *ibv, uint64_t offset, size_t length)
{
    struct device_memory *memory = (struct device_memory *)ibv;
    int error = check_copy(memory, "ibv_memcpy_from_dm", offset, length);

    if (!error)
        memcpy(to, memory->bytes + offset, length);
    return error;
}

static struct ibv_dm *alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *request)
{
    struct device_memory *made;

    if ((uint64_t)fake_settings.device_memory < request->length) {
        errno = ENOMEM;
        return NULL;
    }
    made = calloc(1, sizeof *made + request->length);
    made->ibv = (struct ibv_dm){context, memcpy_to_dm, memcpy_from_dm, 0, 0};
    made->alive = 1;
    made->length = request->length;
    fake_seen.length = request->length;
    fake_seen.flags = (int)request->log_align_req;
    fake_settings.device_memory -= (int)request->length;
    fake_counts.device_memories++;
    return &made->ibv;
}

static int free_dm(struct ibv_dm *ibv)
{
    struct device_memory *memory = (struct device_memory *)ibv;

    if (!fake_check("ibv_free_dm", memory->alive))
        return EINVAL;
    memory->alive = 0;
    fake_settings.device_memory += (int)memory->length;
    fake_counts.device_memories--;
    return 0;
}

static struct ibv_mr *reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *ibv, uint64_t offset, size_t length, unsigned access)
{
    struct device_memory *memory = (struct device_memory *)ibv;
    struct ibv_mr *region;

    if (!fake_check("ibv_reg_dm_mr", memory->alive) || offset + length > memory->length ||
        !(access & IBV_ACCESS_ZERO_BASED)) {
        errno = EINVAL;
        return NULL;
    }
    pthread_mutex_lock(&fake_lock);
    fake_seen.offset = offset;
    fake_seen.length = length;
    fake_seen.access = (int)access;
    region = new_region(pd, NULL, length);
    pthread_mutex_unlock(&fake_lock);
    return region;
}

struct device_context {
    int alive;
    int write_end;
    struct verbs_context verbs;
};

static struct device_context *wrapper(struct ibv_context *context)
{
    return (struct device_context *)((char *)verbs_get_ctx(context) - offsetof(struct device_context, verbs));
}

int fake_async_end(struct ibv_context *context)
{
    return wrapper(context)->write_end;
}

struct ibv_context *ibv_open_device(struct ibv_device *of)
{
    struct device_context *made = calloc(1, sizeof *made);
    struct ibv_context *context = &made->verbs.context;

    made->alive = 1;
    made->verbs.sz = sizeof made->verbs;
    made->verbs.query_device_ex = query_device_ex;
    made->verbs.advise_mr = advise_mr;
    made->verbs.alloc_null_mr = alloc_null_mr;
    made->verbs.alloc_dm = alloc_dm;
    made->verbs.free_dm = free_dm;
    made->verbs.reg_dm_mr = reg_dm_mr;
    fake_fill_extended_operations(&made->verbs);
    fake_fill_completion_operations(&made->verbs);
    context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    context->device = of;
    fake_pipe(&context->async_fd, &made->write_end);
    fake_fill_operations(&context->ops);
    fake_counts.contexts++;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    struct device_context *closed = wrapper(context);

    fake_point("ibv_close_device", 0);
    if (!fake_check("ibv_close_device", closed->alive))
        return EINVAL;
    closed->alive = 0;
    close(context->async_fd);
    close(closed->write_end);
    fake_counts.contexts--;
    fake_point("ibv_close_device", 1);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *out)
{
    memset(out, 0, sizeof *out);
    out->max_mr_size = 1ull << 40;
    out->max_mr = out->max_pd = out->max_qp = out->max_cq = 1000;
    out->max_qp_wr = out->max_cqe = 1000;
    out->max_sge = 16;
    out->max_sge_rd = fake_settings.read_sge;
    out->max_qp_rd_atom = out->max_qp_init_rd_atom = 16;
    out->phys_port_cnt = fake_settings.ports ? (uint8_t)fake_settings.ports : 1;
    out->node_guid = 0xFA;
    if (fake_xrc)
        out->max_srq = out->max_srq_wr = 100;
    if (fake_settings.windows) {
        out->device_cap_flags = fake_settings.windows == 2
                                    ? IBV_DEVICE_MEM_WINDOW
                                    : IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS;
        out->max_mw = 1000;
    }
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *out)
{
    struct ibv_port_attr *attributes = (struct ibv_port_attr *)out;

    const struct fake_port *set = &fake_ports[port - 1];

    attributes->state = set->state                ? (enum ibv_port_state)set->state
                        : fake_settings.port_down ? IBV_PORT_DOWN
                                                  : IBV_PORT_ACTIVE;
    attributes->max_mtu = IBV_MTU_4096;
    attributes->active_mtu = set->mtu ? (enum ibv_mtu)set->mtu : IBV_MTU_4096;
    attributes->max_msg_sz = set->longest < 0 ? 0 : set->longest ? (uint32_t)set->longest : 1u << 30;
    attributes->link_layer = set->link_layer < 0 ? IBV_LINK_LAYER_UNSPECIFIED
                             : set->link_layer   ? (uint8_t)set->link_layer
                                                 : IBV_LINK_LAYER_ETHERNET;
    attributes->lid = (uint16_t)set->lid;
    attributes->gid_tbl_len = fake_settings.places ? fake_settings.places : (int)(sizeof fake_gids / sizeof *fake_gids);
    return 0;
}

/* Newer libraries have it. */
int ibv_query_port_speed(struct ibv_context *context, uint32_t port, uint64_t *speed)
{
    *speed = (uint64_t)fake_settings.speed;
    return fake_settings.speed ? 0 : EOPNOTSUPP;
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode operation, uint32_t flags)
{
    return !flags && fake_settings.in_order & 1 << operation ? 1 : 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most, uint32_t flags,
                             size_t size)
{
    size_t count = (size_t)fake_settings.gids;

    fake_seen.gid_tables++;
    /* As the kernel does: there are those of all ports, or none. */
    if (size != sizeof *entries || count > most)
        return -EINVAL;
    memcpy(entries, fake_gids, count * size);
    return (ssize_t)count;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t size)
{
    int i;

    fake_seen.gids++;
    for (i = 0; i < fake_settings.gids && size == sizeof *entry; i++)
        if (fake_gids[i].port_num == port && fake_gids[i].gid_index == index) {
            *entry = fake_gids[i];
            return 0;
        }
    return ENODATA;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof *pd);

    pd->context = context;
    fake_counts.domains++;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    fake_counts.domains--;
    return 0;
}

/* ---- where datagrams go ---- */

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attributes)
{
    struct ibv_ah *made = calloc(1, sizeof *made);

    fake_point("ibv_create_ah", 0);
    made->context = pd->context;
    pthread_mutex_lock(&fake_lock);
    fake_counts.paths++;
    fake_end("ibv_create_ah", 0);
    return made;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
    fake_point("ibv_destroy_ah", 0);
    free(ah);
    pthread_mutex_lock(&fake_lock);
    fake_counts.paths--;
    return fake_end("ibv_destroy_ah", 0);
}

static int count_attached(const char *call, int change)
{
    fake_begin(call);
    fake_counts.attached += change;
    return fake_end(call, 0);
}

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    return count_attached("ibv_attach_mcast", 1);
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    return count_attached("ibv_detach_mcast", -1);
}

static struct ibv_mr *new_region(struct ibv_pd *pd, void *address, size_t length)
{
    struct ibv_mr *region = calloc(1, sizeof *region);

    region->context = pd->context;
    region->pd = pd;
    region->addr = address;
    region->length = length;
    region->lkey = ++last_key;
    region->rkey = ++last_key;
    fake_seen.registered++;
    return region;
}

static void raise_signal(void)
{
    int number = fake_settings.signal;

    fake_settings.signal = 0;
    if (number)
        raise(number);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
    struct ibv_mr *region = NULL;
    int error;

    fake_begin("ibv_reg_mr");
    fake_seen.calls++;
    fake_seen.at_once++;
    if (fake_seen.at_once > fake_seen.most_at_once)
        fake_seen.most_at_once = fake_seen.at_once;
    while (held)
        pthread_cond_wait(&opened, &fake_lock);
    if (fake_settings.delay_us) {
        pthread_mutex_unlock(&fake_lock);
        usleep((useconds_t)fake_settings.delay_us);
        pthread_mutex_lock(&fake_lock);
    }
    fake_seen.at_once--;
    fake_seen.address = (uintptr_t)address;
    fake_seen.length = length;
    fake_seen.access = access;
    error = access & IBV_ACCESS_MW_BIND && fake_settings.reg_errno_windows ? fake_settings.reg_errno_windows
                                                                           : fake_settings.reg_errno;
    if (!error)
        region = new_region(pd, address, length);
    fake_end("ibv_reg_mr", 0);
    raise_signal();
    if (error)
        errno = error;
    return region;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)
{
    struct ibv_mr *region;

    if (fake_settings.iova_errno) {
        errno = fake_settings.iova_errno;
        return NULL;
    }
    region = ibv_reg_mr(pd, address, length, (int)access);
    if (region)
        fake_seen.address = iova;
    return region;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    struct ibv_mr *region;

    if (fake_settings.dmabuf_errno || fd < 0) {
        errno = fake_settings.dmabuf_errno ? fake_settings.dmabuf_errno : EBADF;
        return NULL;
    }
    pthread_mutex_lock(&fake_lock);
    fake_seen.address = iova;
    fake_seen.length = length;
    fake_seen.offset = offset;
    fake_seen.fd = fd;
    fake_seen.access = access;
    region = new_region(pd, (void *)(uintptr_t)iova, length);
    pthread_mutex_unlock(&fake_lock);
    return region;
}

int ibv_rereg_mr(struct ibv_mr *region, int flags, struct ibv_pd *pd, void *address, size_t length, int access)
{
    fake_seen.moved = pd && pd != region->pd;
    fake_seen.flags = flags;
    fake_seen.address = (uintptr_t)address;
    fake_seen.length = length;
    fake_seen.access = access;
    if (fake_settings.rereg_result && fake_settings.rereg_result != IBV_REREG_MR_ERR_DO_FORK_OLD) {
        errno = fake_settings.rereg_errno;
        return fake_settings.rereg_result;
    }
    if (pd)
        region->pd = pd;
    region->lkey = ++last_key;
    region->rkey = ++last_key;
    return fake_settings.rereg_result;
}

int ibv_dereg_mr(struct ibv_mr *region)
{
    int error = fake_settings.dereg_errno;

    fake_point("ibv_dereg_mr", 0);
    if (!error) {
        pthread_mutex_lock(&fake_lock);
        fake_seen.registered--;
        pthread_mutex_unlock(&fake_lock);
        free(region);
    }
    fake_point("ibv_dereg_mr", 1);
    raise_signal();
    return error;
}

enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return (enum ibv_fork_status)fake_settings.fork_status;
}
