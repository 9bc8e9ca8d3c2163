/* NetworkDirect version 2: structures, interface identifiers and the order of the methods. Statuses, flags, elements
 * and results are those of the engine.
 *
 * The names and numbers are those of the public interface; the declarations are this project's own. Methods take the
 * interface pointer first and use the platform's COM convention.
 */
#ifndef SOFTND_VERSION2_H
#define SOFTND_VERSION2_H

#include <winsock2.h>
#include <ws2tcpip.h>
#include <windows.h>
#include <unknwn.h>
#include <stddef.h>

#include "../engine/vocabulary.h"

/* Versions and flags */
#define ND_VERSION_1 0x1
#define ND_VERSION_2 0x20000

#define ND_ADAPTER_FLAG_IN_ORDER_DMA_SUPPORTED            0x00000001
#define ND_ADAPTER_FLAG_CQ_INTERRUPT_MODERATION_SUPPORTED 0x00000004
#define ND_ADAPTER_FLAG_MULTI_ENGINE_SUPPORTED            0x00000008
#define ND_ADAPTER_FLAG_CQ_RESIZE_SUPPORTED               0x00000100
#define ND_ADAPTER_FLAG_LOOPBACK_CONNECTIONS_SUPPORTED    0x00010000

typedef struct ND2_ADAPTER_INFO {
    ULONG InfoVersion;
    UINT16 VendorId;
    UINT16 DeviceId;
    UINT64 AdapterId;
    SIZE_T MaxRegistrationSize;
    SIZE_T MaxWindowSize;
    ULONG MaxInitiatorSge;
    ULONG MaxReceiveSge;
    ULONG MaxReadSge;
    ULONG MaxTransferLength;
    ULONG MaxInlineDataSize;
    ULONG MaxInboundReadLimit;
    ULONG MaxOutboundReadLimit;
    ULONG MaxReceiveQueueDepth;
    ULONG MaxInitiatorQueueDepth;
    ULONG MaxSharedReceiveQueueDepth;
    ULONG MaxCompletionQueueDepth;
    ULONG InlineRequestThreshold;
    ULONG LargeRequestThreshold;
    ULONG MaxCallerData;
    ULONG MaxCalleeData;
    ULONG AdapterFlags;
} ND2_ADAPTER_INFO;

#if defined(_WIN64)
_Static_assert(sizeof(ND2_ADAPTER_INFO) == 96, "ND2_ADAPTER_INFO");
_Static_assert(offsetof(ND2_ADAPTER_INFO, AdapterId) == 8, "ND2_ADAPTER_INFO");
_Static_assert(offsetof(ND2_ADAPTER_INFO, MaxInitiatorSge) == 32, "ND2_ADAPTER_INFO");
_Static_assert(offsetof(ND2_ADAPTER_INFO, AdapterFlags) == 92, "ND2_ADAPTER_INFO");
_Static_assert(sizeof(ND2_RESULT) == 32 && offsetof(ND2_RESULT, RequestType) == 24, "ND2_RESULT");
_Static_assert(sizeof(ND2_SGE) == 16 && offsetof(ND2_SGE, MemoryRegionToken) == 12, "ND2_SGE");
_Static_assert(sizeof(OVERLAPPED) == 32 && offsetof(OVERLAPPED, hEvent) == 24, "OVERLAPPED");
#endif

/* Interface identifiers, defined in interface_ids.c */
extern const GUID softnd_iid_IND2Overlapped;
extern const GUID softnd_iid_IND2CompletionQueue;
extern const GUID softnd_iid_IND2SharedReceiveQueue;
extern const GUID softnd_iid_IND2MemoryWindow;
extern const GUID softnd_iid_IND2MemoryRegion;
extern const GUID softnd_iid_IND2QueuePair;
extern const GUID softnd_iid_IND2Connector;
extern const GUID softnd_iid_IND2Listener;
extern const GUID softnd_iid_IND2Adapter;
extern const GUID softnd_iid_IND2Provider;
extern const GUID softnd_iid_IUnknown;

/* Interfaces: what a program has a pointer to, and the methods that several begin with. */
#define ND_INTERFACE(type)                    \
    typedef struct type type;                 \
    struct type {                             \
        const struct type##_methods *methods; \
    }
#define IUNKNOWN_METHODS(type)                                                          \
    HRESULT(STDMETHODCALLTYPE *QueryInterface)(type * self, REFIID iid, void **object); \
    ULONG(STDMETHODCALLTYPE *AddRef)(type * self);                                      \
    ULONG(STDMETHODCALLTYPE *Release)(type * self)
