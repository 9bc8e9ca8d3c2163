/* iWARP on the wire: MPA (RFC 5044, RFC 6581), DDP (RFC 5041) and RDMAP (RFC 5040), without any I/O.
 *
 * This code does not allocate or block, and does not depend on an operating system. It keeps no state except in
 * structures that the caller owns. It checks received bytes as far as that is possible without knowing memory:
 * lengths, versions, opcodes, queues, sequence numbers, and offsets that wrap. The caller checks whether a token
 * grants an access.
 *
 * An STag is a uint32_t with the four bytes in the order of the wire. NetworkDirect calls this a remote token. All
 * other numbers are in host order. Buffers need no alignment.
 *
 * Results: WIRE_OK, WIRE_MORE (some bytes are still missing), or an error. An error is what a Terminate message
 * reports; it is always positive.
 */
#ifndef SOFTND_WIRE_H
#define SOFTND_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WIRE_OK                       0
#define WIRE_MORE                     (-1)
#define WIRE_ERROR(layer, type, code) (0x10000 | (layer) << 12 | (type) << 8 | (code))
#define WIRE_ERROR_LAYER(error)       ((error) >> 12 & 15)
#define WIRE_ERROR_TYPE(error)        ((error) >> 8 & 15)
#define WIRE_ERROR_CODE(error)        ((error) & 255)

/* RFC 5040 section 4.8 (layer 0), RFC 5041 section 8.2 (layer 1), RFC 5044 section 8 and RFC 6581 section 8 (layer 2):
 * those that this code sends or looks for. */
enum wire_error {
    RDMAP_LOCAL_CATASTROPHIC = WIRE_ERROR(0, 0, 0),
    RDMAP_INVALID_STAG = WIRE_ERROR(0, 1, 0),
    RDMAP_BOUNDS = WIRE_ERROR(0, 1, 1),
    RDMAP_ACCESS = WIRE_ERROR(0, 1, 2),
    RDMAP_OFFSET_WRAPS = WIRE_ERROR(0, 1, 4),
    RDMAP_CANNOT_INVALIDATE = WIRE_ERROR(0, 1, 9),
    RDMAP_VERSION = WIRE_ERROR(0, 2, 5),
    RDMAP_OPCODE = WIRE_ERROR(0, 2, 6),
    RDMAP_OPERATION = WIRE_ERROR(0, 2, 255),

    DDP_LOCAL_CATASTROPHIC = WIRE_ERROR(1, 0, 0),
    DDP_INVALID_STAG = WIRE_ERROR(1, 1, 0),
    DDP_BOUNDS = WIRE_ERROR(1, 1, 1),
    DDP_OFFSET_WRAPS = WIRE_ERROR(1, 1, 3),
    DDP_TAGGED_VERSION = WIRE_ERROR(1, 1, 4),
    DDP_INVALID_QUEUE = WIRE_ERROR(1, 2, 1),
    DDP_NO_BUFFER = WIRE_ERROR(1, 2, 2),
    DDP_SEQUENCE = WIRE_ERROR(1, 2, 3),
    DDP_MESSAGE_OFFSET = WIRE_ERROR(1, 2, 4),
    DDP_TOO_LONG = WIRE_ERROR(1, 2, 5),
    DDP_UNTAGGED_VERSION = WIRE_ERROR(1, 2, 6),

    MPA_CRC = WIRE_ERROR(2, 0, 2),
    MPA_LENGTH = WIRE_ERROR(2, 0, 3),
    MPA_FRAME = WIRE_ERROR(2, 0, 4)
};

/* CRC32C of `size` more bytes. Start with 0 and pass the last result. */
uint32_t wire_crc32c(uint32_t crc, const void *data, size_t size);

/* ---- MPA start-up frames (RFC 5044 section 7.1, RFC 6581 section 4) ---- */

#define MPA_HEADER_SIZE      20u
#define MPA_MAX_PRIVATE_DATA 512u
#define MPA_MAX_FRAME        (MPA_HEADER_SIZE + MPA_MAX_PRIVATE_DATA)
#define MPA_MAX_READ_LIMIT   0x3FFFu /* means "not negotiated" */

struct mpa_frame {
    uint8_t revision; /* 1 or 2 */
    bool reply, markers, crc, reject;
    bool enhanced; /* revision 2 only: the next seven members apply, and take 4 of the 512 bytes of private data */
    bool peer_to_peer;
    bool rtr_send, rtr_write, rtr_read;
    uint16_t ird, ord; /* from the view of the frame's sender */
    uint16_t private_size;
    const uint8_t *private_data; /* decoded: points into the caller's buffer */
};

/* Writes up to MPA_MAX_FRAME bytes and returns their number. Returns 0 if the private data are too long. */
size_t mpa_encode(uint8_t *out, const struct mpa_frame *frame);
/* Decodes a reply or a request. Returns WIRE_MORE until the frame is complete. Returns MPA_FRAME as soon as the bytes
 * cannot be a frame of that kind, the revision is not 1 or 2, or there are more than 512 bytes of private data. */
