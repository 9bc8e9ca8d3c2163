"""NetworkDirect 2 as a program sees it: numbers, layouts and the order of methods, directly on the COM interfaces.

Everything here comes from the contract's tables B.1 to B.6 and nothing from softnd's own header, so that an error
in either shows. `softnd()` loads the DLL that SOFTND_DLL names, or softrdma/build/softnd.dll.
"""

from __future__ import annotations

import enum
import ipaddress
import os
import re
import struct
import uuid
from pathlib import Path
from typing import Any

import cffi

ffi = cffi.FFI()


class Status(enum.IntEnum):
    """Every status of table B.1.3, the statuses of B.1.5 that programs meet, and the COM values of B.1.7."""

    SUCCESS = 0x00000000
    S_FALSE = 0x00000001
    TIMEOUT = 0x00000102
    PENDING = 0x00000103
    BUFFER_OVERFLOW = 0x80000005
    DEVICE_BUSY = 0x80000011
    NO_MORE_ENTRIES = 0x8000001A
    UNSUCCESSFUL = 0xC0000001
    ACCESS_VIOLATION = 0xC0000005
    INVALID_HANDLE = 0xC0000008
    INVALID_PARAMETER = 0xC000000D
    INVALID_DEVICE_REQUEST = 0xC0000010
    NO_MEMORY = 0xC0000017
    INVALID_PARAMETER_MIX = 0xC0000030
    DATA_OVERRUN = 0xC000003C
    DATA_ERROR = 0xC000003E
    SHARING_VIOLATION = 0xC0000043
    INSUFFICIENT_RESOURCES = 0xC000009A
    DEVICE_NOT_READY = 0xC00000A3
    IO_TIMEOUT = 0xC00000B5
    NOT_SUPPORTED = 0xC00000BB
    BAD_NETWORK_NAME = 0xC00000CC
    INTERNAL_ERROR = 0xC00000E5
    INVALID_PARAMETER_1 = 0xC00000EF
    INVALID_PARAMETER_2 = 0xC00000F0
    INVALID_PARAMETER_3 = 0xC00000F1
    INVALID_PARAMETER_4 = 0xC00000F2
    INVALID_PARAMETER_5 = 0xC00000F3
    INVALID_PARAMETER_6 = 0xC00000F4
    INVALID_PARAMETER_7 = 0xC00000F5
    INVALID_PARAMETER_8 = 0xC00000F6
    INVALID_PARAMETER_9 = 0xC00000F7
    INVALID_PARAMETER_10 = 0xC00000F8
    CANCELED = 0xC0000120
    REMOTE_ERROR = 0xC000013D
    INVALID_ADDRESS = 0xC0000141
    INVALID_DEVICE_STATE = 0xC0000184
    INVALID_BUFFER_SIZE = 0xC0000206
    TOO_MANY_ADDRESSES = 0xC0000209
    ADDRESS_ALREADY_EXISTS = 0xC000020A
    CONNECTION_DISCONNECTED = 0xC000020C
    CONNECTION_REFUSED = 0xC0000236
    ADDRESS_ALREADY_ASSOCIATED = 0xC0000238
    CONNECTION_INVALID = 0xC000023A
    CONNECTION_ACTIVE = 0xC000023B
    NETWORK_UNREACHABLE = 0xC000023C
    HOST_UNREACHABLE = 0xC000023D
    CONNECTION_ABORTED = 0xC0000241
    DEVICE_REMOVED = 0xC00002B6
    E_NOINTERFACE = 0x80004002
    E_POINTER = 0x80004003
    E_INVALIDARG = 0x80070057
    CLASS_E_CLASSNOTAVAILABLE = 0x80040111
    CLASS_E_NOAGGREGATION = 0x80040110

    def __repr__(self) -> str:
        return self.name

    @property
    def failed(self) -> bool:
        """The result of the FAILED macro."""
        return self.value >= 0x80000000


def status(value: int) -> Status | int:
    """Return the status of a signed or unsigned 32-bit value."""
    value &= 0xFFFFFFFF
    try:
        return Status(value)
    except ValueError:
        return value


# B.2
ND_VERSION_1 = 0x1
ND_VERSION_2 = 0x20000


