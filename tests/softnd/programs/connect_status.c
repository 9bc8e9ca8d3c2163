/* Prints one JSON object: for each error number in its arguments, the status of Connect. */
#include "../../../softrdma/system/windows/status.h"

#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments)
{
    printf("{");
    for (int i = 1; i < count; i++) {
        DWORD error = (DWORD)strtoul(arguments[i], NULL, 10);
        printf("%s\"%lu\": %lu", i > 1 ? ", " : "", (unsigned long)error, (unsigned long)handshake_status(error));
    }
    printf("}\n");
    return 0;
}
