/* NetworkDirect version 1 (HPC Pack 2008): what it has beside version 2, and the order of its methods.
 *
 * The names and numbers are those of the public interface; the declarations are this project's own. Statuses and flags
 * are in version2.h. There is no ND_OP_FLAG_INLINE. Sizes are SIZE_T where version 2 has ULONG. A request is
 * identified by the ND_RESULT that it was posted with, and memory by the handle that RegisterMemory writes.
 */
#ifndef SOFTND_VERSION1_H
#define SOFTND_VERSION1_H

#include "version2.h"

#define ND_LOCAL_LENGTH       ND_DATA_OVERRUN
#define ND_INVALIDATION_ERROR ND_INVALID_DEVICE_REQUEST

/* Opaque: the pointer is never followed. */
typedef struct ND_MR_HANDLE_ *ND_MR_HANDLE;

typedef struct ND_ADAPTER_INFO {
    UINT32 VendorId;
    UINT32 DeviceId;
    SIZE_T MaxInboundSge;
    SIZE_T MaxInboundRequests;
    SIZE_T MaxInboundLength;
    SIZE_T MaxOutboundSge;
    SIZE_T MaxOutboundRequests;
    SIZE_T MaxOutboundLength;
    SIZE_T MaxInlineData;
    SIZE_T MaxInboundReadLimit;
    SIZE_T MaxOutboundReadLimit;
    SIZE_T MaxCqEntries;
    SIZE_T MaxRegistrationSize;
    SIZE_T MaxWindowSize;
    SIZE_T LargeRequestThreshold;
    SIZE_T MaxCallerData;
    SIZE_T MaxCalleeData;
} ND_ADAPTER_INFO;

typedef struct ND_RESULT {
    HRESULT Status;
    SIZE_T BytesTransferred;
} ND_RESULT;

/* Every member is in network byte order. */
#pragma pack(push, 1)
typedef struct ND_MW_DESCRIPTOR {
    UINT64 Base;
    UINT64 Length;
    UINT32 Token;
} ND_MW_DESCRIPTOR;
#pragma pack(pop)

typedef struct ND_SGE {
    void *pAddr;
    SIZE_T Length;
    ND_MR_HANDLE hMr;
} ND_SGE;

#if defined(_WIN64)
_Static_assert(sizeof(ND_ADAPTER_INFO) == 128, "ND_ADAPTER_INFO");
_Static_assert(offsetof(ND_ADAPTER_INFO, MaxInlineData) == 56, "ND_ADAPTER_INFO");
_Static_assert(offsetof(ND_ADAPTER_INFO, MaxCalleeData) == 120, "ND_ADAPTER_INFO");
_Static_assert(sizeof(ND_RESULT) == 16 && offsetof(ND_RESULT, BytesTransferred) == 8, "ND_RESULT");
_Static_assert(sizeof(ND_SGE) == 24 && offsetof(ND_SGE, hMr) == 16, "ND_SGE");
#endif
_Static_assert(sizeof(ND_MW_DESCRIPTOR) == 20 && offsetof(ND_MW_DESCRIPTOR, Token) == 16, "ND_MW_DESCRIPTOR");

/* Interface identifiers, defined in interface_ids.c. INDMemoryWindow has the identifier of IND2MemoryWindow. */
extern const GUID softnd_iid_INDOverlapped;
extern const GUID softnd_iid_INDCompletionQueue;
extern const GUID softnd_iid_INDEndpoint;
extern const GUID softnd_iid_INDConnector;
extern const GUID softnd_iid_INDListen;
extern const GUID softnd_iid_INDAdapter;
extern const GUID softnd_iid_INDProvider;
extern const GUID softnd_iid_IClassFactory;

/* Interfaces. INDMemoryWindow has no methods of its own, so an IND2MemoryWindow serves as one. */
typedef IND2MemoryWindow INDMemoryWindow;

#define INDOVERLAPPED_METHODS(type)                                    \
    IUNKNOWN_METHODS(type);                                            \
    HRESULT(STDMETHODCALLTYPE *CancelOverlappedRequests)(type * self); \
    HRESULT(STDMETHODCALLTYPE *GetOverlappedResult)(type * self, OVERLAPPED * overlapped, SIZE_T * bytes, BOOL wait)

ND_INTERFACE(INDCompletionQueue);
struct INDCompletionQueue_methods {
    INDOVERLAPPED_METHODS(INDCompletionQueue);
    HRESULT(STDMETHODCALLTYPE *Resize)(INDCompletionQueue *self, SIZE_T entries);
    HRESULT(STDMETHODCALLTYPE *Notify)(INDCompletionQueue *self, DWORD type, OVERLAPPED *overlapped);
    SIZE_T(STDMETHODCALLTYPE *GetResults)(INDCompletionQueue *self, ND_RESULT **results, SIZE_T count);
};

ND_INTERFACE(INDEndpoint);
struct INDEndpoint_methods {
    IUNKNOWN_METHODS(INDEndpoint);
    HRESULT(STDMETHODCALLTYPE *Flush)(INDEndpoint *self);
    void(STDMETHODCALLTYPE *StartRequestBatch)(INDEndpoint *self);
    void(STDMETHODCALLTYPE *SubmitRequestBatch)(INDEndpoint *self);
    HRESULT(STDMETHODCALLTYPE *Send)(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge, SIZE_T sge_count,
                                     DWORD flags);
    HRESULT(STDMETHODCALLTYPE *SendAndInvalidate)(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge,
                                                  SIZE_T sge_count, const ND_MW_DESCRIPTOR *remote, DWORD flags);
    HRESULT(STDMETHODCALLTYPE *Receive)(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge, SIZE_T sge_count);
    HRESULT(STDMETHODCALLTYPE *Bind)(INDEndpoint *self, ND_RESULT *result, ND_MR_HANDLE memory, INDMemoryWindow *window,
                                     const void *buffer, SIZE_T size, DWORD flags, ND_MW_DESCRIPTOR *descriptor);
    HRESULT(STDMETHODCALLTYPE *Invalidate)(INDEndpoint *self, ND_RESULT *result, INDMemoryWindow *window, DWORD flags);
    HRESULT(STDMETHODCALLTYPE *Read)(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge, SIZE_T sge_count,
                                     const ND_MW_DESCRIPTOR *remote, ULONGLONG offset, DWORD flags);
    HRESULT(STDMETHODCALLTYPE *Write)(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge, SIZE_T sge_count,
                                      const ND_MW_DESCRIPTOR *remote, ULONGLONG offset, DWORD flags);
};

