/* The DLL's exports and its provider object. */
#ifndef SOFTND_PROVIDER_H
#define SOFTND_PROVIDER_H

#include "object.h"

#endif
