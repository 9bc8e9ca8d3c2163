/* The wire code against bytes and numbers from the RFCs. */
#include "../engine/wire/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned checks, failures;

#define CHECK(condition)                                                            \
    do {                                                                            \
        checks++;                                                                   \
        if (!(condition)) {                                                         \
            failures++;                                                             \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                           \
    } while (0)

static uint32_t stag_of(const char bytes[4])
{
    uint32_t stag;

    memcpy(&stag, bytes, sizeof stag);
    return stag;
}

/* A copy that ends where its allocation ends, so that AddressSanitizer sees every read past its end. */
static uint8_t *exact_copy(const void *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);

    if (!copy)
        abort();
    memcpy(copy, data, size);
    return copy;
}

static int parse(const uint8_t *data, size_t size, bool with_crc, struct wire_segment *segment, size_t *used)
{
    uint8_t *copy = exact_copy(data, size);
    int result = wire_parse(copy, size, with_crc, segment, used);

    segment->payload = segment->header = NULL; /* they pointed into the copy */
    free(copy);
    return result;
}

static void test_crc32c_has_the_values_of_rfc_3720_b_4(void)
{
    static const uint8_t read_command[48] = {0x01,        0xC0,        [16] = 0x14, [22] = 0x04,
                                             [27] = 0x14, [31] = 0x18, [32] = 0x28, [40] = 0x02};
    uint8_t data[32];

    memset(data, 0, sizeof data);
    CHECK(wire_crc32c(0, data, sizeof data) == 0x8A9136AA);
    memset(data, 0xFF, sizeof data);
    CHECK(wire_crc32c(0, data, sizeof data) == 0x62A8AB43);
    for (unsigned i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)i;
    CHECK(wire_crc32c(0, data, sizeof data) == 0x46DD794E);
    for (unsigned cut = 0; cut <= sizeof data; cut++)
        CHECK(wire_crc32c(wire_crc32c(0, data, cut), data + cut, sizeof data - cut) == 0x46DD794E);
    for (unsigned i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(31 - i);
    CHECK(wire_crc32c(0, data, sizeof data) == 0x113FDB5C);
    CHECK(wire_crc32c(0, read_command, sizeof read_command) == 0xD9963A56);
    CHECK(wire_crc32c(0, "123456789", 9) == 0xE3069283);
}

static void test_start_up_frame_has_the_layout_of_rfc_5044_and_6581(void)
{
    static const uint8_t expected[] = {'M', 'P',  'A', ' ', 'I', 'D',  ' ',  'R',  'e',  'q', ' ', 'F', 'r', 'a', 'm',
                                       'e', 0x50, 2,   0,   9,   0x80, 0x01, 0x7F, 0xFF, 'h', 'e', 'l', 'l', 'o'};
    const struct mpa_frame frame = {.revision = 2,
                                    .crc = true,
                                    .enhanced = true,
                                    .peer_to_peer = true,
                                    .rtr_read = true,
                                    .ird = 1,
                                    .ord = 0x3FFF,
                                    .private_size = 5,
                                    .private_data = (const uint8_t *)"hello"};
    struct mpa_frame decoded;
    uint8_t out[MPA_MAX_FRAME];
    size_t used;

    CHECK(mpa_encode(out, &frame) == sizeof expected);
    CHECK(!memcmp(out, expected, sizeof expected));
    for (size_t size = 0; size < sizeof expected; size++) {
        uint8_t *copy = exact_copy(expected, size);

        CHECK(mpa_decode(copy, size, false, &decoded, &used) == WIRE_MORE);
        free(copy);
    }
    CHECK(mpa_decode(expected, sizeof expected, false, &decoded, &used) == WIRE_OK);
    CHECK(used == sizeof expected);
    CHECK(decoded.revision == 2 && decoded.crc && decoded.enhanced && decoded.peer_to_peer && decoded.rtr_read);
    CHECK(!decoded.markers && !decoded.reject && !decoded.rtr_send && !decoded.rtr_write && !decoded.reply);
    CHECK(decoded.ird == 1 && decoded.ord == 0x3FFF);
    CHECK(decoded.private_size == 5 && !memcmp(decoded.private_data, "hello", 5));
    CHECK(mpa_decode(expected, sizeof expected, true, &decoded, &used) == MPA_FRAME);
}

static void test_start_up_frames_that_can_be_none_are_refused(void)
{
    struct mpa_frame frame = {.revision = 1, .private_size = 512}, decoded;
    uint8_t out[MPA_MAX_FRAME], private_data[513] = {0};
    size_t used;

    frame.private_data = private_data;
    CHECK(mpa_encode(out, &frame) == MPA_MAX_FRAME);
    CHECK(mpa_decode(out, sizeof out, false, &decoded, &used) == WIRE_OK && used == MPA_MAX_FRAME);
    frame.private_size = 513;
    CHECK(mpa_encode(out, &frame) == 0);
    frame.private_size = 509;
    frame.enhanced = true;
    CHECK(mpa_encode(out, &frame) == 0);

    out[18] = 2; /* 513 bytes of private data; refused before any of them arrives */
    out[19] = 1;
    CHECK(mpa_decode(out, MPA_HEADER_SIZE, false, &decoded, &used) == MPA_FRAME);
    out[18] = out[19] = 0;
    CHECK(mpa_decode(out, MPA_HEADER_SIZE, false, &decoded, &used) == WIRE_OK);
    for (unsigned revision = 0; revision < 256; revision++) {
        out[17] = (uint8_t)revision;
        CHECK((mpa_decode(out, MPA_HEADER_SIZE, false, &decoded, &used) == WIRE_OK) ==
              (revision == 1 || revision == 2));
    }
    out[17] = 2;
    out[16] = 0x10; /* enhanced, but without its four bytes */
    out[19] = 3;
    CHECK(mpa_decode(out, MPA_HEADER_SIZE, false, &decoded, &used) == MPA_FRAME);
    out[0] = 'm';
    CHECK(mpa_decode(out, 1, false, &decoded, &used) == MPA_FRAME);
}

static void test_write_has_the_layout_of_rfc_5041_4_2(void)
{
    static const uint8_t expected[] = {0,    17,   0xC1, 0x40, 0x01, 0x02, 0x03, 0x04, 0x11, 0x22, 0x33, 0x44,
                                       0x55, 0x66, 0x77, 0x88, 'a',  'b',  'c',  0,    0,    0,    0,    0};
    struct wire_segment segment;
    uint8_t out[64];
    size_t used, size = wire_put_tagged(out, RDMAP_WRITE, stag_of("\1\2\3\4"), 0x1122334455667788, true, 3);

    CHECK(size == WIRE_TAGGED_SIZE);
    memcpy(out + size, "abc", 3);
    size += 3;
    size = wire_finish(out, size, false);
    CHECK(size == sizeof expected && !memcmp(out, expected, size));
    for (size_t cut = 0; cut < size; cut++)
        CHECK(parse(out, cut, false, &segment, &used) == WIRE_MORE && used == (cut < 2 ? 0 : size));
    CHECK(parse(out, size, false, &segment, &used) == WIRE_OK && used == size);
    CHECK(segment.tagged && segment.last && segment.opcode == RDMAP_WRITE && segment.size == 3);
    CHECK(segment.stag == stag_of("\1\2\3\4") && segment.offset == 0x1122334455667788);
    out[2] ^= 1; /* version 0 */
    CHECK(parse(out, size, false, &segment, &used) == DDP_TAGGED_VERSION);
    out[2] ^= 1;
    out[3] = 0x80;
    CHECK(parse(out, size, false, &segment, &used) == RDMAP_VERSION);
    out[3] = 0x43; /* a Send cannot be tagged */
    CHECK(parse(out, size, false, &segment, &used) == RDMAP_OPCODE);
}

static void test_send_has_the_layout_of_rfc_5041_4_3(void)
{
    static const uint8_t expected[] = {0, 19, 0x01, 0x46, 0xAA, 0xBB, 0xCC, 0xDD, 0, 0,  0,
                                       0, 0,  0,    0,    7,    0,    0,    0,    9, 'x'};
    struct wire_segment segment;
    uint8_t out[64];
    size_t used,
        size = wire_put_send(out, RDMAP_SEND_SOLICITED_INVALIDATE, stag_of("\xAA\xBB\xCC\xDD"), 7, 9, false, 1);

    CHECK(size == WIRE_UNTAGGED_SIZE);
    out[size++] = 'x';
    CHECK(!memcmp(out, expected, sizeof expected));
    size = wire_finish(out, size, true);
    CHECK(size == 28);
    CHECK(parse(out, size, true, &segment, &used) == WIRE_OK);
    CHECK(!segment.tagged && !segment.last && segment.opcode == RDMAP_SEND_SOLICITED_INVALIDATE);
    CHECK(segment.queue == 0 && segment.msn == 7 && segment.message_offset == 9 && segment.size == 1);
    CHECK(segment.invalidate == stag_of("\xAA\xBB\xCC\xDD"));
    for (size_t bit = 16; bit < size * 8; bit++) { /* the bits of the length move the end */
        out[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(parse(out, size, true, &segment, &used) == MPA_CRC);
        out[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    out[11] = 3;
    CHECK(parse(out, size, false, &segment, &used) == DDP_INVALID_QUEUE);
    out[11] = 1;
    CHECK(parse(out, size, false, &segment, &used) == RDMAP_OPCODE);
    CHECK(wire_put_send(out, RDMAP_SEND, stag_of("\xAA\xBB\xCC\xDD"), 1, 0, true, 0) == WIRE_UNTAGGED_SIZE);
    CHECK(!memcmp(out + 4, "\0\0\0\0", 4)); /* no STag to invalidate */
}

static void test_crc_is_sent_least_significant_byte_first(void)
{
    /* RFC 3720 B.4: 32 zero bytes give aa 36 91 8a on the wire. */
    uint8_t out[32 + WIRE_MAX_TRAILER_SIZE] = {0};

    CHECK(wire_finish(out, 32, true) == 36);
    CHECK(!memcmp(out + 32, "\xAA\x36\x91\x8A", 4));
    CHECK(wire_finish(out, 29, true) == 36); /* padding is part of the CRC */
    CHECK(!memcmp(out + 29, "\0\0\0\xAA\x36\x91\x8A", 7));
}

static void test_read_request_has_the_layout_of_rfc_5040_4_4(void)
{
    static const uint8_t payload[] = {1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0,
                                      0, 3, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 5};
    const struct wire_read_request request = {.sink_stag = stag_of("\1\1\1\1"),
                                              .sink_offset = 2,
                                              .size = 3,
                                              .source_stag = stag_of("\4\4\4\4"),
                                              .source_offset = 5};
    struct wire_segment segment;
    uint8_t out[64];
    size_t used, size = wire_put_read_request(out, 1, &request);

    CHECK(size == WIRE_READ_REQUEST_SIZE);
    CHECK(!memcmp(out + WIRE_UNTAGGED_SIZE, payload, sizeof payload));
    size = wire_finish(out, size, false);
    CHECK(parse(out, size, false, &segment, &used) == WIRE_OK);
    CHECK(segment.queue == 1 && segment.msn == 1 && segment.request.size == 3 && segment.request.source_offset == 5);
    CHECK(segment.request.sink_stag == request.sink_stag && segment.request.source_stag == request.source_stag);
    memset(out + 40, 0xFF, 8); /* three bytes from the last offset */
    CHECK(parse(out, size, false, &segment, &used) == RDMAP_OFFSET_WRAPS);
    out[47] = 0xFD; /* up to the last byte */
    CHECK(parse(out, size, false, &segment, &used) == WIRE_OK);
}

static void test_terminate_comes_back_as_it_was_sent(void)
{
    const struct wire_read_request request = {
        .sink_stag = stag_of("\1\1\1\1"), .size = 100, .source_stag = stag_of("\4\4\4\4")};
    struct wire_segment offender, segment;
    uint8_t bad[64], out[128];
    size_t used, size;

    size = wire_put_tagged(bad, RDMAP_WRITE, stag_of("\1\2\3\4"), 77, true, 0);
    size = wire_finish(bad, size, false);
    CHECK(wire_parse(bad, size, false, &offender, &used) == WIRE_OK);
    size = wire_put_terminate(out, DDP_BOUNDS, &offender);
    CHECK(size <= WIRE_MAX_TERMINATE_SIZE);
    CHECK(!memcmp(out + 2, "\x41\x47\0\0\0\0\0\0\0\2\0\0\0\1\0\0\0\0\x11\x01\xC0\0\0\x0E\xC1\x40\1\2\3\4", 30));
    size = wire_finish(out, size, false);
    CHECK(parse(out, size, false, &segment, &used) == WIRE_OK);
    CHECK(segment.terminate.error == DDP_BOUNDS && segment.terminate.has_header && segment.terminate.tagged);
    CHECK(segment.terminate.stag == stag_of("\1\2\3\4") && segment.terminate.offset == 77);

    size = wire_put_read_request(bad, 5, &request);
    size = wire_finish(bad, size, false);
    CHECK(wire_parse(bad, size, false, &offender, &used) == WIRE_OK);
    size = wire_put_terminate(out, RDMAP_ACCESS, &offender);
    CHECK(size <= WIRE_MAX_TERMINATE_SIZE);
    size = wire_finish(out, size, false);
    CHECK(parse(out, size, false, &segment, &used) == WIRE_OK);
    CHECK(segment.terminate.error == RDMAP_ACCESS && segment.terminate.has_header && !segment.terminate.tagged);
    CHECK(segment.terminate.queue == 1 && segment.terminate.msn == 5 && segment.terminate.has_request);
    CHECK(segment.terminate.request.size == 100);

    size = wire_put_terminate(out, MPA_CRC, NULL);
    CHECK(size == WIRE_UNTAGGED_SIZE + 4 && !memcmp(out + 20, "\x20\x02\0\0", 4));
}

static void test_lengths_that_hold_no_header_are_refused_at_once(void)
{
    struct wire_segment segment;
    size_t used;
    uint8_t untagged[24] = {0, 17, 0x41, 0x43};

    for (unsigned length = 0; length < 14; length++) {
        const uint8_t data[2] = {0, (uint8_t)length};

        CHECK(parse(data, sizeof data, false, &segment, &used) == MPA_LENGTH);
    }
    CHECK(parse(untagged, sizeof untagged, false, &segment, &used) == MPA_LENGTH); /* an untagged header has 18 */
}

static void test_tagged_offsets_may_reach_the_last_byte_and_not_wrap(void)
{
    struct wire_segment segment;
    uint8_t out[64] = {0};
    size_t used;

    wire_put_tagged(out, RDMAP_WRITE, 1, UINT64_MAX - 3, true, 4);
    CHECK(parse(out, 24, false, &segment, &used) == WIRE_OK);
    wire_put_tagged(out, RDMAP_WRITE, 1, UINT64_MAX - 2, true, 4);
    CHECK(parse(out, 24, false, &segment, &used) == DDP_OFFSET_WRAPS);
    wire_put_tagged(out, RDMAP_WRITE, 1, UINT64_MAX, true, 0);
    CHECK(parse(out, 20, false, &segment, &used) == WIRE_OK);
}

static int receive_send(struct wire_receiver *receiver, enum wire_opcode opcode, uint32_t msn, uint32_t offset,
                        bool last, uint32_t payload)
{
    static uint8_t out[WIRE_MAX_FPDU];
    struct wire_segment segment;
    size_t used, size = wire_put_send(out, opcode, 0, msn, offset, last, payload);

    size += payload;
    size = wire_finish(out, size, false);
    if (wire_parse(out, size, false, &segment, &used) != WIRE_OK)
        return MPA_LENGTH;
    return wire_receive(receiver, &segment);
}

static void test_messages_come_in_order_and_without_gaps(void)
{
    struct wire_receiver receiver = {0};

    CHECK(receive_send(&receiver, RDMAP_SEND, 0, 0, true, 4) == DDP_SEQUENCE);
    CHECK(receive_send(&receiver, RDMAP_SEND, 2, 0, true, 4) == DDP_SEQUENCE);
    CHECK(receive_send(&receiver, RDMAP_SEND, 1, 4, true, 4) == DDP_MESSAGE_OFFSET);
    CHECK(receive_send(&receiver, RDMAP_SEND, 1, 0, true, 4) == WIRE_OK);
    CHECK(receive_send(&receiver, RDMAP_SEND, 1, 0, true, 4) == DDP_SEQUENCE); /* a replay */
    CHECK(receive_send(&receiver, RDMAP_SEND, 2, 0, false, 8) == WIRE_OK);
    CHECK(receive_send(&receiver, RDMAP_SEND, 2, 0, false, 8) == DDP_MESSAGE_OFFSET);
    CHECK(receive_send(&receiver, RDMAP_SEND, 2, 12, false, 8) == DDP_MESSAGE_OFFSET);
    CHECK(receive_send(&receiver, RDMAP_SEND_SOLICITED, 2, 8, true, 8) == RDMAP_OPCODE);
    CHECK(receive_send(&receiver, RDMAP_SEND, 2, 8, true, 0) == WIRE_OK);
    CHECK(receive_send(&receiver, RDMAP_SEND, 3, 0, true, 0) == WIRE_OK);
    receiver.messages[QUEUE_SEND] = UINT32_MAX; /* RFC 5041 section 5.1: the sequence number wraps */
    CHECK(receive_send(&receiver, RDMAP_SEND, 0, 0, true, 0) == WIRE_OK);
}

static int receive_response(struct wire_read *read, uint32_t stag, uint64_t offset, bool last, uint32_t size)
{
    const struct wire_segment segment = {
        .opcode = RDMAP_READ_RESPONSE, .tagged = true, .stag = stag, .offset = offset, .last = last, .size = size};

    return wire_receive_response(read, &segment);
}

static void test_read_response_fills_exactly_what_was_asked_for(void)
{
    struct wire_read read = {.sink_stag = 5, .sink_offset = 100, .left = 10};

    CHECK(receive_response(&read, 6, 100, true, 10) == DDP_INVALID_STAG);
    CHECK(receive_response(&read, 5, 101, true, 9) == DDP_BOUNDS);
    CHECK(receive_response(&read, 5, 99, true, 10) == DDP_BOUNDS);
    CHECK(receive_response(&read, 5, 100, true, 11) == DDP_BOUNDS);
    CHECK(receive_response(&read, 5, 100, true, 9) == RDMAP_OPERATION);   /* ends too early */
    CHECK(receive_response(&read, 5, 100, false, 10) == RDMAP_OPERATION); /* does not end */
    CHECK(receive_response(&read, 5, 100, false, 0) == RDMAP_OPERATION);  /* no progress */
    CHECK(receive_response(&read, 5, 100, false, 4) == WIRE_OK);
    CHECK(receive_response(&read, 5, 100, false, 4) == DDP_BOUNDS);
    CHECK(receive_response(&read, 5, 104, true, 6) == WIRE_OK && read.left == 0);
    read = (struct wire_read){.sink_stag = 5};
    CHECK(receive_response(&read, 5, 0, true, 0) == WIRE_OK);
}

static void test_nothing_comes_after_a_terminate(void)
{
    struct wire_receiver receiver = {0};
    struct wire_segment segment;
    uint8_t out[128];
    size_t used, size = wire_put_terminate(out, RDMAP_LOCAL_CATASTROPHIC, NULL);

    size = wire_finish(out, size, false);
    CHECK(wire_parse(out, size, false, &segment, &used) == WIRE_OK);
    CHECK(wire_receive(&receiver, &segment) == WIRE_OK && receiver.terminated);
    CHECK(wire_receive(&receiver, &segment) != WIRE_OK);
    CHECK(receive_send(&receiver, RDMAP_SEND, 1, 0, true, 0) != WIRE_OK);
}

static void test_largest_fpdu_is_parsed(void)
{
    static uint8_t out[WIRE_MAX_FPDU];
    struct wire_segment segment;
    size_t used;

    wire_put_tagged(out, RDMAP_WRITE, 1, 0, true, WIRE_MAX_ULPDU - 14);
    CHECK(parse(out, sizeof out, false, &segment, &used) == WIRE_OK);
    CHECK(used <= sizeof out && segment.size == WIRE_MAX_ULPDU - 14);
    CHECK(WIRE_MAX_PAYLOAD + WIRE_UNTAGGED_SIZE - 2 <= WIRE_MAX_ULPDU);
}

int main(void)
{
    test_crc32c_has_the_values_of_rfc_3720_b_4();
    test_start_up_frame_has_the_layout_of_rfc_5044_and_6581();
    test_start_up_frames_that_can_be_none_are_refused();
    test_write_has_the_layout_of_rfc_5041_4_2();
    test_send_has_the_layout_of_rfc_5041_4_3();
    test_crc_is_sent_least_significant_byte_first();
    test_read_request_has_the_layout_of_rfc_5040_4_4();
    test_terminate_comes_back_as_it_was_sent();
    test_lengths_that_hold_no_header_are_refused_at_once();
    test_tagged_offsets_may_reach_the_last_byte_and_not_wrap();
    test_messages_come_in_order_and_without_gaps();
    test_read_response_fills_exactly_what_was_asked_for();
    test_nothing_comes_after_a_terminate();
    test_largest_fpdu_is_parsed();
    printf("wire: %u checks, %u failures\n", checks, failures);
    return failures != 0;
}
