/* The program's own threads do the work of the workers while they wait for a completion. This saves two changes of
 * threads for each message.
 *
 * A worker's gate is open whenever no such thread is inside a call of the library. So what comes while the program does
 * something else wakes the worker at once. A thread that has shown that it does this work again and again shuts the
 * gates as long as it is inside, and nobody is woken for what it handles.
 * A thread that waits elsewhere, for the descriptor of a loop, counts as inside while it sleeps.
 *
 * A thread that sleeps has claimed nothing that others need. It may be canceled, or leave by siglongjmp() in a handler.
 * If it had shut the gates, worker 0 opens them: it looks every NAP_MS while gates are used.
 */
#ifndef LINUX_DRIVING_H
#define LINUX_DRIVING_H

#include "system.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* Blocks all signals but those that an instruction causes: blocked, these would end the process without asking a
 * handler. */
void signals_off(sigset_t *before);

/* Handles whatever has arrived for any socket. Does not wait. One thread at a time; for others it does nothing. */
void workers_drive(void);
/* The same for a program that looks for something again and again. If it does that in quick succession, this stays for
 * some microseconds, until `found` is true or something was handled. */
void workers_spin(bool (*found)(void *what), void *what);
/* The program found what it looks for without that. */
void workers_found(void);
/* This thread goes to sleep soon. */
void workers_sleep_soon(void);
/* Sends what sockets hold back for what may follow soon. */
void driving_push(void);
/* Waits until the descriptor is readable, and drives meanwhile if no other thread does. Returns early for no reason,
 * and with EINTR in errno and false after a signal. Call it again until it is readable. The thread has called
 * signals_off(), and `signals` are those that it blocks while it sleeps. */
bool workers_drive_until(int descriptor, const sigset_t *signals);

/* Whether this thread is in workers_drive_until() or loop_drive() for this descriptor, and not asleep. It learns of
 * what it does itself without the descriptor. */
bool driving_for(int descriptor);

/* A descriptor for a program that waits for many in one poll() or epoll_wait(). It is readable when `event` is. A
 * program that has come soon each of the last times is believed: as long as it sleeps the gates are shut, and the
 * descriptor is readable when a socket is. So a socket wakes the program's thread itself, which works for all in
 * loop_drive(). It is believed no more when it comes late, or when it was woken for nothing again and again. */
struct loop {
    struct lock lock;
    int epoll, event;
    _Atomic bool nonblocking; /* the program does not sleep in the library */
    _Atomic uint64_t since;   /* when it went to sleep, ns; 0: it has come since */
    uint32_t comes, vain;     /* how often in a row it came soon, and for nothing */
    _Atomic bool joined;      /* the descriptor is readable when a socket is */
    bool shuts;
    uint32_t ticket;
};

/* Returns the descriptor, or `event` itself if there are too many of them. */
int loop_open(struct loop *loop, int event);
/* Does not close `event`. */
void loop_close(struct loop *loop);
/* The program goes to sleep soon. */
void loop_sleeps(struct loop *loop);
/* It has got what it waited for. */
void loop_wakes(struct loop *loop);
/* It has found nothing, and does not sleep in the library. Handles whatever has arrived for any socket. */
void loop_drive(struct loop *loop);
/* It sleeps in the library, from now on. */
void loop_blocks(struct loop *loop);

#endif
