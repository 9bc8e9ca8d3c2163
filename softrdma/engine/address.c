#include "address.h"

#include <string.h>

int address_size(const struct sockaddr *address)
{
    return address->sa_family == AF_INET ? (int)sizeof(struct sockaddr_in) : (int)sizeof(struct sockaddr_in6);
}

bool address_same_host(const struct sockaddr *a, const struct sockaddr *b)
{
    if (a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr == ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
}

bool address_is_link_local_v6(const struct sockaddr *address)
{
    const uint8_t *bytes = (const uint8_t *)&((const struct sockaddr_in6 *)address)->sin6_addr;

    return address->sa_family == AF_INET6 && bytes[0] == 0xFE && (bytes[1] & 0xC0) == 0x80;
}

bool address_same(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!address_same_host(a, b))
        return false;
    if (!address_is_link_local_v6(a))
        return true;
    uint32_t x = ((const struct sockaddr_in6 *)a)->sin6_scope_id, y = ((const struct sockaddr_in6 *)b)->sin6_scope_id;
    return x == y || x == 0 || y == 0;
}

bool address_is_wildcard(const struct sockaddr *address)
{
    static const struct in6_addr none;

    if (address->sa_family == AF_INET)
        return ((const struct sockaddr_in *)address)->sin_addr.s_addr == 0;
    return memcmp(&((const struct sockaddr_in6 *)address)->sin6_addr, &none, sizeof none) == 0;
}

uint16_t address_port(const struct sockaddr *address)
{
    return ntohs(address->sa_family == AF_INET ? ((const struct sockaddr_in *)address)->sin_port
                                               : ((const struct sockaddr_in6 *)address)->sin6_port);
}

void address_set_port(struct sockaddr *address, uint16_t port)
{
    if (address->sa_family == AF_INET)
        ((struct sockaddr_in *)address)->sin_port = htons(port);
    else
        ((struct sockaddr_in6 *)address)->sin6_port = htons(port);
}
