/* The kernel tells by netlink (sock_diag), or by /proc/net/tcp where netlink cannot be had. Both name the user who made
 * a socket. A socket that no process has any more has no inode, and then its user means nothing. */
#include "owner.h"
#include "address.h"
#include "internal.h"
#include "trace.h"

#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define ESTABLISHED 1 /* TCP_ESTABLISHED of the kernel, as both report it */
/* The kernel answers within the call. */
#define ANSWER_S 1
/* As long as nobody has changed it. */
#define OVERFLOW_UID 65534

enum answer { UNKNOWN, TRUSTED, OTHER };

/* In a user namespace, the kernel gives all users that it has no number for the same one: the overflow uid. */
static bool stands_for_others(uint32_t uid)
{
    uint32_t overflow = OVERFLOW_UID, size;
    uint64_t numbers = 0;

    FILE *file = fopen("/proc/sys/kernel/overflowuid", "re");
    if (file != NULL) {
        if (fscanf(file, "%" SCNu32, &overflow) != 1)
            overflow = OVERFLOW_UID;
        fclose(file);
    }
    if (uid != overflow)
        return false;
    /* Outside of all namespaces everybody has a number. */
    file = fopen("/proc/self/uid_map", "re");
    while (file != NULL && fscanf(file, "%*u %*u %" SCNu32, &size) == 1)
        numbers += size;
    if (file != NULL)
        fclose(file);
    return numbers < UINT32_MAX;
}

static enum answer judge(uint32_t uid, uint64_t inode)
{
    if (inode == 0)
        return UNKNOWN;
    return uid == 0 || (uid == geteuid() && !stands_for_others(uid)) ? TRUSTED : OTHER;
}

static void put_address(const struct sockaddr_storage *address, __be16 *port, __be32 out[4])
{
    *port = htons(address_port((const struct sockaddr *)address));
    if (address->ss_family == AF_INET6)
        memcpy(out, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
    else
        memcpy(out, &((const struct sockaddr_in *)address)->sin_addr, 4);
}

/* ---- sock_diag ---- */

struct question {
    struct nlmsghdr header;
    struct inet_diag_req_v2 request;
};

/* The socket whose own address is `own` and whose peer is `other`. */
static struct question question_for(const struct sockaddr_storage *own, const struct sockaddr_storage *other)
{
    struct question question = {
        .header = {.nlmsg_len = sizeof question, .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST},
        .request = {.sdiag_family = (uint8_t)own->ss_family, .sdiag_protocol = IPPROTO_TCP, .idiag_states = ~0u},
    };
    struct inet_diag_sockid *id = &question.request.id;

    put_address(own, &id->idiag_sport, id->idiag_src);
    put_address(other, &id->idiag_dport, id->idiag_dst);
    id->idiag_cookie[0] = id->idiag_cookie[1] = INET_DIAG_NOCOOKIE;
    return question;
}

/* For a connection that it does not find, the kernel may answer with a listener of the port. */
static enum answer read_answer(const struct question *question, const uint8_t *data, size_t size)
{
    struct nlmsghdr header;
    struct inet_diag_msg found;

    if (size < NLMSG_HDRLEN + sizeof found)
        return UNKNOWN;
    memcpy(&header, data, sizeof header);
    memcpy(&found, data + NLMSG_HDRLEN, sizeof found);
    const struct inet_diag_sockid *id = &question->request.id;
    if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY || found.idiag_state != ESTABLISHED ||
        found.id.idiag_sport != id->idiag_sport || found.id.idiag_dport != id->idiag_dport)
        return UNKNOWN;
    return judge(found.idiag_uid, found.idiag_inode);
}

static enum answer ask_kernel(const struct sockaddr_storage *local, const struct sockaddr_storage *peer)
{
    struct question question = question_for(peer, local);
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    struct timeval limit = {.tv_sec = ANSWER_S};
    uint8_t data[1024];

    handles_lock();
    int handle = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (!handles_add(handle))
        handle = -1;
    handles_unlock();
    if (handle < 0)
        return UNKNOWN;
    setsockopt(handle, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ssize_t size = sendto(handle, &question, sizeof question, 0, (struct sockaddr *)&kernel, sizeof kernel);
    if (size >= 0)
        size = recv(handle, data, sizeof data, 0);
    socket_discard(handle);
    return size > 0 ? read_answer(&question, data, (size_t)size) : UNKNOWN;
}

/* ---- /proc/net/tcp ---- */

/* Addresses are numbers of 32 bits in the machine's order there. */
static void write_address(char *out, size_t room, const struct sockaddr_storage *address)
{
    __be32 words[4];
    __be16 port;
    size_t at = 0;

    put_address(address, &port, words);
    for (int i = 0; i < (address->ss_family == AF_INET6 ? 4 : 1); i++)
        at += (size_t)snprintf(out + at, room - at, "%08X", (unsigned)words[i]);
    snprintf(out + at, room - at, ":%04X", (unsigned)ntohs(port));
}

static enum answer read_table(const struct sockaddr_storage *local, const struct sockaddr_storage *peer)
{
    char own[48], other[48], line[512], from[48], to[48];
    unsigned state, uid;
    unsigned long inode;
    enum answer answer = UNKNOWN;

    FILE *table = fopen(peer->ss_family == AF_INET6 ? "/proc/net/tcp6" : "/proc/net/tcp", "re");
    if (table == NULL)
        return UNKNOWN;
    write_address(own, sizeof own, peer);
    write_address(other, sizeof other, local);
    while (answer == UNKNOWN && fgets(line, sizeof line, table) != NULL)
        if (sscanf(line, "%*s %47s %47s %x %*s %*s %*s %u %*s %lu", from, to, &state, &uid, &inode) == 5 &&
            state == ESTABLISHED && strcmp(from, own) == 0 && strcmp(to, other) == 0)
            answer = judge(uid, inode);
    fclose(table);
    return answer;
}

/* ---- Is it this machine? ---- */

static bool is_own(const struct sockaddr_storage *address)
{
    struct ifaddrs *interfaces;
    bool own = false;

    if (address->ss_family == AF_INET &&
        ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET)
        return true;
    /* Nothing is known. The peer tries again. */
    if (getifaddrs(&interfaces) != 0)
        return true;
    for (const struct ifaddrs *at = interfaces; at != NULL && !own; at = at->ifa_next)
        own = at->ifa_addr != NULL && address_same_host(at->ifa_addr, (const struct sockaddr *)address);
    freeifaddrs(interfaces);
    return own;
}

bool owner_is_trusted(const struct sockaddr_storage *local, const struct sockaddr_storage *peer)
{
    int cancel = cancel_off();

    enum answer answer = ask_kernel(local, peer);
    bool here = answer == UNKNOWN && is_own(peer);
    if (here)
        answer = read_table(local, peer);
    cancel_as(cancel);
    TRACE("the peer on port %u %s", address_port((const struct sockaddr *)peer),
          answer == TRUSTED ? "belongs to this user or root"
          : answer == OTHER ? "belongs to another user"
          : here            ? "has no owner that could be found"
                            : "is another host");
    return answer == TRUSTED || (answer == UNKNOWN && !here);
}
