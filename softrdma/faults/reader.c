/* Reads a scenario, and says which words go together. */
#ifdef _WIN32
#include <winsock2.h>
#include <io.h>
#include <ws2tcpip.h>
#else
#include <arpa/inet.h>
#include <unistd.h>
#endif

#include "scenario_parts.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE (1u << 20)
#define MAX_MS   86400000u

/* The words of a fault. */
enum key {
    KEY_AT,
    KEY_DO,
    KEY_CALL,
    KEY_OPERATION,
    KEY_QUEUE_PAIR,
    KEY_PEER,
    KEY_MIN_SIZE,
    KEY_MAX_SIZE,
    KEY_CONTENT,
    KEY_NTH,
    KEY_EVERY,
    KEY_PROBABILITY,
    KEY_AFTER_MS,
    KEY_UNTIL_MS,
    KEY_TIMES,
    KEY_ERRNO,
    KEY_STATUS,
    KEY_MS,
    KEY_BYTES,
    KEY_LIMIT,
    KEY_DATA,
    KEYS
};
#define KEY_BIT(key) (1u << (key))
static const char *const key_names[KEYS] = {
    "at",       "do",      "call",   "operation", "queue_pair",  "peer",     "min_size",
    "max_size", "content", "nth",    "every",     "probability", "after_ms", "until_ms",
    "times",    "errno",   "status", "ms",        "bytes",       "limit",    "data",
};

#define WHEN                                                                                    \
    (KEY_BIT(KEY_NTH) | KEY_BIT(KEY_EVERY) | KEY_BIT(KEY_PROBABILITY) | KEY_BIT(KEY_AFTER_MS) | \
     KEY_BIT(KEY_UNTIL_MS) | KEY_BIT(KEY_TIMES))
#define OF_MESSAGES (KEY_BIT(KEY_MIN_SIZE) | KEY_BIT(KEY_MAX_SIZE) | KEY_BIT(KEY_CONTENT))
#define ALWAYS      (KEY_BIT(KEY_AT) | KEY_BIT(KEY_DO) | KEY_BIT(KEY_QUEUE_PAIR) | WHEN)

static const unsigned keys_at[FAULT_ATS] = {
    [AT_CALL] = ALWAYS | KEY_BIT(KEY_CALL),
    [AT_REQUEST] = ALWAYS | KEY_BIT(KEY_OPERATION) | KEY_BIT(KEY_PEER) | OF_MESSAGES,
    [AT_MESSAGE] = ALWAYS | KEY_BIT(KEY_OPERATION) | KEY_BIT(KEY_PEER) | OF_MESSAGES,
    [AT_CONNECTION] = ALWAYS | KEY_BIT(KEY_PEER),
    [AT_ADAPTER] = ALWAYS,
};

#define AT_BIT(at) (1u << (at))
static const struct {
    const char *name;
    unsigned ats;
    unsigned needs, takes; /* values */
} kinds[FAULT_KINDS] = {
    [FAULT_ERRNO] = {"errno", AT_BIT(AT_CALL), KEY_BIT(KEY_ERRNO), 0},
    [FAULT_SLOW] = {"slow", AT_BIT(AT_CALL), KEY_BIT(KEY_MS), 0},
    [FAULT_LIMIT] = {"limit", AT_BIT(AT_CALL), KEY_BIT(KEY_LIMIT), 0},
    [FAULT_STATUS] = {"status", AT_BIT(AT_REQUEST), KEY_BIT(KEY_STATUS), 0},
    [FAULT_DELAY] = {"delay", AT_BIT(AT_REQUEST) | AT_BIT(AT_MESSAGE), KEY_BIT(KEY_MS), 0},
    [FAULT_SILENT] = {"silent", AT_BIT(AT_REQUEST), 0, 0},
    [FAULT_HOLD] = {"hold", AT_BIT(AT_REQUEST), 0, KEY_BIT(KEY_MS)},
    [FAULT_LATE_RECEIVE] = {"late_receive", AT_BIT(AT_REQUEST), KEY_BIT(KEY_MS), 0},
    [FAULT_SPLIT] = {"split", AT_BIT(AT_MESSAGE), 0, 0},
    [FAULT_CORRUPT] = {"corrupt", AT_BIT(AT_MESSAGE), 0, 0},
    [FAULT_DUPLICATE] = {"duplicate", AT_BIT(AT_MESSAGE), 0, 0},
    [FAULT_REORDER] = {"reorder", AT_BIT(AT_MESSAGE), 0, 0},
    [FAULT_REFUSE] = {"refuse", AT_BIT(AT_CONNECTION), 0, 0},
    [FAULT_TIME_OUT] = {"time_out", AT_BIT(AT_CONNECTION), 0, 0},
    [FAULT_REJECT] = {"reject", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_DATA)},
    [FAULT_LOSE] = {"lose", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_BYTES)},
    [FAULT_DISCONNECT] = {"disconnect", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_BYTES)},
    [FAULT_MUTE] = {"mute", AT_BIT(AT_CONNECTION), 0, KEY_BIT(KEY_BYTES)},
    [FAULT_PORT_DOWN] = {"port_down", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_PORT_UP] = {"port_up", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_GID_CHANGE] = {"gid_change", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_QUEUE_PAIR_FATAL] = {"queue_pair_fatal", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_COMPLETION_QUEUE_ERROR] = {"completion_queue_error", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_REMOVE] = {"remove", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_PATH_MIGRATED] = {"path_migrated", AT_BIT(AT_ADAPTER), 0, 0},
    [FAULT_FULL_EVENT_QUEUE] = {"full_event_queue", AT_BIT(AT_ADAPTER), 0, 0},
};
#define VALUES                                                                                              \
    (KEY_BIT(KEY_ERRNO) | KEY_BIT(KEY_STATUS) | KEY_BIT(KEY_MS) | KEY_BIT(KEY_BYTES) | KEY_BIT(KEY_LIMIT) | \
     KEY_BIT(KEY_DATA))