ND_INTERFACE(INDConnector);
struct INDConnector_methods {
    INDOVERLAPPED_METHODS(INDConnector);
    HRESULT(STDMETHODCALLTYPE *CreateEndpoint)(INDConnector *self, INDCompletionQueue *inbound_queue,
                                               INDCompletionQueue *outbound_queue, SIZE_T inbound_entries,
                                               SIZE_T outbound_entries, SIZE_T inbound_sge, SIZE_T outbound_sge,
                                               SIZE_T inbound_read_limit, SIZE_T outbound_read_limit,
                                               SIZE_T *max_inline_data, INDEndpoint **endpoint);
    HRESULT(STDMETHODCALLTYPE *Connect)(INDConnector *self, INDEndpoint *endpoint, const struct sockaddr *address,
                                        SIZE_T address_size, INT protocol, USHORT local_port, const void *private_data,
                                        SIZE_T private_size, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *CompleteConnect)(INDConnector *self, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Accept)(INDConnector *self, INDEndpoint *endpoint, const void *private_data,
                                       SIZE_T private_size, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Reject)(INDConnector *self, const void *private_data, SIZE_T private_size);
    HRESULT(STDMETHODCALLTYPE *GetConnectionData)(INDConnector *self, SIZE_T *inbound_read_limit,
                                                  SIZE_T *outbound_read_limit, void *private_data,
                                                  SIZE_T *private_size);
    HRESULT(STDMETHODCALLTYPE *GetLocalAddress)(INDConnector *self, struct sockaddr *address, SIZE_T *size);
    HRESULT(STDMETHODCALLTYPE *GetPeerAddress)(INDConnector *self, struct sockaddr *address, SIZE_T *size);
    HRESULT(STDMETHODCALLTYPE *NotifyDisconnect)(INDConnector *self, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Disconnect)(INDConnector *self, OVERLAPPED *overlapped);
};

ND_INTERFACE(INDListen);
struct INDListen_methods {
    INDOVERLAPPED_METHODS(INDListen);
    HRESULT(STDMETHODCALLTYPE *GetConnectionRequest)(INDListen *self, INDConnector *connector, OVERLAPPED *overlapped);
};

ND_INTERFACE(INDAdapter);
struct INDAdapter_methods {
    INDOVERLAPPED_METHODS(INDAdapter);
    HANDLE(STDMETHODCALLTYPE *GetFileHandle)(INDAdapter *self);
    HRESULT(STDMETHODCALLTYPE *Query)(INDAdapter *self, DWORD version, ND_ADAPTER_INFO *info, SIZE_T *size);
    HRESULT(STDMETHODCALLTYPE *Control)(INDAdapter *self, DWORD code, const void *in, SIZE_T in_size, void *out,
                                        SIZE_T out_size, SIZE_T *returned, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *CreateCompletionQueue)(INDAdapter *self, SIZE_T entries,
                                                      INDCompletionQueue **completion_queue);
    HRESULT(STDMETHODCALLTYPE *RegisterMemory)(INDAdapter *self, const void *buffer, SIZE_T size,
                                               OVERLAPPED *overlapped, ND_MR_HANDLE *memory);
    HRESULT(STDMETHODCALLTYPE *DeregisterMemory)(INDAdapter *self, ND_MR_HANDLE memory, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *CreateMemoryWindow)(INDAdapter *self, ND_RESULT *invalidate_result,
                                                   INDMemoryWindow **window);
    HRESULT(STDMETHODCALLTYPE *CreateConnector)(INDAdapter *self, INDConnector **connector);
    HRESULT(STDMETHODCALLTYPE *Listen)(INDAdapter *self, SIZE_T backlog, INT protocol, USHORT port,
                                       USHORT *assigned_port, INDListen **listen);
};

ND_INTERFACE(INDProvider);
struct INDProvider_methods {
    IUNKNOWN_METHODS(INDProvider);
    HRESULT(STDMETHODCALLTYPE *QueryAddressList)(INDProvider *self, SOCKET_ADDRESS_LIST *list, SIZE_T *size);
    HRESULT(STDMETHODCALLTYPE *OpenAdapter)(INDProvider *self, const struct sockaddr *address, SIZE_T size,
                                            INDAdapter **adapter);
};

_Static_assert(sizeof(struct INDCompletionQueue_methods) == 8 * sizeof(void *), "slots");
_Static_assert(sizeof(struct INDEndpoint_methods) == 13 * sizeof(void *), "slots");
_Static_assert(sizeof(struct INDConnector_methods) == 15 * sizeof(void *), "slots");
_Static_assert(sizeof(struct INDListen_methods) == 6 * sizeof(void *), "slots");
_Static_assert(sizeof(struct INDAdapter_methods) == 14 * sizeof(void *), "slots");
_Static_assert(sizeof(struct INDProvider_methods) == 5 * sizeof(void *), "slots");

#endif
