#include "switches.h"
#include "face.h"
#include "system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool switches_text(const char *name, char *buffer, uint32_t size)
{
    char whole[64];

    snprintf(whole, sizeof whole, "%s%s", face_prefix, name);
    return environment_text(whole, buffer, size);
}

uint64_t switches_number(const char *name, uint64_t otherwise)
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
    uint64_t value = switches_number(name, 0);
    return value > 3600000 ? 3600000 : (uint32_t)value;
}

static bool has_value(const char *name, const char *value)
{
    char text[32];
    return switches_text(name, text, sizeof text) && strcmp(text, value) == 0;
}

struct switches switches_read(void)
{
    return (struct switches){
        .delay_completions_ms = milliseconds("DELAY_COMPLETIONS_MS"),
        .delay_cancel_ms = milliseconds("DELAY_CANCEL_MS"),
        .delay_registration_ms = milliseconds("DELAY_REGISTRATION_MS"),
        .start_up_ms = milliseconds("START_UP_MS"),
        .cut_after_bytes = switches_number("CUT_AFTER_BYTES", SWITCH_OFF),
        .remove_after_requests = switches_number("REMOVE_AFTER_REQUESTS", SWITCH_OFF),
        .refuse_registrations_after = switches_number("REFUSE_REGISTRATIONS_AFTER", SWITCH_OFF),
        .connect_timeouts = switches_number("CONNECT_TIMEOUTS", 0),
        .strict_read_sink = has_value("READ_SINK", "strict"),
        .require_crc = has_value("CRC", "required"),
        .exact_sge = has_value("SGE", "exact"),
    };
}