#define IND2OVERLAPPED_METHODS(type)                                   \
    IUNKNOWN_METHODS(type);                                            \
    HRESULT(STDMETHODCALLTYPE *CancelOverlappedRequests)(type * self); \
    HRESULT(STDMETHODCALLTYPE *GetOverlappedResult)(type * self, OVERLAPPED * overlapped, BOOL wait)

ND_INTERFACE(IND2Overlapped);
struct IND2Overlapped_methods {
    IND2OVERLAPPED_METHODS(IND2Overlapped);
};

ND_INTERFACE(IND2CompletionQueue);
struct IND2CompletionQueue_methods {
    IND2OVERLAPPED_METHODS(IND2CompletionQueue);
    HRESULT(STDMETHODCALLTYPE *GetNotifyAffinity)(IND2CompletionQueue *self, USHORT *group, KAFFINITY *affinity);
    HRESULT(STDMETHODCALLTYPE *Resize)(IND2CompletionQueue *self, ULONG depth);
    HRESULT(STDMETHODCALLTYPE *Notify)(IND2CompletionQueue *self, ULONG type, OVERLAPPED *overlapped);
    ULONG(STDMETHODCALLTYPE *GetResults)(IND2CompletionQueue *self, ND2_RESULT *results, ULONG count);
};

ND_INTERFACE(IND2SharedReceiveQueue);
struct IND2SharedReceiveQueue_methods {
    IND2OVERLAPPED_METHODS(IND2SharedReceiveQueue);
    HRESULT(STDMETHODCALLTYPE *GetNotifyAffinity)(IND2SharedReceiveQueue *self, USHORT *group, KAFFINITY *affinity);
    HRESULT(STDMETHODCALLTYPE *Modify)(IND2SharedReceiveQueue *self, ULONG depth, ULONG threshold);
    HRESULT(STDMETHODCALLTYPE *Notify)(IND2SharedReceiveQueue *self, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Receive)(IND2SharedReceiveQueue *self, void *context, const ND2_SGE *sge,
                                        ULONG sge_count);
};

ND_INTERFACE(IND2MemoryWindow);
struct IND2MemoryWindow_methods {
    IUNKNOWN_METHODS(IND2MemoryWindow);
    UINT32(STDMETHODCALLTYPE *GetRemoteToken)(IND2MemoryWindow *self);
};

ND_INTERFACE(IND2MemoryRegion);
struct IND2MemoryRegion_methods {
    IND2OVERLAPPED_METHODS(IND2MemoryRegion);
    HRESULT(STDMETHODCALLTYPE *Register)(IND2MemoryRegion *self, const void *buffer, SIZE_T size, ULONG flags,
                                         OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Deregister)(IND2MemoryRegion *self, OVERLAPPED *overlapped);
    UINT32(STDMETHODCALLTYPE *GetLocalToken)(IND2MemoryRegion *self);
    UINT32(STDMETHODCALLTYPE *GetRemoteToken)(IND2MemoryRegion *self);
};

ND_INTERFACE(IND2QueuePair);
struct IND2QueuePair_methods {
    IUNKNOWN_METHODS(IND2QueuePair);
    HRESULT(STDMETHODCALLTYPE *Flush)(IND2QueuePair *self);
    HRESULT(STDMETHODCALLTYPE *Send)(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count,
                                     ULONG flags);
    HRESULT(STDMETHODCALLTYPE *Receive)(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count);
    HRESULT(STDMETHODCALLTYPE *Bind)(IND2QueuePair *self, void *context, IUnknown *region, IUnknown *window,
                                     const void *buffer, SIZE_T size, ULONG flags);
    HRESULT(STDMETHODCALLTYPE *Invalidate)(IND2QueuePair *self, void *context, IUnknown *window, ULONG flags);
    HRESULT(STDMETHODCALLTYPE *Read)(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count,
                                     UINT64 remote_address, UINT32 remote_token, ULONG flags);
    HRESULT(STDMETHODCALLTYPE *Write)(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count,
                                      UINT64 remote_address, UINT32 remote_token, ULONG flags);
};

ND_INTERFACE(IND2Connector);
struct IND2Connector_methods {
    IND2OVERLAPPED_METHODS(IND2Connector);
    HRESULT(STDMETHODCALLTYPE *Bind)(IND2Connector *self, const struct sockaddr *address, ULONG size);
    HRESULT(STDMETHODCALLTYPE *Connect)(IND2Connector *self, IUnknown *queue_pair, const struct sockaddr *destination,
                                        ULONG size, ULONG inbound_read_limit, ULONG outbound_read_limit,
                                        const void *private_data, ULONG private_size, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *CompleteConnect)(IND2Connector *self, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Accept)(IND2Connector *self, IUnknown *queue_pair, ULONG inbound_read_limit,
                                       ULONG outbound_read_limit, const void *private_data, ULONG private_size,
                                       OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Reject)(IND2Connector *self, const void *private_data, ULONG private_size);
    HRESULT(STDMETHODCALLTYPE *GetReadLimits)(IND2Connector *self, ULONG *inbound_read_limit,
                                              ULONG *outbound_read_limit);
    HRESULT(STDMETHODCALLTYPE *GetPrivateData)(IND2Connector *self, void *private_data, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *GetLocalAddress)(IND2Connector *self, struct sockaddr *address, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *GetPeerAddress)(IND2Connector *self, struct sockaddr *address, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *NotifyDisconnect)(IND2Connector *self, OVERLAPPED *overlapped);
    HRESULT(STDMETHODCALLTYPE *Disconnect)(IND2Connector *self, OVERLAPPED *overlapped);
};

