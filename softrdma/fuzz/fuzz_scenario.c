/* Any text as a scenario; what is accepted is asked at places. */
#include "../faults/scenario.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char error[200];

    /* These open files. */
    if (memmem(data, size, "report", 6) != NULL || memmem(data, size, "count", 5) != NULL)
        return 0;
    struct scenario *scenario = scenario_parse("fuzz", (const char *)data, size, error, sizeof error);
    for (unsigned i = 0; scenario != NULL && i < 40; i++) {
        const struct place place = {.at = (enum fault_at)(i % FAULT_ATS),
                                    .what = 1 + i % 9,
                                    .queue_pair = i % 3,
                                    .size = i,
                                    .content = "h",
                                    .content_size = 1};
        scenario_at(scenario, &place);
    }
    scenario_free(scenario);
    return 0;
}
