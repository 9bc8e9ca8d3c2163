/* The addresses that the adapter serves: those of the machine, or the ones among them that SOFTND_ADDRESSES names. */
#ifndef SOFTND_ADDRESSES_H
#define SOFTND_ADDRESSES_H

#include "address.h"
#include "version2.h"

/* Fills a SOCKET_ADDRESS_LIST as section A.5 says. */
HRESULT addresses_list(SOCKET_ADDRESS_LIST *list, ULONG *size);
/* Ignores port and scope. */
bool addresses_serve(const struct sockaddr *address);

/* Copies and checks a consumer's socket address: the family must be IPv4 or IPv6 and the size must suffice. */
HRESULT address_take(const struct sockaddr *address, ULONG size, struct sockaddr_storage *out);
/* Answers a sized getter. ND_BUFFER_OVERFLOW leaves the buffer unchanged. */
HRESULT address_give(const struct sockaddr_storage *address, struct sockaddr *out, ULONG *size);

#endif
