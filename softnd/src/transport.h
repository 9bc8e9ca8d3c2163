/* The process's worker threads, their completion ports, and its timers.
 *
 * Each worker has a port of its own: a handle stays with one thread, so that what this thread started also ends there
 * without waking another. Workers run while any object of an adapter exists. A callback runs on a worker (or, for an operation that
 * finished at once, where its issuer decides), never holds up others for long and never waits for the consumer.
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
    unsigned worker; /* for transport_post */
};

struct timer;
typedef void timer_fired(struct timer *timer);

struct timer {
    struct timer *next;
    uint64_t due_ms;
    timer_fired *fired;
    bool set;
};

/* The first user starts the workers; the last one waits until everything in flight has ended and joins them. */
bool transport_acquire(void);
void transport_release(void);
bool transport_stopped(void);

/* Gives the handle to one of the workers, whose number it tells. Its operations end there. */
bool transport_attach(HANDLE handle, unsigned *worker);
/* Runs io->done on io->worker. */
void transport_post(struct io *io);

/* Things that must end before the workers do: streams, listening sockets and overlapped files. */
void transport_hold(void);
void transport_unhold(void);

uint64_t transport_now_ms(void);
void timer_set(struct timer *timer, uint32_t delay_ms, timer_fired *fired);
/* True when the timer was set and will not fire any more. */
bool timer_cancel(struct timer *timer);

#endif
