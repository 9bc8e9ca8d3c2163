#include "trace.h"
#include "settings.h"
#include "system.h"

#include <stdarg.h>
#include <stdio.h>

bool trace_on;
static struct log_file *file;

void trace_open(void)
{
    char name[512];

    if (!settings_text("TRACE", name, sizeof name))
        return;
    file = log_open(name);
    trace_on = file != NULL;
}

void trace_close(void)
{
    if (!trace_on)
        return;
    trace_on = false;
    log_close(file);
    file = NULL;
}

void trace_line(const char *format, ...)
{
    char line[512];
    va_list arguments;

    int length = (int)log_stamp(line, sizeof line);
    va_start(arguments, format);
    int more = vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
    va_end(arguments);
    if (more < 0)
        return;
    length += more;
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    log_append(file, line, (size_t)length);
}
