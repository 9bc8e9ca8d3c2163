/* Scenarios: what their text may say, when faults fire, what is reported and counted. Then random input. */
#include "../faults/scenario.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned checks, failures;

#define CHECK(condition)                                                            \
    do {                                                                            \
        checks++;                                                                   \
        if (!(condition)) {                                                         \
            failures++;                                                             \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                           \
    } while (0)

#define FIRST "scenario 1\n"

static char message[512];

static struct scenario *parse(const char *text)
{
    message[0] = '\0';
    return scenario_parse("x", text, strlen(text), message, sizeof message);
}

static struct scenario *good(const char *text)
{
    struct scenario *scenario = parse(text);

    if (scenario == NULL) {
        fprintf(stderr, "%s\n", message);
        abort();
    }
    return scenario;
}

static void test_a_text_that_is_wrong_is_refused_and_the_reason_said(void)
{
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"", "the file is empty"},
        {"# nothing\n", "the file is empty"},
        {"seed 1\n", "x:1: seed: the first line has to be: scenario 1"},
        {"scenario 2\n", "scenario 1"},
        {"scenario\n", "scenario 1"},
        {"scenario 1 2\n", "scenario 1"},
        {FIRST "seed\n", "x:2: seed"},
        {FIRST "seed 1x\n", "x:2: seed"},
        {FIRST "seed -1\n", "x:2: seed"},
        {FIRST "seed 18446744073709551616\n", "x:2: seed"},
        {FIRST "seed 1\nseed 1\n", "x:3: seed: given twice"},
        {FIRST "seeds 1\n", "x:2: seeds: unknown word"},
        {FIRST "report\n", "x:2: report: a path is missing"},
        {FIRST "report /tmp/\n", "x:2: report /tmp/:"},
        {FIRST "count /nowhere/there\n", "x:2: count /nowhere/there: No such file"},
        {FIRST "\n\nfault\n", "x:4: a fault needs at="},
        {FIRST "fault at=request\n", "needs do="},
        {FIRST "fault at=heaven do=errno\n", "at=heaven"},
        {FIRST "fault at=call do=status status=REM_OP_ERR\n", "do=status is not one of at=call"},
        {FIRST "fault at=call do=errno\n", "do=errno needs errno="},
        {FIRST "fault at=call do=errno errno=EFUN\n", "errno=EFUN"},
        {FIRST "fault at=call do=errno errno=EIO ms=3\n", "do=errno takes no ms="},
        {FIRST "fault at=call call=reg_mrs do=errno errno=EIO\n", "call=reg_mrs"},
        {FIRST "fault at=call operation=send do=errno errno=EIO\n", "at=call takes no operation="},
        {FIRST "fault at=call call=post_send do=limit limit=3\n", "a call that makes an object"},
        {FIRST "fault at=call do=limit limit=3\n", "a call that makes an object"},
        {FIRST "fault at=request do=status status=WR_FLUSH_ERR\n", "status=WR_FLUSH_ERR"},
        {FIRST "fault at=request operation=receive do=status status=RETRY_EXC_ERR\n", "operation=receive does not end"},
        {FIRST "fault at=request operation=send do=late_receive ms=3\n", "needs operation=receive"},
        {FIRST "fault at=request do=silent nth=0\n", "nth=0"},
        {FIRST "fault at=request do=silent nth=1 nth=1\n", "nth=: given twice"},
        {FIRST "fault at=request do=silent nth=1 every=1\n", "exclude each other"},
        {FIRST "fault at=request do=silent every=1 probability=0.5\n", "exclude each other"},
        {FIRST "fault at=request do=silent probability=1.1\n", "probability=1.1"},
        {FIRST "fault at=request do=silent probability=.5\n", "probability=.5"},
        {FIRST "fault at=request do=silent probability=0.\n", "probability=0."},
        {FIRST "fault at=request do=silent probability=nan\n", "probability=nan"},
        {FIRST "fault at=request do=silent after_ms=5 until_ms=5\n", "until_ms= has to be above"},
        {FIRST "fault at=request do=silent min_size=5 max_size=4\n", "min_size= is above"},
        {FIRST "fault at=request do=silent content=abc\n", "content=abc"},
        {FIRST "fault at=request do=silent content=\n", "content="},
        {FIRST "fault at=request do=silent content=zz\n", "content=zz"},
        {FIRST "fault at=request do=silent peer=1.2.3\n", "peer=1.2.3"},
        {FIRST "fault at=request do=silent queue_pair=0\n", "queue_pair=0"},
        {FIRST "fault at=request do=silent queue_pair=4294967296\n", "queue_pair=4294967296"},
        {FIRST "fault at=request do=silent times=0\n", "times=0"},
        {FIRST "fault at=request do=silent color=red\n", "color=: unknown word"},
        {FIRST "fault at=request do=silent silent\n", "silent: not of the form"},
        {FIRST "fault at=adapter do=remove bytes=3\n", "do=remove takes no bytes="},
        {FIRST "fault a=1 b=1 c=1 d=1 e=1 f=1 g=1 h=1 i=1 j=1 k=1 l=1 m=1 n=1 o=1 p=1 q=1 r=1 s=1 t=1 u=1 v=1 w=1\n",
         "too many words"},
    };

    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(parse(wrong[i].text) == NULL);
        CHECK(strstr(message, wrong[i].says) != NULL);
        if (strstr(message, wrong[i].says) == NULL)
            fprintf(stderr, "said: %s\nbut should: %s\n", message, wrong[i].says);
    }
    static const char nul[] = FIRST "seed 1\0\n";
    CHECK(scenario_parse("x", nul, sizeof nul - 1, message, sizeof message) == NULL);
    CHECK(scenario_read("/nowhere/there", message, sizeof message) == NULL);
    CHECK(strstr(message, "/nowhere/there: No such file") != NULL);
}

