/* Access to memory that belongs to the consumer and may not be there. */
#ifndef SOFTND_GUARDED_COPY_H
#define SOFTND_GUARDED_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* Called once at load and at unload. */
bool guarded_copy_start(void);
void guarded_copy_stop(void);

/* Copies `size` bytes; false when either side faults, with a prefix of the destination written. The bytes become
 * visible in ascending order and the last one last: programs spin on the last byte of a transfer (F.3.11). */
bool guarded_copy(void *destination, const void *source, size_t size);

#endif
