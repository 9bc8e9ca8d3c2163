/* In place of listen(): at the moment when a socket of the library is bound and does not listen yet, another user tries
   to listen on its port, at each address and with each way of sharing. It writes to NDPY_TEST_ATTACKS what came of it.
 */

#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int listens(int, int);

static listens *real(void)
{
    return (listens *)dlsym(RTLD_NEXT, "listen");
}

static void attack(const char *address, int option, in_port_t port)
{
    FILE *out = fopen(getenv("NDPY_TEST_ATTACKS"), "a");
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = port};
    int on = 1;

    inet_pton(AF_INET, address, &at.sin_addr);
    if (out == NULL || setuid(65534) != 0)
        _exit(1);
    int handle = socket(AF_INET, SOCK_STREAM, 0);
    if (option != 0)
        setsockopt(handle, SOL_SOCKET, option, &on, sizeof on);
    int got = bind(handle, (struct sockaddr *)&at, sizeof at) == 0 && real()(handle, 1) == 0;
    fprintf(out, "%s %s\n", address, got ? "got" : "refused");
    fclose(out);
    _exit(0);
}

int listen(int handle, int backlog)
{
    static const char *const addresses[] = {"0.0.0.0", "127.0.0.1", "127.0.0.2"};
    static const int options[] = {0, SO_REUSEADDR, SO_REUSEPORT};
    struct sockaddr_in own;
    socklen_t size = sizeof own;

    if (getsockname(handle, (struct sockaddr *)&own, &size) == 0 && own.sin_family == AF_INET)
        for (int i = 0; i < 9; i++) {
            if (fork() == 0)
                attack(addresses[i / 3], options[i % 3], own.sin_port);
            wait(NULL);
        }
    return real()(handle, backlog);
}
