#include "settings.h"
#include "face.h"
#include "system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool settings_text(const char *name, char *buffer, uint32_t size)
{
    char whole[64];

    snprintf(whole, sizeof whole, "%s%s", face_prefix, name);
    return environment_text(whole, buffer, size);
}

uint64_t settings_number(const char *name, uint64_t otherwise)
{
    char text[32];
    char *end;

    if (!settings_text(name, text, sizeof text))
        return otherwise;
    unsigned long long value = strtoull(text, &end, 10);
    return end == text || *end != '\0' ? otherwise : value;
}

static uint32_t milliseconds(const char *name)
{
    uint64_t value = settings_number(name, 0);
    return value > 3600000 ? 3600000 : (uint32_t)value;
}

static bool has_value(const char *name, const char *value)
{
    char text[32];
    return settings_text(name, text, sizeof text) && strcmp(text, value) == 0;
}

struct settings settings_read(void)
{
    return (struct settings){
        .start_up_ms = milliseconds("START_UP_MS"),
        .strict_read_sink = has_value("READ_SINK", "strict"),
        .require_crc = has_value("CRC", "required"),
        .exact_sge = has_value("SGE", "exact"),
    };
}
