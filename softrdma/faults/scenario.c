/* Whether a fault fires at a place, and what is counted and reported. */
#ifdef _WIN32
#include <winsock2.h>
#include <io.h>
#include <process.h>
#else
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif

#include "scenario_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t scenario_clock_ms(void)
{
#ifdef _WIN32
    return GetTickCount64();
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
#endif
}

/* ---- Counts ---- */

#define PROBES 8u

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static bool has_key(_Atomic uint64_t *slot, uint64_t key)
{
    uint64_t found = 0;

    return atomic_load(slot) == key || atomic_compare_exchange_strong(slot, &found, key) || found == key;
}

/* NULL: there is no memory. */
static struct tally *tally_of(struct fault_counts *counts, uint64_t key)
{
    for (;;) {
        for (unsigned i = 0; i < PROBES; i++) {
            struct tally *tally = &counts->slots[(mix(key) + i) % TABLE_SLOTS];
            if (has_key(&tally->key, key))
                return tally;
        }
        struct fault_counts *next = atomic_load(&counts->next);
        if (next == NULL) {
            struct fault_counts *made = calloc(1, sizeof *made);
            if (made == NULL)
                return NULL;
            if (atomic_compare_exchange_strong(&counts->next, &next, made))
                next = made;
            else
                free(made);
        }
        counts = next;
    }
}

static void counts_free(struct fault_counts *counts)
{
    while (counts != NULL) {
        struct fault_counts *next = atomic_load(&counts->next);
        free(counts);
        counts = next;
    }
}

/* ---- Its files ---- */

int scenario_open_report(const char *path)
{
#ifdef _WIN32
    return _open(path, _O_WRONLY | _O_APPEND | _O_CREAT | _O_BINARY, 0666);
#else
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
#endif
}

#ifdef _WIN32
struct count_slot *scenario_map_counts(const char *path)
{
    (void)path;
    errno = ENOSYS;
    return NULL;
}

static void unmap_counts(struct count_slot *slots)
{
    (void)slots;
}
#else
#define MAPPED (sizeof(struct count_header) + COUNT_SLOTS * sizeof(struct count_slot))

