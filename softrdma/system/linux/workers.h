/* What workers.c and driving.c share. */
#ifndef LINUX_WORKERS_H
#define LINUX_WORKERS_H

#include "internal.h"

#define MIN_WORKERS 2
#define MAX_WORKERS 4

/* A worker sleeps in its gate, an epoll that has two members: the epoll of its sockets, and the event by which others
 * wake it. A gate that is shut reports the event alone. */
struct worker {
    struct lock lock;
    struct io *first, *last; /* posted */
    bool sleeping, poked, stopping;
    _Atomic int32_t sockets;
    struct channel *channels; /* free ones */
    struct channel *inherited;
    int epoll, gate, event;
    pthread_t thread;
    bool shut; /* its gate; under the lock of driving.c, so apart from what the worker's lock is for */
};

extern struct worker workers[MAX_WORKERS];
/* Set after they are started: worker 0 may find it 0. */
extern _Atomic unsigned worker_count;

/* Handles what has come to the worker's sockets, a batch at most, and what was posted to it. Returns how much that was.
 */
int worker_handle(struct worker *worker);
bool worker_open_gate(struct worker *worker, bool open);

/* ---- driving.c ---- */

/* How long worker 0 may sleep, -1 for no limit, if it has nothing else to do. */
int driving_limit(void);
/* Worker 0 calls this whenever it is awake; see workers_wake(). */
void driving_attend(void);
/* The process was forked. */
void driving_forget(void);

#endif
