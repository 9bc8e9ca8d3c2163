/* MPA start-up frames: key, flags, revision, size of the private data, private data. */
#include "wire.h"

#include "bytes.h"

#define KEY_SIZE      16u
#define FLAG_MARKERS  0x80u
#define FLAG_CRC      0x40u
#define FLAG_REJECT   0x20u
#define FLAG_ENHANCED 0x10u

#define ENHANCED_SIZE 4u
#define PEER_TO_PEER  0x8000u /* in the field of the IRD */
#define RTR_SEND      0x4000u
#define RTR_WRITE     0x8000u /* in the field of the ORD */
#define RTR_READ      0x4000u

static const char request_key[KEY_SIZE + 1] = "MPA ID Req Frame";
static const char reply_key[KEY_SIZE + 1] = "MPA ID Rep Frame";

size_t mpa_encode(uint8_t *out, const struct mpa_frame *frame)
{
    size_t extra = frame->enhanced ? ENHANCED_SIZE : 0;
    size_t size = extra + frame->private_size;

    if (size > MPA_MAX_PRIVATE_DATA)
        return 0;
    memcpy(out, frame->reply ? reply_key : request_key, KEY_SIZE);
    out[16] = (uint8_t)((frame->markers ? FLAG_MARKERS : 0) | (frame->crc ? FLAG_CRC : 0) |
                        (frame->reject ? FLAG_REJECT : 0) | (frame->enhanced ? FLAG_ENHANCED : 0));
    out[17] = frame->revision;
    put16(out + 18, (uint32_t)size);
    if (frame->enhanced) {
        put16(out + 20, (frame->peer_to_peer ? PEER_TO_PEER : 0) | (frame->rtr_send ? RTR_SEND : 0) |
                            (frame->ird & MPA_MAX_READ_LIMIT));
        put16(out + 22, (frame->rtr_write ? RTR_WRITE : 0) | (frame->rtr_read ? RTR_READ : 0) |
                            (frame->ord & MPA_MAX_READ_LIMIT));
    }
    if (frame->private_size)
        memcpy(out + MPA_HEADER_SIZE + extra, frame->private_data, frame->private_size);
    return MPA_HEADER_SIZE + size;
}

int mpa_decode(const uint8_t *data, size_t size, bool reply, struct mpa_frame *frame, size_t *used)
{
    const char *key = reply ? reply_key : request_key;
    uint32_t private_size;

    *used = 0;
    if (memcmp(data, key, size < KEY_SIZE ? size : KEY_SIZE))
        return MPA_FRAME;
    if (size < MPA_HEADER_SIZE)
        return WIRE_MORE;
    private_size = get16(data + 18);
    if (data[17] < 1 || data[17] > 2 || private_size > MPA_MAX_PRIVATE_DATA)
        return MPA_FRAME;
    memset(frame, 0, sizeof *frame);
    frame->reply = reply;
    frame->revision = data[17];
    frame->markers = data[16] & FLAG_MARKERS;
    frame->crc = data[16] & FLAG_CRC;
    frame->reject = data[16] & FLAG_REJECT;
    frame->enhanced = frame->revision == 2 && data[16] & FLAG_ENHANCED;
    if (frame->enhanced && private_size < ENHANCED_SIZE)
        return MPA_FRAME;
    if (size < MPA_HEADER_SIZE + private_size)
        return WIRE_MORE;
    data += MPA_HEADER_SIZE;
    *used = MPA_HEADER_SIZE + private_size;
    if (frame->enhanced) {
        uint16_t inbound = get16(data), outbound = get16(data + 2);

        frame->peer_to_peer = inbound & PEER_TO_PEER;
        frame->rtr_send = inbound & RTR_SEND;
        frame->rtr_write = outbound & RTR_WRITE;
        frame->rtr_read = outbound & RTR_READ;
        frame->ird = inbound & MPA_MAX_READ_LIMIT;
        frame->ord = outbound & MPA_MAX_READ_LIMIT;
        data += ENHANCED_SIZE;
        private_size -= ENHANCED_SIZE;
    }
    frame->private_data = data;
    frame->private_size = (uint16_t)private_size;
    return WIRE_OK;
}
