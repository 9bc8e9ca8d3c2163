/* NetworkDirect 2 as tables: structures, numbers, and the methods of each interface in the order of its vtable.

   cffi reads this file as it is. build_networkdirect.py makes the vtable, the identifier and one thunk per method
   from it. A comment "interface NAME : BASE, N slots {identifier}" opens an interface. Each declaration after it is
   its next method. Statuses are HRESULTs. Void pointers stand for any interface and for GUIDs. */

struct nd_overlapped { /* OVERLAPPED */
    uintptr_t internal;
    uintptr_t internal_high;
    uint32_t offset;
    uint32_t offset_high;
    void *event;
};

struct nd2_adapter_info { /* ND2_ADAPTER_INFO */
    uint32_t info_version;
    uint16_t vendor_id;
    uint16_t device_id;
    uint64_t adapter_id;
    size_t max_registration_size;
    size_t max_window_size;
    uint32_t max_initiator_sge;
    uint32_t max_receive_sge;
    uint32_t max_read_sge;
    uint32_t max_transfer_length;
    uint32_t max_inline_data_size;
    uint32_t max_inbound_read_limit;
    uint32_t max_outbound_read_limit;
    uint32_t max_receive_queue_depth;
    uint32_t max_initiator_queue_depth;
    uint32_t max_shared_receive_queue_depth;
    uint32_t max_completion_queue_depth;
    uint32_t inline_request_threshold;
    uint32_t large_request_threshold;
    uint32_t max_caller_data;
    uint32_t max_callee_data;
    uint32_t adapter_flags;
};

struct nd2_result { /* ND2_RESULT */
    int32_t status;
    uint32_t bytes_transferred;
    void *queue_pair_context;
    void *request_context;
    uint32_t request_type;
};

struct nd2_sge { /* ND2_SGE */
    void *buffer;
    uint32_t buffer_length;
    uint32_t memory_region_token;
};

enum nd_version { ND_VERSION_1 = 0x1, ND_VERSION_2 = 0x20000 };

enum nd_adapter_flag {
    ND_ADAPTER_FLAG_IN_ORDER_DMA_SUPPORTED = 0x1,
    ND_ADAPTER_FLAG_CQ_INTERRUPT_MODERATION_SUPPORTED = 0x4,
    ND_ADAPTER_FLAG_MULTI_ENGINE_SUPPORTED = 0x8,
    ND_ADAPTER_FLAG_CQ_RESIZE_SUPPORTED = 0x100,
    ND_ADAPTER_FLAG_LOOPBACK_CONNECTIONS_SUPPORTED = 0x10000
};

enum nd_cq_notify { ND_CQ_NOTIFY_ERRORS = 0, ND_CQ_NOTIFY_ANY = 1, ND_CQ_NOTIFY_SOLICITED = 2 };

enum nd_op_flag {
    ND_OP_FLAG_SILENT_SUCCESS = 0x1,
    ND_OP_FLAG_READ_FENCE = 0x2,
    ND_OP_FLAG_SEND_AND_SOLICIT_EVENT = 0x4,
    ND_OP_FLAG_ALLOW_READ = 0x8,
    ND_OP_FLAG_ALLOW_WRITE = 0x10,
    ND_OP_FLAG_INLINE = 0x20
};

/* interface IUnknown, 3 slots {00000000-0000-0000-C000-000000000046} */
int32_t IUnknown_QueryInterface(struct IUnknown *self, const void *iid, void **object);
uint32_t IUnknown_AddRef(struct IUnknown *self);
uint32_t IUnknown_Release(struct IUnknown *self);

/* interface IClassFactory : IUnknown, 5 slots {00000001-0000-0000-C000-000000000046} */
int32_t IClassFactory_CreateInstance(struct IClassFactory *self, void *outer, const void *iid, void **object);
int32_t IClassFactory_LockServer(struct IClassFactory *self, int32_t lock);

/* interface IND2Overlapped : IUnknown, 5 slots {ABF72719-B016-4A40-A6F7-622791A7044C} */
int32_t IND2Overlapped_CancelOverlappedRequests(struct IND2Overlapped *self);
int32_t IND2Overlapped_GetOverlappedResult(struct IND2Overlapped *self, struct nd_overlapped *overlapped, int32_t wait);

