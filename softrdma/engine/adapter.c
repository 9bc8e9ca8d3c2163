#include "adapter.h"
#include "face.h"
#include "stream.h"
#include "trace.h"

void adapter_remove(struct adapter *adapter)
{
    if (atomic_exchange(&adapter->removed, 1) != 0)
        return;
    streams_remove_adapter(adapter);
    face_adapter_removed(adapter);
}

bool adapter_request(struct adapter *adapter)
{
    if (adapter->switches.remove_after_requests != SWITCH_OFF &&
        (uint64_t)++adapter->requests > adapter->switches.remove_after_requests && !adapter_gone(adapter)) {
        TRACE("adapter %p: removed by REMOVE_AFTER_REQUESTS", (void *)adapter);
        adapter_remove(adapter);
    }
    return !adapter_gone(adapter);
}

bool adapter_start(struct adapter *adapter, const struct object_class *class, void *face)
{
    adapter->switches = switches_read();
    tokens_start(&adapter->tokens);
    return object_start(&adapter->object, class, NULL, face);
}

void adapter_end(struct adapter *adapter)
{
    tokens_free(&adapter->tokens);
}
