/* HOT: a function of the hot path, which becomes part of each of its callers. APART: a function that does not, so that
   a caller saves no registers for it when it is not called. */

#ifndef NDPY_HOT_H
#define NDPY_HOT_H

#ifdef _MSC_VER
#define HOT   static __forceinline
#define APART static __declspec(noinline)
#else
#define HOT   static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#endif

#endif
