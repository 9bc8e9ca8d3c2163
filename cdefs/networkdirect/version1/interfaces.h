/* NetworkDirect 1 as tables; see ../interfaces.h (contract B.5, B.6). ND_MR_HANDLE is void *, INT int32_t, DWORD
   uint32_t. */

struct nd_adapter_info1 { /* ND_ADAPTER_INFO1 */
    uint32_t vendor_id;
    uint32_t device_id;
    size_t max_inbound_sge;
    size_t max_inbound_requests;
    size_t max_inbound_length;
    size_t max_outbound_sge;
    size_t max_outbound_requests;
    size_t max_outbound_length;
    size_t max_inline_data;
    size_t max_inbound_read_limit;
    size_t max_outbound_read_limit;
    size_t max_cq_entries;
    size_t max_registration_size;
    size_t max_window_size;
    size_t large_request_threshold;
    size_t max_caller_data;
    size_t max_callee_data;
};

struct nd_result { /* ND_RESULT */
    int32_t status;
    size_t bytes_transferred;
};

struct nd_sge { /* ND_SGE */
    void *address;
    size_t length;
    void *region;
};

/* interface INDOverlapped : IUnknown, 5 slots {C859E15E-75E2-4FE3-8D6D-0DFF36F02442} */
int32_t INDOverlapped_CancelOverlappedRequests(struct INDOverlapped *self);
int32_t INDOverlapped_GetOverlappedResult(struct INDOverlapped *self, struct nd_overlapped *overlapped, size_t *bytes,
                                          int32_t wait);

/* interface INDCompletionQueue : INDOverlapped, 8 slots {1245A633-2A32-473A-830C-E05D1F869D02} */
int32_t INDCompletionQueue_Resize(struct INDCompletionQueue *self, size_t entries);
int32_t INDCompletionQueue_Notify(struct INDCompletionQueue *self, uint32_t type, struct nd_overlapped *overlapped);
size_t INDCompletionQueue_GetResults(struct INDCompletionQueue *self, struct nd_result **results, size_t count);

/* interface INDEndpoint : IUnknown, 13 slots {DBD00EAB-B679-44A9-BD65-E82F3DE12D1A} */
int32_t INDEndpoint_Flush(struct INDEndpoint *self);
void INDEndpoint_StartRequestBatch(struct INDEndpoint *self);
void INDEndpoint_SubmitRequestBatch(struct INDEndpoint *self);
int32_t INDEndpoint_Send(struct INDEndpoint *self, struct nd_result *result, const struct nd_sge *sge, size_t count,
                         uint32_t flags);
int32_t INDEndpoint_SendAndInvalidate(struct INDEndpoint *self, struct nd_result *result, const struct nd_sge *sge,
                                      size_t count, const void *remote, uint32_t flags);
int32_t INDEndpoint_Receive(struct INDEndpoint *self, struct nd_result *result, const struct nd_sge *sge, size_t count);
int32_t INDEndpoint_Bind(struct INDEndpoint *self, struct nd_result *result, void *region, void *window,
                         const void *buffer, size_t size, uint32_t flags, void *descriptor);
int32_t INDEndpoint_Invalidate(struct INDEndpoint *self, struct nd_result *result, void *window, uint32_t flags);
int32_t INDEndpoint_Read(struct INDEndpoint *self, struct nd_result *result, const struct nd_sge *sge, size_t count,
                         const void *remote, uint64_t offset, uint32_t flags);
int32_t INDEndpoint_Write(struct INDEndpoint *self, struct nd_result *result, const struct nd_sge *sge, size_t count,
                          const void *remote, uint64_t offset, uint32_t flags);

/* interface INDConnector : INDOverlapped, 15 slots {1BCAF2D1-E274-4AEB-AC57-CD5D4376E0B7} */
int32_t INDConnector_CreateEndpoint(struct INDConnector *self, void *inbound_cq, void *outbound_cq,
                                    size_t inbound_entries, size_t outbound_entries, size_t inbound_sge,
                                    size_t outbound_sge, size_t inbound_read_limit, size_t outbound_read_limit,
                                    size_t *max_inline_data, void **endpoint);
int32_t INDConnector_Connect(struct INDConnector *self, void *endpoint, const void *address, size_t size,
                             int32_t protocol, uint16_t local_port, const void *private_data, size_t private_data_size,
                             struct nd_overlapped *overlapped);
int32_t INDConnector_CompleteConnect(struct INDConnector *self, struct nd_overlapped *overlapped);
int32_t INDConnector_Accept(struct INDConnector *self, void *endpoint, const void *private_data,
                            size_t private_data_size, struct nd_overlapped *overlapped);
int32_t INDConnector_Reject(struct INDConnector *self, const void *private_data, size_t private_data_size);
int32_t INDConnector_GetConnectionData(struct INDConnector *self, size_t *inbound_read_limit,
                                       size_t *outbound_read_limit, void *private_data, size_t *private_data_size);
int32_t INDConnector_GetLocalAddress(struct INDConnector *self, void *address, size_t *size);
int32_t INDConnector_GetPeerAddress(struct INDConnector *self, void *address, size_t *size);
int32_t INDConnector_NotifyDisconnect(struct INDConnector *self, struct nd_overlapped *overlapped);
int32_t INDConnector_Disconnect(struct INDConnector *self, struct nd_overlapped *overlapped);

/* interface INDListen : INDOverlapped, 6 slots {BB902588-BA3F-4441-9FE1-3B6795E4E668} */
int32_t INDListen_GetConnectionRequest(struct INDListen *self, void *connector, struct nd_overlapped *overlapped);

/* interface INDAdapter : INDOverlapped, 14 slots {A023C5A0-5B73-43BC-8D20-33AA07E9510F} */
void *INDAdapter_GetFileHandle(struct INDAdapter *self);
int32_t INDAdapter_Query(struct INDAdapter *self, uint32_t version, struct nd_adapter_info1 *info, size_t *size);
int32_t INDAdapter_Control(struct INDAdapter *self, uint32_t code, const void *in, size_t in_size, void *out,
                           size_t out_size, size_t *returned, struct nd_overlapped *overlapped);
int32_t INDAdapter_CreateCompletionQueue(struct INDAdapter *self, size_t entries, void **object);
int32_t INDAdapter_RegisterMemory(struct INDAdapter *self, const void *buffer, size_t size,
                                  struct nd_overlapped *overlapped, void **region);
int32_t INDAdapter_DeregisterMemory(struct INDAdapter *self, void *region, struct nd_overlapped *overlapped);
int32_t INDAdapter_CreateMemoryWindow(struct INDAdapter *self, struct nd_result *invalidated, void **object);
int32_t INDAdapter_CreateConnector(struct INDAdapter *self, void **object);
int32_t INDAdapter_Listen(struct INDAdapter *self, size_t backlog, int32_t protocol, uint16_t port,
                          uint16_t *assigned_port, void **object);

/* interface INDProvider : IUnknown, 5 slots {0C5DD316-5FDF-47E6-B2D0-2A6EDA8D39DD} */
int32_t INDProvider_QueryAddressList(struct INDProvider *self, void *list, size_t *size);
int32_t INDProvider_OpenAdapter(struct INDProvider *self, const void *address, size_t size, void **object);
