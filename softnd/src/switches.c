#include "switches.h"

#include <stdlib.h>
#include <string.h>
#include <windows.h>

bool switches_text(const char *name, char *buffer, uint32_t size)
{
    DWORD length = GetEnvironmentVariableA(name, buffer, size);
    return length > 0 && length < size;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    char text[32];
    char *end;

    if (!switches_text(name, text, sizeof text))
        return otherwise;
    unsigned long long value = strtoull(text, &end, 10);
    return end == text || *end != '\0' ? otherwise : value;
}

static uint32_t milliseconds(const char *name)
{
    uint64_t value = number(name, 0);
    return value > 3600000 ? 3600000 : (uint32_t)value;
}

static bool has_value(const char *name, const char *value)
{
    char text[32];
    return switches_text(name, text, sizeof text) && strcmp(text, value) == 0;
}

bool switches_version(unsigned version)
{
    uint64_t only = number("SOFTND_VERSION", 0);
    return only == 0 || only == version;
}

struct switches switches_read(void)
{
    return (struct switches){
        .delay_completions_ms = milliseconds("SOFTND_DELAY_COMPLETIONS_MS"),
        .delay_cancel_ms = milliseconds("SOFTND_DELAY_CANCEL_MS"),
        .delay_registration_ms = milliseconds("SOFTND_DELAY_REGISTRATION_MS"),
        .start_up_ms = milliseconds("SOFTND_START_UP_MS"),
        .cut_after_bytes = number("SOFTND_CUT_AFTER_BYTES", SWITCH_OFF),
        .remove_after_requests = number("SOFTND_REMOVE_AFTER_REQUESTS", SWITCH_OFF),
        .refuse_registrations_after = number("SOFTND_REFUSE_REGISTRATIONS_AFTER", SWITCH_OFF),
        .connect_timeouts = number("SOFTND_CONNECT_TIMEOUTS", 0),
        .strict_read_sink = has_value("SOFTND_READ_SINK", "strict"),
        .require_crc = has_value("SOFTND_CRC", "required"),
        .exact_sge = has_value("SOFTND_SGE", "exact"),
    };
}
