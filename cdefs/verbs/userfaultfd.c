/* The monitor: tells when any code of this process has unmapped, moved or emptied watched memory.

   The process has one userfaultfd. Watched ranges are registered with it in write-protect mode. No page is ever
   write-protected, so no page fault comes this way. When a thread calls munmap, mremap, mmap with MAP_FIXED or madvise
   on a watched range, the kernel queues an event. The thread then waits until the event has been read. It may hold any
   lock, including malloc's and the GIL. So the reader takes no lock and allocates nothing. It marks the watches that
   overlap, and writes to their eventfds.

   A watch without a mark means unchanged memory only when two things hold. wait_until_marked() waits for both:
   - No change is under way. The kernel counts a change from before it takes effect until its event has been read.
     Meanwhile it refuses other ioctls with EAGAIN. Suppose that one thread is still in munmap, and another thread
     already gets the same range from mmap. This check keeps the new memory from passing for the old.
   - Every event that was read is marked. `turn` is odd from before an event is read until it is marked.

   The userfaultfd stays open, and the reader runs, until the process ends. If nobody read the events, munmap of a
   registered range would wait for ever. */

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Older headers lack these definitions. */
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif
#ifndef UFFDIO_WRITEPROTECT
struct uffdio_writeprotect {
    struct uffdio_range range;
    __u64 mode;
};
#define UFFDIO_WRITEPROTECT _IOWR(UFFDIO, 0x06, struct uffdio_writeprotect)
#endif

#define EVENTS               (UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE)
#define SHARED_WRITE_PROTECT ((uint64_t)1 << 12)
#define WATCHES_PER_BLOCK    256
#define YIELDS               200
#define LONGEST_WAIT_NS      1000000000

struct ndpy_watch {
    atomic_uint_least64_t start;
    atomic_uint_least64_t end; /* 0: not in use */
    atomic_int changed;
    atomic_int notify; /* an eventfd, or -1 */
    struct ndpy_watch *next_free;
};

struct block {
    struct ndpy_watch watches[WATCHES_PER_BLOCK];
    struct block *_Atomic next;
};

static struct {
    int fd;
    int started;
    int shared_memory;
    atomic_int broken; /* the reader has stopped: everything counts as changed */
    atomic_uint turn;
    struct block *_Atomic blocks;
    struct ndpy_watch *free;
    /* Held to watch and to unwatch. The reader does not take it. */
    pthread_mutex_t lock;
} monitor = {.fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

static void mark(uint64_t start, uint64_t end)
{
    for (struct block *block = atomic_load(&monitor.blocks); block; block = atomic_load(&block->next))
        for (int i = 0; i < WATCHES_PER_BLOCK; i++) {
            struct ndpy_watch *watch = &block->watches[i];
            uint64_t one = 1;
            int notify;

            if (atomic_load(&watch->end) <= start || atomic_load(&watch->start) >= end)
                continue;
            if (atomic_exchange(&watch->changed, 1))
                continue;
            notify = atomic_load(&watch->notify);
            /* The write fails if the counter is full. Then the eventfd is readable anyway. */
            if (notify >= 0 && write(notify, &one, sizeof one) < 0)
                continue;
        }
}

static void *read_events(void *unused)
{
    struct pollfd ready = {.fd = monitor.fd, .events = POLLIN};
    struct uffd_msg message;
    ssize_t got;

    for (;;) {
        if (poll(&ready, 1, -1) < 0 && errno != EINTR)
            break;
        if (ready.revents & (POLLERR | POLLHUP | POLLNVAL))
            break;
        atomic_fetch_add(&monitor.turn, 1);
        while ((got = read(monitor.fd, &message, sizeof message)) == sizeof message) {
            if (message.event == UFFD_EVENT_UNMAP || message.event == UFFD_EVENT_REMOVE)
                mark(message.arg.remove.start, message.arg.remove.end);
            else if (message.event == UFFD_EVENT_REMAP)
                mark(message.arg.remap.from, message.arg.remap.from + message.arg.remap.len);
        }
        atomic_fetch_add(&monitor.turn, 1);
        if (got >= 0 || (errno != EAGAIN && errno != EINTR))
            break;
    }
    atomic_store(&monitor.broken, 1);
    return NULL;
}

/* A forked child has no reader, and its memory is not registered. So its copies of the parent's watches end here. They
   are not reused, because objects in the child may still refer to them. */
static void forget_in_child(void)
{
    for (struct block *block = atomic_load(&monitor.blocks); block; block = atomic_load(&block->next))
        for (int i = 0; i < WATCHES_PER_BLOCK; i++) {
            atomic_store(&block->watches[i].end, 0);
            atomic_store(&block->watches[i].changed, 1);
        }
    if (monitor.fd >= 0)
        close(monitor.fd);
    monitor.fd = -1;
    monitor.started = 0;
    monitor.free = NULL;
    atomic_store(&monitor.blocks, NULL);
    atomic_store(&monitor.broken, 0);
    atomic_store(&monitor.turn, 0);
    pthread_mutex_init(&monitor.lock, NULL);
}

static int open_userfaultfd(void)
{
    int flags = O_CLOEXEC | O_NONBLOCK, device, fd, error;

    /* To handle page faults in the kernel needs a privilege. No page faults come here, so give them up. */
    fd = (int)syscall(SYS_userfaultfd, flags | UFFD_USER_MODE_ONLY);
    if (fd < 0 && errno == EINVAL)
        fd = (int)syscall(SYS_userfaultfd, flags);
    if (fd >= 0)
        return fd;
    error = errno;
    device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device >= 0) {
        fd = ioctl(device, USERFAULTFD_IOC_NEW, flags);
        close(device);
    }
    errno = error;
    return fd;
}

