/* The environment and log files. A log file is the handle of a file, so that lines can be written while the process
 * ends. */
#include "system.h"

#include <stdio.h>

bool environment_text(const char *name, char *buffer, size_t size)
{
    DWORD length = GetEnvironmentVariableA(name, buffer, (DWORD)size);
    return length > 0 && length < size;
}

struct log_file *log_open(const char *name)
{
    /* With append access, each write lands at the end, so several processes can share the file. */
    HANDLE file = CreateFileA(name, FILE_APPEND_DATA, FILE_SHARE_READ | FILE_SHARE_WRITE, NULL, OPEN_ALWAYS, 0, NULL);
    return file == INVALID_HANDLE_VALUE ? NULL : (struct log_file *)file;
}

void log_append(struct log_file *file, const char *text, size_t size)
{
    DWORD written;

    WriteFile((HANDLE)file, text, (DWORD)size, &written, NULL);
}

void log_close(struct log_file *file)
{
    CloseHandle((HANDLE)file);
}

size_t log_stamp(char *out, size_t size)
{
    SYSTEMTIME now;

    GetSystemTime(&now);
    return (size_t)snprintf(out, size, "%02u:%02u:%02u.%03u %lu.%lu ", now.wHour, now.wMinute, now.wSecond,
                            now.wMilliseconds, GetCurrentProcessId(), GetCurrentThreadId());
}
