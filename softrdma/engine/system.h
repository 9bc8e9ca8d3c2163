/* What the engine needs of an operating system: locks, threads, time, sockets with completion, guarded access to
 * memory.
 *
 * ../system has one folder for each system, which implements all of this. system_types.h comes from there. No other
 * file of the engine depends on a system.
 *
 * Workers are the engine's own threads. A socket stays with one worker. Operations on it end there, except those that
 * end at once.
 */
#ifndef ENGINE_SYSTEM_H
#define ENGINE_SYSTEM_H

#include "vocabulary.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct io;
/* `error` is ND_SUCCESS or the reason. A callback runs on a worker, without locks. It never waits for the consumer. */
typedef void io_done(struct io *io, nd_status error, size_t bytes);

/* Defines struct lock, struct condition, struct io, struct socket, socket_handle, NO_SOCKET, LOCK_INIT and
 * CONDITION_INIT, and includes the system's headers of socket addresses. struct io has the members `done` and `worker`.
 */
#include "system_types.h"

/* ---- Locks ---- */

/* A lock that one thread has, or several share. It need not be freed. */
void lock_start(struct lock *lock);
void lock_acquire(struct lock *lock);
void lock_release(struct lock *lock);
void lock_share(struct lock *lock);
void lock_unshare(struct lock *lock);

void condition_start(struct condition *condition);
/* Releases the lock, which this thread has exclusively, and waits. May return for no reason. */
void condition_wait(struct condition *condition, struct lock *lock);
void condition_wait_ms(struct condition *condition, struct lock *lock, uint64_t ms);
void condition_wake_all(struct condition *condition);

/* ---- Threads and time ---- */

/* A number that no other thread of the process has, never 0. */
uint64_t thread_id(void);
/* A program that finds nothing usually asks again at once. Lets another thread run. */
void thread_yield(void);
/* Does not go backwards. */
uint64_t now_ms(void);

/* Starts the workers and returns their number, 0 if none could be started. Worker 0 calls timers_run(). */
unsigned workers_start(void);
void workers_stop(void);
/* Wakes worker 0, so that it calls timers_run() again. */
void workers_wake(void);
/* Runs io->done on the worker with the number io->worker. */
void worker_post(struct io *io);

/* ---- Sockets ---- */

/* system_types.h also has how much a connection receives and sends at once: IN_BUFFER_SIZE and OUT_BUFFER_SIZE. It
 * begins to receive with IN_BUFFER_FIRST, which holds a whole segment. */

enum io_result { IO_DONE, IO_PENDING, IO_FAILED };

/* A socket that is bound to the address; port 0 stands for any free port. On failure NO_SOCKET, and *status says why:
 * ND_SHARING_VIOLATION, ND_ACCESS_DENIED, ND_TOO_MANY_ADDRESSES, ND_INVALID_ADDRESS, ND_TOO_MANY_OPENED_FILES or
 * ND_INSUFFICIENT_RESOURCES. */
socket_handle socket_bound(const struct sockaddr_storage *address, bool listening, nd_status *status);
bool socket_address(socket_handle handle, struct sockaddr_storage *out);
/* Closes a handle that no struct socket has. */
void socket_discard(socket_handle handle);

/* Takes the handle over and assigns it to a worker, whose number is then socket->worker. `accepted`: it is connected.
 * False: it was closed. */
bool socket_start(struct socket *socket, socket_handle handle, bool accepted);
/* These three do as much as is possible at once. IO_PENDING: io->done follows. The memory must stay until then.
 * IO_FAILED: *error is set. At most one operation of each kind runs at a time. */
enum io_result socket_connect(struct socket *socket, struct io *io, const struct sockaddr_storage *peer,
                              nd_status *error);
/* `more`: other data may follow soon and then take these along. The bytes are the system's in any case. */
enum io_result socket_send(struct socket *socket, struct io *io, const void *data, size_t size, bool more, size_t *sent,
                           nd_status *error);
/* IO_DONE with *received 0: the peer sends no more. */
enum io_result socket_receive(struct socket *socket, struct io *io, void *data, size_t size, size_t *received,
                              nd_status *error);
/* Gives a receive that is pending other memory. MOVE_ENDS: the system cannot; it ends the receive, and io->done
 * follows, with an error unless data have come. MOVE_FAILED: it is not pending any more. */
enum move { MOVE_DONE, MOVE_ENDS, MOVE_FAILED };
enum move socket_receive_elsewhere(struct socket *socket, struct io *io, void *data, size_t size);
/* `on`: TCP asks the peer's host for a sign of life every second, as long as nothing else is under way. */
void socket_probe(struct socket *socket, bool on);
/* How many questions of TCP the peer's host has left unanswered, and for how long it has said nothing. */
unsigned socket_unanswered(struct socket *socket, uint32_t *silent_ms);
/* Whether the peer sends no more, or has gone, even if what it sent has not been received yet. False if the system does
 * not tell. */
bool socket_peer_ended(struct socket *socket);
/* The local address of a socket that has connected. */
void socket_connected(struct socket *socket, struct sockaddr_storage *local);
/* From now on a socket that is closed, also because the process ends, resets the connection. Otherwise its system would
 * go on to send what has no room at the peer, and the peer would not learn that there is nobody. */
void socket_resets(struct socket *socket);
/* Sends a FIN behind what was sent. The socket resets no more. */
void socket_end_sending(struct socket *socket);
/* Ends all operations. Their callbacks follow, on the worker. */
void socket_cancel(struct socket *socket, bool reset);
/* After socket_cancel. `reset`: the peer gets a reset, not a FIN. */
void socket_close(struct socket *socket);

/* ---- Memory ---- */

/* Called once at load and once at unload. */
bool guarded_copy_start(void);
void guarded_copy_stop(void);
/* Copies `size` bytes. False if either side faults; the beginning of the destination may then be written. The bytes
 * become visible at ascending addresses and the last one last, because programs spin on the last byte of a transfer
 * (F.3.11). */
bool guarded_copy(void *destination, const void *source, size_t size);
/* Whether every page of the range exists and can be read, and also written if asked for (D.2.3). */
bool memory_allows(const void *memory, size_t size, bool write);
/* Zeroed pages. Those that nobody touches cost nothing. */
void *pages_take(size_t size);
void pages_give(void *pages, size_t size);

/* ---- The environment, files ---- */

/* Copies the value of an environment variable. False if it is not set or does not fit. */
bool environment_text(const char *name, char *buffer, size_t size);
/* A file to which several processes can append lines. False if it cannot be opened. */
struct log_file;
struct log_file *log_open(const char *name);
void log_append(struct log_file *file, const char *text, size_t size);
void log_close(struct log_file *file);
/* The time of day, the process and the thread, as text for a line of a log. */
size_t log_stamp(char *out, size_t size);

#endif
