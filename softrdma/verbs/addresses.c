/* The machine's addresses, which are also the GIDs of the port. */
#include "soft.h"
#include "address.h"

#include <errno.h>
#include <ifaddrs.h>
#include <string.h>

/* How the addresses are sorted. */
enum rank { IPV4, IPV6, IPV4_LOOPBACK, IPV6_LOOPBACK, IPV6_LINK_LOCAL, RANKS };

static const uint8_t mapped_prefix[12] = {[10] = 0xFF, [11] = 0xFF};

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static enum rank rank_of(const struct sockaddr *address)
{
    if (address_is_link_local_v6(address))
        return IPV6_LINK_LOCAL;
    if (address->sa_family == AF_INET)
        return is_loopback(address) ? IPV4_LOOPBACK : IPV4;
    return is_loopback(address) ? IPV6_LOOPBACK : IPV6;
}

static uint32_t scope_of(const struct sockaddr *address)
{
    return address_is_link_local_v6(address) ? ((const struct sockaddr_in6 *)address)->sin6_scope_id : 0;
}

static int add_ranked(struct sockaddr_storage *out, int count, int max, const struct ifaddrs *interfaces,
                      enum rank rank)
{
    for (const struct ifaddrs *at = interfaces; at != NULL; at = at->ifa_next) {
        const struct sockaddr *address = at->ifa_addr;
        if (address != NULL && (at->ifa_flags & IFF_UP) != 0 && address_is_usable(address) && rank_of(address) == rank)
            count = addresses_add(out, count, max, address);
    }
    return count;
}

/* Why getifaddrs() failed: it could work later. */
static bool for_want_of_resources(int error)
{
    return error == ENOMEM || error == ENOBUFS || error == EMFILE || error == ENFILE;
}

/* The order does not depend on `max`, so an index means the same everywhere. */
int soft_addresses(struct sockaddr_storage *out, int max)
{
    const struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_storage all[SOFT_MAX_GIDS];
    struct ifaddrs *interfaces;
    int count = 0;

    if (getifaddrs(&interfaces) == 0) {
        /* On a machine with very many addresses, loopback is listed nevertheless. */
        for (enum rank rank = IPV4; rank < RANKS; rank++)
            count = add_ranked(all, count, rank < IPV4_LOOPBACK ? SOFT_MAX_GIDS - 2 : SOFT_MAX_GIDS, interfaces, rank);
        freeifaddrs(interfaces);
    } else if (for_want_of_resources(errno)) {
        return -1;
    } else { /* some sandboxes do not list interfaces */
        count = addresses_add(all, 0, SOFT_MAX_GIDS, (const struct sockaddr *)&loopback);
    }
    if (count > max)
        count = max > 0 ? max : 0;
    if (count > 0)
        memcpy(out, all, (size_t)count * sizeof *out);
    return count;
}

/* The name of the interface that is up and has the address, "" if the system cannot be asked. */
static bool interface_of(const struct sockaddr *address, char name[static IF_NAMESIZE])
{
    struct ifaddrs *interfaces;
    bool found = false;

    name[0] = '\0';
    if (getifaddrs(&interfaces) != 0)
        return for_want_of_resources(errno);
    for (const struct ifaddrs *at = interfaces; at != NULL && !found; at = at->ifa_next) {
        if (at->ifa_addr == NULL || (at->ifa_flags & IFF_UP) == 0 || !address_same(at->ifa_addr, address))
            continue;
        strncpy(name, at->ifa_name, IF_NAMESIZE - 1);
        name[IF_NAMESIZE - 1] = '\0';
        found = true;
    }
    freeifaddrs(interfaces);
    return found;
}

bool soft_serves(const struct sockaddr *address)
{
    char name[IF_NAMESIZE];

    if (!address_is_usable(address) || !address_is_selected(address))
        return false;
    /* The machine has every address of 127.0.0.0/8, and interfaces list only the first. */
    return is_loopback(address) || interface_of(address, name);
}

