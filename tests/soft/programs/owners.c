/* Whom system/linux/owner.c trusts: of IPv4, then of IPv6, root's socket, another user's, one of root's that was
   closed, one that its program has not accepted. Then another host. The argument "table" stands for a kernel without
   sock_diag, "nothing" for one without /proc too. "namespaces" tells whom user 1234 trusts from a user namespace
   without numbers, from one where this user is root, and from one where this user has the number that stands for all
   others: a socket of the same user, and one of another. "-" if the system allows no namespaces. */

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <sys/socket.h>
static int no_netlink, no_table;
static int asked(int domain, int type, int protocol)
{
    if (domain == AF_NETLINK && no_netlink) {
        errno = EPROTONOSUPPORT;
        return -1;
    }
    return (socket)(domain, type, protocol);
}
static FILE *opened(const char *name, const char *how)
{
    return no_table ? NULL : (fopen)(name, how);
}
#define socket(domain, type, protocol) asked(domain, type, protocol)
#define fopen(name, how)               opened(name, how)
#include "owner.c"

/* All addresses are selected. */
bool settings_text(const char *name, char *buffer, uint32_t size)
{
    (void)name, (void)buffer, (void)size;
    return false;
}
void handles_lock(void) {}
void handles_unlock(void) {}
bool handles_add(int handle)
{
    (void)handle;
    return true;
}
void socket_discard(int handle)
{
    close(handle);
}
bool trace_on;
void trace_line(const char *format, ...)
{
    (void)format;
}

enum space { NONE, UNMAPPED, AS_ROOT, AS_OVERFLOW_UID };

/* User 1234 in a user namespace. */
static void enter(enum space space)
{
    if (setuid(1234) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0)
        _exit(2);
    if (unshare(CLONE_NEWUSER) != 0)
        _exit('-');
    if (space == UNMAPPED)
        return;
    const char *numbers = space == AS_ROOT ? "0 1234 1" : "65534 1234 1";
    ssize_t length = (ssize_t)strlen(numbers);
    if (write(open("/proc/self/uid_map", O_WRONLY), numbers, (size_t)length) != length)
        _exit('-');
}

static bool judged(int family, unsigned uid, bool closed, enum space space)
{
    struct sockaddr_storage own = {.ss_family = (sa_family_t)family}, peer;
    socklen_t size = sizeof own, peer_size = sizeof peer;
    int ready[2], listening = (socket)(family, SOCK_STREAM, 0);

    if (family == AF_INET6)
        ((struct sockaddr_in6 *)&own)->sin6_addr = in6addr_loopback;
    else
        ((struct sockaddr_in *)&own)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (pipe(ready) != 0 || bind(listening, (struct sockaddr *)&own, size) != 0 || listen(listening, 1) != 0 ||
        getsockname(listening, (struct sockaddr *)&own, &size) != 0)
        _exit(2);
    if (fork() == 0) {
        char end;
        if (setuid(uid) != 0)
            _exit(2);
        int made = (socket)(family, SOCK_STREAM, 0);
        if (connect(made, (struct sockaddr *)&own, size) != 0)
            _exit(2);
        if (closed)
            close(made);
        close(listening);
        close(ready[1]);
        if (read(ready[0], &end, 1) < 0)
            _exit(2);
        _exit(0);
    }
    if (space != NONE)
        enter(space);
    int taken = accept(listening, (struct sockaddr *)&peer, &peer_size);
    if (closed && read(taken, &peer_size, 1) != 0)
        _exit(2);
    bool trusted = owner_is_trusted(&own, &peer);
    close(ready[1]);
    wait(NULL);
    return trusted;
}

/* The peer's program has not taken the connection, so nobody has that end yet. */
static bool judged_early(int family)
{
    struct sockaddr_storage listens = {.ss_family = (sa_family_t)family}, own;
    socklen_t size = sizeof listens, own_size = sizeof own;
    int listening = (socket)(family, SOCK_STREAM, 0), made = (socket)(family, SOCK_STREAM, 0);

    if (family == AF_INET6)
        ((struct sockaddr_in6 *)&listens)->sin6_addr = in6addr_loopback;
    else
        ((struct sockaddr_in *)&listens)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listening, (struct sockaddr *)&listens, size) != 0 || listen(listening, 1) != 0 ||
        getsockname(listening, (struct sockaddr *)&listens, &size) != 0 ||
        connect(made, (struct sockaddr *)&listens, size) != 0 ||
        getsockname(made, (struct sockaddr *)&own, &own_size) != 0)
        _exit(2);
    bool trusted = owner_is_trusted(&own, &listens);
    close(made);
    close(listening);
    return trusted;
}

/* In a process of its own, which does not come back from the namespace. */
static char judged_from(enum space space, unsigned uid)
{
    int status;
    pid_t judge = fork();

    if (judge == 0)
        _exit(judged(AF_INET, uid, false, space) ? '1' : '0');
    waitpid(judge, &status, 0);
    return WIFEXITED(status) ? (char)WEXITSTATUS(status) : '?';
}

int main(int count, char **words)
{
    if (count > 1 && strcmp(words[1], "namespaces") == 0) {
        for (enum space space = UNMAPPED; space <= AS_OVERFLOW_UID; space++)
            printf("%c %c ", judged_from(space, 1234), judged_from(space, 4321));
        return 0;
    }
    no_netlink = count > 1 && strcmp(words[1], "kernel") != 0;
    no_table = count > 1 && strcmp(words[1], "nothing") == 0;
    for (int i = 0; i < 2; i++) {
        int family = i == 0 ? AF_INET : AF_INET6;
        printf("%d %d %d %d ", judged(family, 0, false, NONE), judged(family, 65534, false, NONE),
               judged(family, 0, true, NONE), judged_early(family));
    }
    struct sockaddr_storage own = {.ss_family = AF_INET}, away = {.ss_family = AF_INET};
    ((struct sockaddr_in *)&away)->sin_addr.s_addr = htonl(0xC6336402); /* 198.51.100.2 */
    printf("%d\n", owner_is_trusted(&own, &away));
    return 0;
}
