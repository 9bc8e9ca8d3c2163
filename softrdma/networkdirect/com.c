#include "com.h"
#include "face.h"

#include <stdlib.h>
#include <string.h>

void com_start(struct com *com, const struct object_view *view)
{
    com->methods = view->methods;
    com->view = view;
    com->references = 1;
}

void com_attach(struct com *com, struct object *object)
{
    com->object = object;
    if (com->source.file != NULL)
        source_start(&com->source, object->adapter, object);
}

void *com_new(size_t size, const struct object_view *view)
{
    struct com *com = calloc(1, size);

    if (com != NULL)
        com_start(com, view);
    return com;
}

HRESULT com_open(void *face, HANDLE file)
{
    return face == NULL ? ND_NO_MEMORY : source_open(&((struct com *)face)->source, file);
}

HRESULT com_finish(void *face, HRESULT status, struct object *object, void **out)
{
    if (status == ND_SUCCESS) {
        com_attach(face, object);
        *out = face;
    } else {
        com_discard(face);
    }
    return status;
}

void com_discard(void *face)
{
    struct com *com = face;

    if (com == NULL)
        return;
    source_free(&com->source);
    free(com);
}

void face_free(struct object *object)
{
    com_discard(object->face);
}

HRESULT com_check_iid(const struct object_view *view, REFIID iid, void **out)
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

HRESULT STDMETHODCALLTYPE com_query_interface(struct com *com, REFIID iid, void **out)
{
    HRESULT status = com_check_iid(com->view, iid, out);

    if (status != ND_SUCCESS)
        return status;
    com_add_ref(com);
    *out = com;
    return S_OK;
}

ULONG STDMETHODCALLTYPE com_add_ref(struct com *com)
{
    return (ULONG)InterlockedIncrement(&com->references);
}

ULONG STDMETHODCALLTYPE com_release(struct com *com)
{
    LONG left = InterlockedDecrement(&com->references);

    if (left > 0)
        return (ULONG)left;
    /* The objects that embed it close their source themselves. */
    if (com->object->face == com && com->source.file != NULL)
        source_close(&com->source);
    object_close(com->object);
    return 0;
}

HRESULT STDMETHODCALLTYPE com_cancel(struct com *com)
{
    return source_cancel(&com->source);
}

HRESULT STDMETHODCALLTYPE com_result(struct com *com, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(com);
    return overlapped_result(overlapped, wait);
}

struct com *com_from(const void *pointer, const struct object_view *view, const struct adapter *adapter)
{
    const void *methods;

    if (pointer == NULL || !guarded_copy(&methods, pointer, sizeof methods) || methods != view->methods)
        return NULL;
    struct com *com = (struct com *)(void *)pointer;
    return adapter == NULL || com->object->adapter == adapter ? com : NULL;
}
