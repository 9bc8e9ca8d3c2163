/* Writes the streams that the fuzzer starts from into the named folder: sequences of all kinds of messages, and single
 * Terminates. */
#include "../engine/wire/wire.h"

#include <stdio.h>
#include <string.h>

static uint8_t stream[4096];
static size_t size;

static uint32_t token_of(unsigned index)
{
    const uint8_t bytes[4] = {0, 0, 1, (uint8_t)index};
    uint32_t token;

    memcpy(&token, bytes, sizeof token);
    return token;
}

static void end(size_t header, uint32_t payload)
{
    size_t begin = size;

    size += header;
    memset(stream + size, 'p', payload);
    size += payload;
    size = begin + wire_finish(stream + begin, size - begin, true);
}

static void startup(bool reply, uint8_t revision)
{
    const struct mpa_frame frame = {.revision = revision,
                                    .reply = reply,
                                    .crc = true,
                                    .enhanced = revision == 2,
                                    .peer_to_peer = true,
                                    .rtr_read = true,
                                    .ird = 4,
                                    .ord = 4,
                                    .private_size = 7,
                                    .private_data = (const uint8_t *)"private"};

    size += mpa_encode(stream + size, &frame);
}

static void messages(void)
{
    const struct wire_read_request request = {.sink_stag = token_of(7), .source_stag = token_of(1), .size = 100};

    end(wire_put_tagged(stream + size, RDMAP_WRITE, token_of(0), 8, false, 32), 32);
    end(wire_put_tagged(stream + size, RDMAP_WRITE, token_of(0), 40, true, 5), 5);
    end(wire_put_send(stream + size, RDMAP_SEND, 0, 1, 0, false, 20), 20);
    end(wire_put_send(stream + size, RDMAP_SEND, 0, 1, 20, true, 3), 3);
    end(wire_put_send(stream + size, RDMAP_SEND_SOLICITED, 0, 2, 0, true, 0), 0);
    end(wire_put_send(stream + size, RDMAP_SEND_INVALIDATE, token_of(2), 3, 0, true, 9), 9);
    end(wire_put_read_request(stream + size, 1, &request), 0);
    end(wire_put_tagged(stream + size, RDMAP_READ_RESPONSE, token_of(9), 0, false, 200), 200);
    end(wire_put_tagged(stream + size, RDMAP_READ_RESPONSE, token_of(9), 200, true, 56), 56);
    end(wire_put_send(stream + size, RDMAP_SEND_SOLICITED_INVALIDATE, token_of(3), 4, 0, true, 1), 1);
}

/* A Terminate that complains of a Write, of a Read Request, of a Send, or of nothing. */
static void terminate(unsigned kind)
{
    const struct wire_read_request request = {.sink_stag = token_of(7), .source_stag = token_of(1), .size = 100};
    static uint8_t fpdu[128];
    struct wire_segment offender;
    size_t header, used;

    switch (kind) {
    case 0:
        header = wire_put_tagged(fpdu, RDMAP_WRITE, token_of(0), 8, true, 0);
        break;
    case 1:
        header = wire_put_read_request(fpdu, 1, &request);
        break;
    default:
        header = wire_put_send(fpdu, RDMAP_SEND, 0, 1, 0, true, 0);
    }
    header = wire_finish(fpdu, header, false);
    if (wire_parse(fpdu, header, false, &offender, &used) == WIRE_OK)
        end(wire_put_terminate(stream + size, DDP_BOUNDS, kind == 3 ? NULL : &offender), 0);
}

static int save(const char *folder, unsigned number)
{
    char path[1024];
    FILE *file;
    size_t written;

    snprintf(path, sizeof path, "%s/seed-%u", folder, number);
    file = fopen(path, "wb");
    if (!file)
        return 1;
    written = fwrite(stream, 1, size, file);
    return fclose(file) || written != size;
}

int main(int count, char **arguments)
{
    int failed = 0;

    if (count != 2) {
        fprintf(stderr, "seeds FOLDER\n");
        return 2;
    }
    for (unsigned mode = 0; mode < 16 && !failed; mode++) {
        size = 0;
        stream[size++] = (uint8_t)mode;
        if (mode & 4)
            startup(mode & 8, mode & 1 ? 2 : 1);
        messages();
        terminate(mode & 3);
        failed = save(arguments[1], mode);
    }
    /* A Terminate alone. If there were messages before it, a changed length would shift its beginning. */
    for (unsigned kind = 0; kind < 4 && !failed; kind++) {
        size = 0;
        stream[size++] = 0;
        terminate(kind);
        failed = save(arguments[1], 16 + kind);
    }
    return failed;
}