static void test_a_text_says_what_it_says(void)
{
    struct scenario *scenario =
        good(FIRST "  # a comment\r\n\tseed 18446744073709551615 # the last one\r\n"
                   "fault at=request operation=send queue_pair=2 nth=3 do=status status=RETRY_EXC_ERR # why not\r\n"
                   "fault do=slow ms=7 at=call call=rdma_connect every=2 times=3\n"
                   "fault at=connection peer=10.1.2.3 do=reject data=00ffAB\n"
                   "fault at=request do=hold content=0102 min_size=2 max_size=9 after_ms=1 until_ms=2\n"
                   "fault at=connection peer=fd00::1 do=lose bytes=0");

    CHECK(scenario_faults(scenario) == 5);
    const struct fault *fault = scenario_fault(scenario, 0);
    CHECK(fault->at == AT_REQUEST && fault->what == PLACE_SEND && fault->queue_pair == 2 && fault->nth == 3);
    CHECK(fault->kind == FAULT_STATUS && fault->status == STATUS_RETRY_EXC_ERR && fault->times == 1 &&
          fault->line == 4);
    fault = scenario_fault(scenario, 1);
    CHECK(fault->kind == FAULT_SLOW && fault->ms == 7 && fault->what == PLACE_CALL_RDMA_CONNECT && fault->times == 3);
    fault = scenario_fault(scenario, 2);
    CHECK(fault->data_size == 3 && memcmp(fault->data, "\0\377\253", 3) == 0);
    CHECK(memcmp(fault->peer, "\0\0\0\0\0\0\0\0\0\0\377\377\12\1\2\3", 16) == 0 && fault->times == UINT64_MAX);
    fault = scenario_fault(scenario, 3);
    CHECK(fault->ms == FAULT_FOREVER && fault->content_size == 2 && fault->min_size == 2 && fault->max_size == 9);
    fault = scenario_fault(scenario, 4);
    CHECK(fault->peer[0] == 0xFD && fault->bytes == 0);
    scenario_free(scenario);
}

