/* CRC32C (polynomial 0x1EDC6F41, reflected), with the processor's instruction if it has one. */
#include "wire.h"

#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <nmmintrin.h>
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#define SSE42_FUNCTION
#else
#include <cpuid.h>
#define SSE42_FUNCTION __attribute__((target("sse4.2")))
#endif
#define HAVE_INSTRUCTION 1
#endif

#define POLYNOMIAL 0x82F63B78u

static uint32_t table[256];

static uint32_t with_table(uint32_t crc, const uint8_t *data, size_t size)
{
    while (size--)
        crc = crc >> 8 ^ table[(crc ^ *data++) & 255];
    return crc;
}

static void make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;

        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
        table[i] = value;
    }
}

#ifdef HAVE_INSTRUCTION
static SSE42_FUNCTION uint32_t with_instruction(uint32_t crc, const uint8_t *data, size_t size)
{
    uint64_t wide = crc;

    for (; size >= 8; size -= 8, data += 8) {
        uint64_t word;

        memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    while (size--)
        crc = _mm_crc32_u8(crc, *data++);
    return crc;
}

static int processor_has_it(void)
{
#if defined(_MSC_VER) && !defined(__clang__)
    int registers[4];

    __cpuid(registers, 1);
    return registers[2] >> 20 & 1;
#else
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 20 & 1);
#endif
}
#endif

uint32_t wire_crc32c(uint32_t crc, const void *data, size_t size)
{
    /* Several threads may get here first. Each writes the same values. */
    static volatile int method;

    if (!method) {
        make_table();
        method = 1;
#ifdef HAVE_INSTRUCTION
        if (processor_has_it())
            method = 2;
#endif
    }
#ifdef HAVE_INSTRUCTION
    if (method == 2)
        return ~with_instruction(~crc, data, size);
#endif
    return ~with_table(~crc, data, size);
}
