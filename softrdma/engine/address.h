/* IPv4 and IPv6 socket addresses. */
#ifndef ENGINE_ADDRESS_H
#define ENGINE_ADDRESS_H

#include "system.h"

int address_size(const struct sockaddr *address);
bool address_is_wildcard(const struct sockaddr *address);
/* IPv4 or IPv6, and no wildcard. */
bool address_is_usable(const struct sockaddr *address);
/* Whether the comma-separated list in the setting ADDRESSES names the address. Unset, it selects every address. */
bool address_is_selected(const struct sockaddr *address);
/* Adds one that is usable and selected to those of the machine, with port 0, unless it is there already. Returns their
 * number. */
int addresses_add(struct sockaddr_storage *all, int count, int max, const struct sockaddr *address);
/* Ignores port and scope. */
bool address_same_host(const struct sockaddr *a, const struct sockaddr *b);
/* The same, but link-local addresses of two interfaces differ. One without a scope is that of any interface. */
bool address_same(const struct sockaddr *a, const struct sockaddr *b);
bool address_is_link_local_v6(const struct sockaddr *address);
/* Its 16 bytes as one of IPv6. An address of IPv4 becomes ::ffff:a.b.c.d. */
void address_mapped(const struct sockaddr_storage *address, uint8_t *out);
uint16_t address_port(const struct sockaddr *address);
void address_set_port(struct sockaddr *address, uint16_t port);

#endif
