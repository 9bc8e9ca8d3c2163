/* The adapter of both versions, and the objects that it creates. */
#ifndef SOFTND_ND_ADAPTER_H
#define SOFTND_ND_ADAPTER_H

#include "adapter.h"
#include "com.h"

#define SOFTND_ADAPTER_ID UINT64_C(0x736F66746E640001)
#define SOFTND_VENDOR_ID  0x736Eu
#define SOFTND_DEVICE_ID  0x0002u
#define LARGE_REQUEST     32768u

struct nd_adapter {
    struct com com;
    struct adapter adapter;
    SRWLOCK sources_lock; /* taken only outside of other locks or under a listener's or connector's */
    struct source *sources;
};

static inline struct adapter *nd_adapter_of(IND2Adapter *self)
{
    return &((struct nd_adapter *)self)->adapter;
}

/* What each method begins with that creates an object: the adapter is there, and such objects have this interface. */
HRESULT nd_adapter_check(IND2Adapter *self, const struct object_view *view, REFIID iid, void **out);
HRESULT nd_adapter_create(REFIID iid, void **out);
/* As adapter_start(). `adapter` is zeroed memory. */
HRESULT nd_adapter_start(struct nd_adapter *adapter, const struct object_class *class, const struct object_view *as);

#endif
