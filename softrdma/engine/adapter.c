#include "adapter.h"
#include "face.h"
#include "stream.h"

void adapter_remove(struct adapter *adapter)
{
    if (atomic_exchange(&adapter->removed, 1) != 0)
        return;
    streams_remove_adapter(adapter);
    face_adapter_removed(adapter);
}

nd_status adapter_start(struct adapter *adapter, const struct object_class *class, void *face)
{
    struct faults *faults;
    nd_status status = faults_use(&faults);

    if (status != ND_SUCCESS)
        return status;
    adapter->faults = faults;
    adapter->settings = settings_read();
    tokens_start(&adapter->tokens);
    if (!object_start(&adapter->object, class, NULL, face))
        return ND_INSUFFICIENT_RESOURCES;
    faults_start_timed(adapter);
    return ND_SUCCESS;
}

void adapter_closed(struct object *object)
{
    faults_stop_timed(CONTAINER_OF(object, struct adapter, object));
}

void adapter_end(struct adapter *adapter)
{
    tokens_free(&adapter->tokens);
}