/* How often a fault fires, as a text of one character for each count. */
static const char *pattern(struct scenario *scenario, struct place place, unsigned count)
{
    static char out[128];

    memset(out, 0, sizeof out);
    for (unsigned i = 0; i < count; i++) {
        const struct fault *fault = scenario_at(scenario, &place);
        out[i] = fault == NULL ? '.' : (char)('0' + fault->number);
    }
    return out;
}

static const char *pattern_of(const char *words, struct place place, unsigned count)
{
    char text[512];

    snprintf(text, sizeof text, FIRST "seed 7\nfault %s\n", words);
    struct scenario *scenario = good(text);
    const char *out = pattern(scenario, place, count);
    scenario_free(scenario);
    return out;
}

static void test_when_a_fault_fires(void)
{
    const struct place send = {.at = AT_REQUEST, .what = PLACE_SEND, .queue_pair = 1};

    CHECK(strcmp(pattern_of("at=request do=silent", send, 4), "0000") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent times=2", send, 4), "00..") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent nth=3", send, 5), "..0..") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent nth=2 times=3", send, 6), ".000..") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent every=2", send, 6), ".0.0.0") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent every=2 times=2", send, 6), ".0.0..") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent probability=0", send, 6), "......") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent probability=1", send, 6), "000000") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent after_ms=60000", send, 2), "..") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent until_ms=60000", send, 2), "00") == 0);
    CHECK(strcmp(pattern_of("at=request operation=write do=silent", send, 2), "..") == 0);
    CHECK(strcmp(pattern_of("at=request queue_pair=2 do=silent", send, 2), "..") == 0);
    CHECK(strcmp(pattern_of("at=message do=corrupt", send, 2), "..") == 0);
    /* A status that the operation cannot have. */
    CHECK(strcmp(pattern_of("at=request do=status status=MW_BIND_ERR", send, 2), "..") == 0);

    char often[128];
    strcpy(often, pattern_of("at=request do=silent probability=0.5", send, 100));
    unsigned fired = 0;
    for (unsigned i = 0; i < 100; i++)
        fired += often[i] == '0';
    CHECK(fired > 30 && fired < 70);
    CHECK(strcmp(often, pattern_of("at=request do=silent probability=0.5", send, 100)) == 0);
    struct place other = send;
    other.queue_pair = 2;
    CHECK(strcmp(often, pattern_of("at=request do=silent probability=0.5", other, 100)) != 0);
}

static void test_which_messages_and_peers(void)
{
    static const uint8_t peer[16] = {[10] = 0xFF, [11] = 0xFF, [12] = 10, [15] = 1};
    struct place place = {
        .at = AT_REQUEST, .what = PLACE_SEND, .size = 5, .content = "hello", .content_size = 5, .peer = peer};

    CHECK(strcmp(pattern_of("at=request do=silent min_size=5 max_size=5", place, 1), "0") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent min_size=6", place, 1), ".") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent max_size=4", place, 1), ".") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent content=68656c", place, 1), "0") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent content=68656d", place, 1), ".") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent content=68656c6c6f21", place, 1), ".") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent peer=10.0.0.1", place, 1), "0") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent peer=10.0.0.2", place, 1), ".") == 0);
    place.content = NULL;
    place.peer = NULL;
    CHECK(strcmp(pattern_of("at=request do=silent content=68656c", place, 1), ".") == 0);
    CHECK(strcmp(pattern_of("at=request do=silent peer=10.0.0.1", place, 1), ".") == 0);
}

