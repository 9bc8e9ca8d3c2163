/* The devices of a machine, as a file of this folder describes them: the provider without a device of tests/unit, with
   a table of devices in place of its only one. Python fills the table by the functions machine_...(). In the object
   files of that provider, the functions that are here too have been given names that begin with "one_". */

#include "fake_verbs.h"

#undef ibv_get_device_list
#undef ibv_query_port

struct ibv_context *one_open_device(struct ibv_device *device);
int one_query_device(struct ibv_context *context, struct ibv_device_attr *out);
struct ibv_qp *one_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *request);
int ibv_query_port_speed(struct ibv_context *context, uint32_t number, uint64_t *speed);

enum { MOST_DEVICES = 64, MOST_PORTS = 4, MOST_GIDS = 4096 };

struct port {
    struct ibv_port_attr attributes;
    int error;
    uint64_t speed;
};

static struct device {
    struct ibv_device ibv;
    int open_error, query_error;
    int unconnected; /* it has queue pairs for datagrams only */
    int ports;
    uint32_t vendor, part;
    uint64_t guid;
    char firmware[64];
    struct port port[MOST_PORTS];
} table[MOST_DEVICES];
static struct ibv_gid_entry gids[MOST_GIDS];
static int gid_device[MOST_GIDS];
static int count, gid_count;
static char printed[4096];

void machine_clear(void)
{
    memset(table, 0, sizeof table);
    count = gid_count = 0;
    printed[0] = 0;
}

/* What ibv_get_device_list() prints to standard error. */
void machine_print(const char *lines)
{
    snprintf(printed, sizeof printed, "%s", lines);
}

/* Add a device. Returns 0 if the table is full. The errors are what the calls fail with, 0 for none. */
int machine_add_device(const char *name, const char *firmware, uint32_t vendor, uint32_t part, uint64_t guid,
                       int unconnected, int open_error, int query_error)
{
    struct device *made = &table[count];

    if (count == MOST_DEVICES)
        return 0;
    count++;
    made->ibv.node_type = IBV_NODE_CA;
    made->ibv.transport_type = IBV_TRANSPORT_IB;
    snprintf(made->ibv.name, sizeof made->ibv.name, "%s", name);
    snprintf(made->firmware, sizeof made->firmware, "%s", firmware);
    made->vendor = vendor;
    made->part = part;
    made->guid = guid;
    made->unconnected = unconnected;
    made->open_error = open_error;
    made->query_error = query_error;
    return 1;
}

/* Add a port to the device that was added last. */
int machine_add_port(int state, int layer, int mtu, int max_mtu, int lid, int table_length, int speed, int error)
{
    struct device *device = &table[count - 1];
    struct port *made = &device->port[device->ports];

    if (device->ports == MOST_PORTS)
        return 0;
    device->ports++;
    made->attributes.state = (enum ibv_port_state)state;
    made->attributes.link_layer = (uint8_t)layer;
    made->attributes.active_mtu = (enum ibv_mtu)mtu;
    made->attributes.max_mtu = (enum ibv_mtu)max_mtu;
    made->attributes.lid = (uint16_t)lid;
    made->attributes.gid_tbl_len = table_length;
    made->attributes.max_msg_sz = 1u << 30;
    made->speed = (uint64_t)speed;
    made->error = error;
    return 1;
}

/* Add a GID to the port that was added last. */
int machine_add_gid(const unsigned char *raw, int index, int type)
{
    struct ibv_gid_entry *made = &gids[gid_count];

    if (gid_count == MOST_GIDS)
        return 0;
    memcpy(made->gid.raw, raw, sizeof made->gid.raw);
    made->gid_index = (uint32_t)index;
    made->gid_type = (uint32_t)type;
    made->port_num = (uint32_t)table[count - 1].ports;
    gid_device[gid_count++] = count - 1;
    return 1;
}

struct ibv_device **ibv_get_device_list(int *found)
{
    static struct ibv_device *list[MOST_DEVICES + 1];
    int i;

    fputs(printed, stderr);
    for (i = 0; i < count; i++)
        list[i] = &table[i].ibv;
    list[i] = NULL;
    *found = count;
    return list;
}

static struct device *device_of(struct ibv_context *context)
{
    return (struct device *)context->device;
}

struct ibv_context *ibv_open_device(struct ibv_device *ibv)
{
    errno = ((struct device *)ibv)->open_error;
    return errno ? NULL : one_open_device(ibv);
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *out)
{
    struct device *device = device_of(context);

    if (device->query_error)
        return device->query_error;
    one_query_device(context, out);
    out->vendor_id = device->vendor;
    out->vendor_part_id = device->part;
    out->node_guid = device->guid;
    out->phys_port_cnt = (uint8_t)device->ports;
    memcpy(out->fw_ver, device->firmware, sizeof out->fw_ver);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *request)
{
    if (device_of(domain->context)->unconnected && request->qp_type != IBV_QPT_UD) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return one_create_qp(domain, request);
}

int ibv_query_port(struct ibv_context *context, uint8_t number, struct _compat_ibv_port_attr *out)
{
    struct device *device = device_of(context);

    if (number < 1 || number > device->ports)
        return EINVAL;
    *(struct ibv_port_attr *)out = device->port[number - 1].attributes;
    return device->port[number - 1].error;
}

int ibv_query_port_speed(struct ibv_context *context, uint32_t number, uint64_t *speed)
{
    *speed = device_of(context)->port[number - 1].speed;
    return *speed ? 0 : EOPNOTSUPP;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most, uint32_t flags,
                             size_t size)
{
    size_t found = 0;
    int i;

    (void)flags;
    if (size != sizeof *entries)
        return -EINVAL;
    for (i = 0; i < gid_count; i++) {
        if (&table[gid_device[i]] != device_of(context))
            continue;
        if (found == most)
            return -EINVAL;
        entries[found++] = gids[i];
    }
    return (ssize_t)found;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t number, uint32_t index, struct ibv_gid_entry *out,
                      uint32_t flags, size_t size)
{
    int i;

    (void)flags;
    for (i = 0; i < gid_count && size == sizeof *out; i++)
        if (&table[gid_device[i]] == device_of(context) && gids[i].port_num == number && gids[i].gid_index == index) {
            *out = gids[i];
            return 0;
        }
    return ENODATA;
}

int ibv_query_gid(struct ibv_context *context, uint8_t number, int index, union ibv_gid *out)
{
    struct ibv_gid_entry entry;

    if (!_ibv_query_gid_ex(context, number, (uint32_t)index, &entry, 0, sizeof entry)) {
        *out = entry.gid;
        return 0;
    }
    memset(out, 0, sizeof *out);
    return index < device_of(context)->port[number - 1].attributes.gid_tbl_len ? 0 : -1;
}
