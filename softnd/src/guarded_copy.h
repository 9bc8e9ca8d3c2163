/* Access to memory of the consumer, which may not be there. */
#ifndef SOFTND_GUARDED_COPY_H
#define SOFTND_GUARDED_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* guarded_copy_start is called once at load, guarded_copy_stop at unload. */
bool guarded_copy_start(void);
void guarded_copy_stop(void);

/* Copies `size` bytes. False if either side faults; the beginning of the destination may then be written. The bytes
 * become visible at ascending addresses and the last one last, because programs spin on the last byte of a transfer
 * (F.3.11). */
bool guarded_copy(void *destination, const void *source, size_t size);

#endif