static void test_what_is_counted_together(void)
{
    struct scenario *scenario = good(FIRST "fault at=request do=silent nth=2\n"
                                           "fault at=call do=errno errno=ENOMEM nth=2\n"
                                           "fault at=connection do=refuse nth=3\n"
                                           "fault at=adapter queue_pair=5 do=queue_pair_fatal nth=2\n"
                                           "fault at=call call=reg_mr do=limit limit=2\n");
    struct place place = {.at = AT_REQUEST, .what = PLACE_SEND, .queue_pair = 1};

    /* Requests: of each queue pair, all operations together. */
    CHECK(strcmp(pattern(scenario, place, 1), ".") == 0);
    place.queue_pair = 2;
    CHECK(strcmp(pattern(scenario, place, 1), ".") == 0);
    place.what = PLACE_WRITE;
    CHECK(strcmp(pattern(scenario, place, 2), "0.") == 0);
    place.queue_pair = 1;
    CHECK(strcmp(pattern(scenario, place, 2), "0.") == 0);
    /* Places with other kinds do not count. */
    place.queue_pair = 9;
    place.kinds = FAULT_BIT(FAULT_STATUS);
    CHECK(strcmp(pattern(scenario, place, 4), "....") == 0);
    place.kinds = FAULT_BIT(FAULT_SILENT);
    CHECK(strcmp(pattern(scenario, place, 2), ".0") == 0);
    /* Calls: of each call. */
    place = (struct place){.at = AT_CALL, .what = PLACE_CALL_CREATE_CQ};
    CHECK(strcmp(pattern(scenario, place, 1), ".") == 0);
    place.what = PLACE_CALL_ALLOC_PD;
    CHECK(strcmp(pattern(scenario, place, 3), ".1.") == 0);
    /* Connections: of the process. */
    place = (struct place){.at = AT_CONNECTION, .queue_pair = 1};
    CHECK(strcmp(pattern(scenario, place, 1), ".") == 0);
    place.queue_pair = 2;
    CHECK(strcmp(pattern(scenario, place, 1), ".") == 0);
    place.queue_pair = 3;
    CHECK(strcmp(pattern(scenario, place, 2), "2.") == 0);
    /* The adapter: of the queue pair that is named. */
    place = (struct place){.at = AT_ADAPTER, .queue_pair = 4};
    CHECK(strcmp(pattern(scenario, place, 3), "...") == 0);
    place.queue_pair = 5;
    CHECK(strcmp(pattern(scenario, place, 3), ".3.") == 0);
    /* A limit looks at the objects that there are. */
    place = (struct place){.at = AT_CALL, .what = PLACE_CALL_REG_MR, .kinds = FAULT_BIT(FAULT_LIMIT), .live = 1};
    CHECK(strcmp(pattern(scenario, place, 2), "..") == 0);
    place.live = 2;
    CHECK(strcmp(pattern(scenario, place, 2), "44") == 0);
    scenario_free(scenario);
}

static void test_many_queue_pairs_are_counted_apart(void)
{
    struct scenario *scenario = good(FIRST "fault at=request do=silent nth=2\n");
    struct place place = {.at = AT_REQUEST, .what = PLACE_SEND};
    bool right = true;

    for (unsigned round = 1; round <= 3; round++)
        for (place.queue_pair = 1; place.queue_pair <= 5000; place.queue_pair++)
            right &= (scenario_at(scenario, &place) != NULL) == (round == 2);
    CHECK(right);
    scenario_free(scenario);
}

static void test_timed_faults_are_the_executors(void)
{
    struct scenario *scenario = good(FIRST "fault at=adapter do=port_down after_ms=10\n"
                                           "fault at=adapter do=port_up nth=1\n");
    const struct place place = {.at = AT_ADAPTER};

    CHECK(fault_is_timed(scenario_fault(scenario, 0)) && !fault_is_timed(scenario_fault(scenario, 1)));
    CHECK(strcmp(pattern(scenario, place, 2), "1.") == 0);
    scenario_free(scenario);
}

static bool no_limits(const struct fault *fault)
{
    return fault->kind != FAULT_LIMIT;
}

static void test_an_executor_says_what_it_cannot(void)
{
    struct scenario *scenario = good(FIRST "fault at=call do=slow ms=1\nfault at=call call=reg_mr do=limit limit=1\n");

    CHECK(!scenario_suits(scenario, "this engine", no_limits, message, sizeof message));
    CHECK(strcmp(message, "line 3: this engine cannot do=limit at reg_mr") == 0);
    scenario_free(scenario);
}

static size_t read_back(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "rb");
    size_t length = file != NULL ? fread(out, 1, size, file) : 0;

    if (file != NULL)
        fclose(file);
    return length;
}

