/* Opens libibverbs and librdmacm and looks up their functions. build_verbs.py makes NDPY_SYMBOLS from ibverbs.h,
   newer.h, rdmacm.h and softverbs.h. The module links to neither library, so it loads on a machine without them.

   There are two pairs of libraries: the system's and softverbs, which is one file for both. A program can have adapters
   of both at once. A call goes to the library of its object. build_verbs.py makes a macro for that from each
   declaration. Either pair is there a second time: its functions as the shim libndpyfaults.so, which makes faults,
   stands in for them. */

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NDPY_MEMBER(library, name, required) __typeof__(name) *call_##name;
struct ndpy_library {
    NDPY_SYMBOLS(NDPY_MEMBER)
};
#undef NDPY_MEMBER

static struct ndpy_library ndpy_libraries[NDPY_LIBRARY_COUNT];

struct ndpy_symbol {
    const char *name;
    size_t offset;
    int from_rdmacm;
    int required;
};

#define NDPY_ENTRY(library, name, required) \
    {#name, offsetof(struct ndpy_library, call_##name), NDPY_IS_##library, required},
#define NDPY_IS_ibverbs   0
#define NDPY_IS_newer     0
#define NDPY_IS_softverbs 0
#define NDPY_IS_rdmacm    1
static const struct ndpy_symbol ndpy_symbols[] = {NDPY_SYMBOLS(NDPY_ENTRY)};
#undef NDPY_ENTRY

#define NDPY_SYMBOL_COUNT (sizeof ndpy_symbols / sizeof ndpy_symbols[0])

static void **slot_of(int library, const struct ndpy_symbol *symbol)
{
    return (void **)((char *)&ndpy_libraries[library] + symbol->offset);
}

/* The shim's functions. NULL before it is open. */
static void *(*faults_function)(const char *, void *);
static int (*faults_begin)(const char *, char *, size_t);
static void (*faults_end)(void);

int ndpy_load_shim(const char *path, char *failed, size_t failed_size)
{
    void (*host)(void) = NULL;
    void *handle = NULL;

    if (dlsym(RTLD_DEFAULT, "ndpy_faults_shim")) {
        snprintf(failed, failed_size, "this process has it by LD_PRELOAD, with a scenario of its own");
        return EBUSY;
    }
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        snprintf(failed, failed_size, "%s", why ? why : "dlopen failed");
        return ENOENT;
    }
    *(void **)&host = dlsym(handle, "ndpy_faults_host");
    *(void **)&faults_begin = dlsym(handle, "ndpy_faults_begin");
    *(void **)&faults_end = dlsym(handle, "ndpy_faults_end");
    *(void **)&faults_function = dlsym(handle, "ndpy_faults_function");
    if (!host || !faults_begin || !faults_end || !faults_function) {
        snprintf(failed, failed_size, "it is of another version");
        return ENOENT;
    }
    host();
    return 0;
}

int ndpy_begin_faults(const char *path, char *failed, size_t failed_size)
{
    return faults_begin(path, failed, failed_size);
}

void ndpy_end_faults(void)
{
    faults_end();
}

int ndpy_load(int library, const char *verbs_path, const char *rdmacm_path, char *failed, size_t failed_size)
{
    const char *paths[2] = {verbs_path, rdmacm_path};
    void *handles[2];

    for (int i = 0; i < 2; i++) {
        handles[i] = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
        if (!handles[i]) {
            const char *why = dlerror();
            snprintf(failed, failed_size, "%s", why ? why : "dlopen failed");
            return i + 1;
        }
    }
    for (size_t i = 0; i < NDPY_SYMBOL_COUNT; i++) {
        const struct ndpy_symbol *symbol = &ndpy_symbols[i];
        void **slot = slot_of(library, symbol);

        *slot = dlsym(handles[symbol->from_rdmacm], symbol->name);
        if (!*slot && symbol->required) {
            snprintf(failed, failed_size, "no symbol %s", symbol->name);
            memset(&ndpy_libraries[library], 0, sizeof ndpy_libraries[library]);
            return symbol->from_rdmacm + 1;
        }
        if (library & NDPY_FAULTY)
            *slot = faults_function(symbol->name, *slot);
    }
    return 0;
}

int ndpy_has_symbol(int library, const char *name)
{
    for (size_t i = 0; i < NDPY_SYMBOL_COUNT; i++)
        if (!strcmp(ndpy_symbols[i].name, name))
            return *slot_of(library, &ndpy_symbols[i]) != NULL;
    return 0;
}

/* ---- the library of an object ---- */

/* Every object of verbs leads to its context. The contexts of softverbs, and those of a library through the shim, have
   one function of their own, and no others have it. NULL before the first one is opened, and always NULL for the
   system's libraries, whose drivers have many. */
typedef int poll_function(struct ibv_cq *, int, struct ibv_wc *);
static poll_function *_Atomic own_polls[NDPY_LIBRARY_COUNT];