void soft_gid_of(const struct sockaddr *address, union ibv_gid *gid)
{
    if (address->sa_family == AF_INET6) {
        memcpy(gid->raw, &((const struct sockaddr_in6 *)address)->sin6_addr, sizeof gid->raw);
        return;
    }
    memcpy(gid->raw, mapped_prefix, sizeof mapped_prefix);
    memcpy(gid->raw + sizeof mapped_prefix, &((const struct sockaddr_in *)address)->sin_addr, 4);
}

bool soft_address_of(const union ibv_gid *gid, const struct sockaddr_storage *own, struct sockaddr_storage *out)
{
    static const uint8_t zeros[10];

    memset(out, 0, sizeof *out);
    if (memcmp(gid->raw, mapped_prefix, sizeof mapped_prefix) == 0) {
        out->ss_family = AF_INET;
        memcpy(&((struct sockaddr_in *)out)->sin_addr, gid->raw + sizeof mapped_prefix, 4);
    } else {
        out->ss_family = AF_INET6;
        memcpy(&((struct sockaddr_in6 *)out)->sin6_addr, gid->raw, sizeof gid->raw);
        /* The GIDs of other iWARP devices are MAC addresses with zeros behind them. */
        if (gid->raw[0] == 0xFF || memcmp(gid->raw + 6, zeros, sizeof zeros) == 0)
            return false;
    }
    if (!address_is_usable((struct sockaddr *)out) || out->ss_family != own->ss_family)
        return false;
    bool near = address_is_link_local_v6((struct sockaddr *)out);
    if (near)
        ((struct sockaddr_in6 *)out)->sin6_scope_id = ((const struct sockaddr_in6 *)own)->sin6_scope_id;
    return near == address_is_link_local_v6((const struct sockaddr *)own);
}

/* For programs that look for soft0's addresses without opening it. */
EXPORT int softverbs_addresses(struct sockaddr_storage *out, int max)
{
    return soft_addresses(out, max);
}

/* ---- The table of GIDs ---- */

static void describe(const struct sockaddr *address, int index, struct ibv_gid_entry *out)
{
    char name[IF_NAMESIZE];

    memset(out, 0, sizeof *out);
    soft_gid_of(address, &out->gid);
    out->gid_index = (uint32_t)index;
    out->port_num = 1;
    out->gid_type = IBV_GID_TYPE_IB; /* as the kernel says for iWARP devices */
    out->ndev_ifindex = scope_of(address);
    if (out->ndev_ifindex == 0 && interface_of(address, name))
        out->ndev_ifindex = if_nametoindex(name);
}

EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *out,
                             uint32_t flags, size_t size)
{
    struct sockaddr_storage all[SOFT_MAX_GIDS];
    struct ibv_gid_entry entry;

    UNUSED(context);
    if (flags != 0)
        return errno = EOPNOTSUPP;
    int count = soft_addresses(all, SOFT_MAX_GIDS);
    if (count < 0)
        return errno;
    if (port != 1 || index >= (uint32_t)count)
        return errno = EINVAL;
    describe((struct sockaddr *)&all[index], (int)index, &entry);
    soft_answer(out, size, &entry, sizeof entry);
    return 0;
}

EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *out, size_t max, uint32_t flags,
                                    size_t size)
{
    struct sockaddr_storage all[SOFT_MAX_GIDS];

    UNUSED(context);
    if (flags != 0)
        return -EOPNOTSUPP;
    int count = soft_addresses(all, SOFT_MAX_GIDS);
    if (count < 0)
        return -errno;
    if ((size_t)count > max)
        return -EINVAL;
    for (int i = 0; i < count; i++) {
        struct ibv_gid_entry entry;
        describe((struct sockaddr *)&all[i], i, &entry);
        soft_answer((char *)out + (size_t)i * size, size, &entry, sizeof entry);
    }
    return count;
}