/* interface IND2CompletionQueue : IND2Overlapped, 9 slots {20CC445E-64A0-4CBB-AA75-F6A7251FDA9E} */
int32_t IND2CompletionQueue_GetNotifyAffinity(struct IND2CompletionQueue *self, uint16_t *group, uintptr_t *affinity);
int32_t IND2CompletionQueue_Resize(struct IND2CompletionQueue *self, uint32_t depth);
int32_t IND2CompletionQueue_Notify(struct IND2CompletionQueue *self, uint32_t type, struct nd_overlapped *overlapped);
uint32_t IND2CompletionQueue_GetResults(struct IND2CompletionQueue *self, struct nd2_result *results, uint32_t count);

/* interface IND2SharedReceiveQueue : IND2Overlapped, 9 slots {AABD67DC-459A-4DB1-826B-56CFCC278883} */
int32_t IND2SharedReceiveQueue_GetNotifyAffinity(struct IND2SharedReceiveQueue *self, uint16_t *group,
                                                 uintptr_t *affinity);
int32_t IND2SharedReceiveQueue_Modify(struct IND2SharedReceiveQueue *self, uint32_t depth, uint32_t threshold);
int32_t IND2SharedReceiveQueue_Notify(struct IND2SharedReceiveQueue *self, struct nd_overlapped *overlapped);
int32_t IND2SharedReceiveQueue_Receive(struct IND2SharedReceiveQueue *self, void *context, const struct nd2_sge *sge,
                                       uint32_t count);

/* interface IND2MemoryWindow : IUnknown, 4 slots {070FE1F5-0AB5-4361-88DB-974BA704D4B9} */
uint32_t IND2MemoryWindow_GetRemoteToken(struct IND2MemoryWindow *self);

/* interface IND2MemoryRegion : IND2Overlapped, 9 slots {55DFEA2F-BC56-4982-8A45-0301BE46C413} */
int32_t IND2MemoryRegion_Register(struct IND2MemoryRegion *self, const void *buffer, size_t size, uint32_t flags,
                                  struct nd_overlapped *overlapped);
int32_t IND2MemoryRegion_Deregister(struct IND2MemoryRegion *self, struct nd_overlapped *overlapped);
uint32_t IND2MemoryRegion_GetLocalToken(struct IND2MemoryRegion *self);
uint32_t IND2MemoryRegion_GetRemoteToken(struct IND2MemoryRegion *self);

/* interface IND2QueuePair : IUnknown, 10 slots {EEF2F332-B75D-4063-BCE3-3A0BAD2D02CE} */
int32_t IND2QueuePair_Flush(struct IND2QueuePair *self);
int32_t IND2QueuePair_Send(struct IND2QueuePair *self, void *context, const struct nd2_sge *sge, uint32_t count,
                           uint32_t flags);
int32_t IND2QueuePair_Receive(struct IND2QueuePair *self, void *context, const struct nd2_sge *sge, uint32_t count);
int32_t IND2QueuePair_Bind(struct IND2QueuePair *self, void *context, void *region, void *window, const void *buffer,
                           size_t size, uint32_t flags);
int32_t IND2QueuePair_Invalidate(struct IND2QueuePair *self, void *context, void *window, uint32_t flags);
int32_t IND2QueuePair_Read(struct IND2QueuePair *self, void *context, const struct nd2_sge *sge, uint32_t count,
                           uint64_t remote_address, uint32_t remote_token, uint32_t flags);
int32_t IND2QueuePair_Write(struct IND2QueuePair *self, void *context, const struct nd2_sge *sge, uint32_t count,
                            uint64_t remote_address, uint32_t remote_token, uint32_t flags);

/* interface IND2Connector : IND2Overlapped, 16 slots {7DD615C4-6B4C-4866-950C-F3B1D25A5302} */
int32_t IND2Connector_Bind(struct IND2Connector *self, const void *address, uint32_t size);
int32_t IND2Connector_Connect(struct IND2Connector *self, void *queue_pair, const void *address, uint32_t size,
                              uint32_t inbound_read_limit, uint32_t outbound_read_limit, const void *private_data,
                              uint32_t private_data_size, struct nd_overlapped *overlapped);