static void test_what_fires_is_reported(const char *folder)
{
    char text[512], path[256], out[2048] = "";

    snprintf(path, sizeof path, "%s/a report #1", folder);
    snprintf(text, sizeof text, FIRST "report %s \nfault at=request do=silent nth=2\n", path);
    struct scenario *scenario = good(text);
    const struct place place = {
        .at = AT_REQUEST, .what = PLACE_SEND, .queue_pair = 6, .caller = (void *)(uintptr_t)atoi};
    pattern(scenario, place, 5);
    scenario_free(scenario);
    read_back(path, out, sizeof out - 1);
    char *end = strchr(out, '\n');
    CHECK(end != NULL && end[1] == '\0');
    char begin[128];
    snprintf(begin, sizeof begin,
             "{\"fault\":0,\"pid\":%d,\"at\":\"request\",\"place\":\"send\",\"queue_pair\":6,\"count\":2,\"does\":"
             "\"silent\",",
             (int)getpid());
    CHECK(strncmp(out, begin, strlen(begin)) == 0);
    CHECK(strstr(out, "\"caller\":\"") != NULL && end != NULL && end[-1] == '}');
    unlink(path);
}

static uint64_t counted(const char *path, uint64_t key)
{
    static struct {
        struct count_header header;
        struct count_slot slots[COUNT_SLOTS];
    } file;

    if (read_back(path, (char *)&file, sizeof file) != sizeof file || memcmp(file.header.magic, COUNT_MAGIC, 8) != 0)
        return UINT64_MAX;
    for (unsigned i = 0; i < COUNT_SLOTS; i++)
        if (file.slots[i].key == key)
            return file.slots[i].count;
    return 0;
}

static void test_places_are_counted_in_a_file(const char *folder)
{
    char text[512], path[256];

    snprintf(path, sizeof path, "%s/count", folder);
    snprintf(text, sizeof text, FIRST "count %s\n", path);
    struct scenario *one = good(text), *two = good(text);
    struct place place = {.at = AT_REQUEST, .what = PLACE_WRITE, .queue_pair = 3};
    pattern(one, place, 5);
    pattern(two, place, 7);
    place.again = true;
    pattern(two, place, 9);
    place = (struct place){.at = AT_CALL, .what = PLACE_CALL_POLL_CQ};
    pattern(one, place, 2);
    CHECK(counted(path, COUNT_KEY(AT_REQUEST, PLACE_WRITE, 3)) == 7);
    CHECK(counted(path, COUNT_KEY(AT_CALL, PLACE_CALL_POLL_CQ, 0)) == 2);
    CHECK(counted(path, COUNT_KEY(AT_CALL, PLACE_CALL_REG_MR, 0)) == 0);
    scenario_free(one);
    scenario_free(two);
    unlink(path);
}

struct counter {
    struct scenario *scenario;
    uint32_t queue_pair;
    unsigned fired;
};

static void *ask_often(void *what)
{
    struct counter *counter = what;

    for (unsigned i = 0; i < 20000; i++) {
        const struct place place = {.at = AT_REQUEST, .what = PLACE_SEND, .queue_pair = counter->queue_pair};
        counter->fired += scenario_at(counter->scenario, &place) != NULL;
    }
    return NULL;
}

static void test_threads_lose_no_count(void)
{
    struct scenario *scenario = good(FIRST "fault at=request do=silent every=5\n");
    struct counter counters[4];
    pthread_t threads[4];

    for (unsigned i = 0; i < 4; i++) {
        counters[i] = (struct counter){scenario, 1 + i / 2, 0};
        pthread_create(&threads[i], NULL, ask_often, &counters[i]);
    }
    for (unsigned i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(counters[0].fired + counters[1].fired == 8000);
    CHECK(counters[2].fired + counters[3].fired == 8000);
    scenario_free(scenario);
}

static void test_every_name_is_there(void)
{
    for (enum fault_at at = 0; at < FAULT_ATS; at++)
        CHECK(fault_at_name(at) != NULL);
    for (enum fault_kind kind = 0; kind < FAULT_KINDS; kind++)
        CHECK(fault_kind_name(kind) != NULL);
    for (unsigned call = 1; call < FAULT_CALLS; call++)
        CHECK(fault_what_name(AT_CALL, call) != NULL && fault_call_named(fault_what_name(AT_CALL, call)) == call);
    for (unsigned operation = 1; operation < FAULT_OPERATIONS; operation++)
        CHECK(fault_what_name(AT_REQUEST, operation) != NULL);
    CHECK(fault_call_named("ibv_reg_mr") == FAULT_CALLS);
}

/* ---- Random input ---- */

static uint64_t state = 1;

static unsigned below(unsigned limit)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (unsigned)(state >> 33) % limit;
}

