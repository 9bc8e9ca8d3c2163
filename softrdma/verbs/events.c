/* Events that a program waits for on a descriptor.
 *
 * The descriptor is an eventfd that counts the events of the list. A program may wait for it with poll() or sleep in
 * event_take(). The sleep is a read() of the descriptor, as on a real device. O_NONBLOCK prevents it. After a signal it
 * goes on or ends, as the program has asked with SA_RESTART.
 *
 * So event_take() reads the descriptor first, without the lock, and takes an event afterwards. In between,
 * event_remove() may take that very event away. It cannot take back the count, which the reader has, so it notes that
 * one count is owed, and the reader starts over. With the lock held, this is always true:
 *
 *     count of the descriptor + readers between read() and the lock = events in the list + counts owed
 */
#include "soft.h"
#include "forking.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 8
#endif

/* The list begins with this node, which is no event. */
struct head {
    struct event event; /* first */
    uint32_t owed;
    uint32_t generation; /* of the process that has the queue */
};

static struct head *head_of(struct event_queue *queue)
{
    return (struct head *)queue->first;
}

/* A child shares the descriptor with its parent. It has no worker that would put an event, and a thread of the parent
 * may have had the lock during the fork. */
static bool is_parents(struct event_queue *queue)
{
    return head_of(queue)->generation != system_generation;
}

bool event_queue_start(struct event_queue *queue)
{
    struct head *head = calloc(1, sizeof *head);

    if (head == NULL)
        return false;
    head->generation = system_generation;
    queue->fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    if (queue->fd < 0) {
        free(head);
        return false;
    }
    pthread_mutex_init(&queue->lock, NULL);
    queue->first = &head->event;
    queue->last = &head->event.next;
    return true;
}

void event_queue_end(struct event_queue *queue)
{
    if (is_parents(queue)) {
        close(queue->fd);
        return;
    }
    for (struct event *event = queue->first; event != NULL;) {
        struct event *next = event->next;
        free(event);
        event = next;
    }
    queue->first = NULL;
    close(queue->fd);
    queue->fd = -1;
    pthread_mutex_destroy(&queue->lock);
}

void event_put(struct event_queue *queue, struct event *event)
{
    const uint64_t one = 1;
    int cancel;

    event->next = NULL;
    /* Otherwise a thread that is canceled in write() keeps the lock. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    pthread_mutex_lock(&queue->lock);
    *queue->last = event;
    queue->last = &event->next;
    /* The counter has room for more events than memory has. */
    while (write(queue->fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_mutex_unlock(&queue->lock);
    pthread_setcancelstate(cancel, &cancel);
}

bool event_waits(struct event_queue *queue)
{
    if (is_parents(queue))
        return true; /* event_take() says what is wrong */
    pthread_mutex_lock(&queue->lock);
    bool waits = head_of(queue)->event.next != NULL;
    pthread_mutex_unlock(&queue->lock);
    return waits;
}

struct event *event_take(struct event_queue *queue)
{
    struct head *head = head_of(queue);
    struct event *event = NULL;
    uint64_t one;

    if (is_parents(queue)) {
        errno = EIO;
        return NULL;
    }
    while (event == NULL) {
        ssize_t size = read(queue->fd, &one, sizeof one);
        if (size < 0)
            return NULL;
        pthread_mutex_lock(&queue->lock);
        event = head->event.next;
        if (head->owed > 0) {
            head->owed--;
            event = NULL;
        }
        if (event != NULL) {
            head->event.next = event->next;
            if (event->next == NULL)
                queue->last = &head->event.next;
        }
        pthread_mutex_unlock(&queue->lock);
    }
    return event;
}

/* Takes back one count. Never waits for it, even if the descriptor blocks. Linux before 5.8 cannot do that. There the
 * count stays, and the next reader uses it up. */
static bool count_taken_back(int fd)
{
    uint64_t one;
    struct iovec part = {.iov_base = &one, .iov_len = sizeof one};

    return syscall(SYS_preadv2, fd, &part, 1, -1L, -1L, RWF_NOWAIT) == (long)sizeof one;
}

void event_remove(struct event_queue *queue, bool (*matches)(const struct event *event, const void *what),
                  const void *what)
{
    struct head *head = head_of(queue);
    struct event *removed = NULL;
    bool counts = true;

    if (is_parents(queue))
        return;
    pthread_mutex_lock(&queue->lock);
    struct event **at = &head->event.next;
    while (*at != NULL) {
        struct event *event = *at;
        if (!matches(event, what)) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        event->next = removed;
        removed = event;
        counts = counts && count_taken_back(queue->fd);
        head->owed += !counts;
    }
    queue->last = at;
    pthread_mutex_unlock(&queue->lock);
    while (removed != NULL) {
        struct event *next = removed->next;
        free(removed);
        removed = next;
    }
}
