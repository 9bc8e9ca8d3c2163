/* What a file needs that has stand-ins: stand_in_NAME() for each name of a list of calls.h. */
#ifndef SHIM_STAND_INS_H
#define SHIM_STAND_INS_H

#include "shim.h"

/* What a call returns that fails as functions of verbs do, and as those of the connection manager do. */
static inline void *null_with(int error)
{
    errno = error;
    return NULL;
}

static inline int minus_with(int error)
{
    errno = error;
    return -1;
}

#define WITH(...) (library_number __VA_OPT__(, ) __VA_ARGS__)
#define FOUND(number, type, name, parameters, ...) \
    static type found_##number##_##name parameters \
    {                                              \
        enum { library_number = number };          \
        caller = __builtin_return_address(0);      \
        return stand_in_##name WITH(__VA_ARGS__);  \
    }
#define FOUND_1(type, name, parameters, ...) FOUND(1, type, name, parameters, __VA_ARGS__)
#define FOUND_2(type, name, parameters, ...) FOUND(2, type, name, parameters, __VA_ARGS__)

#define LINKED(type, name, parameters, ...)       \
    EXPORT type name parameters                   \
    {                                             \
        enum { library_number = 0 };              \
        if (!shim_on)                             \
            return REAL(0, name)(__VA_ARGS__);    \
        caller = __builtin_return_address(0);     \
        return stand_in_##name WITH(__VA_ARGS__); \
    }
#define ROW(type, name, ...) [INDEX_##name] = {(void *)name, (void *)found_1_##name, (void *)found_2_##name},

/* The functions that programs see: those that they are linked with are exported, and the others are in a table, by name
 * and library. */
#define STAND_INS(table, names) \
    names(FOUND_1) names(FOUND_2) names(LINKED) void *const table[NAME_COUNT][MAX_LIBRARIES] = {names(ROW)};

#endif
