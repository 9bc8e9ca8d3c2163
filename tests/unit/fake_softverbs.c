/* Makes the provider without a device a stand-in for softverbs: its device is soft0, and it has softverbs' own call. */

#include "fake_verbs.h"

#include <arpa/inet.h>
#include <netinet/in.h>

/* The test sets these. */
struct fake_softverbs {
    int32_t failure; /* if not 0, softverbs_addresses() returns this */
    int32_t many;    /* how many addresses of a further network there are */
} fake_softverbs;

__attribute__((constructor)) static void become_softverbs(void)
{
    strcpy(fake_device.name, "soft0");
    fake_device.node_type = IBV_NODE_RNIC;
    fake_device.transport_type = IBV_TRANSPORT_IWARP;
}

static void put(struct sockaddr_storage *out, const char *text, uint32_t scope)
{
    struct sockaddr_in *four = (struct sockaddr_in *)out;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)out;

    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        return;
    }
    inet_pton(AF_INET6, text, &six->sin6_addr);
    six->sin6_family = AF_INET6;
    six->sin6_scope_id = scope;
}

int softverbs_addresses(struct sockaddr_storage *out, int count)
{
    static const char *const addresses[] = {"fe80::1", "127.0.0.1", "192.0.2.7", "::1", "2001:db8::7"};
    int written = 0;

    if (fake_softverbs.failure)
        return fake_softverbs.failure;
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses && written < count; i++)
        put(&out[written++], addresses[i], i == 0 ? 1 : 0);
    for (int32_t i = 0; i < fake_softverbs.many && written < count; i++) {
        char text[32];

        snprintf(text, sizeof text, "198.51.100.%d", (int)i + 1);
        put(&out[written++], text, 0);
    }
    return written;
}