/* Calls that make an object, and so have a limit. */
static const enum fault_call creations[] = {
    PLACE_CALL_ALLOC_PD,
    PLACE_CALL_REG_MR,
    PLACE_CALL_ALLOC_MW,
    PLACE_CALL_CREATE_COMP_CHANNEL,
    PLACE_CALL_CREATE_CQ,
    PLACE_CALL_CREATE_SRQ,
    PLACE_CALL_CREATE_QP,
    PLACE_CALL_CREATE_AH,
    PLACE_CALL_RDMA_CREATE_ID,
    PLACE_CALL_RDMA_CREATE_QP,
    PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL,
};

const char *fault_kind_name(enum fault_kind kind)
{
    return kinds[kind].name;
}

/* ---- Reading ---- */

struct reader {
    const char *name; /* of the file */
    unsigned line;
    char *error;
    size_t size;
    struct scenario *scenario;
    bool has_version, has_seed;
};

/* Returns false. */
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
static bool wrong(const struct reader *reader, const char *format, ...)
{
    va_list arguments;

    int length = snprintf(reader->error, reader->size, "%s:%u: ", reader->name, reader->line);
    if (length < 0 || (size_t)length >= reader->size)
        return false;
    va_start(arguments, format);
    vsnprintf(reader->error + length, reader->size - (size_t)length, format, arguments);
    va_end(arguments);
    return false;
}

