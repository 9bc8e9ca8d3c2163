/* Opens libibverbs and librdmacm and fills one pointer for each symbol. build_verbs.py makes NDPY_SYMBOLS from
   ibverbs.h and rdmacm.h. The module links to neither library, so it loads on a machine without them. */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define NDPY_DEFINE(library, name, required) static __typeof__(name) *ndpy_call_##name;
NDPY_SYMBOLS(NDPY_DEFINE)
#undef NDPY_DEFINE

struct ndpy_symbol {
    const char *name;
    void **slot;
    int from_rdmacm;
    int required;
};

#define NDPY_ENTRY(library, name, required) {#name, (void **)&ndpy_call_##name, NDPY_IS_##library, required},
#define NDPY_IS_ibverbs 0
#define NDPY_IS_rdmacm 1
static const struct ndpy_symbol ndpy_symbols[] = {NDPY_SYMBOLS(NDPY_ENTRY)};
#undef NDPY_ENTRY

#define NDPY_SYMBOL_COUNT (sizeof ndpy_symbols / sizeof ndpy_symbols[0])

int ndpy_load(const char *verbs_path, const char *rdmacm_path, char *failed, size_t failed_size)
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

        *symbol->slot = dlsym(handles[symbol->from_rdmacm], symbol->name);
        if (!*symbol->slot && symbol->required) {
            snprintf(failed, failed_size, "no symbol %s", symbol->name);
            return symbol->from_rdmacm + 1;
        }
    }
    return 0;
}

int ndpy_has_symbol(const char *name)
{
    for (size_t i = 0; i < NDPY_SYMBOL_COUNT; i++)
        if (!strcmp(ndpy_symbols[i].name, name))
            return *ndpy_symbols[i].slot != NULL;
    return 0;
}