/* The event channels of all libraries but the system's. An identifier may have no context yet, but it leads to its
   channel. Entries are never freed, so that nobody needs a lock, which another thread may hold when the process forks.
 */
static struct noted_channel {
    struct rdma_event_channel *_Atomic channel;
    _Atomic int library;
    struct noted_channel *next;
} *_Atomic noted_channels;

/* The library for functions that need no object and do the same in both. */
static const struct ndpy_library *of_none(void)
{
    return &ndpy_libraries[ndpy_libraries[NDPY_SYSTEM].call_ibv_get_device_list ? NDPY_SYSTEM : NDPY_SOFTVERBS];
}

static const struct ndpy_library *of_context(const struct ibv_context *context)
{
    for (int library = NDPY_SYSTEM + 1; library < NDPY_LIBRARY_COUNT; library++)
        if (context->ops.poll_cq == atomic_load_explicit(&own_polls[library], memory_order_relaxed))
            return &ndpy_libraries[library];
    return &ndpy_libraries[NDPY_SYSTEM];
}

#define NDPY_LEADS_TO_CONTEXT(type)                                                     \
    static inline const struct ndpy_library *of_##type(const struct ibv_##type *object) \
    {                                                                                   \
        return of_context(object->context);                                             \
    }
NDPY_LEADS_TO_CONTEXT(pd)
NDPY_LEADS_TO_CONTEXT(mr)
NDPY_LEADS_TO_CONTEXT(comp_channel)
NDPY_LEADS_TO_CONTEXT(cq)
NDPY_LEADS_TO_CONTEXT(srq)
NDPY_LEADS_TO_CONTEXT(qp)
NDPY_LEADS_TO_CONTEXT(ah)
#undef NDPY_LEADS_TO_CONTEXT

static struct noted_channel *entry_of(const struct rdma_event_channel *channel)
{
    struct noted_channel *entry = atomic_load(&noted_channels);

    while (entry && atomic_load(&entry->channel) != channel)
        entry = entry->next;
    return entry;
}

static const struct ndpy_library *of_event_channel(const struct rdma_event_channel *channel)
{
    const struct noted_channel *entry = entry_of(channel);

    return &ndpy_libraries[entry ? atomic_load(&entry->library) : NDPY_SYSTEM];
}

static const struct ndpy_library *of_cm_id(const struct rdma_cm_id *id)
{
    return of_event_channel(id->channel);
}

/* Take a free entry, or add one. */
static int note_channel(int library, struct rdma_event_channel *channel)
{
    struct noted_channel *entry = atomic_load(&noted_channels);

    for (; entry; entry = entry->next) {
        struct rdma_event_channel *free_entry = NULL;

        if (atomic_compare_exchange_strong(&entry->channel, &free_entry, channel)) {
            atomic_store(&entry->library, library);
            return 0;
        }
    }
    entry = malloc(sizeof *entry);
    if (!entry)
        return ENOMEM;
    atomic_init(&entry->channel, channel);
    atomic_init(&entry->library, library);
    entry->next = atomic_load(&noted_channels);
    while (!atomic_compare_exchange_weak(&noted_channels, &entry->next, entry))
        ;
    return 0;
}

static int is_faulty(const struct ndpy_library *library)
{
    return ((library - ndpy_libraries) & NDPY_FAULTY) != 0;
}

struct ibv_device **ndpy_get_device_list(int library, int *count)
{
    return ndpy_libraries[library].call_ibv_get_device_list(count);
}

void ndpy_free_device_list(int library, struct ibv_device **list)
{
    ndpy_libraries[library].call_ibv_free_device_list(list);
}

struct ibv_context *ndpy_open_device(int library, struct ibv_device *device)
{
    struct ibv_context *context = ndpy_libraries[library].call_ibv_open_device(device);

    if (context && library != NDPY_SYSTEM)
        atomic_store(&own_polls[library], context->ops.poll_cq);
    return context;
}

struct rdma_event_channel *ndpy_create_event_channel(int library)
{
    struct rdma_event_channel *channel = ndpy_libraries[library].call_rdma_create_event_channel();
    int error = channel && library != NDPY_SYSTEM ? note_channel(library, channel) : 0;

    if (error) {
        ndpy_libraries[library].call_rdma_destroy_event_channel(channel);
        errno = error;
        return NULL;
    }
    return channel;
}

void ndpy_destroy_event_channel(struct rdma_event_channel *channel)
{
    const struct ndpy_library *library = of_event_channel(channel);
    struct noted_channel *entry = entry_of(channel);

    /* Afterwards the system's library may get a channel at the same address. */
    if (entry)
        atomic_store(&entry->channel, NULL);
    library->call_rdma_destroy_event_channel(channel);
}

_Static_assert(sizeof(struct ndpy_socket_address) == sizeof(struct sockaddr_storage),
               "an array of one is one of the other");

int ndpy_softverbs_addresses(int library, struct ndpy_socket_address *out, int count)
{
    return ndpy_libraries[library].call_softverbs_addresses((struct sockaddr_storage *)out, count);
}
