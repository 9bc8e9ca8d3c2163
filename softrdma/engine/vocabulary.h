/* The engine's words: statuses, rights, flags and structures of NetworkDirect version 2, without any system's types.
 *
 * They are neutral and complete, so both faces use them: the NetworkDirect face hands them to its consumers as they
 * are, the verbs face translates them. The names and numbers are those of the public interface. ND_ACCESS_DENIED,
 * ND_BAD_NETWORK_NAME, ND_TOO_MANY_OPENED_FILES and ND_ADDRESS_ALREADY_ASSOCIATED are NTSTATUS values without an ND
 * name there.
 */
#ifndef ENGINE_VOCABULARY_H
#define ENGINE_VOCABULARY_H

#include <stdint.h>

typedef int32_t nd_status;

#define ND_SUCCESS                    ((nd_status)0x00000000)
#define ND_TIMEOUT                    ((nd_status)0x00000102)
#define ND_PENDING                    ((nd_status)0x00000103)
#define ND_BUFFER_OVERFLOW            ((nd_status)0x80000005)
#define ND_DEVICE_BUSY                ((nd_status)0x80000011)
#define ND_NO_MORE_ENTRIES            ((nd_status)0x8000001A)
#define ND_UNSUCCESSFUL               ((nd_status)0xC0000001)
#define ND_ACCESS_VIOLATION           ((nd_status)0xC0000005)
#define ND_INVALID_HANDLE             ((nd_status)0xC0000008)
#define ND_INVALID_PARAMETER          ((nd_status)0xC000000D)
#define ND_INVALID_DEVICE_REQUEST     ((nd_status)0xC0000010)
#define ND_ACCESS_DENIED              ((nd_status)0xC0000022)
#define ND_NO_MEMORY                  ((nd_status)0xC0000017)
#define ND_INVALID_PARAMETER_MIX      ((nd_status)0xC0000030)
#define ND_DATA_OVERRUN               ((nd_status)0xC000003C)
#define ND_SHARING_VIOLATION          ((nd_status)0xC0000043)
#define ND_INSUFFICIENT_RESOURCES     ((nd_status)0xC000009A)
#define ND_DEVICE_NOT_READY           ((nd_status)0xC00000A3)
#define ND_IO_TIMEOUT                 ((nd_status)0xC00000B5)
#define ND_NOT_SUPPORTED              ((nd_status)0xC00000BB)
#define ND_BAD_NETWORK_NAME           ((nd_status)0xC00000CC)
#define ND_INTERNAL_ERROR             ((nd_status)0xC00000E5)
#define ND_INVALID_PARAMETER_1        ((nd_status)0xC00000EF)
#define ND_INVALID_PARAMETER_2        ((nd_status)0xC00000F0)
#define ND_INVALID_PARAMETER_3        ((nd_status)0xC00000F1)
#define ND_INVALID_PARAMETER_4        ((nd_status)0xC00000F2)
#define ND_INVALID_PARAMETER_5        ((nd_status)0xC00000F3)
#define ND_INVALID_PARAMETER_6        ((nd_status)0xC00000F4)
#define ND_INVALID_PARAMETER_7        ((nd_status)0xC00000F5)
#define ND_INVALID_PARAMETER_8        ((nd_status)0xC00000F6)
#define ND_INVALID_PARAMETER_9        ((nd_status)0xC00000F7)
#define ND_INVALID_PARAMETER_10       ((nd_status)0xC00000F8)
#define ND_TOO_MANY_OPENED_FILES      ((nd_status)0xC000011F)
#define ND_CANCELED                   ((nd_status)0xC0000120)
#define ND_REMOTE_ERROR               ((nd_status)0xC000013D)
#define ND_INVALID_ADDRESS            ((nd_status)0xC0000141)
#define ND_INVALID_DEVICE_STATE       ((nd_status)0xC0000184)
#define ND_INVALID_BUFFER_SIZE        ((nd_status)0xC0000206)
#define ND_TOO_MANY_ADDRESSES         ((nd_status)0xC0000209)
#define ND_ADDRESS_ALREADY_EXISTS     ((nd_status)0xC000020A)
#define ND_CONNECTION_REFUSED         ((nd_status)0xC0000236)
#define ND_ADDRESS_ALREADY_ASSOCIATED ((nd_status)0xC0000238)
#define ND_CONNECTION_INVALID         ((nd_status)0xC000023A)
#define ND_CONNECTION_ACTIVE          ((nd_status)0xC000023B)
#define ND_NETWORK_UNREACHABLE        ((nd_status)0xC000023C)
#define ND_HOST_UNREACHABLE           ((nd_status)0xC000023D)
#define ND_CONNECTION_ABORTED         ((nd_status)0xC0000241)
#define ND_DEVICE_REMOVED             ((nd_status)0xC00002B6)

#define ND_CQ_NOTIFY_ERRORS    0
#define ND_CQ_NOTIFY_ANY       1
#define ND_CQ_NOTIFY_SOLICITED 2

#define ND_MR_FLAG_ALLOW_LOCAL_WRITE  0x00000001u
#define ND_MR_FLAG_ALLOW_REMOTE_READ  0x00000002u
#define ND_MR_FLAG_ALLOW_REMOTE_WRITE 0x00000005u
#define ND_MR_FLAG_RDMA_READ_SINK     0x00000008u
#define ND_MR_FLAG_DO_NOT_SECURE_VM   0x80000000u

#define ND_OP_FLAG_SILENT_SUCCESS         0x00000001u
#define ND_OP_FLAG_READ_FENCE             0x00000002u
#define ND_OP_FLAG_SEND_AND_SOLICIT_EVENT 0x00000004u
#define ND_OP_FLAG_ALLOW_READ             0x00000008u
#define ND_OP_FLAG_ALLOW_WRITE            0x00000010u
#define ND_OP_FLAG_INLINE                 0x00000020u

typedef enum ND2_REQUEST_TYPE {
    Nd2RequestTypeReceive,
    Nd2RequestTypeSend,
    Nd2RequestTypeBind,
    Nd2RequestTypeInvalidate,
    Nd2RequestTypeRead,
    Nd2RequestTypeWrite
} ND2_REQUEST_TYPE;

typedef struct ND2_RESULT {
    nd_status Status;
    uint32_t BytesTransferred;
    void *QueuePairContext;
    void *RequestContext;
    ND2_REQUEST_TYPE RequestType;
} ND2_RESULT;

typedef struct ND2_SGE {
    void *Buffer;
    uint32_t BufferLength;
    uint32_t MemoryRegionToken;
} ND2_SGE;

#endif