class AdapterFlag(enum.IntFlag):
    IN_ORDER_DMA = 0x1
    CQ_INTERRUPT_MODERATION = 0x4
    MULTI_ENGINE = 0x8
    CQ_RESIZE = 0x100
    LOOPBACK_CONNECTIONS = 0x10000


NOTIFY_ERRORS, NOTIFY_ANY, NOTIFY_SOLICITED = 0, 1, 2


class Mr(enum.IntFlag):
    LOCAL_READ = 0x0
    LOCAL_WRITE = 0x1
    REMOTE_READ = 0x2
    REMOTE_WRITE = 0x5
    READ_SINK = 0x8
    DO_NOT_SECURE_VM = 0x80000000
    EVERYTHING = 0xF


class Op(enum.IntFlag):
    NONE = 0x0
    SILENT_SUCCESS = 0x1
    READ_FENCE = 0x2
    SOLICIT = 0x4
    ALLOW_READ = 0x8
    ALLOW_WRITE = 0x10
    INLINE = 0x20


class Kind(enum.IntEnum):
    """The type of a request in its completion."""

    RECEIVE = 0
    SEND = 1
    BIND = 2
    INVALIDATE = 3
    READ = 4
    WRITE = 5


# B.3 and B.4: identifier, base, and the methods that follow those of the base.
_INTERFACES = """
interface IUnknown uuid(00000000-0000-0000-C000-000000000046) {
    int32_t QueryInterface(const void *iid, void **object);
    uint32_t AddRef();
    uint32_t Release();
};
interface IND2Overlapped : IUnknown uuid(ABF72719-B016-4A40-A6F7-622791A7044C) {
    int32_t CancelOverlappedRequests();
    int32_t GetOverlappedResult(OVERLAPPED *overlapped, int32_t wait);
};
interface IND2CompletionQueue : IND2Overlapped uuid(20CC445E-64A0-4CBB-AA75-F6A7251FDA9E) {
    int32_t GetNotifyAffinity(uint16_t *group, uintptr_t *affinity);
    int32_t Resize(uint32_t depth);
    int32_t Notify(uint32_t type, OVERLAPPED *overlapped);
    uint32_t GetResults(ND2_RESULT *results, uint32_t count);
};
interface IND2SharedReceiveQueue : IND2Overlapped uuid(AABD67DC-459A-4DB1-826B-56CFCC278883) {
    int32_t GetNotifyAffinity(uint16_t *group, uintptr_t *affinity);
    int32_t Modify(uint32_t depth, uint32_t threshold);
    int32_t Notify(OVERLAPPED *overlapped);
    int32_t Receive(void *context, const ND2_SGE *sge, uint32_t count);
};
interface IND2MemoryWindow : IUnknown uuid(070FE1F5-0AB5-4361-88DB-974BA704D4B9) {
    uint32_t GetRemoteToken();
};
interface IND2MemoryRegion : IND2Overlapped uuid(55DFEA2F-BC56-4982-8A45-0301BE46C413) {
    int32_t Register(const void *buffer, size_t size, uint32_t flags, OVERLAPPED *overlapped);
    int32_t Deregister(OVERLAPPED *overlapped);
    uint32_t GetLocalToken();
    uint32_t GetRemoteToken();
};
interface IND2QueuePair : IUnknown uuid(EEF2F332-B75D-4063-BCE3-3A0BAD2D02CE) {
    int32_t Flush();
    int32_t Send(void *context, const ND2_SGE *sge, uint32_t count, uint32_t flags);
    int32_t Receive(void *context, const ND2_SGE *sge, uint32_t count);
    int32_t Bind(void *context, void *region, void *window, const void *buffer, size_t size, uint32_t flags);
    int32_t Invalidate(void *context, void *window, uint32_t flags);
    int32_t Read(void *context, const ND2_SGE *sge, uint32_t count, uint64_t address, uint32_t token,
        uint32_t flags);
    int32_t Write(void *context, const ND2_SGE *sge, uint32_t count, uint64_t address, uint32_t token,
        uint32_t flags);
};
interface IND2Connector : IND2Overlapped uuid(7DD615C4-6B4C-4866-950C-F3B1D25A5302) {
    int32_t Bind(const void *address, uint32_t size);
    int32_t Connect(void *queue_pair, const void *address, uint32_t size, uint32_t inbound, uint32_t outbound,
        const void *private_data, uint32_t private_size, OVERLAPPED *overlapped);
    int32_t CompleteConnect(OVERLAPPED *overlapped);
    int32_t Accept(void *queue_pair, uint32_t inbound, uint32_t outbound, const void *private_data,
        uint32_t private_size, OVERLAPPED *overlapped);
    int32_t Reject(const void *private_data, uint32_t private_size);
    int32_t GetReadLimits(uint32_t *inbound, uint32_t *outbound);
    int32_t GetPrivateData(void *data, uint32_t *size);
    int32_t GetLocalAddress(void *address, uint32_t *size);
    int32_t GetPeerAddress(void *address, uint32_t *size);
    int32_t NotifyDisconnect(OVERLAPPED *overlapped);
    int32_t Disconnect(OVERLAPPED *overlapped);
};
interface IND2Listener : IND2Overlapped uuid(65D23D83-3A57-4E02-86A4-350165C2D130) {
    int32_t Bind(const void *address, uint32_t size);
    int32_t Listen(uint32_t backlog);
    int32_t GetLocalAddress(void *address, uint32_t *size);
    int32_t GetConnectionRequest(void *connector, OVERLAPPED *overlapped);
};
interface IND2Adapter : IUnknown uuid(D89C798C-4823-4D69-846C-DFDCCFF9E5F3) {
    int32_t CreateOverlappedFile(void **file);
    int32_t Query(void *info, uint32_t *size);
    int32_t QueryAddressList(void *list, uint32_t *size);
    int32_t CreateCompletionQueue(const void *iid, void *file, uint32_t depth, uint16_t group, uintptr_t affinity,
        void **object);
    int32_t CreateMemoryRegion(const void *iid, void *file, void **object);
    int32_t CreateMemoryWindow(const void *iid, void **object);
    int32_t CreateSharedReceiveQueue(const void *iid, void *file, uint32_t depth, uint32_t max_sge,
        uint32_t threshold, uint16_t group, uintptr_t affinity, void **object);
    int32_t CreateQueuePair(const void *iid, void *receive_cq, void *initiator_cq, void *context,
        uint32_t receive_depth, uint32_t initiator_depth, uint32_t receive_sge, uint32_t initiator_sge,
        uint32_t inline_size, void **object);
    int32_t CreateQueuePairWithSrq(const void *iid, void *receive_cq, void *initiator_cq, void *srq, void *context,
        uint32_t initiator_depth, uint32_t initiator_sge, uint32_t inline_size, void **object);
    int32_t CreateConnector(const void *iid, void *file, void **object);
    int32_t CreateListener(const void *iid, void *file, void **object);
};
interface IND2Provider : IUnknown uuid(49EAE6C1-76C4-46D0-8003-5C2EAA2C9A8E) {
    int32_t QueryAddressList(void *list, uint32_t *size);
    int32_t ResolveAddress(const void *address, uint32_t size, uint64_t *id);
    int32_t OpenAdapter(const void *iid, uint64_t id, void **object);
};
"""

