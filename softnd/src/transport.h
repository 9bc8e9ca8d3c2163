/* The process's worker threads, their completion ports, and its timers.
 *
 * Each worker has its own port. A handle stays with one worker, so an operation that this thread started also ends on
 * it, without waking another thread. Workers run while any object of an adapter exists. A callback runs on a worker;
 * the issuer may also run it for an operation that finished at once. A callback never delays others for long and never
 * waits for the consumer.
 */
#ifndef SOFTND_TRANSPORT_H
#define SOFTND_TRANSPORT_H

#include <winsock2.h>
#include <windows.h>
#include <stdbool.h>
#include <stdint.h>

struct io;
typedef void io_done(struct io *io, DWORD error, DWORD bytes);

/* One operation in flight. `done` gets a Win32 error, 0 for success. */
struct io {
    OVERLAPPED overlapped;
    io_done *done;
    unsigned worker; /* used by transport_post */
};

struct timer;
typedef void timer_fired(struct timer *timer);

struct timer {
    struct timer *next;
    uint64_t due_ms;
    timer_fired *fired;
    bool set;
};

/* The first user starts the workers. The last one waits until all operations have ended, then joins the workers. */
bool transport_acquire(void);
void transport_release(void);
bool transport_stopped(void);

/* Assigns the handle to a worker and returns its number in *worker. The handle's operations end there. */
bool transport_attach(HANDLE handle, unsigned *worker);
/* Runs io->done on io->worker. */
void transport_post(struct io *io);

/* Counts what must end before the workers do: streams, listening sockets and overlapped files. */
void transport_hold(void);
void transport_unhold(void);

uint64_t transport_now_ms(void);
void timer_set(struct timer *timer, uint32_t delay_ms, timer_fired *fired);
/* True if the timer was set and will no longer fire. */
bool timer_cancel(struct timer *timer);

#endif
