/* The DLL's exports and the provider of version 2. */
#ifndef SOFTND_PROVIDER_H
#define SOFTND_PROVIDER_H

#include "com.h"

/* A provider or a class factory, of either version. */
HRESULT plain_object_create(enum object_kind kind, const struct object_view *as, void **out);

#endif
