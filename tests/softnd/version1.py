"""NetworkDirect 1 as a program sees it, from the contract's tables B.3, B.5 and B.6. version2 has the statuses."""

from __future__ import annotations

from typing import Any

import version2
from version2 import ffi

LOCAL_LENGTH = version2.Status.DATA_OVERRUN  # B.1.4
INVALIDATION_ERROR = version2.Status.INVALID_DEVICE_REQUEST
TCP, UDP = 6, 17

_INTERFACES = """
interface IClassFactory : IUnknown uuid(00000001-0000-0000-C000-000000000046) {
    int32_t CreateInstance(void *outer, const void *iid, void **object);
    int32_t LockServer(int32_t lock);
};
interface INDOverlapped : IUnknown uuid(C859E15E-75E2-4FE3-8D6D-0DFF36F02442) {
    int32_t CancelOverlappedRequests();
    int32_t GetOverlappedResult(OVERLAPPED *overlapped, size_t *bytes, int32_t wait);
};
interface INDCompletionQueue : INDOverlapped uuid(1245A633-2A32-473A-830C-E05D1F869D02) {
    int32_t Resize(size_t entries);
    int32_t Notify(uint32_t type, OVERLAPPED *overlapped);
    size_t GetResults(ND_RESULT **results, size_t count);
};
interface INDMemoryWindow : IUnknown uuid(070FE1F5-0AB5-4361-88DB-974BA704D4B9) {
};
interface INDEndpoint : IUnknown uuid(DBD00EAB-B679-44A9-BD65-E82F3DE12D1A) {
    int32_t Flush();
    void StartRequestBatch();
    void SubmitRequestBatch();
    int32_t Send(ND_RESULT *result, const ND_SGE *sgl, size_t count, uint32_t flags);
    int32_t SendAndInvalidate(ND_RESULT *result, const ND_SGE *sgl, size_t count, const ND_MW_DESCRIPTOR *remote,
        uint32_t flags);
    int32_t Receive(ND_RESULT *result, const ND_SGE *sgl, size_t count);
    int32_t Bind(ND_RESULT *result, uintptr_t memory, void *window, const void *buffer, size_t size,
        uint32_t flags, ND_MW_DESCRIPTOR *descriptor);
    int32_t Invalidate(ND_RESULT *result, void *window, uint32_t flags);
    int32_t Read(ND_RESULT *result, const ND_SGE *sgl, size_t count, const ND_MW_DESCRIPTOR *remote,
        uint64_t offset, uint32_t flags);
    int32_t Write(ND_RESULT *result, const ND_SGE *sgl, size_t count, const ND_MW_DESCRIPTOR *remote,
        uint64_t offset, uint32_t flags);
};
interface INDConnector : INDOverlapped uuid(1BCAF2D1-E274-4AEB-AC57-CD5D4376E0B7) {
    int32_t CreateEndpoint(void *inbound, void *outbound, size_t inbound_entries, size_t outbound_entries,
        size_t inbound_sge, size_t outbound_sge, size_t inbound_limit, size_t outbound_limit, size_t *max_inline,
        void **object);
    int32_t Connect(void *endpoint, const void *address, size_t size, int32_t protocol, uint16_t local_port,
        const void *private_data, size_t private_size, OVERLAPPED *overlapped);
    int32_t CompleteConnect(OVERLAPPED *overlapped);
    int32_t Accept(void *endpoint, const void *private_data, size_t private_size, OVERLAPPED *overlapped);
    int32_t Reject(const void *private_data, size_t private_size);
    int32_t GetConnectionData(size_t *inbound, size_t *outbound, void *private_data, size_t *size);
    int32_t GetLocalAddress(void *address, size_t *size);
    int32_t GetPeerAddress(void *address, size_t *size);
    int32_t NotifyDisconnect(OVERLAPPED *overlapped);
    int32_t Disconnect(OVERLAPPED *overlapped);
};
interface INDListen : INDOverlapped uuid(BB902588-BA3F-4441-9FE1-3B6795E4E668) {
    int32_t GetConnectionRequest(void *connector, OVERLAPPED *overlapped);
};
interface INDAdapter : INDOverlapped uuid(A023C5A0-5B73-43BC-8D20-33AA07E9510F) {
    void *GetFileHandle();
    int32_t Query(uint32_t version, ND_ADAPTER_INFO1 *info, size_t *size);
    int32_t Control(uint32_t code, const void *in, size_t in_size, void *out, size_t out_size, size_t *returned,
        OVERLAPPED *overlapped);
    int32_t CreateCompletionQueue(size_t entries, void **object);
    int32_t RegisterMemory(const void *buffer, size_t size, OVERLAPPED *overlapped, uintptr_t *memory);
    int32_t DeregisterMemory(uintptr_t memory, OVERLAPPED *overlapped);
    int32_t CreateMemoryWindow(ND_RESULT *invalidate_result, void **object);
    int32_t CreateConnector(void **object);
    int32_t Listen(size_t backlog, int32_t protocol, uint16_t port, uint16_t *assigned, void **object);
};
interface INDProvider : IUnknown uuid(0C5DD316-5FDF-47E6-B2D0-2A6EDA8D39DD) {
    int32_t QueryAddressList(void *list, size_t *size);
    int32_t OpenAdapter(const void *address, size_t size, void **object);
};
"""

# B.6
ffi.cdef("""
typedef struct { int32_t Status; size_t BytesTransferred; } ND_RESULT;
typedef struct { void *pAddr; size_t Length; uintptr_t hMr; } ND_SGE;
typedef struct {
    uint32_t VendorId, DeviceId;
    size_t MaxInboundSge, MaxInboundRequests, MaxInboundLength, MaxOutboundSge, MaxOutboundRequests, MaxOutboundLength,
        MaxInlineData, MaxInboundReadLimit, MaxOutboundReadLimit, MaxCqEntries, MaxRegistrationSize, MaxWindowSize,
        LargeRequestThreshold, MaxCallerData, MaxCalleeData;
} ND_ADAPTER_INFO1;
""")
ffi.cdef("typedef struct { uint64_t Base, Length; uint32_t Token; } ND_MW_DESCRIPTOR;", packed=True)
version2.declare(_INTERFACES)


def class_factory(library: version2.Library) -> version2.Interface:
    code, pointer = library.class_object(version2.IID["IClassFactory"])
    assert code == version2.Status.SUCCESS, code
    return version2.Interface("IClassFactory", pointer)


def provider(library: version2.Library) -> version2.Interface:
    """A.3.2: create an instance through the class factory and release the factory."""
    factory = class_factory(library)
    out: Any = ffi.new("void **")
    assert factory.CreateInstance(ffi.NULL, version2.IID["INDProvider"], out) == version2.Status.SUCCESS
    factory.release()
    return version2.Interface("INDProvider", out[0])
