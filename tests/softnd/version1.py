"""NetworkDirect 1 as a program sees it, from the contract's tables B.3, B.5 and B.6. version2 has the statuses."""

from __future__ import annotations

from typing import Any

import version2
from version2 import ffi

LOCAL_LENGTH = version2.Status.DATA_OVERRUN  # B.1.4
INVALIDATION_ERROR = version2.Status.INVALID_DEVICE_REQUEST
TCP, UDP = 6, 17

_INTERFACES: version2.Interfaces = {
    "IClassFactory": (
        "IUnknown",
        "00000001-0000-0000-C000-000000000046",
        [
            ("CreateInstance", "int32_t", "void *outer, const void *iid, void **object"),
            ("LockServer", "int32_t", "int32_t lock"),
        ],
    ),
    "INDOverlapped": (
        "IUnknown",
        "C859E15E-75E2-4FE3-8D6D-0DFF36F02442",
        [
            ("CancelOverlappedRequests", "int32_t", ""),
            ("GetOverlappedResult", "int32_t", "OVERLAPPED *overlapped, size_t *bytes, int32_t wait"),
        ],
    ),
    "INDCompletionQueue": (
        "INDOverlapped",
        "1245A633-2A32-473A-830C-E05D1F869D02",
        [
            ("Resize", "int32_t", "size_t entries"),
            ("Notify", "int32_t", "uint32_t type, OVERLAPPED *overlapped"),
            ("GetResults", "size_t", "ND_RESULT **results, size_t count"),
        ],
    ),
    "INDMemoryWindow": ("IUnknown", "070FE1F5-0AB5-4361-88DB-974BA704D4B9", []),
    "INDEndpoint": (
        "IUnknown",
        "DBD00EAB-B679-44A9-BD65-E82F3DE12D1A",
        [
            ("Flush", "int32_t", ""),
            ("StartRequestBatch", "void", ""),
            ("SubmitRequestBatch", "void", ""),
            ("Send", "int32_t", "ND_RESULT *result, const ND_SGE *sgl, size_t count, uint32_t flags"),
            (
                "SendAndInvalidate",
                "int32_t",
                "ND_RESULT *result, const ND_SGE *sgl, size_t count, const ND_MW_DESCRIPTOR *remote, uint32_t flags",
            ),
            ("Receive", "int32_t", "ND_RESULT *result, const ND_SGE *sgl, size_t count"),
            (
                "Bind",
                "int32_t",
                "ND_RESULT *result, uintptr_t memory, void *window, const void *buffer, size_t size, uint32_t flags, "
                "ND_MW_DESCRIPTOR *descriptor",
            ),
            ("Invalidate", "int32_t", "ND_RESULT *result, void *window, uint32_t flags"),
            (
                "Read",
                "int32_t",
                "ND_RESULT *result, const ND_SGE *sgl, size_t count, const ND_MW_DESCRIPTOR *remote, uint64_t offset, "
                "uint32_t flags",
            ),
            (
                "Write",
                "int32_t",
                "ND_RESULT *result, const ND_SGE *sgl, size_t count, const ND_MW_DESCRIPTOR *remote, uint64_t offset, "
                "uint32_t flags",
            ),
        ],
    ),
    "INDConnector": (
        "INDOverlapped",
        "1BCAF2D1-E274-4AEB-AC57-CD5D4376E0B7",
        [
            (
                "CreateEndpoint",
                "int32_t",
                "void *inbound, void *outbound, size_t inbound_entries, size_t outbound_entries, size_t inbound_sge, "
                "size_t outbound_sge, size_t inbound_limit, size_t outbound_limit, size_t *max_inline, void **object",
            ),
            (
                "Connect",
                "int32_t",
                "void *endpoint, const void *address, size_t size, int32_t protocol, uint16_t local_port, "
                "const void *private_data, size_t private_size, OVERLAPPED *overlapped",
            ),
            ("CompleteConnect", "int32_t", "OVERLAPPED *overlapped"),
            (
                "Accept",
                "int32_t",
                "void *endpoint, const void *private_data, size_t private_size, OVERLAPPED *overlapped",
            ),
            ("Reject", "int32_t", "const void *private_data, size_t private_size"),
            ("GetConnectionData", "int32_t", "size_t *inbound, size_t *outbound, void *private_data, size_t *size"),
            ("GetLocalAddress", "int32_t", "void *address, size_t *size"),
            ("GetPeerAddress", "int32_t", "void *address, size_t *size"),
            ("NotifyDisconnect", "int32_t", "OVERLAPPED *overlapped"),
            ("Disconnect", "int32_t", "OVERLAPPED *overlapped"),
        ],
    ),
    "INDListen": (
        "INDOverlapped",
        "BB902588-BA3F-4441-9FE1-3B6795E4E668",
        [("GetConnectionRequest", "int32_t", "void *connector, OVERLAPPED *overlapped")],
    ),
    "INDAdapter": (
        "INDOverlapped",
        "A023C5A0-5B73-43BC-8D20-33AA07E9510F",
        [
            ("GetFileHandle", "void *", ""),
            ("Query", "int32_t", "uint32_t version, ND_ADAPTER_INFO1 *info, size_t *size"),
            (
                "Control",
                "int32_t",
                "uint32_t code, const void *in, size_t in_size, void *out, size_t out_size, size_t *returned, "
                "OVERLAPPED *overlapped",
            ),
            ("CreateCompletionQueue", "int32_t", "size_t entries, void **object"),
            (
                "RegisterMemory",
                "int32_t",
                "const void *buffer, size_t size, OVERLAPPED *overlapped, uintptr_t *memory",
            ),
            ("DeregisterMemory", "int32_t", "uintptr_t memory, OVERLAPPED *overlapped"),
            ("CreateMemoryWindow", "int32_t", "ND_RESULT *invalidate_result, void **object"),
            ("CreateConnector", "int32_t", "void **object"),
            ("Listen", "int32_t", "size_t backlog, int32_t protocol, uint16_t port, uint16_t *assigned, void **object"),
        ],
    ),
    "INDProvider": (
        "IUnknown",
        "0C5DD316-5FDF-47E6-B2D0-2A6EDA8D39DD",
        [
            ("QueryAddressList", "int32_t", "void *list, size_t *size"),
            ("OpenAdapter", "int32_t", "const void *address, size_t size, void **object"),
        ],
    ),
}

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
