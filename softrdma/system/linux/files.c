/* The environment and log files. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct log_file {
    int file;
};

bool environment_text(const char *name, char *buffer, size_t size)
{
    const char *value = getenv(name);

    if (value == NULL || strlen(value) >= size)
        return false;
    strcpy(buffer, value);
    return true;
}

struct log_file *log_open(const char *name)
{
    struct log_file *log = malloc(sizeof *log);

    if (log == NULL)
        return NULL;
    log->file = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY, 0666);
    if (log->file < 0) {
        free(log);
        return NULL;
    }
    return log;
}

/* One call per line: with O_APPEND, lines of several processes do not mix. */
void log_append(struct log_file *log, const char *text, size_t size)
{
    int cancel = cancel_off();

    while (write(log->file, text, size) < 0 && errno == EINTR)
        ;
    cancel_as(cancel);
}

void log_close(struct log_file *log)
{
    close(log->file);
    free(log);
}

size_t log_stamp(char *out, size_t size)
{
    struct timespec now;
    struct tm parts;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    int length = snprintf(out, size, "%02d:%02d:%02d.%03ld %ld.%llu ", parts.tm_hour, parts.tm_min, parts.tm_sec,
                          now.tv_nsec / 1000000, (long)getpid(), (unsigned long long)thread_id());
    return length < 0 ? 0 : (size_t)length < size ? (size_t)length : size - 1;
}
