/* The thread that takes the libraries' events and does what is due. It runs only after a program has opened a device.
 */
#include "shim.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static int epoll_fd = -1, wake_fd = -1;

static void add_event(int fd)
{
    const uint64_t one = 1;

    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void channel_raise(struct channel *channel, struct cq *cq)
{
    struct channel_event *event = calloc(1, sizeof *event);

    if (event == NULL)
        return;
    event->cq = cq;
    cq->events_given++;
    *channel->last = event;
    channel->last = &event->next;
    add_event(channel->fd);
}

static void async_add(struct context *context, const struct ibv_async_event *ibv, bool made)
{
    struct async_event **at = &context->events, *event = adapter_loses_events() ? NULL : calloc(1, sizeof *event);

    if (event == NULL || context->fd < 0) {
        free(event);
        return;
    }
    while (*at != NULL)
        at = &(*at)->next;
    event->ibv = *ibv;
    event->made = made;
    *at = event;
    add_event(context->fd);
}

void async_raise(struct context *context, enum ibv_event_type type, void *element)
{
    struct ibv_async_event event = {.event_type = type};

    if (element != NULL)
        event.element.qp = element; /* the members are pointers of one size */
    else
        event.element.port_num = 1;
    async_add(context, &event, true);
}

/* rdma-core's function reads the descriptor of the structure that it is given, and softverbs' has its own. */
static void take_completion_events(struct channel *channel)
{
    struct ibv_comp_channel copy = *channel->ibv;
    bool of_kernel = channel->context->ibv->cmd_fd >= 0;
    unsigned library = channel->context->library;
    struct ibv_cq *ibv;
    void *cq_context;

    copy.fd = channel->real_fd;
    while (REAL(library, ibv_get_cq_event)(of_kernel ? &copy : channel->ibv, &ibv, &cq_context) == 0) {
        REAL(library, ibv_ack_cq_events)(ibv, 1);
        struct cq *cq = (struct cq *)object_find(OBJECT_CQ, ibv);
        if (cq != NULL)
            cq_on_event(cq);
    }
}

static void take_async_events(struct context *context)
{
    struct ibv_async_event event;

    /* rdma-core's function reads the descriptor of the context, and hands the context itself to the driver. */
    context->ibv->async_fd = context->real_fd;
    while (REAL(context->library, ibv_get_async_event)(context->ibv, &event) == 0)
        async_add(context, &event, false);
    context->ibv->async_fd = context->fd;
}

struct readable {
    int fd;
};

static void read_object(struct object *object, void *what)
{
    int fd = ((struct readable *)what)->fd;

    if (object->kind == OBJECT_CHANNEL && ((struct channel *)object)->real_fd == fd)
        take_completion_events((struct channel *)object);
    if (object->kind == OBJECT_CONTEXT && ((struct context *)object)->real_fd == fd)
        take_async_events((struct context *)object);
}

static void *run(void *argument)
{
    uint64_t next = NEVER;

    (void)argument;
    inside++; /* none of its calls are the program's */
    for (;;) {
        struct epoll_event events[16];
        uint64_t now = now_ns(), ms = next <= now ? 0 : (next - now) / 1000000 + 1;
        int count = epoll_wait(epoll_fd, events, COUNT_OF(events), next == NEVER ? -1 : (int)(ms < 1000 ? ms : 1000));
        lock();
        for (int i = 0; i < count; i++) {
            struct readable readable = {events[i].data.fd};
            uint64_t number;
            if (readable.fd == wake_fd) {
                if (read(wake_fd, &number, sizeof number) < 0)
                    number = 0;
                continue;
            }
            each_object(OBJECT_CHANNEL, read_object, &readable);
            each_object(OBJECT_CONTEXT, read_object, &readable);
        }
        next = adapter_on_time(now_ns());
        uint64_t other = requests_on_time();
        next = other < next ? other : next;
        connections_tell_removal();
        unlock();
    }
    return NULL;
}

static bool start(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;

    if (epoll_fd >= 0)
        return true;
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (epoll_fd < 0 || wake_fd < 0)
        goto fail;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = wake_fd};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) != 0)
        goto fail;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error == 0)
        return true;
fail:
    if (epoll_fd >= 0)
        close(epoll_fd);
    if (wake_fd >= 0)
        close(wake_fd);
    epoll_fd = wake_fd = -1;
    return false;
}

void thread_wake(void)
{
    const uint64_t one = 1;

    if (start() && write(wake_fd, &one, sizeof one) < 0)
        return;
}

bool thread_watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};

    return start() && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

void thread_unwatch(int fd)
{
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

void thread_forget(void)
{
    if (epoll_fd >= 0)
        close(epoll_fd);
    if (wake_fd >= 0)
        close(wake_fd);
    epoll_fd = wake_fd = -1;
}
