/* For libFuzzer: a stream of bytes that a peer could send, handled as a connection handles it.
 *
 * The first byte of an input says how to read it. The rest is the stream: perhaps a start-up frame, then FPDUs. Each
 * FPDU is parsed in a buffer that ends with it, so that AddressSanitizer sees any read past its end. Payload is copied
 * into a small memory under the rules of a responder. Guards surround what the tokens grant.
 */
#include "../engine/wire/wire.h"

#include <stdlib.h>
#include <string.h>

#define MODE_CRC      1u /* CRCs are checked */
#define MODE_MEND_CRC 2u /* and corrected right before, since a fuzzer does not find them */
#define MODE_STARTUP  4u
#define MODE_REPLY    8u

#define GUARD        64u
#define WINDOW       256u
#define TOKENS       4u
#define RECEIVE_SIZE 96u
#define FILL         0xA5

struct peer {
    struct wire_receiver receiver;
    struct wire_read read;
    bool reading;
    uint32_t received; /* bytes of the message that is arriving */
    bool granted[TOKENS];
    uint8_t memory[GUARD + WINDOW + GUARD];
    uint8_t message[GUARD + RECEIVE_SIZE + GUARD];
};

static void require(bool condition)
{
    if (!condition)
        abort();
}

static uint32_t token_of(unsigned index)
{
    const uint8_t bytes[4] = {0, 0, 1, (uint8_t)index};
    uint32_t token;

    memcpy(&token, bytes, sizeof token);
    return token;
}

static bool *grant_of(struct peer *peer, uint32_t stag)
{
    for (unsigned i = 0; i < TOKENS; i++)
        if (stag == token_of(i) && peer->granted[i])
            return &peer->granted[i];
    return NULL;
}

static bool fits(uint64_t offset, uint32_t size, uint32_t limit)
{
    return size <= limit && offset <= limit - size;
}

static int place_tagged(struct peer *peer, const struct wire_segment *segment)
{
    if (segment->opcode == RDMAP_READ_RESPONSE) {
        struct wire_read before = peer->read;
        int error = peer->reading ? wire_receive_response(&peer->read, segment) : RDMAP_OPCODE;

        if (error)
            return error;
        require(peer->read.left <= before.left && peer->read.left == before.left - segment->size);
        require(fits(segment->offset, segment->size, WINDOW));
        memcpy(peer->memory + GUARD + segment->offset, segment->payload, segment->size);
        peer->reading = peer->read.left != 0;
        return WIRE_OK;
    }
    if (!segment->size)
        return WIRE_OK;
    if (!grant_of(peer, segment->stag))
        return DDP_INVALID_STAG;
    if (!fits(segment->offset, segment->size, WINDOW))
        return DDP_BOUNDS;
    memcpy(peer->memory + GUARD + segment->offset, segment->payload, segment->size);
    return WIRE_OK;
}

static int place_send(struct peer *peer, const struct wire_segment *segment)
{
    require(segment->message_offset == peer->received);
    peer->received = segment->last ? 0 : peer->received + segment->size;
    if (!fits(segment->message_offset, segment->size, RECEIVE_SIZE))
        return DDP_TOO_LONG;
    memcpy(peer->message + GUARD + segment->message_offset, segment->payload, segment->size);
    if (segment->last && segment->invalidate) {
        bool *grant = grant_of(peer, segment->invalidate);

        if (!grant)
            return RDMAP_CANNOT_INVALIDATE;
        *grant = false;
    }
    return WIRE_OK;
}

static int take(struct peer *peer, const struct wire_segment *segment)
{
    int error = wire_receive(&peer->receiver, segment);

    if (error)
        return error;
    if (segment->tagged)
        return place_tagged(peer, segment);
    if (segment->queue == QUEUE_SEND)
        return place_send(peer, segment);
    if (segment->queue == QUEUE_READ_REQUEST && segment->request.size && !grant_of(peer, segment->request.source_stag))
        return RDMAP_INVALID_STAG;
    if (segment->queue == QUEUE_READ_REQUEST && !fits(segment->request.source_offset, segment->request.size, WINDOW))
        return segment->request.size ? RDMAP_BOUNDS : WIRE_OK;
    return WIRE_OK;
}

/* The description of the offending segment must survive the way to the peer. */
static void check_terminate(int error, const struct wire_segment *offender)
{
    uint8_t out[WIRE_MAX_TERMINATE_SIZE + WIRE_MAX_TRAILER_SIZE];
    struct wire_segment back;
    size_t used, size = wire_put_terminate(out, error, offender);

    require(size <= WIRE_MAX_TERMINATE_SIZE);
    size = wire_finish(out, size, true);
    require(wire_parse(out, size, true, &back, &used) == WIRE_OK && used == size);
    require(back.opcode == RDMAP_TERMINATE && back.terminate.error == error);
    require(back.terminate.has_header == (offender->header != NULL));
    if (offender->header && offender->tagged)
        require(back.terminate.tagged && back.terminate.stag == offender->stag &&
                back.terminate.offset == offender->offset);
    if (offender->header && !offender->tagged)
        require(!back.terminate.tagged && back.terminate.queue == offender->queue &&
                back.terminate.msn == offender->msn);
}

