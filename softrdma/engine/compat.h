/* Differences between compilers, and nothing else. */
#ifndef ENGINE_COMPAT_H
#define ENGINE_COMPAT_H

#include <stddef.h>

#define CONTAINER_OF(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))
#define COUNT_OF(array)                     (sizeof(array) / sizeof((array)[0]))
#define UNUSED(name)                        ((void)(name))

#if defined(__GNUC__)
#define PRINTF_LIKE(text, first) __attribute__((__format__(__printf__, text, first)))
#else
#define PRINTF_LIKE(text, first)
#endif

#endif
