/* The addresses the adapter serves: the machine's own, or those of them that SOFTND_ADDRESSES names. */
#ifndef SOFTND_ADDRESSES_H
#define SOFTND_ADDRESSES_H

#include "../nd2.h"

#include <stdbool.h>

/* Fills a SOCKET_ADDRESS_LIST in the way of section A.5. */
HRESULT addresses_list(SOCKET_ADDRESS_LIST *list, ULONG *size);
/* Port and scope are ignored. */
bool addresses_serve(const struct sockaddr *address);
/* The first served address of the family, port 0; false when there is none. */
bool addresses_any(int family, struct sockaddr_storage *out);

/* A consumer's socket address, checked: its family is IPv4 or IPv6 and its size suffices. */
HRESULT address_take(const struct sockaddr *address, ULONG size, struct sockaddr_storage *out);
int address_size(const struct sockaddr *address);
bool address_is_wildcard(const struct sockaddr *address);
USHORT address_port(const struct sockaddr *address);
void address_set_port(struct sockaddr *address, USHORT port);
/* Answers a sized getter: ND_BUFFER_OVERFLOW leaves the buffer alone. */
HRESULT address_give(const struct sockaddr_storage *address, struct sockaddr *out, ULONG *size);

#endif