static int start_reader(void)
{
    static int forks_are_followed;
    sigset_t all, former;
    pthread_attr_t attributes;
    pthread_t thread;
    int error;

    if (!forks_are_followed) {
        error = pthread_atfork(NULL, NULL, forget_in_child);
        if (error)
            return error;
        forks_are_followed = 1;
    }
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    error = pthread_create(&thread, &attributes, read_events, NULL);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

static int start(void)
{
    struct uffdio_api api = {.api = UFFD_API};
    int probe = open_userfaultfd(), error;

    if (probe < 0)
        return errno;
    /* The first descriptor only asks which features exist. A second one chooses them. */
    error = ioctl(probe, UFFDIO_API, &api) ? errno : 0;
    close(probe);
    if (error)
        return error;
    if (!(api.features & UFFD_FEATURE_PAGEFAULT_FLAG_WP) || (api.features & EVENTS) != EVENTS)
        return EOPNOTSUPP;
    monitor.shared_memory = (api.features & SHARED_WRITE_PROTECT) != 0;
    api = (struct uffdio_api){
        .api = UFFD_API,
        .features = EVENTS | UFFD_FEATURE_PAGEFAULT_FLAG_WP | (api.features & SHARED_WRITE_PROTECT),
    };
    monitor.fd = open_userfaultfd();
    if (monitor.fd < 0)
        return errno;
    error = ioctl(monitor.fd, UFFDIO_API, &api) ? errno : 0;
    if (!error)
        error = start_reader();
    if (error) {
        close(monitor.fd);
        monitor.fd = -1;
        return error;
    }
    monitor.started = 1;
    return 0;
}

int ndpy_monitor_start(void)
{
    int error = 0;

    pthread_mutex_lock(&monitor.lock);
    if (!monitor.started)
        error = start();
    pthread_mutex_unlock(&monitor.lock);
    return error;
}

int ndpy_monitor_takes_shared_memory(void)
{
    return monitor.shared_memory;
}

/* Wait until every change that has taken effect is marked, or until `watch` is marked. Returns 1 then. Returns 0 if
   this stays unknown. */
static int wait_until_marked(struct ndpy_watch *watch)
{
    struct uffdio_writeprotect nothing = {.range = {.len = 0}};
    struct timespec pause = {.tv_nsec = 50000};
    int64_t waited = 0;

    for (int round = 0; !atomic_load(&monitor.broken); round++) {
        if (watch && atomic_load(&watch->changed))
            return 1;
        /* The range is empty. The kernel answers EAGAIN while a change is under way, and otherwise EINVAL. */
        if (ioctl(monitor.fd, UFFDIO_WRITEPROTECT, &nothing) && errno != EAGAIN && !(atomic_load(&monitor.turn) & 1))
            return 1;
        if (round < YIELDS) {
            sched_yield();
            continue;
        }
        /* Give up: a kernel before 6.13 never stops counting a move that failed half-way. */
        if (waited > LONGEST_WAIT_NS)
            break;
        nanosleep(&pause, NULL);
        waited += pause.tv_nsec;
    }
    return 0;
}

static void add_block(struct block *block)
{
    for (int i = 0; i < WATCHES_PER_BLOCK; i++) {
        block->watches[i].next_free = monitor.free;
        monitor.free = &block->watches[i];
    }
    atomic_store(&block->next, atomic_load(&monitor.blocks));
    atomic_store(&monitor.blocks, block);
}

static void give_back(struct ndpy_watch *watch)
{
    atomic_store(&watch->end, 0);
    atomic_store(&watch->notify, -1);
    watch->next_free = monitor.free;
    monitor.free = watch;
}

struct ndpy_watch *ndpy_watch(uint64_t start, uint64_t end, int notify)
{
    struct uffdio_register request = {
        .range = {.start = start, .len = end - start},
        .mode = UFFDIO_REGISTER_MODE_WP,
    };
    struct ndpy_watch *watch;
    int error = 0;

    /* Changes of earlier memory at these addresses must not mark the new watch. */
    wait_until_marked(NULL);
    pthread_mutex_lock(&monitor.lock);
    while (!monitor.free) {
        struct block *block;

        /* Do not allocate under the lock: malloc may give memory back to the system. */
        pthread_mutex_unlock(&monitor.lock);
        block = calloc(1, sizeof *block);
        if (!block) {
            errno = ENOMEM;
            return NULL;
        }
        pthread_mutex_lock(&monitor.lock);
        add_block(block);
    }
    watch = monitor.free;
    monitor.free = watch->next_free;
    atomic_store(&watch->notify, notify);
    atomic_store(&watch->changed, 0);
    atomic_store(&watch->start, start);
    atomic_store(&watch->end, end);
    /* The reader sees the watch now, so events may come. */
    if (ioctl(monitor.fd, UFFDIO_REGISTER, &request)) {
        error = errno;
        give_back(watch);
        watch = NULL;
    }
    pthread_mutex_unlock(&monitor.lock);
    errno = error;
    return watch;
}

int ndpy_watch_changed(struct ndpy_watch *watch)
{
    /* If it stays unknown, treat the memory as changed. */
    return !wait_until_marked(watch) || atomic_load(&watch->changed);
}

/* Find the first part of [*from, *to) that no watch covers. Returns 0 if watches cover all of it. */
static int next_unwatched(uint64_t *from, uint64_t *to)
{
    uint64_t end = *to;
    int moved = 1;

    while (moved) {
        moved = 0;
        *to = end;
        for (struct block *block = atomic_load(&monitor.blocks); block; block = atomic_load(&block->next))
            for (int i = 0; i < WATCHES_PER_BLOCK; i++) {
                uint64_t first = atomic_load(&block->watches[i].start), last = atomic_load(&block->watches[i].end);

                if (last <= *from || first >= *to)
                    continue;
                if (first <= *from) {
                    *from = last;
                    moved = 1;
                } else {
                    *to = first;
                }
            }
    }
    return *from < end;
}

void ndpy_unwatch(struct ndpy_watch *watch)
{
    /* After a change, these addresses may belong to other memory. Then do not unregister them. */
    int changed = ndpy_watch_changed(watch);
    uint64_t from, to, end;

    pthread_mutex_lock(&monitor.lock);
    from = atomic_load(&watch->start);
    to = end = atomic_load(&watch->end);
    /* In a forked child, the watch has ended already. */
    if (end)
        give_back(watch);
    while (end && !changed && next_unwatched(&from, &to)) {
        struct uffdio_range range = {.start = from, .len = to - from};

        ioctl(monitor.fd, UFFDIO_UNREGISTER, &range);
        from = to;
        to = end;
    }
    pthread_mutex_unlock(&monitor.lock);
}

void ndpy_monitor_wait_for_reader(void)
{
    unsigned turn = atomic_load(&monitor.turn);

    while (turn & 1 && turn == atomic_load(&monitor.turn) && !atomic_load(&monitor.broken))
        sched_yield();
}
