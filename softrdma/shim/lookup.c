/* dlsym(3) and dlvsym(3): programs that look for a function of verbs find the shim's.
 *
 * With RTLD_NEXT they depend on who calls, so the real one has to be called from the place of the caller: this file is
 * compiled so that these calls are jumps.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

#include "calls.h"

#define EXPORT __attribute__((visibility("default")))

static bool is_ours(const char *name)
{
    return name != NULL && (strncmp(name, "ibv_", 4) == 0 || strncmp(name, "rdma_", 5) == 0);
}

static void *__attribute__((noinline)) find(void *handle, const char *name)
{
    return library_replacement(handle, name, real_dlsym()(handle, name));
}

static void *__attribute__((noinline)) find_version(void *handle, const char *name, const char *version)
{
    void *found = real_dlvsym()(handle, name, version);

    /* An older version has other structures. */
    return found != NULL && found == real_dlsym()(handle, name) ? library_replacement(handle, name, found) : found;
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
