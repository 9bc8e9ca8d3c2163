/* Sent FPDUs: headers and trailers. */
#include "wire.h"

#include "bytes.h"
#include "ddp.h"

static void put_control(uint8_t *out, enum wire_opcode opcode, bool tagged, bool last)
{
    out[0] = (uint8_t)(DDP_VERSION | (tagged ? DDP_TAGGED : 0) | (last ? DDP_LAST : 0));
    out[1] = (uint8_t)(RDMAP_VERSION_1 | opcode);
}

static void put_untagged(uint8_t *out, enum wire_opcode opcode, uint32_t invalidate, enum wire_queue queue,
                         uint32_t msn, uint32_t message_offset, bool last, uint32_t payload)
{
    put16(out, UNTAGGED_HEADER + payload);
    out += LENGTH_SIZE;
    put_control(out, opcode, false, last);
    put_stag(out + 2, invalidate);
    put32(out + 6, queue);
    put32(out + 10, msn);
    put32(out + 14, message_offset);
}

static void put_request(uint8_t *out, const struct wire_read_request *request)
{
    put_stag(out, request->sink_stag);
    put64(out + 4, request->sink_offset);
    put32(out + 12, request->size);
    put_stag(out + 16, request->source_stag);
    put64(out + 20, request->source_offset);
}

size_t wire_put_tagged(uint8_t *out, enum wire_opcode opcode, uint32_t stag, uint64_t offset, bool last,
                       uint32_t payload)
{
    put16(out, TAGGED_HEADER + payload);
    out += LENGTH_SIZE;
    put_control(out, opcode, true, last);
    put_stag(out + 2, stag);
    put64(out + 6, offset);
    return WIRE_TAGGED_SIZE;
}

size_t wire_put_send(uint8_t *out, enum wire_opcode opcode, uint32_t invalidate, uint32_t msn, uint32_t message_offset,
                     bool last, uint32_t payload)
{
    bool invalidates = opcode == RDMAP_SEND_INVALIDATE || opcode == RDMAP_SEND_SOLICITED_INVALIDATE;

    put_untagged(out, opcode, invalidates ? invalidate : 0, QUEUE_SEND, msn, message_offset, last, payload);
    return WIRE_UNTAGGED_SIZE;
}

size_t wire_put_read_request(uint8_t *out, uint32_t msn, const struct wire_read_request *request)
{
    put_untagged(out, RDMAP_READ_REQUEST, 0, QUEUE_READ_REQUEST, msn, 0, true, READ_REQUEST_PAYLOAD);
    put_request(out + WIRE_UNTAGGED_SIZE, request);
    return WIRE_READ_REQUEST_SIZE;
}

size_t wire_put_terminate(uint8_t *out, int error, const struct wire_segment *offender)
{
    uint8_t *payload = out + WIRE_UNTAGGED_SIZE;
    size_t size = TERMINATE_FIXED;

    payload[0] = (uint8_t)(WIRE_ERROR_LAYER(error) << 4 | WIRE_ERROR_TYPE(error));
    payload[1] = (uint8_t)WIRE_ERROR_CODE(error);
    payload[2] = payload[3] = 0;
    if (offender && offender->header) {
        size_t header = offender->tagged ? TAGGED_HEADER : UNTAGGED_HEADER;

        payload[2] = TERMINATE_HAS_SIZE | TERMINATE_HAS_DDP;
        put16(payload + 4, offender->ulpdu_size);
        memcpy(payload + 6, offender->header, header);
        size = 6 + header;
        if (!offender->tagged && offender->opcode == RDMAP_READ_REQUEST && offender->size == READ_REQUEST_PAYLOAD) {
            payload[2] |= TERMINATE_HAS_RDMAP;
            put_request(payload + size, &offender->request);
            size += READ_REQUEST_PAYLOAD;
        }
    }
    put_untagged(out, RDMAP_TERMINATE, 0, QUEUE_TERMINATE, 1, 0, true, (uint32_t)size);
    return WIRE_UNTAGGED_SIZE + size;
}

size_t wire_finish(uint8_t *fpdu, size_t size, bool with_crc)
{
    size_t covered = (size + 3) & ~(size_t)3;

    memset(fpdu + size, 0, covered + CRC_SIZE - size);
    uint32_t crc = with_crc ? wire_crc32c(0, fpdu, covered) : 0;
    for (unsigned i = 0; i < CRC_SIZE && with_crc; i++)
        fpdu[covered + i] = (uint8_t)(crc >> 8 * i);
    return covered + CRC_SIZE;
}