int mpa_decode(const uint8_t *data, size_t size, bool reply, struct mpa_frame *frame, size_t *used);

/* ---- FPDUs out ---- */

enum wire_opcode {
    RDMAP_WRITE,
    RDMAP_READ_REQUEST,
    RDMAP_READ_RESPONSE,
    RDMAP_SEND,
    RDMAP_SEND_INVALIDATE,
    RDMAP_SEND_SOLICITED,
    RDMAP_SEND_SOLICITED_INVALIDATE,
    RDMAP_TERMINATE
};

enum wire_queue { QUEUE_SEND, QUEUE_READ_REQUEST, QUEUE_TERMINATE, QUEUE_COUNT };

#define WIRE_MAX_ULPDU 65535u
#define WIRE_MAX_FPDU  (2u + WIRE_MAX_ULPDU + 3u + 4u)
/* The largest payload in one FPDU. It needs no padding and is a whole number of cache lines below the limit. */
#define WIRE_MAX_PAYLOAD        65472u
#define WIRE_TAGGED_SIZE        16u /* including the length field */
#define WIRE_UNTAGGED_SIZE      20u /* including the length field */
#define WIRE_READ_REQUEST_SIZE  48u /* including the length field and the payload */
#define WIRE_MAX_TERMINATE_SIZE 72u
#define WIRE_MAX_TRAILER_SIZE   7u

struct wire_read_request {
    uint32_t sink_stag, source_stag;
    uint64_t sink_offset, source_offset;
    uint32_t size;
};

struct wire_segment;

/* These functions write everything in front of the payload and return its size. opcode: RDMAP_WRITE or
 * RDMAP_READ_RESPONSE. */
size_t wire_put_tagged(uint8_t *out, enum wire_opcode opcode, uint32_t stag, uint64_t offset, bool last,
                       uint32_t payload);
/* opcode: one of the four Sends. invalidate: used by two of them. msn: starts with 1 on each queue. */
size_t wire_put_send(uint8_t *out, enum wire_opcode opcode, uint32_t invalidate, uint32_t msn, uint32_t message_offset,
                     bool last, uint32_t payload);
size_t wire_put_read_request(uint8_t *out, uint32_t msn, const struct wire_read_request *request);
/* offender: the segment that the Terminate complains of, or NULL. Its header is sent with the Terminate. */
size_t wire_put_terminate(uint8_t *out, int error, const struct wire_segment *offender);
/* Writes padding and CRC behind the FPDU, which has `size` bytes so far, and returns its whole size. */
size_t wire_finish(uint8_t *fpdu, size_t size, bool with_crc);

/* ---- FPDUs in ---- */

struct wire_terminate {
    int error;       /* a WIRE_ERROR(), perhaps one that is not listed above */
    bool has_header; /* then the next members come from the offender's header */
    bool tagged;
    enum wire_opcode opcode;
    uint32_t stag;
    uint64_t offset;
    uint32_t queue, msn;
    bool has_request; /* then `request` is the offending Read Request */
    struct wire_read_request request;
};

struct wire_segment {
    enum wire_opcode opcode;
    bool tagged, last;
    uint32_t stag; /* tagged */
    uint64_t offset;
    uint32_t queue, msn, message_offset; /* untagged */
    uint32_t invalidate;                 /* of a Send with Invalidate */
    const uint8_t *payload;              /* points into the caller's buffer */
    uint32_t size;
    struct wire_read_request request; /* of a Read Request */
    struct wire_terminate terminate;  /* of a Terminate */
    const uint8_t *header;            /* DDP header in the caller's buffer */
    uint16_t ulpdu_size;
};

/* Parses one FPDU at the beginning of the data. After WIRE_OK, *used is its size. After WIRE_MORE, *used is the size
 * that the FPDU will have, or 0 if that is not known yet. After an error, segment->header points to the header if it
 * could be read, so that a Terminate can carry it. Otherwise segment->header is NULL. */
int wire_parse(const uint8_t *data, size_t size, bool with_crc, struct wire_segment *segment, size_t *used);

/* What was received on one connection. All zeros at its beginning. */
struct wire_receiver {
    uint32_t messages[QUEUE_COUNT]; /* complete messages on each queue */
    bool in_message;                /* a Send has begun; the next members describe it */
    enum wire_opcode opcode;
    uint32_t invalidate;
    uint32_t message_offset;
    bool terminated;
};

/* Checks that a parsed segment may arrive now, and updates the receiver. For a Send, segment->message_offset is then
 * the number of bytes before it. */
int wire_receive(struct wire_receiver *receiver, const struct wire_segment *segment);

/* The oldest Read Request whose answer is not complete. */
struct wire_read {
    uint32_t sink_stag;
    uint64_t sink_offset;
    uint32_t left;
};

/* Checks a Read Response segment against the Read Request and updates it. read->left is 0 after the last segment. */
int wire_receive_response(struct wire_read *read, const struct wire_segment *segment);

#endif
