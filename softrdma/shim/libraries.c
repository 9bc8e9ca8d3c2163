/* The real functions. */
#include "calls.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    bool of_rdmacm;
} names[] = {
#define NAME_OF_VERBS(type, name, ...)  {#name, false},
#define NAME_OF_RDMACM(type, name, ...) {#name, true},
    VERBS_NAMES(NAME_OF_VERBS) RDMA_NAMES(NAME_OF_RDMACM)};

static const char *const file_names[2] = {"libibverbs.so.1", "librdmacm.so.1"};

static void *_Atomic functions[MAX_LIBRARIES][NAME_COUNT];
/* Where the files are loaded, and handles of theirs. By library and whether it is that of librdmacm. */
static void *_Atomic bases[MAX_LIBRARIES][2];
static void *_Atomic handles[MAX_LIBRARIES][2];

/* ---- Libraries ---- */

static void *base_of(const void *function)
{
    Dl_info info;

    return function != NULL && dladdr(function, &info) != 0 ? info.dli_fbase : NULL;
}

static void *handle_of(const void *function)
{
    Dl_info info;

    if (dladdr(function, &info) == 0 || info.dli_fname == NULL)
        return NULL;
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

/* The library that the program is linked with. Without one, the function was found in the shim itself, by a program
 * that looked for it everywhere, or the library is one that was opened only for the one that calls. */
static void *find_linked(enum name_index index)
{
    bool of_rdmacm = names[index].of_rdmacm;
    void *found = real_dlsym()(RTLD_NEXT, names[index].name);

    if (found != NULL)
        return found;
    void *handle = atomic_load(&handles[0][of_rdmacm]);
    if (handle == NULL)
        handle = dlopen(file_names[of_rdmacm], RTLD_NOW | RTLD_NOLOAD);
    if (handle == NULL)
        handle = dlopen(file_names[of_rdmacm], RTLD_NOW);
    if (handle == NULL)
        return NULL;
    atomic_store(&handles[0][of_rdmacm], handle);
    return real_dlsym()(handle, names[index].name);
}

static void *find_function(unsigned library, enum name_index index)
{
    void *handle = library == 0 ? NULL : atomic_load(&handles[library][names[index].of_rdmacm]);
    void *found = handle != NULL ? real_dlsym()(handle, names[index].name) : NULL;

    /* librdmacm that was opened alone still calls libibverbs. */
    return found != NULL ? found : find_linked(index);
}

void *library_function(unsigned library, enum name_index index)
{
    void *function = atomic_load_explicit(&functions[library][index], memory_order_acquire);

    if (function == NULL) {
        function = find_function(library, index);
        if (function == NULL) {
            fprintf(stderr, "ndpy faults: the libraries of verbs have no %s()\n", names[index].name);
            abort();
        }
        atomic_store(&functions[library][index], function);
        if (library == 0)
            atomic_store(&bases[0][names[index].of_rdmacm], base_of(function));
    }
    return function;
}

void *library_replacement(const char *name, void *found)
{
    static const char own = 0;
    unsigned index = 0;

    while (index < NAME_COUNT && strcmp(names[index].name, name) != 0)
        index++;
    if (found == NULL || index == NAME_COUNT)
        return found;
    void *base = base_of(found);
    bool of_rdmacm = names[index].of_rdmacm;
    /* Found everywhere: the libraries may lack it. */
    if (base == base_of(&own))
        return find_linked(index) != NULL ? found : NULL;
    for (unsigned library = 0; library < MAX_LIBRARIES; library++) {
        void *expected = NULL;
        bool is_new = library > 0 && atomic_compare_exchange_strong(&bases[library][of_rdmacm], &expected, base);
        if (!is_new && atomic_load(&bases[library][of_rdmacm]) != base)
            continue;
        if (is_new)
            atomic_store(&handles[library][of_rdmacm], handle_of(found));
        atomic_store(&functions[library][index], found);
        return of_rdmacm ? manager_stand_ins[index][library] : verbs_stand_ins[index][library];
    }
    return found;
}