static bool number(const char *text, uint64_t least, uint64_t most, uint64_t *out)
{
    uint64_t value = 0;

    if (*text == '\0')
        return false;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9')
            return false;
        unsigned digit = (unsigned)(*text - '0');
        if (value > (UINT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return value >= least && value <= most;
}

/* 0 to 1 with up to 15 digits behind the point, in every locale. */
static bool fraction(const char *text, double *out)
{
    double value = 0, unit = 1;
    unsigned digits = 0;

    if ((text[0] != '0' && text[0] != '1') || (text[1] != '\0' && text[1] != '.'))
        return false;
    if (text[1] == '.') {
        for (const char *at = text + 2; *at != '\0'; at++) {
            if (*at < '0' || *at > '9' || ++digits > 15)
                return false;
            unit /= 10;
            value += (*at - '0') * unit;
        }
        if (digits == 0)
            return false;
    }
    *out = (text[0] - '0') + value;
    return *out <= 1;
}

static int nibble(char digit)
{
    return digit >= '0' && digit <= '9'   ? digit - '0'
           : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
           : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                          : -1;
}

static bool bytes_of(const char *hex, uint8_t *out, size_t room, size_t *size)
{
    *size = 0;
    for (; *hex != '\0'; hex += 2) {
        if (hex[1] == '\0' || *size == room)
            return false;
        int high = nibble(hex[0]), low = nibble(hex[1]);
        if (high < 0 || low < 0)
            return false;
        out[(*size)++] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool address_of(const char *text, uint8_t *out)
{
    static const uint8_t prefix[12] = {[10] = 0xFF, [11] = 0xFF};

    if (inet_pton(AF_INET6, text, out) == 1)
        return true;
    memcpy(out, prefix, sizeof prefix);
    return inet_pton(AF_INET, text, out + sizeof prefix) == 1;
}

static bool take_value(const struct reader *reader, struct fault *fault, enum key key, const char *text)
{
    uint64_t value = 0;
    bool fits;

    switch (key) {
    case KEY_AT:
        fault->at = fault_at_named(text);
        fits = fault->at < FAULT_ATS;
        break;
    case KEY_DO:
        for (fault->kind = 0; fault->kind < FAULT_KINDS && strcmp(kinds[fault->kind].name, text) != 0;)
            fault->kind++;
        fits = fault->kind < FAULT_KINDS;
        break;
    case KEY_CALL:
        fault->what = fault_call_named(text);
        fits = fault->what < FAULT_CALLS;
        break;
    case KEY_OPERATION:
        fault->what = fault_operation_named(text);
        fits = fault->what < FAULT_OPERATIONS;
        break;
    case KEY_QUEUE_PAIR:
        fits = number(text, 1, UINT32_MAX, &value);
        fault->queue_pair = (uint32_t)value;
        break;
    case KEY_PEER:
        fits = fault->has_peer = address_of(text, fault->peer);
        break;
    case KEY_MIN_SIZE:
        fits = number(text, 0, UINT32_MAX, &fault->min_size);
        break;
    case KEY_MAX_SIZE:
        fits = number(text, 0, UINT32_MAX, &fault->max_size);
        break;
    case KEY_CONTENT:
        fits = bytes_of(text, fault->content, sizeof fault->content, &fault->content_size) && fault->content_size > 0;
        break;
    case KEY_NTH:
        fits = number(text, 1, INT64_MAX, &fault->nth);
        break;
    case KEY_EVERY:
        fits = number(text, 1, INT64_MAX, &fault->every);
        break;
    case KEY_PROBABILITY:
        fits = fraction(text, &fault->probability);
        break;
    case KEY_AFTER_MS:
        fits = number(text, 0, MAX_MS, &fault->after_ms);
        break;
    case KEY_UNTIL_MS:
        fits = number(text, 1, MAX_MS, &fault->until_ms);
        break;
    case KEY_TIMES:
        fits = number(text, 1, INT64_MAX, &fault->times);
        break;
    case KEY_ERRNO:
        fault->error = fault_error_named(text);
        fits = fault->error != 0;
        break;
    case KEY_STATUS:
        fault->status = fault_status_named(text);
        fits = fault->status != 0;
        break;
    case KEY_MS:
        fits = number(text, 0, MAX_MS, &fault->ms);
        break;
    case KEY_BYTES:
        fits = number(text, 0, INT64_MAX, &fault->bytes);
        break;
    case KEY_LIMIT:
        fits = number(text, 0, INT64_MAX, &fault->limit);
        break;
    default:
        fits = bytes_of(text, fault->data, sizeof fault->data, &fault->data_size);
        break;
    }
    return fits || wrong(reader, "%s=%s: not a value of %s, or out of range", key_names[key], text, key_names[key]);
}

/* Whether the words of a fault go together. */
static bool check(const struct reader *reader, struct fault *fault, unsigned given)
{
    if ((given & KEY_BIT(KEY_AT)) == 0)
        return wrong(reader, "a fault needs at=");
    if ((given & KEY_BIT(KEY_DO)) == 0)
        return wrong(reader, "a fault needs do=");
    const char *kind = kinds[fault->kind].name, *at = fault_at_name(fault->at);
    if ((kinds[fault->kind].ats & AT_BIT(fault->at)) == 0)
        return wrong(reader, "do=%s is not one of at=%s", kind, at);
    unsigned values = kinds[fault->kind].needs | kinds[fault->kind].takes;
    for (enum key key = 0; key < KEYS; key++) {
        bool has = (given & KEY_BIT(key)) != 0;
        if (has && (VALUES & KEY_BIT(key)) != 0 && (values & KEY_BIT(key)) == 0)
            return wrong(reader, "do=%s takes no %s=", kind, key_names[key]);
        if (has && (VALUES & KEY_BIT(key)) == 0 && (keys_at[fault->at] & KEY_BIT(key)) == 0)
            return wrong(reader, "at=%s takes no %s=", at, key_names[key]);
        if (!has && (kinds[fault->kind].needs & KEY_BIT(key)) != 0)
            return wrong(reader, "do=%s needs %s=", kind, key_names[key]);
    }
    if ((fault->nth != 0) + (fault->every != 0) + (fault->probability >= 0) > 1)
        return wrong(reader, "nth=, every= and probability= exclude each other");
    if (fault->after_ms >= fault->until_ms)
        return wrong(reader, "until_ms= has to be above after_ms=");
    if (fault->min_size > fault->max_size)
        return wrong(reader, "min_size= is above max_size=");
    if (fault->kind == FAULT_STATUS && fault->what != ANY_OPERATION &&
        !fault_status_fits((enum fault_operation)fault->what, fault->status))
        return wrong(reader, "status=%s: operation=%s does not end with it", fault_status_name(fault->status),
                     fault_what_name(fault->at, fault->what));
    if (fault->kind == FAULT_LATE_RECEIVE && fault->what != PLACE_RECEIVE)
        return wrong(reader, "do=late_receive needs operation=receive");
    if (fault->kind == FAULT_LIMIT) {
        size_t i = 0;
        while (i < COUNT_OF(creations) && (unsigned)creations[i] != fault->what)
            i++;
        if (i == COUNT_OF(creations))
            return wrong(reader, "do=limit needs call= with a call that makes an object");
    }
    if ((given & KEY_BIT(KEY_TIMES)) == 0)
        fault->times = fault->nth != 0 || fault->at == AT_ADAPTER ? 1 : UINT64_MAX;
    return true;
}

static bool read_fault(struct reader *reader, char **words, size_t count)
{
    struct scenario *scenario = reader->scenario;
    unsigned given = 0;

    if (scenario->fault_count == SCENARIO_MAX_FAULTS)
        return wrong(reader, "more than %u faults", SCENARIO_MAX_FAULTS);
    struct fault *faults = realloc(scenario->faults, (scenario->fault_count + 1) * sizeof *faults);
    if (faults == NULL)
        return wrong(reader, "no memory");
    scenario->faults = faults;
    struct fault *fault = &faults[scenario->fault_count];
    *fault = (struct fault){.number = scenario->fault_count,
                            .line = reader->line,
                            .max_size = UINT64_MAX,
                            .probability = -1,
                            .until_ms = UINT64_MAX,
                            .ms = FAULT_FOREVER};
    for (size_t i = 0; i < count; i++) {
        char *value = strchr(words[i], '=');
        if (value == NULL)
            return wrong(reader, "%s: not of the form name=value", words[i]);
        *value++ = '\0';
        enum key key = (enum key)find_name(key_names, KEYS, 0, words[i]);
        if (key == KEYS)
            return wrong(reader, "%s=: unknown word", words[i]);
        if ((given & KEY_BIT(key)) != 0)
            return wrong(reader, "%s=: given twice", words[i]);
        given |= KEY_BIT(key);
        if (!take_value(reader, fault, key, value))
            return false;
    }
    if (!check(reader, fault, given))
        return false;
    fault->counts = calloc(1, sizeof *fault->counts);
    if (fault->counts == NULL)
        return wrong(reader, "no memory");
    scenario->fault_count++;
    return true;
}

static bool blank(char c)
{
    return c == ' ' || c == '\t';
}

/* The words of a line, each ended by a NUL. A word that begins with # ends them. */
static size_t split(char *line, char **words, size_t room)
{
    size_t count = 0;

    for (;;) {
        while (blank(*line))
            *line++ = '\0';
        if (*line == '\0' || *line == '#')
            return count;
        if (count == room)
            return room + 1;
        words[count++] = line;
        while (*line != '\0' && !blank(*line))
            line++;
    }
}

static bool take_path(const struct reader *reader, const char *word, char *line, char *out)
{
    line += strspn(line, " \t") + strlen(word);
    line += strspn(line, " \t");
    size_t length = strlen(line);
    while (length > 0 && blank(line[length - 1]))
        length--;
    if (out[0] != '\0')
        return wrong(reader, "%s: given twice", word);
    if (length == 0 || length >= PATH_ROOM)
        return wrong(reader, "%s: a path is missing, or too long", word);
    memcpy(out, line, length);
    out[length] = '\0';
    return true;
}

static bool read_line(struct reader *reader, char *line)
{
    struct scenario *scenario = reader->scenario;
    char *words[KEYS + 2];
    uint64_t version;
    char *text = line + strspn(line, " \t");

    /* A path may have blanks and #. */
    size_t first = strcspn(text, " \t");
    if (first == 6 && memcmp(text, "report", 6) == 0 && reader->has_version)
        return take_path(reader, "report", line, scenario->report);
    if (first == 5 && memcmp(text, "count", 5) == 0 && reader->has_version)
        return take_path(reader, "count", line, scenario->count);

    size_t count = split(line, words, COUNT_OF(words));
    if (count == 0)
        return true;
    if (count > COUNT_OF(words))
        return wrong(reader, "too many words");
    if (!reader->has_version) {
        if (strcmp(words[0], "scenario") != 0 || count != 2 || !number(words[1], 1, 1, &version))
            return wrong(reader, "%s: the first line has to be: scenario 1", words[0]);
        reader->has_version = true;
        return true;
    }
    if (strcmp(words[0], "seed") == 0) {
        if (reader->has_seed)
            return wrong(reader, "seed: given twice");
        if (count != 2 || !number(words[1], 0, UINT64_MAX, &scenario->seed))
            return wrong(reader, "seed: needs one number below 2^64");
        reader->has_seed = true;
        return true;
    }
    if (strcmp(words[0], "fault") == 0)
        return read_fault(reader, words + 1, count - 1);
    return wrong(reader, "%s: unknown word", words[0]);
}

static bool read_lines(struct reader *reader, char *text, size_t length)
{
    char *end = text + length;

    if (memchr(text, '\0', length) != NULL) {
        reader->line = 1;
        return wrong(reader, "there is a NUL in the file");
    }
    while (text < end) {
        char *newline = memchr(text, '\n', (size_t)(end - text));
        char *next = newline != NULL ? newline + 1 : end;
        if (newline != NULL)
            *newline = '\0';
        size_t size = strlen(text);
        if (size > 0 && text[size - 1] == '\r')
            text[size - 1] = '\0';
        reader->line++;
        if (!read_line(reader, text))
            return false;
        text = next;
    }
    return reader->has_version || wrong(reader, "the file is empty; its first line has to be: scenario 1");
}

static bool open_files(struct reader *reader)
{
    struct scenario *scenario = reader->scenario;

    if (scenario->report[0] != '\0') {
        int fd = scenario_open_report(scenario->report);
        if (fd < 0)
            return wrong(reader, "report %s: %s", scenario->report, strerror(errno));
        close(fd);
    }
    if (scenario->count[0] == '\0')
        return true;
    scenario->shared = scenario_map_counts(scenario->count);
    return scenario->shared != NULL ||
           wrong(reader, "count %s: %s", scenario->count, errno == ENOSYS ? "not on this system" : strerror(errno));
}

struct scenario *scenario_parse(const char *name, const char *text, size_t length, char *error, size_t size)
{
    struct scenario *scenario = calloc(1, sizeof *scenario);
    char *copy = malloc(length + 1);
    struct reader reader = {.name = name, .error = error, .size = size, .scenario = scenario};

    if (scenario != NULL)
        scenario->places = calloc(1, sizeof *scenario->places);
    bool good = false;
    if (scenario == NULL || copy == NULL || scenario->places == NULL) {
        wrong(&reader, "no memory");
    } else {
        memcpy(copy, text, length);
        copy[length] = '\0';
        good = read_lines(&reader, copy, length) && open_files(&reader);
        scenario->began_ms = scenario_clock_ms();
    }
    free(copy);
    if (!good) {
        scenario_free(scenario);
        return NULL;
    }
    return scenario;
}

struct scenario *scenario_read(const char *path, char *error, size_t size)
{
    struct scenario *scenario = NULL;
    FILE *file = fopen(path, "rb");
    char *text = file != NULL ? malloc(MAX_FILE + 1) : NULL;

    if (text == NULL) {
        snprintf(error, size, "%s: %s", path, strerror(errno));
    } else {
        size_t length = fread(text, 1, MAX_FILE + 1, file);
        if (ferror(file))
            snprintf(error, size, "%s: %s", path, strerror(errno));
        else if (length > MAX_FILE)
            snprintf(error, size, "%s: larger than %u bytes", path, MAX_FILE);
        else
            scenario = scenario_parse(path, text, length, error, size);
    }
    free(text);
    if (file != NULL)
        fclose(file);
    return scenario;
}
