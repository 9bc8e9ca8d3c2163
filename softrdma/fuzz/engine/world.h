/* What the fuzzer is to the engine: the system, and the peer at the other end of each socket. */
#ifndef FUZZ_WORLD_H
#define FUZZ_WORLD_H

#include "system.h"

/* Before each input. */
void world_reset(void);
/* Lets everything happen that can, without moving the clock. */
void world_run(void);
/* Moves the clock, and runs each timer at its time. */
void world_pass(uint64_t ms);

/* The peer asks the only listening socket for a connection. Returns the socket that this makes, or NO_SOCKET. */
socket_handle world_knock(void);
/* The newest socket that is open. */
socket_handle world_newest(void);
/* The peer's bytes. */
void world_feed(socket_handle handle, const void *data, size_t size);
/* The peer sends no more, or is gone. */
void world_end(socket_handle handle, bool reset);
/* The peer's host answers no question of TCP from now on. */
void world_falls_silent(socket_handle handle);
/* How often the peer's host was asked for a sign of life, and whether it is asked now. */
unsigned world_asked(socket_handle handle, bool *now);
/* The most that a receive gets at once, and how much sends may take from now on. */
void world_limit(size_t chunk, size_t room);

/* All that the engine has sent on this socket. Valid until it sends more. */
const uint8_t *world_output(socket_handle handle, size_t *size);
/* How the next attempts to connect go. */
enum world_connects { CONNECTS_LATER, CONNECTS_AT_ONCE, REFUSES_AT_ONCE, REFUSES_LATER };
void world_connects(enum world_connects how);
/* From now on a receive keeps its memory until it ends, as on Windows. */
void world_receives_stay(void);
/* From now on the system has no memory for sends and receives. */
void world_lacks_buffers(bool lacks);
/* From now on there are no pages, or copies of registered memory meet a missing page. */
void world_lacks(bool pages, bool copies);
/* Locks that are taken now. */
unsigned world_locks(void);

/* What a wrong state of the engine ends in. */
void world_require(bool condition, const char *what);
/* Sockets that are open. */
unsigned world_open_sockets(void);

#endif