int32_t IND2Connector_CompleteConnect(struct IND2Connector *self, struct nd_overlapped *overlapped);
int32_t IND2Connector_Accept(struct IND2Connector *self, void *queue_pair, uint32_t inbound_read_limit,
                             uint32_t outbound_read_limit, const void *private_data, uint32_t private_data_size,
                             struct nd_overlapped *overlapped);
int32_t IND2Connector_Reject(struct IND2Connector *self, const void *private_data, uint32_t private_data_size);
int32_t IND2Connector_GetReadLimits(struct IND2Connector *self, uint32_t *inbound, uint32_t *outbound);
int32_t IND2Connector_GetPrivateData(struct IND2Connector *self, void *private_data, uint32_t *size);
int32_t IND2Connector_GetLocalAddress(struct IND2Connector *self, void *address, uint32_t *size);
int32_t IND2Connector_GetPeerAddress(struct IND2Connector *self, void *address, uint32_t *size);
int32_t IND2Connector_NotifyDisconnect(struct IND2Connector *self, struct nd_overlapped *overlapped);
int32_t IND2Connector_Disconnect(struct IND2Connector *self, struct nd_overlapped *overlapped);

/* interface IND2Listener : IND2Overlapped, 9 slots {65D23D83-3A57-4E02-86A4-350165C2D130} */
int32_t IND2Listener_Bind(struct IND2Listener *self, const void *address, uint32_t size);
int32_t IND2Listener_Listen(struct IND2Listener *self, uint32_t backlog);
int32_t IND2Listener_GetLocalAddress(struct IND2Listener *self, void *address, uint32_t *size);
int32_t IND2Listener_GetConnectionRequest(struct IND2Listener *self, void *connector, struct nd_overlapped *overlapped);

/* interface IND2Adapter : IUnknown, 14 slots {D89C798C-4823-4D69-846C-DFDCCFF9E5F3} */
int32_t IND2Adapter_CreateOverlappedFile(struct IND2Adapter *self, void **file);
int32_t IND2Adapter_Query(struct IND2Adapter *self, struct nd2_adapter_info *info, uint32_t *size);
int32_t IND2Adapter_QueryAddressList(struct IND2Adapter *self, void *list, uint32_t *size);
int32_t IND2Adapter_CreateCompletionQueue(struct IND2Adapter *self, const void *iid, void *file, uint32_t depth,
                                          uint16_t group, uintptr_t affinity, void **object);
int32_t IND2Adapter_CreateMemoryRegion(struct IND2Adapter *self, const void *iid, void *file, void **object);
int32_t IND2Adapter_CreateMemoryWindow(struct IND2Adapter *self, const void *iid, void **object);
int32_t IND2Adapter_CreateSharedReceiveQueue(struct IND2Adapter *self, const void *iid, void *file, uint32_t depth,
                                             uint32_t max_request_sge, uint32_t threshold, uint16_t group,
                                             uintptr_t affinity, void **object);
int32_t IND2Adapter_CreateQueuePair(struct IND2Adapter *self, const void *iid, void *receive_cq, void *initiator_cq,
                                    void *context, uint32_t receive_depth, uint32_t initiator_depth,
                                    uint32_t max_receive_sge, uint32_t max_initiator_sge, uint32_t inline_data_size,
                                    void **object);
int32_t IND2Adapter_CreateQueuePairWithSrq(struct IND2Adapter *self, const void *iid, void *receive_cq,
                                           void *initiator_cq, void *srq, void *context, uint32_t initiator_depth,
                                           uint32_t max_initiator_sge, uint32_t inline_data_size, void **object);
int32_t IND2Adapter_CreateConnector(struct IND2Adapter *self, const void *iid, void *file, void **object);
int32_t IND2Adapter_CreateListener(struct IND2Adapter *self, const void *iid, void *file, void **object);

/* interface IND2Provider : IUnknown, 6 slots {49EAE6C1-76C4-46D0-8003-5C2EAA2C9A8E} */
int32_t IND2Provider_QueryAddressList(struct IND2Provider *self, void *list, uint32_t *size);
int32_t IND2Provider_ResolveAddress(struct IND2Provider *self, const void *address, uint32_t size,
                                    uint64_t *adapter_id);
int32_t IND2Provider_OpenAdapter(struct IND2Provider *self, const void *iid, uint64_t adapter_id, void **object);