# B.6
_STRUCTURES = """
typedef struct { uintptr_t Internal, InternalHigh; uint32_t Offset, OffsetHigh; void *hEvent; } OVERLAPPED;
typedef struct {
    int32_t Status; uint32_t BytesTransferred; void *QueuePairContext, *RequestContext; uint32_t RequestType;
} ND2_RESULT;
typedef struct { void *Buffer; uint32_t BufferLength, MemoryRegionToken; } ND2_SGE;
typedef struct {
    uint32_t InfoVersion; uint16_t VendorId, DeviceId; uint64_t AdapterId;
    size_t MaxRegistrationSize, MaxWindowSize;
    uint32_t MaxInitiatorSge, MaxReceiveSge, MaxReadSge, MaxTransferLength, MaxInlineDataSize, MaxInboundReadLimit,
        MaxOutboundReadLimit, MaxReceiveQueueDepth, MaxInitiatorQueueDepth, MaxSharedReceiveQueueDepth,
        MaxCompletionQueueDepth, InlineRequestThreshold, LargeRequestThreshold, MaxCallerData, MaxCalleeData,
        AdapterFlags;
} ND2_ADAPTER_INFO;
typedef struct { void *lpSockaddr; int32_t iSockaddrLength; } SOCKET_ADDRESS;
"""

