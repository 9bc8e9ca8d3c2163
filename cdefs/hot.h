/* HOT: a function of the hot path, which becomes part of each of its callers. */

#ifndef NDPY_HOT_H
#define NDPY_HOT_H

#ifdef _MSC_VER
#define HOT static __forceinline
#else
#define HOT static inline __attribute__((always_inline))
#endif

#endif