/* Headers built from parsed values must equal the parsed headers, except for reserved bits. */
static void check_round_trip(const uint8_t *data, const struct wire_segment *segment)
{
    uint8_t out[WIRE_READ_REQUEST_SIZE];
    size_t size;

    if (segment->tagged)
        size = wire_put_tagged(out, segment->opcode, segment->stag, segment->offset, segment->last, segment->size);
    else if (segment->opcode == RDMAP_READ_REQUEST)
        size = wire_put_read_request(out, segment->msn, &segment->request);
    else if (segment->opcode != RDMAP_TERMINATE)
        size = wire_put_send(out, segment->opcode, segment->invalidate, segment->msn, segment->message_offset,
                             segment->last, segment->size);
    else
        return;
    require(out[2] == (data[2] & 0xC3) && out[3] == (data[3] & 0xCF));
    for (size_t i = 0; i < size; i++)
        if (i != 2 && i != 3 && (segment->tagged || segment->invalidate || i < 4 || i >= 8))
            require(out[i] == data[i]);
}

static void mend_crc(uint8_t *fpdu, size_t size)
{
    uint32_t crc = wire_crc32c(0, fpdu, size - 4);

    for (unsigned i = 0; i < 4; i++)
        fpdu[size - 4 + i] = (uint8_t)(crc >> 8 * i);
}

/* Returns the number of bytes taken, or 0 if the stream ends or breaks here. */
static size_t take_fpdu(struct peer *peer, const uint8_t *data, size_t size, unsigned mode)
{
    bool with_crc = mode & MODE_CRC;
    struct wire_segment segment;
    size_t used, expected, exact;
    uint8_t *copy;
    int result;

    result = wire_parse(data, size < 2 ? size : 2, with_crc, &segment, &expected);
    require(result == WIRE_MORE || (result == MPA_LENGTH && size >= 2));
    if (result != WIRE_MORE || !expected)
        return 0;
    require(expected <= WIRE_MAX_FPDU && expected % 4 == 0);
    exact = size < expected ? size : expected;
    copy = malloc(exact);
    require(copy != NULL);
    memcpy(copy, data, exact);
    if (exact == expected && mode & MODE_MEND_CRC)
        mend_crc(copy, exact);
    result = wire_parse(copy, exact, with_crc, &segment, &used);
    require(used == expected);
    require((result == WIRE_MORE) == (exact < expected));
    if (result == WIRE_OK) {
        require(segment.payload >= copy && segment.payload + segment.size <= copy + exact - 4);
        check_round_trip(copy, &segment);
        result = take(peer, &segment);
    }
    if (result > 0)
        check_terminate(result, &segment);
    free(copy);
    return result == WIRE_OK ? expected : 0;
}

static size_t take_startup(const uint8_t *data, size_t size, bool reply)
{
    struct mpa_frame frame, again;
    uint8_t out[MPA_MAX_FRAME];
    size_t used, back;

    /* Try each length. A longer prefix gives the same result once a frame is refused or complete. No byte past the end
     * is read. */
    for (size_t length = 0; length <= size && length <= MPA_MAX_FRAME; length++) {
        uint8_t *copy = malloc(length ? length : 1);
        int result;

        require(copy != NULL);
        memcpy(copy, data, length);
        result = mpa_decode(copy, length, reply, &frame, &used);
        if (result == WIRE_OK) {
            require(used == length && length >= MPA_HEADER_SIZE);
            require(frame.private_data >= copy && frame.private_data + frame.private_size == copy + length);
            require(mpa_encode(out, &frame) == used);
            require(mpa_decode(out, used, reply, &again, &back) == WIRE_OK && back == used);
            require(again.ird == frame.ird && again.ord == frame.ord && again.revision == frame.revision);
            require(!memcmp(again.private_data, frame.private_data, frame.private_size));
        }
        free(copy);
        if (result != WIRE_MORE)
            return result == WIRE_OK ? used : 0;
    }
    return 0;
}

static bool is_filled(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (data[i] != FILL)
            return false;
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct peer peer = {.read = {.sink_stag = token_of(9), .left = WINDOW}, .reading = true};
    unsigned mode;
    size_t taken;

    if (!size)
        return 0;
    mode = *data++;
    size--;
    memset(peer.granted, true, sizeof peer.granted);
    memset(peer.memory, FILL, sizeof peer.memory);
    memset(peer.message, FILL, sizeof peer.message);
    if (mode & MODE_STARTUP) {
        taken = take_startup(data, size, mode & MODE_REPLY);
        if (!taken)
            return 0;
        data += taken;
        size -= taken;
    }
    while ((taken = take_fpdu(&peer, data, size, mode)) != 0) {
        data += taken;
        size -= taken;
    }
    require(is_filled(peer.memory, GUARD) && is_filled(peer.memory + GUARD + WINDOW, GUARD));
    require(is_filled(peer.message, GUARD) && is_filled(peer.message + GUARD + RECEIVE_SIZE, GUARD));
    return 0;
}
