#include "object.h"
#include "adapter.h"
#include "face.h"
#include "settings.h"
#include "trace.h"
#include "transport.h"

#include <stdio.h>

static const char *const kind_names[KIND_COUNT] = {
    "class factory",        "provider",   "adapter",   "memory region", "memory window", "completion queue",
    "shared receive queue", "queue pair", "connector", "listener",      "registration",
};

static _Atomic int32_t live[KIND_COUNT];
static _Atomic int32_t created[KIND_COUNT];
static _Atomic int32_t live_total;

bool object_start(struct object *object, const struct object_class *class, struct adapter *adapter, void *face)
{
    object->class = class;
    object->references = 1;
    object->adapter = NULL;
    object->face = face;
    if (class->kind > KIND_PROVIDER && !transport_acquire())
        return false;
    object->adapter = adapter;
    if (adapter != NULL)
        object_hold(&adapter->object);
    live[class->kind]++;
    created[class->kind]++;
    live_total++;
    return true;
}

void object_hold(struct object *object)
{
    object->references++;
}

void object_drop(struct object *object)
{
    struct adapter *adapter = object->adapter;

    if (--object->references > 0)
        return;
    face_free(object);
    object->class->destroy(object);
    if (adapter != NULL)
        object_drop(&adapter->object);
}

void object_close(struct object *object)
{
    enum object_kind kind = object->class->kind;

    TRACE("%s %p released", kind_names[kind], (void *)object);
    if (object->class->closed != NULL)
        object->class->closed(object);
    object_drop(object);
    live[kind]--;
    if (kind > KIND_PROVIDER)
        transport_release();
    live_total--;
}

void registration_made(void)
{
    live[KIND_REGISTRATION]++;
    created[KIND_REGISTRATION]++;
}

void registration_ended(void)
{
    live[KIND_REGISTRATION]--;
}

int32_t object_live_count(void)
{
    return live_total;
}

int32_t object_live(enum object_kind kind)
{
    return live[kind];
}

void objects_forget(void)
{
    for (int kind = 0; kind < KIND_COUNT; kind++)
        live[kind] = created[kind] = 0;
    live_total = 0;
}

void object_write_statistics(void)
{
    char name[512];
    char text[1024];
    int length = 0;

    if (!settings_text("STATISTICS", name, sizeof name))
        return;
    for (int kind = 0; kind < KIND_COUNT; kind++)
        length += snprintf(text + length, sizeof text - (size_t)length, "%s: %d created, %d leaked\n", kind_names[kind],
                           (int)created[kind], (int)live[kind]);
    struct log_file *file = log_open(name);
    if (file == NULL)
        return;
    log_append(file, text, (size_t)length);
    log_close(file);
}
