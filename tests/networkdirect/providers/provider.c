/* A provider DLL that is broken in the way that the macro says; see the Makefile. */

#include <windows.h>

#include <string.h>

#define EXPORT __declspec(dllexport)

/* An object whose methods all exist and which is never freed. It stands for IND2Provider and for IClassFactory. */
struct object {
    const void *const *methods;
};

static HRESULT STDMETHODCALLTYPE query(struct object *self, const GUID *iid, void **out)
{
    (void)iid;
    *out = self;
    return 0;
}

static ULONG STDMETHODCALLTYPE count(struct object *self)
{
    (void)self;
    return 1;
}

/* IND2Provider::QueryAddressList of a provider without adapters: a list of none is one number of 8 bytes with padding. */
static HRESULT STDMETHODCALLTYPE addresses(struct object *self, void *list, ULONG *size)
{
    (void)self;
    if (*size < 8) {
        *size = 8;
        return (HRESULT)0x80000005;
    }
    memset(list, 0, 8);
    *size = 8;
    return 0;
}

static HRESULT STDMETHODCALLTYPE refuse(void)
{
    return (HRESULT)0xC00000BB;
}

static const void *const methods[] = {query, count, count, addresses, refuse, refuse};
static struct object object = {methods};

static const GUID iid_class_factory = {0x00000001, 0, 0, {0xC0, 0, 0, 0, 0, 0, 0, 0x46}};

#ifndef NO_EXPORTS
EXPORT HRESULT STDMETHODCALLTYPE DllGetClassObject(const GUID *class_id, const GUID *iid, void **out)
{
    (void)class_id;
    *out = NULL;
#if defined(CRASHES)
    *(volatile int *)0 = 1;
#elif defined(EXITS)
    ExitProcess(7);
#elif defined(HANGS)
    Sleep(INFINITE);
#elif defined(NO_INTERFACE)
    return (HRESULT)0x80004002;
#elif defined(VERSION_1)
    if (memcmp(iid, &iid_class_factory, sizeof *iid))
        return (HRESULT)0x80004002;
#endif
    (void)iid;
    *out = &object;
    return 0;
}

#ifndef ONE_EXPORT
EXPORT HRESULT STDMETHODCALLTYPE DllCanUnloadNow(void)
{
    return 1;
}
#endif
#endif

BOOL WINAPI DllMain(HINSTANCE instance, DWORD reason, void *reserved)
{
    (void)instance, (void)reason, (void)reserved, (void)&object, (void)&iid_class_factory;
    return TRUE;
}
