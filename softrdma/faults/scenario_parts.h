/* What the files of this folder share. */
#ifndef FAULTS_SCENARIO_PARTS_H
#define FAULTS_SCENARIO_PARTS_H

#include "scenario.h"

#include <stdatomic.h>

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PATH_ROOM       1024u

/* What is counted for each queue pair, or for each call. Tables are added, never moved, so no lock is needed. */
#define TABLE_SLOTS 256u
struct fault_counts {
    struct fault_counts *_Atomic next;
    struct tally {
        _Atomic uint64_t key; /* COUNT_KEY(); 0: free */
        _Atomic uint64_t count, fired;
    } slots[TABLE_SLOTS];
};

struct scenario {
    uint64_t seed;
    char report[PATH_ROOM], count[PATH_ROOM];
    struct count_slot *shared; /* in the file of `count`; NULL: none */
    struct fault_counts *places;
    uint64_t began_ms;
    struct fault *faults;
    unsigned fault_count;
};

/* `first` is the first index that has a name. The result is `count` if there is no such name. */
unsigned find_name(const char *const *names, size_t count, unsigned first, const char *name);
/* FAULT_ATS, FAULT_OPERATIONS or 0: no such name. */
enum fault_at fault_at_named(const char *name);
enum fault_operation fault_operation_named(const char *name);
int fault_error_named(const char *name);
enum fault_status fault_status_named(const char *name);
const char *fault_status_name(enum fault_status status);

/* A descriptor; -1 with errno. */
int scenario_open_report(const char *path);
/* NULL with errno, which is ENOSYS where there is no such file. */
struct count_slot *scenario_map_counts(const char *path);
uint64_t scenario_clock_ms(void);

#endif
