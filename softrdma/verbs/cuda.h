/* Memory of CUDA devices, which the processor cannot use itself. */
#ifndef SOFTVERBS_CUDA_H
#define SOFTVERBS_CUDA_H

#include "memory.h"

/* NULL if this range is not in one allocation of a CUDA device that this process can use. Free it when no region has
 * it any more. */
struct device_memory *cuda_memory_find(uint64_t address, size_t length);
/* `memory` may be NULL. */
void cuda_memory_free(struct device_memory *memory);

#endif
