/* Events that a program waits for on a descriptor.
 *
 * An eventfd counts the events of the list. Both change together, under the lock. The event that ends a wait of the
 * thread that puts it needs neither. The descriptor is the eventfd, or the
 * epoll of a loop (driving.h). A program may wait for it with poll() or sleep in event_take(). O_NONBLOCK prevents
 * that. After a signal, event_take() goes on if all handlers have SA_RESTART, as a read() of the descriptor would.
 *
 * What has a queue is called a source: a context or a channel. A program's thread may ask for an event while another
 * one closes the source, and afterwards; rping does. The memory of a source stays of its kind, so such a call fails
 * with EBADF, as with a descriptor that was closed. A thread that waits already goes on waiting, as in a read(): rping
 * ends with an error if it is told.
 *
 * A handler may leave a wait in event_take() by siglongjmp(), as it may leave a read(). So signals are off but for the
 * sleep, during which the thread has nothing that others need. They stay on if the descriptor did not block the last
 * time: then nothing waits.
 */
#include "soft.h"
#include "driving.h"
#include "forking.h"
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 8
#endif

/* What this thread has put while it drove for the queue that it takes from. It is not in the list, and has no count. */
static _Thread_local struct event *own;

/* Per kind: sources that are closed, to be used again. Their locks stay initialized. */
static struct event_queue *closed[EVENT_SOURCES];
static pthread_mutex_t closed_lock = PTHREAD_MUTEX_INITIALIZER;

/* A child shares the descriptor with its parent. It has no worker that would put an event, and a thread of the parent
 * may have had the lock during the fork. */
static bool is_parents(const struct event_queue *queue)
{
    return queue->generation != system_generation;
}

/* ---- What has a queue ---- */

static bool queue_start(struct event_queue *queue, bool drives)
{
    int count = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);

    if (count < 0)
        return false;
    pthread_mutex_lock(&queue->lock);
    queue->generation = system_generation;
    queue->drives = drives;
    queue->nonblocking = false;
    queue->first = NULL;
    queue->last = &queue->first;
    queue->fd = drives ? loop_open(&queue->loop, count) : count;
    queue->count = count;
    pthread_mutex_unlock(&queue->lock);
    return true;
}

static void keep(enum event_source kind, struct event_queue *queue)
{
    pthread_mutex_lock(&closed_lock);
    queue->next_closed = closed[kind];
    closed[kind] = queue;
    pthread_mutex_unlock(&closed_lock);
}

void *event_source_new(enum event_source kind, size_t offset, bool drives)
{
    pthread_mutex_lock(&closed_lock);
    struct event_queue *queue = closed[kind];
    if (queue != NULL)
        closed[kind] = queue->next_closed;
    pthread_mutex_unlock(&closed_lock);

    char *source = queue != NULL ? (char *)queue - offset : calloc(1, offset + sizeof *queue);
    if (source == NULL)
        return NULL;
    if (queue != NULL) {
        memset(source, 0, offset);
    } else {
        queue = (struct event_queue *)(source + offset);
        queue->fd = queue->count = -1;
        pthread_mutex_init(&queue->lock, NULL);
    }
    if (queue_start(queue, drives))
        return source;
    int error = errno;
    keep(kind, queue);
    return soft_null(error);
}

static void close_inherited(const struct event_queue *queue)
{
    if (queue->fd != queue->count)
        close(queue->fd);
    close(queue->count);
}

void event_source_close(enum event_source kind, struct event_queue *queue, event_call *last, const void *what)
{
    if (is_parents(queue)) {
        close_inherited(queue);
        return;
    }
    pthread_mutex_lock(&queue->lock);
    struct event *event = queue->first;
    int count = queue->count;
    queue->first = NULL;
    queue->last = &queue->first;
    queue->fd = queue->count = -1;
    pthread_mutex_unlock(&queue->lock);
    if (count < 0)
        return;
    while (event != NULL) {
        struct event *next = event->next;
        if (last != NULL)
            last(event, what);
        free(event);
        event = next;
    }
    if (queue->drives)
        loop_close(&queue->loop);
    close(count);
    keep(kind, queue);
}

void event_sources_forget(void)
{
    for (unsigned kind = 0; kind < EVENT_SOURCES; kind++) {
        system_keep(closed[kind]);
        closed[kind] = NULL;
    }
    pthread_mutex_init(&closed_lock, NULL);
}

/* ---- Events ---- */