_WINDOWS = """
void *CreateEventW(void *security, int32_t manual, int32_t initial, void *name);
int32_t SetEvent(void *event);
int32_t ResetEvent(void *event);
uint32_t WaitForSingleObject(void *handle, uint32_t ms);
int32_t CloseHandle(void *handle);
void *CreateIoCompletionPort(void *file, void *port, uintptr_t key, uint32_t threads);
int32_t GetQueuedCompletionStatus(void *port, uint32_t *bytes, uintptr_t *key, OVERLAPPED **overlapped, uint32_t ms);
int32_t GetOverlappedResult(void *file, OVERLAPPED *overlapped, uint32_t *bytes, int32_t wait);
int32_t GetHandleInformation(void *handle, uint32_t *flags);
void *VirtualAlloc(void *address, size_t size, uint32_t type, uint32_t protection);
int32_t VirtualFree(void *address, size_t size, uint32_t type);
int32_t VirtualProtect(void *address, size_t size, uint32_t protection, uint32_t *old);
void *LoadLibraryExW(const void *path, void *file, uint32_t flags);
int32_t FreeLibrary(void *module);
void *GetProcAddress(void *module, const char *name);
void *GetModuleHandleW(const void *name);
uint32_t GetLastError(void);
void Sleep(uint32_t ms);
void *CreateFileW(const void *name, uint32_t access, uint32_t share, void *security, uint32_t how, uint32_t flags,
    void *template_file);
"""

ORDER: dict[str, list[str]] = {}
IID: dict[str, Any] = {}
BASE: dict[str, str] = {}
_methods: dict[str, list[str]] = {}


def guid(text: str) -> Any:
    """Return the 16 bytes of a GUID in memory."""
    return ffi.new("unsigned char[16]", uuid.UUID(text).bytes_le)


def declare(interfaces: str) -> None:
    """Add the interfaces to ffi, ORDER, IID and BASE."""
    for name, base, identifier, own in re.findall(
        r"interface (\w+)(?: : (\w+))? uuid\((\S+)\) {(.*?)}", interfaces, re.DOTALL
    ):
        lines = list(_methods.get(base, ()))
        order = list(ORDER.get(base, ()))
        for returns, method, parameters in re.findall(r"(\w[\w *]*?)(\w+)\((.*?)\);", own, re.DOTALL):
            separator = ", " if parameters else ""
            lines.append(f"{returns} (*{method})(void *self{separator}{parameters});")
            order.append(method)
        _methods[name], ORDER[name], IID[name], BASE[name] = lines, order, guid(identifier), base
        ffi.cdef(f"typedef struct {{ {' '.join(lines)} }} {name}_methods;")
        ffi.cdef(f"typedef struct {{ {name}_methods *methods; }} {name};")


ffi.cdef(_STRUCTURES)
declare(_INTERFACES)
ffi.cdef(_WINDOWS)
ffi.cdef("typedef int32_t (*get_class_object)(const void *clsid, const void *iid, void **object);")
ffi.cdef("typedef int32_t (*can_unload_now)(void);")
kernel32: Any = ffi.dlopen("kernel32.dll")
NULL = ffi.NULL
INVALID_HANDLE = ffi.cast("void *", -1)
WAIT_TIMEOUT = 0x102
PAGE_NOACCESS, PAGE_READONLY, PAGE_READWRITE = 0x01, 0x02, 0x04
MEM_COMMIT_RESERVE, MEM_RELEASE = 0x3000, 0x8000
PAGE = 4096


IID_INDMemoryWindow = IID["IND2MemoryWindow"]  # one identifier for both versions (B.3.1)
IID_unknown = guid("12345678-9ABC-DEF0-1234-56789ABCDEF0")


