/* dlsym(3) and dlvsym(3): programs that look for a function of verbs find the shim's.
 *
 * With RTLD_NEXT they depend on who calls, so the real one has to be called from the place of the caller: this file is
 * compiled so that these calls are jumps, and without sanitizers, which call dlsym() before they are ready.
 */
#include "calls.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- The dynamic loader's own functions ---- */

static uint32_t gnu_hash(const char *name)
{
    uint32_t hash = 5381;

    while (*name != '\0')
        hash = hash * 33 + (unsigned char)*name++;
    return hash;
}

static bool same(const char *a, const char *b)
{
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* An address of a dynamic section. glibc has made it absolute, but not that of the vdso. */
static const void *address_in(const struct link_map *object, ElfW(Addr) value)
{
    return (const void *)(value < object->l_addr ? object->l_addr + value : value);
}

static void *find_in(const struct link_map *object, const char *name, uint32_t wanted)
{
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *table = NULL;

    for (const ElfW(Dyn) *dynamic = object->l_ld; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == DT_SYMTAB)
            symbols = address_in(object, dynamic->d_un.d_ptr);
        if (dynamic->d_tag == DT_STRTAB)
            strings = address_in(object, dynamic->d_un.d_ptr);
        if (dynamic->d_tag == DT_GNU_HASH)
            table = address_in(object, dynamic->d_un.d_ptr);
    }
    if (symbols == NULL || strings == NULL || table == NULL || table[0] == 0)
        return NULL;
    uint32_t bucket_count = table[0], first = table[1], bloom_size = table[2];
    const uint32_t *buckets = (const uint32_t *)((const ElfW(Addr) *)(table + 4) + bloom_size);
    const uint32_t *chain = buckets + bucket_count;
    uint32_t at = buckets[wanted % bucket_count];
    for (bool last = at < first; !last; at++) {
        uint32_t hash = chain[at - first];
        const ElfW(Sym) *symbol = &symbols[at];
        if ((hash | 1) == (wanted | 1) && symbol->st_shndx != SHN_UNDEF && symbol->st_value != 0 &&
            (symbol->st_info & 0xF) == STT_FUNC && same(strings + symbol->st_name, name))
            return (void *)(object->l_addr + symbol->st_value);
        last = (hash & 1) != 0;
    }
    return NULL;
}

extern const ElfW(Dyn) own_dynamic[] __asm__("_DYNAMIC") __attribute__((visibility("hidden")));

/* Where the loader's list begins: the first one is glibc's, the other one musl's. */
extern struct r_debug _r_debug __attribute__((weak));
extern struct r_debug *_dl_debug_addr __attribute__((weak));

static const struct link_map *first_object(void)
{
    if (&_r_debug != NULL)
        return _r_debug.r_map;
    return &_dl_debug_addr != NULL ? _dl_debug_addr->r_map : NULL;
}

/* dlsym() itself cannot be asked for them: that would be the shim's. Nor can dl_iterate_phdr(3): ThreadSanitizer stands
 * in for it, and calls dlsym() before that works. The loader appends to its list, under a lock that is not known here.
 * The C library is among the objects that the process began with, so the search ends before it reaches later ones. */
static void *search_for(const char *name)
{
    uint32_t hash = gnu_hash(name);

    for (const struct link_map *object = first_object(); object != NULL; object = object->l_next) {
        void *found = object->l_ld != own_dynamic ? find_in(object, name, hash) : NULL;
        if (found != NULL)
            return found;
    }
    fprintf(stderr, "ndpy faults: this C library has no %s() that can be found\n", name);
    abort();
}

dlsym_function *real_dlsym(void)
{
    static void *_Atomic function;
    void *known = atomic_load_explicit(&function, memory_order_relaxed);

    if (known == NULL)
        atomic_store(&function, known = search_for("dlsym"));
    return (dlsym_function *)known;
}

dlvsym_function *real_dlvsym(void)
{
    static void *_Atomic function;
    void *known = atomic_load_explicit(&function, memory_order_relaxed);

    if (known == NULL)
        atomic_store(&function, known = search_for("dlvsym"));
    return (dlvsym_function *)known;
}

/* ---- What programs call ---- */

static bool begins_with(const char *name, const char *start)
{
    while (*start != '\0' && *name == *start) {
        name++;
        start++;
    }
    return *start == '\0';
}

static bool is_ours(const char *name)
{
    return name != NULL && (begins_with(name, "ibv_") || begins_with(name, "rdma_"));
}

static void *__attribute__((noinline)) find(void *handle, const char *name)
{
    return library_replacement(name, real_dlsym()(handle, name));
}

static void *__attribute__((noinline)) find_version(void *handle, const char *name, const char *version)
{
    void *found = real_dlvsym()(handle, name, version);

    /* An older version has other structures. */
    return found != NULL && found == real_dlsym()(handle, name) ? library_replacement(name, found) : found;
}

EXPORT void *dlsym(void *restrict handle, const char *restrict name)
{
    if (shim_on && handle != RTLD_NEXT && is_ours(name))
        return find(handle, name);
    return real_dlsym()(handle, name);
}

EXPORT void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version)
{
    if (shim_on && handle != RTLD_NEXT && is_ours(name))
        return find_version(handle, name, version);
    return real_dlvsym()(handle, name, version);
}