bool event_put(struct event_queue *queue, struct event *event)
{
    const uint64_t one = 1;
    int cancel = cancel_off(); /* otherwise a thread that is canceled in write() keeps the lock */

    event->next = NULL;
    pthread_mutex_lock(&queue->lock);
    bool open = event_queue_open(queue);
    if (open && own == NULL && driving_for(queue->count) && queue->first == NULL) {
        own = event;
    } else if (open) {
        *queue->last = event;
        queue->last = &event->next;
        /* The counter has room for more events than memory has. */
        while (write(queue->count, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
    pthread_mutex_unlock(&queue->lock);
    cancel_as(cancel);
    return open;
}

/* Takes back one count. Never waits for it, even if the descriptor blocks and the program has read it. */
static void take_count(int fd)
{
    uint64_t one;
    struct iovec part = {.iov_base = &one, .iov_len = sizeof one};
    struct pollfd state = {.fd = fd, .events = POLLIN};
    int cancel = cancel_off();

    /* Linux before 5.8 cannot do that with one call. */
    if (syscall(SYS_preadv2, fd, &part, 1, -1L, -1L, RWF_NOWAIT) < 0 && errno != EAGAIN && poll(&state, 1, 0) == 1)
        while (read(fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    cancel_as(cancel);
}

static struct event *take_first(struct event_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    struct event *event = queue->first;
    if (event != NULL) {
        queue->first = event->next;
        if (event->next == NULL)
            queue->last = &queue->first;
        take_count(queue->count);
    }
    pthread_mutex_unlock(&queue->lock);
    return event;
}

/* After this thread has driven. */
static struct event *take_driven(struct event_queue *queue)
{
    struct event *event = own;

    own = NULL;
    return event != NULL ? event : take_first(queue);
}

/* Whether a read() would go on after any signal that the program handles. */
static bool signals_restart(void)
{
    struct sigaction action;

    for (int number = 1; number < NSIG; number++) {
        bool fault = number == SIGSEGV || number == SIGBUS;
        if (!fault && sigaction(number, NULL, &action) == 0 && action.sa_handler != SIG_DFL &&
            action.sa_handler != SIG_IGN && (action.sa_flags & SA_RESTART) == 0)
            return false;
    }
    return true;
}

static bool sleep_for(int descriptor, const sigset_t *signals)
{
    struct pollfd state = {.fd = descriptor, .events = POLLIN};

    return ppoll(&state, 1, NULL, signals) >= 0;
}

/* Without a sleep. `*sleeps`: there is no event, and the program wants to wait. */
static struct event *take_now(struct event_queue *queue, bool *sleeps)
{
    struct event *event = take_first(queue);
    int flags = event == NULL ? fcntl(queue->fd, F_GETFL) : 0;

    if (event == NULL && flags >= 0)
        queue->nonblocking = (flags & O_NONBLOCK) != 0;
    *sleeps = event == NULL && flags >= 0 && (flags & O_NONBLOCK) == 0;
    if (event != NULL || flags < 0 || *sleeps)
        return event;
    if (queue->drives) {
        loop_drive(&queue->loop);
        event = take_driven(queue);
    }
    return event != NULL ? event : soft_null(EAGAIN);
}

static struct event *take_or_sleep(struct event_queue *queue)
{
    sigset_t signals;
    bool sleeps;

    signals_off(&signals);
    struct event *event = take_now(queue, &sleeps);
    if (sleeps && queue->drives)
        loop_blocks(&queue->loop);
    while (sleeps && event == NULL) {
        int count = queue->count;
        if (count < 0)
            errno = EBADF;
        if (count < 0 || (!(queue->drives ? workers_drive_until : sleep_for)(count, &signals) &&
                          (errno != EINTR || !signals_restart())))
            break;
        event = take_driven(queue);
    }
    int error = errno;
    pthread_sigmask(SIG_SETMASK, &signals, NULL);
    errno = error;
    return event;
}

struct event *event_take(struct event_queue *queue)
{
    struct event *event = NULL;

    if (is_parents(queue))
        return soft_null(EIO);
    bool sleeps = !queue->nonblocking;
    if (!sleeps)
        event = take_now(queue, &sleeps);
    if (sleeps)
        event = take_or_sleep(queue);
    if (event != NULL && queue->drives)
        loop_wakes(&queue->loop);
    return event;
}

void event_remove(struct event_queue *queue, event_call *matches, const void *what)
{
    struct event *removed = NULL;

    if (is_parents(queue))
        return;
    pthread_mutex_lock(&queue->lock);
    struct event **at = &queue->first;
    while (*at != NULL) {
        struct event *event = *at;
        if (!matches(event, what)) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        event->next = removed;
        removed = event;
        take_count(queue->count);
    }
    queue->last = at;
    pthread_mutex_unlock(&queue->lock);
    while (removed != NULL) {
        struct event *next = removed->next;
        free(removed);
        removed = next;
    }
}
