/* Received FPDUs: what each one says, and whether it may arrive now. */
#include "wire.h"

#include "bytes.h"
#include "ddp.h"

static void get_request(const uint8_t *data, struct wire_read_request *request)
{
    request->sink_stag = get_stag(data);
    request->sink_offset = get64(data + 4);
    request->size = get32(data + 12);
    request->source_stag = get_stag(data + 16);
    request->source_offset = get64(data + 20);
}

static bool wraps(uint64_t offset, uint32_t size)
{
    return size && offset > UINT64_MAX - (size - 1);
}

static bool is_send(enum wire_opcode opcode)
{
    return opcode >= RDMAP_SEND && opcode <= RDMAP_SEND_SOLICITED_INVALIDATE;
}

static void get_terminate(const uint8_t *data, uint32_t size, struct wire_terminate *terminate)
{
    uint32_t header;
    uint8_t which = data[2];

    memset(terminate, 0, sizeof *terminate);
    terminate->error = WIRE_ERROR(data[0] >> 4, data[0] & 15, data[1]);
    if (!(which & TERMINATE_HAS_SIZE) || !(which & TERMINATE_HAS_DDP) || size < 6 + TAGGED_HEADER)
        return;
    data += 6;
    size -= 6;
    terminate->tagged = data[0] & DDP_TAGGED;
    header = terminate->tagged ? TAGGED_HEADER : UNTAGGED_HEADER;
    if (size < header)
        return;
    terminate->has_header = true;
    terminate->opcode = (enum wire_opcode)(data[1] & RDMAP_OPCODE_MASK);
    if (terminate->tagged) {
        terminate->stag = get_stag(data + 2);
        terminate->offset = get64(data + 6);
        return;
    }
    terminate->queue = get32(data + 6);
    terminate->msn = get32(data + 10);
    if (which & TERMINATE_HAS_RDMAP && size >= header + READ_REQUEST_PAYLOAD) {
        terminate->has_request = true;
        get_request(data + header, &terminate->request);
    }
}

static int parse_tagged(const uint8_t *header, struct wire_segment *segment)
{
    segment->stag = get_stag(header + 2);
    segment->offset = get64(header + 6);
    if ((header[0] & DDP_VERSION_MASK) != DDP_VERSION)
        return DDP_TAGGED_VERSION;
    if ((header[1] & RDMAP_VERSION_MASK) != RDMAP_VERSION_1)
        return RDMAP_VERSION;
    if (segment->opcode != RDMAP_WRITE && segment->opcode != RDMAP_READ_RESPONSE)
        return RDMAP_OPCODE;
    return wraps(segment->offset, segment->size) ? DDP_OFFSET_WRAPS : WIRE_OK;
}

static int parse_untagged(const uint8_t *header, struct wire_segment *segment)
{
    segment->queue = get32(header + 6);
    segment->msn = get32(header + 10);
    segment->message_offset = get32(header + 14);
    if ((header[0] & DDP_VERSION_MASK) != DDP_VERSION)
        return DDP_UNTAGGED_VERSION;
    if (segment->queue >= QUEUE_COUNT)
        return DDP_INVALID_QUEUE;
    if ((header[1] & RDMAP_VERSION_MASK) != RDMAP_VERSION_1)
        return RDMAP_VERSION;
    if (is_send(segment->opcode)) {
        if (segment->opcode == RDMAP_SEND_INVALIDATE || segment->opcode == RDMAP_SEND_SOLICITED_INVALIDATE)
            segment->invalidate = get_stag(header + 2);
        return segment->queue == QUEUE_SEND ? WIRE_OK : RDMAP_OPCODE;
    }
    if (segment->opcode == RDMAP_READ_REQUEST) {
        if (segment->queue != QUEUE_READ_REQUEST)
            return RDMAP_OPCODE;
        if (!segment->last || segment->message_offset || segment->size != READ_REQUEST_PAYLOAD)
            return RDMAP_OPERATION;
        get_request(segment->payload, &segment->request);
        if (wraps(segment->request.source_offset, segment->request.size) ||
            wraps(segment->request.sink_offset, segment->request.size))
            return RDMAP_OFFSET_WRAPS;
        return WIRE_OK;
    }
    if (segment->opcode != RDMAP_TERMINATE || segment->queue != QUEUE_TERMINATE)
        return RDMAP_OPCODE;
    if (!segment->last || segment->message_offset || segment->size < TERMINATE_FIXED)
        return RDMAP_OPERATION;
    get_terminate(segment->payload, segment->size, &segment->terminate);
    return WIRE_OK;
}