ND_INTERFACE(IND2Listener);
struct IND2Listener_methods {
    IND2OVERLAPPED_METHODS(IND2Listener);
    HRESULT(STDMETHODCALLTYPE *Bind)(IND2Listener *self, const struct sockaddr *address, ULONG size);
    HRESULT(STDMETHODCALLTYPE *Listen)(IND2Listener *self, ULONG backlog);
    HRESULT(STDMETHODCALLTYPE *GetLocalAddress)(IND2Listener *self, struct sockaddr *address, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *GetConnectionRequest)(IND2Listener *self, IUnknown *connector, OVERLAPPED *overlapped);
};

ND_INTERFACE(IND2Adapter);
struct IND2Adapter_methods {
    IUNKNOWN_METHODS(IND2Adapter);
    HRESULT(STDMETHODCALLTYPE *CreateOverlappedFile)(IND2Adapter *self, HANDLE *file);
    HRESULT(STDMETHODCALLTYPE *Query)(IND2Adapter *self, ND2_ADAPTER_INFO *info, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *QueryAddressList)(IND2Adapter *self, SOCKET_ADDRESS_LIST *list, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *CreateCompletionQueue)(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth,
                                                      USHORT group, KAFFINITY affinity, void **completion_queue);
    HRESULT(STDMETHODCALLTYPE *CreateMemoryRegion)(IND2Adapter *self, REFIID iid, HANDLE file, void **region);
    HRESULT(STDMETHODCALLTYPE *CreateMemoryWindow)(IND2Adapter *self, REFIID iid, void **window);
    HRESULT(STDMETHODCALLTYPE *CreateSharedReceiveQueue)(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth,
                                                         ULONG max_sge, ULONG threshold, USHORT group,
                                                         KAFFINITY affinity, void **queue);
    HRESULT(STDMETHODCALLTYPE *CreateQueuePair)(IND2Adapter *self, REFIID iid, IUnknown *receive_queue,
                                                IUnknown *initiator_queue, void *context, ULONG receive_depth,
                                                ULONG initiator_depth, ULONG max_receive_sge, ULONG max_initiator_sge,
                                                ULONG inline_size, void **queue_pair);
    HRESULT(STDMETHODCALLTYPE *CreateQueuePairWithSrq)(IND2Adapter *self, REFIID iid, IUnknown *receive_queue,
                                                       IUnknown *initiator_queue, IUnknown *shared_receive_queue,
                                                       void *context, ULONG initiator_depth, ULONG max_initiator_sge,
                                                       ULONG inline_size, void **queue_pair);
    HRESULT(STDMETHODCALLTYPE *CreateConnector)(IND2Adapter *self, REFIID iid, HANDLE file, void **connector);
    HRESULT(STDMETHODCALLTYPE *CreateListener)(IND2Adapter *self, REFIID iid, HANDLE file, void **listener);
};

ND_INTERFACE(IND2Provider);
struct IND2Provider_methods {
    IUNKNOWN_METHODS(IND2Provider);
    HRESULT(STDMETHODCALLTYPE *QueryAddressList)(IND2Provider *self, SOCKET_ADDRESS_LIST *list, ULONG *size);
    HRESULT(STDMETHODCALLTYPE *ResolveAddress)(IND2Provider *self, const struct sockaddr *address, ULONG size,
                                               UINT64 *adapter_id);
    HRESULT(STDMETHODCALLTYPE *OpenAdapter)(IND2Provider *self, REFIID iid, UINT64 adapter_id, void **adapter);
};

_Static_assert(sizeof(struct IND2Adapter_methods) == 14 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2CompletionQueue_methods) == 9 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2SharedReceiveQueue_methods) == 9 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2MemoryWindow_methods) == 4 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2MemoryRegion_methods) == 9 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2QueuePair_methods) == 10 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2Connector_methods) == 16 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2Listener_methods) == 9 * sizeof(void *), "slots");
_Static_assert(sizeof(struct IND2Provider_methods) == 6 * sizeof(void *), "slots");

#endif
