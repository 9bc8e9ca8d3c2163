/* Who has the other end of a connection within this machine. For the verbs face. */
#ifndef SYSTEM_LINUX_OWNER_H
#define SYSTEM_LINUX_OWNER_H

#include "system.h"

/* Whether the peer's end of a connection belongs to this process's user or to root, or to another host. False also if
 * the system does not tell, or if the peer has closed its end. `local` and `peer` are the addresses of this process's
 * end. */
bool owner_is_trusted(const struct sockaddr_storage *local, const struct sockaddr_storage *peer);

#endif
