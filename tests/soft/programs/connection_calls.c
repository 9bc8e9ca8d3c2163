/* The system calls that a connection costs both ends, from rdma_create_id() to rdma_destroy_id(). The program counts
   those of the library, as calls.c does.

   connection_calls. Two more queue pairs stay open, as in a program with other connections. Prints the calls for each
   connection. */

#include "ends.h"

#include <dlfcn.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define CONNECTIONS 50

enum call { SOCKET, BIND, CONNECT, ACCEPT, OPTION, OWN_ADDRESS, PEER_ADDRESS, CONTROL, CALLS };
static const char *const names[CALLS] = {
    [SOCKET] = "socket",     [BIND] = "bind",     [CONNECT] = "connect",         [ACCEPT] = "accept4",
    [OPTION] = "setsockopt", [CONTROL] = "ioctl", [OWN_ADDRESS] = "getsockname", [PEER_ADDRESS] = "getpeername",
};
static _Atomic long counts[CALLS];

#define COUNTED(call, name, parameters, arguments)            \
    int name parameters                                       \
    {                                                         \
        static __typeof__(&name) next;                        \
        if (next == NULL)                                     \
            next = (__typeof__(next))dlsym(RTLD_NEXT, #name); \
        counts[call]++;                                       \
        return next arguments;                                \
    }

COUNTED(SOCKET, socket, (int family, int type, int protocol), (family, type, protocol))
COUNTED(BIND, bind, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))
COUNTED(CONNECT, connect, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))
COUNTED(ACCEPT, accept4, (int fd, struct sockaddr *address, socklen_t *size, int flags), (fd, address, size, flags))
COUNTED(OPTION, setsockopt, (int fd, int level, int name, const void *value, socklen_t size),
        (fd, level, name, value, size))
COUNTED(OWN_ADDRESS, getsockname, (int fd, struct sockaddr *address, socklen_t *size), (fd, address, size))
COUNTED(PEER_ADDRESS, getpeername, (int fd, struct sockaddr *address, socklen_t *size), (fd, address, size))

int ioctl(int fd, unsigned long request, ...)
{
    static __typeof__(&ioctl) next;
    va_list arguments;

    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (next == NULL)
        next = (__typeof__(next))dlsym(RTLD_NEXT, "ioctl");
    counts[CONTROL]++;
    return next(fd, request, argument);
}

static void connect_once(struct manager *manager)
{
    struct end ends[2];

    connect_ends(manager, ends, 4);
    EXPECT(rdma_disconnect(ends[0].id) == 0);
    expect_event(manager->events, RDMA_CM_EVENT_DISCONNECTED);
    expect_event(manager->events, RDMA_CM_EVENT_DISCONNECTED);
    close_end(&ends[0]);
    close_end(&ends[1]);
}

int main(void)
{
    struct manager manager;
    struct end kept[2];

    open_manager(&manager);
    connect_ends(&manager, kept, 4);
    connect_once(&manager);
    for (int i = 0; i < CALLS; i++)
        counts[i] = 0;
    for (int i = 0; i < CONNECTIONS; i++)
        connect_once(&manager);
    for (int i = 0; i < CALLS; i++)
        printf("%s %.2f\n", names[i], (double)counts[i] / CONNECTIONS);
    close_end(&kept[0]);
    close_end(&kept[1]);
    close_manager(&manager);
    return 0;
}
