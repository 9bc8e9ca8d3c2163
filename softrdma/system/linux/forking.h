/* What a fork leaves behind: no workers, and none of the engine's sockets.
 *
 * In the child, the sockets are closed, so the child can neither write to the parent's connections nor keep them open.
 * Operations on a struct socket that was started before the fork fail or do nothing. workers_stop returns at once. The
 * child may call workers_start for sockets of its own. Locks that other threads had during the fork stay locked, so the
 * face and the engine begin anew: see system_on_fork and transport_forget.
 */
#ifndef LINUX_FORKING_H
#define LINUX_FORKING_H

#include <stdbool.h>
#include <stdint.h>

/* True in a process that was forked after workers_start. */
extern _Atomic bool system_forked;
/* The number of such forks between the first process and this one. Objects with another number belong to a parent. */
extern _Atomic uint32_t system_generation;

/* Has call() called in each such child, after the system's own part. One call for the process. */
void system_on_fork(void (*call)(void));
/* Keeps what the child has of its parent reachable, for leak checkers. Nobody uses it. */
void system_keep(void *inherited);

#endif