/* Texts of words that mean something, with bytes changed. Whatever is accepted is asked. */
static void try_random_texts(unsigned rounds)
{
    static const char *const words[] = {
        "fault",
        "seed",
        "at=call",
        "at=request",
        "at=message",
        "at=connection",
        "at=adapter",
        "do=errno",
        "do=status",
        "do=slow",
        "do=hold",
        "do=silent",
        "do=lose",
        "do=reject",
        "do=remove",
        "call=reg_mr",
        "operation=send",
        "operation=receive",
        "queue_pair=1",
        "nth=2",
        "every=3",
        "probability=0.25",
        "times=2",
        "after_ms=0",
        "until_ms=100000",
        "errno=ENOMEM",
        "status=REM_OP_ERR",
        "ms=1",
        "bytes=1000",
        "data=0011",
        "content=68",
        "peer=127.0.0.1",
        "min_size=1",
        "max_size=10",
        "#",
        "18446744073709551615",
        "=",
        "\t",
    };
    unsigned accepted = 0;

    for (unsigned round = 0; round < rounds; round++) {
        char text[600] = FIRST;
        size_t used = strlen(text);
        for (unsigned lines = below(4); lines > 0; lines--) {
            for (unsigned count = below(8); count > 0; count--)
                used += (size_t)snprintf(text + used, sizeof text - used, "%s ",
                                         words[below(sizeof words / sizeof words[0])]);
            text[used++] = '\n';
        }
        for (unsigned changes = below(3); changes > 0 && below(4) == 0; changes--)
            text[below((unsigned)used)] = (char)below(256);
        char *copy = malloc(used);
        memcpy(copy, text, used);
        /* No file of a path that chance has made. */
        bool opens = memmem(copy, used, "report", 6) != NULL || memmem(copy, used, "count", 5) != NULL;
        struct scenario *scenario = opens ? NULL : scenario_parse("random", copy, used, message, 1 + below(80));
        free(copy);
        for (unsigned i = 0; scenario != NULL && i < 20; i++) {
            struct place place = {
                .at = below(FAULT_ATS), .queue_pair = below(3), .size = below(20), .content = "h", .content_size = 1};
            place.what = below(place.at == AT_CALL ? FAULT_CALLS : FAULT_OPERATIONS);
            scenario_at(scenario, &place);
        }
        accepted += scenario != NULL;
        scenario_free(scenario);
    }
    CHECK(accepted > rounds / 50 && accepted < rounds);
}

int main(void)
{
    char folder[] = "/tmp/scenario_test.XXXXXX";

    if (mkdtemp(folder) == NULL)
        abort();
    test_a_text_that_is_wrong_is_refused_and_the_reason_said();
    test_a_text_says_what_it_says();
    test_when_a_fault_fires();
    test_which_messages_and_peers();
    test_what_is_counted_together();
    test_many_queue_pairs_are_counted_apart();
    test_timed_faults_are_the_executors();
    test_an_executor_says_what_it_cannot();
    test_what_fires_is_reported(folder);
    test_places_are_counted_in_a_file(folder);
    test_threads_lose_no_count();
    test_every_name_is_there();
    try_random_texts(3000);
    rmdir(folder);
    printf("scenario: %u checks, %u failures\n", checks, failures);
    return failures != 0;
}
