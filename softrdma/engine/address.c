#include "address.h"
#include "settings.h"

#include <stdlib.h>
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

void address_mapped(const struct sockaddr_storage *address, uint8_t *out)
{
    static const uint8_t prefix[12] = {[10] = 0xFF, [11] = 0xFF};

    if (((const struct sockaddr *)address)->sa_family == AF_INET6) {
        memcpy(out, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
        return;
    }
    memcpy(out, prefix, sizeof prefix);
    memcpy(out + sizeof prefix, &((const struct sockaddr_in *)address)->sin_addr, 4);
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

/* ---- The addresses of the machine ---- */

bool address_is_usable(const struct sockaddr *address)
{
    return (address->sa_family == AF_INET || address->sa_family == AF_INET6) && !address_is_wildcard(address);
}

/* A numeric address, perhaps with the name or the index of an interface behind "%". The family is written as the other
 * functions of this file read it: of two types, the compiler takes the one not to change the other. */
static bool read_address(char *text, struct sockaddr_storage *out)
{
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)out;
    char *scope = strchr(text, '%');

    memset(out, 0, sizeof *out);
    if (scope != NULL)
        *scope++ = '\0';
    if (scope == NULL && inet_pton(AF_INET, text, &((struct sockaddr_in *)out)->sin_addr) == 1) {
        ((struct sockaddr *)out)->sa_family = AF_INET;
        return true;
    }
    if (inet_pton(AF_INET6, text, &six->sin6_addr) != 1)
        return false;
    ((struct sockaddr *)out)->sa_family = AF_INET6;
    if (scope == NULL)
        return true;
    six->sin6_scope_id = if_nametoindex(scope);
    if (six->sin6_scope_id == 0)
        six->sin6_scope_id = (uint32_t)strtoul(scope, NULL, 10);
    return six->sin6_scope_id != 0;
}

bool address_is_selected(const struct sockaddr *address)
{
    char list[2048], text[INET6_ADDRSTRLEN + 1 + IF_NAMESIZE];

    if (!settings_text("ADDRESSES", list, sizeof list))
        return true;
    for (char *at = list; *at != '\0';) {
        size_t length = strcspn(at, ", ");
        if (length > 0 && length < sizeof text) {
            struct sockaddr_storage named;
            memcpy(text, at, length);
            text[length] = '\0';
            if (read_address(text, &named) && address_same(address, (struct sockaddr *)&named))
                return true;
        }
        at += length;
        at += *at != '\0';
    }
    return false;
}

int addresses_add(struct sockaddr_storage *all, int count, int max, const struct sockaddr *address)
{
    if (count >= max || !address_is_usable(address) || !address_is_selected(address))
        return count;
    for (int i = 0; i < count; i++)
        if (address_same((struct sockaddr *)&all[i], address))
            return count;
    memset(&all[count], 0, sizeof all[count]);
    memcpy(&all[count], address, (size_t)address_size(address));
    address_set_port((struct sockaddr *)&all[count], 0);
    return count + 1;
}
