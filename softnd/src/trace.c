#include "trace.h"
#include "switches.h"

#include <stdarg.h>
#include <stdio.h>
#include <windows.h>

bool trace_on;
static HANDLE file = INVALID_HANDLE_VALUE;

void trace_open(void)
{
    char name[MAX_PATH];

    if (!switches_text("SOFTND_TRACE", name, sizeof name))
        return;
    /* With append access, each write lands at the end, so several processes can share the file. */
    file = CreateFileA(name, FILE_APPEND_DATA, FILE_SHARE_READ | FILE_SHARE_WRITE, NULL, OPEN_ALWAYS, 0, NULL);
    trace_on = file != INVALID_HANDLE_VALUE;
}

void trace_close(void)
{
    if (!trace_on)
        return;
    trace_on = false;
    CloseHandle(file);
    file = INVALID_HANDLE_VALUE;
}

void trace_line(const char *format, ...)
{
    char line[512];
    va_list arguments;
    DWORD written;
    SYSTEMTIME now;

    GetSystemTime(&now);
    int length = snprintf(line, sizeof line, "%02u:%02u:%02u.%03u %lu.%lu ", now.wHour, now.wMinute, now.wSecond,
                          now.wMilliseconds, GetCurrentProcessId(), GetCurrentThreadId());
    va_start(arguments, format);
    int more = vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
    va_end(arguments);
    if (more < 0)
        return;
    length += more;
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    WriteFile(file, line, (DWORD)length, &written, NULL);
}
