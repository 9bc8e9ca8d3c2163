/* The layout of headers on the wire (RFC 5041 sections 4.2 and 4.3, RFC 5040 sections 4.1 and 4.4). */
#ifndef SOFTND_WIRE_DDP_H
#define SOFTND_WIRE_DDP_H

#define LENGTH_SIZE 2u /* of MPA, in front of the DDP header */
#define CRC_SIZE    4u

/* First byte: DDP. Second byte: RDMAP. */
#define DDP_TAGGED         0x80u
#define DDP_LAST           0x40u
#define DDP_VERSION_MASK   0x03u
#define DDP_VERSION        0x01u
#define RDMAP_VERSION_MASK 0xC0u
#define RDMAP_VERSION_1    0x40u
#define RDMAP_OPCODE_MASK  0x0Fu

/* Tagged: STag 2, offset 6. Untagged: invalidated STag 2, queue 6, sequence number 10, message offset 14. */
#define TAGGED_HEADER   14u
#define UNTAGGED_HEADER 18u
/* Sink STag 0, sink offset 4, size 12, source STag 16, source offset 20. */
#define READ_REQUEST_PAYLOAD 28u
/* Layer and type 0, code 1, bits for the headers that follow 2, reserved 3; then segment size 4, DDP header 6, RDMAP
 * header. */
#define TERMINATE_FIXED     4u
#define TERMINATE_HAS_SIZE  0x80u
#define TERMINATE_HAS_DDP   0x40u
#define TERMINATE_HAS_RDMAP 0x20u

#endif
