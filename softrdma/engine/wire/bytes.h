/* Numbers in network order, at any address. */
#ifndef SOFTND_WIRE_BYTES_H
#define SOFTND_WIRE_BYTES_H

#include <stdint.h>
#include <string.h>

static inline uint16_t get16(const uint8_t *data)
{
    return (uint16_t)(data[0] << 8 | data[1]);
}

static inline uint32_t get32(const uint8_t *data)
{
    return (uint32_t)get16(data) << 16 | get16(data + 2);
}

static inline uint64_t get64(const uint8_t *data)
{
    return (uint64_t)get32(data) << 32 | get32(data + 4);
}

static inline uint32_t get_stag(const uint8_t *data)
{
    uint32_t stag;

    memcpy(&stag, data, sizeof stag);
    return stag;
}

static inline void put16(uint8_t *out, uint32_t value)
{
    out[0] = (uint8_t)(value >> 8);
    out[1] = (uint8_t)value;
}

static inline void put32(uint8_t *out, uint32_t value)
{
    put16(out, value >> 16);
    put16(out + 2, value);
}

static inline void put64(uint8_t *out, uint64_t value)
{
    put32(out, (uint32_t)(value >> 32));
    put32(out + 4, (uint32_t)value);
}

static inline void put_stag(uint8_t *out, uint32_t stag)
{
    memcpy(out, &stag, sizeof stag);
}

#endif
