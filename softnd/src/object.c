#include "object.h"
#include "adapter.h"
#include "guarded_copy.h"
#include "switches.h"
#include "trace.h"
#include "transport.h"

#include <stdio.h>
#include <string.h>

static const char *const kind_names[KIND_COUNT] = {
    "class factory", "provider", "adapter", "memory region", "memory window", "completion queue", "shared receive queue",
    "queue pair", "connector", "listener",
};

static volatile LONG live[KIND_COUNT];
static volatile LONG created[KIND_COUNT];
static volatile LONG live_total;

bool object_start(struct object *object, const struct object_class *class, const struct object_view *view,
                  struct adapter *adapter)
{
    object->methods = view->methods;
    object->class = class;
    object->view = view;
    object->com_references = 1;
    object->references = 1;
    object->adapter = NULL;
    if (class->kind > KIND_PROVIDER && !transport_acquire())
        return false;
    object->adapter = adapter;
    if (adapter != NULL)
        object_hold(&adapter->object);
    InterlockedIncrement(&live[class->kind]);
    InterlockedIncrement(&created[class->kind]);
    InterlockedIncrement(&live_total);
    return true;
}

void object_hold(struct object *object)
{
    InterlockedIncrement(&object->references);
}

void object_drop(struct object *object)
{
    struct adapter *adapter = object->adapter;

    if (InterlockedDecrement(&object->references) > 0)
        return;
    object->class->destroy(object);
    if (adapter != NULL)
        object_drop(&adapter->object);
}

HRESULT object_check_iid(const struct object_view *view, REFIID iid, void **out)
{
    GUID wanted;
    void *none = NULL;

    if (!guarded_copy(out, &none, sizeof none))
        return E_POINTER;
    if (!guarded_copy(&wanted, iid, sizeof wanted))
        return E_POINTER;
    bool known = memcmp(&wanted, &softnd_iid_IUnknown, sizeof wanted) == 0 ||
                 memcmp(&wanted, view->iid, sizeof wanted) == 0 ||
                 (view->base != NULL && memcmp(&wanted, view->base, sizeof wanted) == 0);
    return known ? ND_SUCCESS : E_NOINTERFACE;
}

HRESULT STDMETHODCALLTYPE object_query_interface(struct object *object, REFIID iid, void **out)
{
    HRESULT status = object_check_iid(object->view, iid, out);

    if (status != ND_SUCCESS)
        return status;
    object_add_ref(object);
    *out = object;
    return S_OK;
}

ULONG STDMETHODCALLTYPE object_add_ref(struct object *object)
{
    return (ULONG)InterlockedIncrement(&object->com_references);
}

ULONG STDMETHODCALLTYPE object_release(struct object *object)
{
    LONG left = InterlockedDecrement(&object->com_references);
    enum object_kind kind = object->class->kind;

    if (left > 0)
        return (ULONG)left;
    TRACE("%s %p released", kind_names[kind], (void *)object);
    if (object->class->closed != NULL)
        object->class->closed(object);
    object_drop(object);
    InterlockedDecrement(&live[kind]);
    if (kind > KIND_PROVIDER)
        transport_release();
    InterlockedDecrement(&live_total);
    return 0;
}

struct object *object_from(const void *pointer, const struct object_view *view,
                           const struct adapter *adapter)
{
    struct object head;

    if (pointer == NULL || !guarded_copy(&head.methods, pointer, sizeof head.methods) ||
        head.methods != view->methods)
        return NULL;
    struct object *object = (struct object *)(void *)pointer;
    if (adapter != NULL && object->adapter != adapter)
        return NULL;
    return object;
}

LONG object_live_count(void)
{
    return live_total;
}

void object_write_statistics(void)
{
    char name[MAX_PATH];
    char text[1024];
    int length = 0;
    DWORD written;

    if (!switches_text("SOFTND_STATISTICS", name, sizeof name))
        return;
    for (int kind = 0; kind < KIND_COUNT; kind++)
        length += snprintf(text + length, sizeof text - (size_t)length, "%s: %ld created, %ld leaked\n",
                           kind_names[kind], created[kind], live[kind]);
    length += snprintf(text + length, sizeof text - (size_t)length, "registration: %ld created, %ld leaked\n",
                       adapter_registrations_made(), adapter_registrations_leaked());
    HANDLE file = CreateFileA(name, FILE_APPEND_DATA, FILE_SHARE_READ, NULL, OPEN_ALWAYS, 0, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return;
    WriteFile(file, text, (DWORD)length, &written, NULL);
    CloseHandle(file);
}