class Interface:
    """A COM pointer. Its methods are called by name. An HRESULT is returned as a Status."""

    def __init__(self, name: str, pointer: Any) -> None:
        self.name = name
        self.pointer = ffi.cast(f"{name} *", pointer)
        self.references = 1

    def __getattr__(self, method: str) -> Any:
        function = getattr(self.pointer.methods, method)
        signed = ffi.typeof(function).result.cname == "int32_t"
        pointer = self.pointer

        if signed:

            def call(*arguments: Any) -> Any:
                return status(function(pointer, *arguments))
        else:

            def call(*arguments: Any) -> Any:
                return function(pointer, *arguments)

        setattr(self, method, call)
        return call

    def release(self) -> int | None:
        """Release the reference of this wrapper. Return None if that was done before."""
        if not self.references:
            return None
        self.references = 0
        left: int = self.pointer.methods.Release(self.pointer)
        return left

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self.pointer))


def raw(thing: Any) -> Any:
    """Return the pointer to pass for an interface, a cdata pointer or None."""
    if thing is None:
        return NULL
    return thing.pointer if isinstance(thing, Interface) else thing


def query_interface(thing: Interface, name_or_iid: Any) -> tuple[Any, Any]:
    """Return (status, pointer) of QueryInterface."""
    out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
    iid = IID[name_or_iid] if isinstance(name_or_iid, str) else name_or_iid
    return thing.QueryInterface(iid, out), out[0]


DLL = Path(os.environ.get("SOFTND_DLL") or Path(__file__).parents[2] / "softrdma" / "build" / "softnd.dll")


class Library:
    """The provider's DLL, loaded by path as users of the catalogue load it."""

    def __init__(self, path: Path | str = DLL) -> None:
        self.path = path
        name = ffi.new("char16_t[]", str(path))
        self.module = kernel32.LoadLibraryExW(name, NULL, 0)
        if self.module == NULL:
            raise OSError(f"{path} cannot be loaded, error {kernel32.GetLastError()}")
        self.get_class_object = self._export("DllGetClassObject", "get_class_object")
        self.can_unload_now = self._export("DllCanUnloadNow", "can_unload_now")

    def _export(self, name: str, kind: str) -> Any:
        address = kernel32.GetProcAddress(self.module, name.encode())
        if address == NULL:
            raise OSError(f"no export {name}")
        return ffi.cast(kind, address)

    def class_object(self, iid: Any = IID["IND2Provider"], clsid: Any = None) -> tuple[Any, Any]:
        """Return (status, pointer) of DllGetClassObject."""
        out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
        return status(self.get_class_object(clsid or IID_unknown, iid, out)), out[0]

    def provider(self) -> Interface:
        code, pointer = self.class_object()
        assert code == Status.SUCCESS
        return Interface("IND2Provider", pointer)

    def can_unload(self) -> Any:
        return status(self.can_unload_now())

    def free(self) -> None:
        assert kernel32.FreeLibrary(self.module)


_library: Library | None = None


def softnd() -> Library:
    """Return the DLL under test, which is loaded once."""
    global _library
    if _library is None:
        _library = Library()
    return _library


def sockaddr(address: str, port: int = 0, scope: int = 0) -> Any:
    """Return a SOCKADDR in memory; len() gives its length."""
    parsed = ipaddress.ip_address(address)
    packed_port = struct.pack(">H", port)
    if parsed.version == 4:
        data = struct.pack("<H", 2) + packed_port + parsed.packed + bytes(8)
    else:
        data = struct.pack("<H", 23) + packed_port + bytes(4) + parsed.packed + struct.pack("<I", scope)
    return ffi.new("unsigned char[]", data)


def parse_sockaddr(data: bytes) -> tuple[str, int]:
    """Return (address, port) of a SOCKADDR."""
    (family,) = struct.unpack_from("<H", data)
    (port,) = struct.unpack_from(">H", data, 2)
    if family == 2:
        return str(ipaddress.IPv4Address(data[4:8])), port
    assert family == 23, family
    return str(ipaddress.IPv6Address(data[8:24])), port


def last_error() -> int:
    """Return GetLastError after the last call through cffi."""
    code, _ = ffi.getwinerror()
    return int(code)