struct count_slot *scenario_map_counts(const char *path)
{
    static const struct count_header header = {COUNT_MAGIC, COUNT_VERSION, COUNT_SLOTS};

    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return NULL;
    void *memory = MAP_FAILED;
    if (ftruncate(fd, MAPPED) == 0)
        memory = mmap(NULL, MAPPED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return NULL;
    /* Several processes write the same. */
    memcpy(memory, &header, sizeof header);
    return (struct count_slot *)((char *)memory + sizeof header);
}

static void unmap_counts(struct count_slot *slots)
{
    if (slots != NULL)
        munmap((char *)slots - sizeof(struct count_header), MAPPED);
}
#endif

void scenario_free(struct scenario *scenario)
{
    if (scenario == NULL)
        return;
    for (unsigned i = 0; i < scenario->fault_count; i++)
        counts_free(scenario->faults[i].counts);
    counts_free(scenario->places);
    unmap_counts(scenario->shared);
    free(scenario->faults);
    free(scenario);
}

bool scenario_suits(const struct scenario *scenario, const char *executor, bool (*can)(const struct fault *),
                    char *error, size_t size)
{
    for (unsigned i = 0; i < scenario->fault_count; i++) {
        const struct fault *fault = &scenario->faults[i];
        if (!can(fault)) {
            snprintf(error, size, "line %u: %s cannot do=%s at %s", fault->line, executor, fault_kind_name(fault->kind),
                     fault_what_name(fault->at, fault->what));
            return false;
        }
    }
    return true;
}

/* ---- A place ---- */

static void append(char *line, size_t size, size_t *used, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    int more = vsnprintf(line + *used, size - *used, format, arguments);
    va_end(arguments);
    if (more > 0)
        *used = *used + (size_t)more < size ? *used + (size_t)more : size - 1;
}

#ifndef _WIN32
/* What JSON allows in a text; other characters become question marks. */
static const char *plain(char *out, size_t size, const char *text)
{
    size_t i = 0;

    for (; text != NULL && text[i] != '\0' && i + 1 < size; i++)
        out[i] = text[i] >= ' ' && text[i] < 127 && text[i] != '"' && text[i] != '\\' ? text[i] : '?';
    out[i] = '\0';
    return out;
}
#endif

static void describe_caller(char *line, size_t size, size_t *used, const void *caller)
{
#ifdef _WIN32
    append(line, size, used, ",\"caller\":\"0x%llx\"", (unsigned long long)(uintptr_t)caller);
#else
    char file[256], symbol[128];
    Dl_info info;

    if (dladdr(caller, &info) == 0 || info.dli_fname == NULL) {
        append(line, size, used, ",\"caller\":\"0x%llx\"", (unsigned long long)(uintptr_t)caller);
        return;
    }
    const char *base = strrchr(info.dli_fname, '/');
    append(line, size, used, ",\"caller\":\"%s+0x%llx",
           plain(file, sizeof file, base != NULL ? base + 1 : info.dli_fname),
           (unsigned long long)((uintptr_t)caller - (uintptr_t)info.dli_fbase));
    if (info.dli_sname != NULL)
        append(line, size, used, " (%s)", plain(symbol, sizeof symbol, info.dli_sname));
    append(line, size, used, "\"");
#endif
}

static void report(const struct scenario *scenario, const struct fault *fault, const struct place *place,
                   uint64_t count)
{
    char line[1024];
    size_t used = 0;

    if (scenario->report[0] == '\0')
        return;
    append(line, sizeof line, &used,
           "{\"fault\":%u,\"pid\":%d,\"at\":\"%s\",\"place\":\"%s\",\"queue_pair\":%lu,\"count\":%llu,\"does\":\"%s\","
           "\"time\":%llu",
           fault->number, (int)getpid(), fault_at_name(fault->at), fault_what_name(place->at, place->what),
           (unsigned long)place->queue_pair, (unsigned long long)count, fault_kind_name(fault->kind),
           (unsigned long long)scenario_age_ms(scenario));
    if (place->caller != NULL)
        describe_caller(line, sizeof line - 3, &used, place->caller);
    append(line, sizeof line, &used, "}\n");
    /* It is not kept open: a program that closes all descriptors would give its number to another file. */
    int fd = scenario_open_report(scenario->report);
    if (fd < 0)
        return;
    /* One call, so lines of several processes do not mix. */
    int written = (int)write(fd, line, (unsigned)used);
    (void)written;
    close(fd);
}

/* Counts of connections, and of the adapter, are those of the process, unless the fault is one queue pair's. */
static uint64_t key_for(const struct fault *fault, const struct place *place)
{
    bool of_process = (place->at == AT_CONNECTION || place->at == AT_ADAPTER) && fault->queue_pair == 0;
    return COUNT_KEY(place->at, place->at == AT_CALL ? place->what : 0, of_process ? 0 : place->queue_pair);
}

static void count_place(struct scenario *scenario, const struct place *place)
{
    uint64_t key = COUNT_KEY(place->at, place->what, place->queue_pair);
    struct tally *tally = tally_of(scenario->places, key);

    if (tally == NULL)
        return;
    uint64_t count = ++tally->count;
    for (unsigned i = 0; i < COUNT_SLOTS; i++) {
        struct count_slot *slot = &scenario->shared[(mix(key) + i) % COUNT_SLOTS];
        if (!has_key(&slot->key, key))
            continue;
        uint64_t known = atomic_load(&slot->count);
        while (known < count && !atomic_compare_exchange_weak(&slot->count, &known, count))
            ;
        return;
    }
}

static bool matches(const struct scenario *scenario, const struct fault *fault, const struct place *place)
{
    if (fault->at != place->at || (place->kinds != 0 && (place->kinds & FAULT_BIT(fault->kind)) == 0) ||
        (fault->what != 0 && fault->what != place->what) ||
        (fault->queue_pair != 0 && fault->queue_pair != place->queue_pair))
        return false;
    if (fault->kind == FAULT_STATUS && !fault_status_fits((enum fault_operation)place->what, fault->status))
        return false;
    if (fault->kind == FAULT_LIMIT && place->live < fault->limit)
        return false;
    if (fault->has_peer && (place->peer == NULL || memcmp(fault->peer, place->peer, sizeof fault->peer) != 0))
        return false;
    if (place->size < fault->min_size || place->size > fault->max_size)
        return false;
    if (fault->content_size > 0 && (place->content == NULL || place->content_size < fault->content_size ||
                                    memcmp(place->content, fault->content, fault->content_size) != 0))
        return false;
    if (fault->after_ms == 0 && fault->until_ms == UINT64_MAX)
        return true;
    uint64_t age = scenario_age_ms(scenario);
    return age >= fault->after_ms && age < fault->until_ms;
}

static uint64_t draw(const struct scenario *scenario, const struct fault *fault, uint64_t key, uint64_t count)
{
    return mix(mix(mix(mix(scenario->seed) ^ fault->number) ^ key) ^ count);
}

/* Whether the fault, which matches, fires at this count of its places. */
static bool fires(const struct scenario *scenario, const struct fault *fault, struct tally *tally, uint64_t key,
                  uint64_t count)
{
    if (fault->nth != 0)
        return count >= fault->nth && count - fault->nth < fault->times;
    if (fault->every != 0)
        return count % fault->every == 0 && count / fault->every <= fault->times;
    if (fault->probability >= 0 && (double)(draw(scenario, fault, key, count) >> 11) * 0x1p-53 >= fault->probability)
        return false;
    return fault->times == UINT64_MAX || atomic_fetch_add(&tally->fired, 1) < fault->times;
}

const struct fault *scenario_at(struct scenario *scenario, const struct place *place)
{
    const struct fault *fired = NULL;
    uint64_t count_of_fired = 0;

    if (scenario->shared != NULL && !place->again)
        count_place(scenario, place);
    for (unsigned i = 0; i < scenario->fault_count; i++) {
        const struct fault *fault = &scenario->faults[i];
        if (!matches(scenario, fault, place) || fault_is_timed(fault))
            continue;
        uint64_t key = key_for(fault, place);
        struct tally *tally = tally_of(fault->counts, key);
        if (tally == NULL)
            continue;
        uint64_t count = ++tally->count;
        if (fired == NULL && fires(scenario, fault, tally, key, count)) {
            fired = fault;
            count_of_fired = count;
        }
    }
    if (fired != NULL)
        report(scenario, fired, place, count_of_fired);
    return fired;
}

uint64_t scenario_random(struct scenario *scenario, const struct fault *fault, const struct place *place)
{
    uint64_t key = key_for(fault, place);
    struct tally *tally = tally_of(fault->counts, key);

    return mix(draw(scenario, fault, key, tally != NULL ? atomic_load(&tally->count) : 0));
}

unsigned scenario_faults(const struct scenario *scenario)
{
    return scenario->fault_count;
}

const struct fault *scenario_fault(const struct scenario *scenario, unsigned number)
{
    return &scenario->faults[number];
}

bool fault_is_timed(const struct fault *fault)
{
    return fault->at == AT_ADAPTER && fault->nth == 0 && fault->every == 0 && fault->probability < 0;
}

uint64_t scenario_age_ms(const struct scenario *scenario)
{
    return scenario_clock_ms() - scenario->began_ms;
}

void scenario_fire(struct scenario *scenario, const struct fault *fault, const struct place *place)
{
    report(scenario, fault, place, 1);
}
