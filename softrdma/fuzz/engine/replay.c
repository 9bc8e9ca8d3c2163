/* Runs the inputs in a folder, without libFuzzer. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int main(int count, char **arguments)
{
    static unsigned char data[1 << 16];
    char path[4096];
    unsigned done = 0;
    struct dirent *entry;
    DIR *folder = opendir(count > 1 ? arguments[1] : ".");

    if (folder == NULL) {
        perror("replay");
        return 1;
    }
    while ((entry = readdir(folder)) != NULL) {
        snprintf(path, sizeof path, "%s/%s", arguments[1], entry->d_name);
        FILE *file = entry->d_type == DT_REG ? fopen(path, "rb") : NULL;
        if (file == NULL)
            continue;
        size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
        done++;
    }
    closedir(folder);
    printf("replayed %u inputs\n", done);
    return done == 0;
}
