#include "addresses.h"

#include <iphlpapi.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ADDRESSES 256

static int collect(struct sockaddr_storage *all)
{
    ULONG flags = GAA_FLAG_SKIP_ANYCAST | GAA_FLAG_SKIP_MULTICAST | GAA_FLAG_SKIP_DNS_SERVER;
    ULONG size = 32768;
    IP_ADAPTER_ADDRESSES *list = NULL;
    int count = 0;

    for (;;) {
        IP_ADAPTER_ADDRESSES *grown = realloc(list, size);
        if (grown == NULL)
            break;
        list = grown;
        ULONG error = GetAdaptersAddresses(AF_UNSPEC, flags, NULL, list, &size);
        if (error == ERROR_BUFFER_OVERFLOW && size < (1u << 24))
            continue;
        if (error != ERROR_SUCCESS)
            break;
        for (IP_ADAPTER_ADDRESSES *at = list; at != NULL; at = at->Next)
            for (IP_ADAPTER_UNICAST_ADDRESS *unicast = at->FirstUnicastAddress; unicast; unicast = unicast->Next)
                count = addresses_add(all, count, MAX_ADDRESSES, unicast->Address.lpSockaddr);
        break;
    }
    free(list);

    /* Loopback always works, even if no interface has it. */
    struct sockaddr_in loopback = {.sin_family = AF_INET};
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return addresses_add(all, count, MAX_ADDRESSES, (struct sockaddr *)&loopback);
}

HRESULT addresses_list(SOCKET_ADDRESS_LIST *list, ULONG *size)
{
    struct sockaddr_storage all[MAX_ADDRESSES];
    ULONG have;

    if (!guarded_copy(&have, size, sizeof have))
        return ND_ACCESS_VIOLATION;
    int count = collect(all);
    size_t head = offsetof(SOCKET_ADDRESS_LIST, Address) + (size_t)count * sizeof(SOCKET_ADDRESS);
    if (head < sizeof(SOCKET_ADDRESS_LIST))
        head = sizeof(SOCKET_ADDRESS_LIST);
    size_t need = head;
    for (int i = 0; i < count; i++)
        need += (size_t)(address_size((struct sockaddr *)&all[i]) + 7) & ~(size_t)7;
    ULONG required = (ULONG)need;
    if (!guarded_copy(size, &required, sizeof required))
        return ND_ACCESS_VIOLATION;
    if (list == NULL || have < required)
        return ND_BUFFER_OVERFLOW;

    char *copy = calloc(1, need);
    if (copy == NULL)
        return ND_NO_MEMORY;
    SOCKET_ADDRESS_LIST *built = (SOCKET_ADDRESS_LIST *)(void *)copy;
    built->iAddressCount = count;
    size_t at = head;
    for (int i = 0; i < count; i++) {
        int length = address_size((struct sockaddr *)&all[i]);
        memcpy(copy + at, &all[i], (size_t)length);
        built->Address[i].lpSockaddr = (struct sockaddr *)(void *)((char *)list + at);
        built->Address[i].iSockaddrLength = length;
        at += (size_t)(length + 7) & ~(size_t)7;
    }
    HRESULT status = guarded_copy(list, copy, need) ? ND_SUCCESS : ND_ACCESS_VIOLATION;
    free(copy);
    return status;
}

bool addresses_serve(const struct sockaddr *address)
{
    struct sockaddr_storage all[MAX_ADDRESSES];

    /* Checked first because loopback is always listed, and listing the other addresses takes a millisecond. */
    if (address->sa_family == AF_INET &&
        ((const struct sockaddr_in *)address)->sin_addr.s_addr == htonl(INADDR_LOOPBACK))
        return address_is_selected(address);
    int count = collect(all);
    for (int i = 0; i < count; i++)
        if (address_same((struct sockaddr *)&all[i], address))
            return true;
    return false;
}

HRESULT address_take(const struct sockaddr *address, ULONG size, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    if (size < sizeof(struct sockaddr))
        return ND_INVALID_PARAMETER_2;
    if (address == NULL || !guarded_copy(out, address, size < sizeof *out ? size : sizeof *out))
        return ND_ACCESS_VIOLATION;
    if (out->ss_family != AF_INET && out->ss_family != AF_INET6)
        return ND_INVALID_ADDRESS;
    if (size < (ULONG)address_size((struct sockaddr *)out))
        return ND_INVALID_PARAMETER_2;
    return ND_SUCCESS;
}

HRESULT address_give(const struct sockaddr_storage *address, struct sockaddr *out, ULONG *size)
{
    ULONG have, need = (ULONG)address_size((const struct sockaddr *)address);

    if (!guarded_copy(&have, size, sizeof have) || !guarded_copy(size, &need, sizeof need))
        return ND_ACCESS_VIOLATION;
    if (out == NULL || have < need)
        return ND_BUFFER_OVERFLOW;
    return guarded_copy(out, address, need) ? ND_SUCCESS : ND_ACCESS_VIOLATION;
}