int wire_parse(const uint8_t *data, size_t size, bool with_crc, struct wire_segment *segment, size_t *used)
{
    size_t ulpdu, covered, header_size;
    const uint8_t *header = data + LENGTH_SIZE;

    memset(segment, 0, sizeof *segment);
    *used = 0;
    if (size < LENGTH_SIZE)
        return WIRE_MORE;
    ulpdu = get16(data);
    if (ulpdu < TAGGED_HEADER)
        return MPA_LENGTH;
    covered = (LENGTH_SIZE + ulpdu + 3) & ~(size_t)3;
    *used = covered + CRC_SIZE;
    if (size < *used)
        return WIRE_MORE;
    if (with_crc) {
        const uint8_t *sent = data + covered;
        uint32_t crc = (uint32_t)sent[0] | (uint32_t)sent[1] << 8 | (uint32_t)sent[2] << 16 | (uint32_t)sent[3] << 24;

        if (crc != wire_crc32c(0, data, covered))
            return MPA_CRC;
    }
    segment->tagged = header[0] & DDP_TAGGED;
    header_size = segment->tagged ? TAGGED_HEADER : UNTAGGED_HEADER;
    if (ulpdu < header_size)
        return MPA_LENGTH;
    segment->header = header;
    segment->ulpdu_size = (uint16_t)ulpdu;
    segment->last = header[0] & DDP_LAST;
    segment->opcode = (enum wire_opcode)(header[1] & RDMAP_OPCODE_MASK);
    segment->payload = header + header_size;
    segment->size = (uint32_t)(ulpdu - header_size);
    return segment->tagged ? parse_tagged(header, segment) : parse_untagged(header, segment);
}

int wire_receive(struct wire_receiver *receiver, const struct wire_segment *segment)
{
    if (receiver->terminated)
        return RDMAP_OPCODE;
    if (segment->tagged)
        return WIRE_OK;
    if (segment->msn != receiver->messages[segment->queue] + 1)
        return DDP_SEQUENCE;
    if (segment->queue != QUEUE_SEND) {
        receiver->messages[segment->queue]++;
        receiver->terminated = segment->queue == QUEUE_TERMINATE;
        return WIRE_OK;
    }
    if (segment->message_offset != (receiver->in_message ? receiver->message_offset : 0))
        return DDP_MESSAGE_OFFSET;
    if (receiver->in_message && (segment->opcode != receiver->opcode || segment->invalidate != receiver->invalidate))
        return RDMAP_OPCODE;
    if (segment->size > UINT32_MAX - segment->message_offset)
        return DDP_TOO_LONG;
    if (segment->last) {
        receiver->messages[QUEUE_SEND]++;
        receiver->in_message = false;
        receiver->message_offset = 0;
        return WIRE_OK;
    }
    receiver->in_message = true;
    receiver->opcode = segment->opcode;
    receiver->invalidate = segment->invalidate;
    receiver->message_offset = segment->message_offset + segment->size;
    return WIRE_OK;
}

int wire_receive_response(struct wire_read *read, const struct wire_segment *segment)
{
    if (segment->stag != read->sink_stag)
        return DDP_INVALID_STAG;
    if (segment->offset != read->sink_offset || segment->size > read->left)
        return DDP_BOUNDS;
    /* A response without progress could go on for ever. */
    if (segment->last != (segment->size == read->left) || (!segment->size && read->left))
        return RDMAP_OPERATION;
    read->sink_offset += segment->size;
    read->left -= segment->size;
    return WIRE_OK;
}
