/* The engine's descriptors, and what happens to them in a fork.
 *
 * A forked child would keep the parent's connections open: the peer would not see the end when the parent closes them.
 * So the child closes every descriptor that is noted here. Children that replace their program at once do not come by;
 * for them the descriptors have FD_CLOEXEC. */
#include "forking.h"
#include "internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Atomic bool system_forked;
_Atomic uint32_t system_generation;

static struct lock lock = LOCK_INIT;
static uint8_t *noted; /* a byte per descriptor */
static size_t size;

void handles_lock(void)
{
    lock_acquire(&lock);
}

void handles_unlock(void)
{
    lock_release(&lock);
}

bool handles_add(int handle)
{
    size_t at = (size_t)handle;

    if (handle < 0)
        return true;
    if (at >= size) {
        size_t wanted = at * 2 < 256 ? 256 : at * 2;
        uint8_t *larger = realloc(noted, wanted);
        if (larger == NULL) {
            close(handle);
            return false;
        }
        memset(larger + size, 0, wanted - size);
        noted = larger;
        size = wanted;
    }
    noted[at] = 1;
    return true;
}

void handles_close(int handle)
{
    if (handle < 0)
        return;
    if ((size_t)handle < size)
        noted[handle] = 0;
    int cancel = cancel_off();
    close(handle);
    cancel_as(cancel);
}

static void (*told)(void);

void system_on_fork(void (*call)(void))
{
    told = call;
}

#define KEPT 64

static void *volatile kept[KEPT];
static unsigned kept_count;

void system_keep(void *inherited)
{
    if (inherited != NULL)
        kept[kept_count++ % KEPT] = inherited;
}

static void in_child(void)
{
    for (size_t i = 0; i < size; i++) {
        if (noted[i] != 0)
            close((int)i);
        noted[i] = 0;
    }
    lock_start(&lock);
    atomic_fetch_add(&system_generation, 1);
    atomic_store(&system_forked, true);
    workers_forget();
    guarded_copy_forget();
    if (told != NULL)
        told();
}

static int watch_error;

static void watch(void)
{
    watch_error = pthread_atfork(handles_lock, handles_unlock, in_child);
}

bool handles_watch_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch);
    return watch_error == 0;
}
