"""The extension module's names, sizes and numbers, and what each status means. Expected values are the contract's."""

from __future__ import annotations

import ast
import re
import socket
import uuid
from pathlib import Path

import pytest

import ndpy
from ndpy.platforms.networkdirect import native_calls
from ndpy.platforms.networkdirect.addresses import pack_resolved, unpack_address
from ndpy.platforms.networkdirect.native_calls import ffi, lib, status_error, status_name

CDEFS = Path(__file__).resolve().parent.parent.parent / "cdefs"

# Contract B.3 to B.5: number of slots, identifier, and the interface's own methods, which follow those of its base.
_INTERFACES = """
IUnknown 3 00000000-0000-0000-C000-000000000046 QueryInterface AddRef Release
IClassFactory 5 00000001-0000-0000-C000-000000000046 CreateInstance LockServer
IND2Overlapped 5 ABF72719-B016-4A40-A6F7-622791A7044C CancelOverlappedRequests GetOverlappedResult
IND2CompletionQueue 9 20CC445E-64A0-4CBB-AA75-F6A7251FDA9E GetNotifyAffinity Resize Notify GetResults
IND2SharedReceiveQueue 9 AABD67DC-459A-4DB1-826B-56CFCC278883 GetNotifyAffinity Modify Notify Receive
IND2MemoryWindow 4 070FE1F5-0AB5-4361-88DB-974BA704D4B9 GetRemoteToken
IND2MemoryRegion 9 55DFEA2F-BC56-4982-8A45-0301BE46C413 Register Deregister GetLocalToken GetRemoteToken
IND2QueuePair 10 EEF2F332-B75D-4063-BCE3-3A0BAD2D02CE Flush Send Receive Bind Invalidate Read Write
IND2Connector 16 7DD615C4-6B4C-4866-950C-F3B1D25A5302 Bind Connect CompleteConnect Accept Reject GetReadLimits
    GetPrivateData GetLocalAddress GetPeerAddress NotifyDisconnect Disconnect
IND2Listener 9 65D23D83-3A57-4E02-86A4-350165C2D130 Bind Listen GetLocalAddress GetConnectionRequest
IND2Adapter 14 D89C798C-4823-4D69-846C-DFDCCFF9E5F3 CreateOverlappedFile Query QueryAddressList CreateCompletionQueue
    CreateMemoryRegion CreateMemoryWindow CreateSharedReceiveQueue CreateQueuePair CreateQueuePairWithSrq
    CreateConnector CreateListener
IND2Provider 6 49EAE6C1-76C4-46D0-8003-5C2EAA2C9A8E QueryAddressList ResolveAddress OpenAdapter
INDOverlapped 5 C859E15E-75E2-4FE3-8D6D-0DFF36F02442 CancelOverlappedRequests GetOverlappedResult
INDCompletionQueue 8 1245A633-2A32-473A-830C-E05D1F869D02 Resize Notify GetResults
INDEndpoint 13 DBD00EAB-B679-44A9-BD65-E82F3DE12D1A Flush StartRequestBatch SubmitRequestBatch Send SendAndInvalidate
    Receive Bind Invalidate Read Write
INDConnector 15 1BCAF2D1-E274-4AEB-AC57-CD5D4376E0B7 CreateEndpoint Connect CompleteConnect Accept Reject
    GetConnectionData GetLocalAddress GetPeerAddress NotifyDisconnect Disconnect
INDListen 6 BB902588-BA3F-4441-9FE1-3B6795E4E668 GetConnectionRequest
INDAdapter 14 A023C5A0-5B73-43BC-8D20-33AA07E9510F GetFileHandle Query Control CreateCompletionQueue RegisterMemory
    DeregisterMemory CreateMemoryWindow CreateConnector Listen
INDProvider 5 0C5DD316-5FDF-47E6-B2D0-2A6EDA8D39DD QueryAddressList OpenAdapter
"""
INTERFACES = {
    name: (identifier, int(slots), " ".join(methods))
    for name, slots, identifier, *methods in map(str.split, re.split(r"\n(?=\w)", _INTERFACES.strip()))
}

# Contract B.2.
NUMBERS = {
    "ND_VERSION_1": 0x1,
    "ND_VERSION_2": 0x20000,
    "ND_ADAPTER_FLAG_IN_ORDER_DMA_SUPPORTED": 0x1,
    "ND_ADAPTER_FLAG_CQ_INTERRUPT_MODERATION_SUPPORTED": 0x4,
    "ND_ADAPTER_FLAG_MULTI_ENGINE_SUPPORTED": 0x8,
    "ND_ADAPTER_FLAG_CQ_RESIZE_SUPPORTED": 0x100,
    "ND_ADAPTER_FLAG_LOOPBACK_CONNECTIONS_SUPPORTED": 0x10000,
    "ND_CQ_NOTIFY_ERRORS": 0,
    "ND_CQ_NOTIFY_ANY": 1,
    "ND_CQ_NOTIFY_SOLICITED": 2,
    "ND_OP_FLAG_SILENT_SUCCESS": 0x1,
    "ND_OP_FLAG_READ_FENCE": 0x2,
    "ND_OP_FLAG_SEND_AND_SOLICIT_EVENT": 0x4,
    "ND_OP_FLAG_ALLOW_READ": 0x8,
    "ND_OP_FLAG_ALLOW_WRITE": 0x10,
    "ND_OP_FLAG_INLINE": 0x20,
}

# Contract B.1.3 and B.1.5: number, name, exception.
STATUSES = [
    (0x00000102, "ND_TIMEOUT", ndpy.TimeoutError),
    (0x80000005, "ND_BUFFER_OVERFLOW", ndpy.ProviderError),
    (0x80000011, "ND_DEVICE_BUSY", ndpy.DeviceBusyError),
    (0x8000001A, "ND_NO_MORE_ENTRIES", ndpy.QueueFullError),
    (0xC0000001, "ND_UNSUCCESSFUL", ndpy.ProviderError),
    (0xC0000005, "ND_ACCESS_VIOLATION", ndpy.AccessViolationError),
    (0xC0000008, "ND_INVALID_HANDLE", ndpy.ProviderError),
    (0xC000000D, "ND_INVALID_PARAMETER", ndpy.ProviderError),
    (0xC0000010, "ND_INVALID_DEVICE_REQUEST", ndpy.ProviderError),
    (0xC0000017, "ND_NO_MEMORY", ndpy.InsufficientResourcesError),
    (0xC0000030, "ND_INVALID_PARAMETER_MIX", ndpy.ProviderError),
    (0xC000003C, "ND_DATA_OVERRUN", ndpy.ProviderError),
    (0xC000003E, "STATUS_DATA_ERROR", ndpy.ProviderError),
    (0xC0000043, "ND_SHARING_VIOLATION", ndpy.AddressInUseError),
    (0xC000009A, "ND_INSUFFICIENT_RESOURCES", ndpy.InsufficientResourcesError),
    (0xC00000A3, "ND_DEVICE_NOT_READY", ndpy.ProviderError),
    (0xC00000B5, "ND_IO_TIMEOUT", ndpy.TimeoutError),
    (0xC00000BB, "ND_NOT_SUPPORTED", ndpy.UnsupportedError),
    (0xC00000CC, "STATUS_BAD_NETWORK_NAME", ndpy.AddressUnreachableError),
    (0xC00000E5, "ND_INTERNAL_ERROR", ndpy.ProviderError),
    *((0xC00000EE + number, f"ND_INVALID_PARAMETER_{number}", ndpy.ProviderError) for number in range(1, 11)),
    (0xC0000120, "ND_CANCELED", ndpy.CanceledError),
    (0xC000013D, "ND_REMOTE_ERROR", ndpy.ProviderError),
    (0xC0000141, "ND_INVALID_ADDRESS", ndpy.AddressUnreachableError),
    (0xC0000184, "ND_INVALID_DEVICE_STATE", ndpy.ProviderError),
    (0xC0000206, "ND_INVALID_BUFFER_SIZE", ndpy.ProviderError),
    (0xC0000209, "ND_TOO_MANY_ADDRESSES", ndpy.AddressInUseError),
    (0xC000020A, "ND_ADDRESS_ALREADY_EXISTS", ndpy.AddressInUseError),
    (0xC000020C, "STATUS_CONNECTION_DISCONNECTED", ndpy.ConnectionAbortedError),
    (0xC0000236, "ND_CONNECTION_REFUSED", ndpy.ConnectionRefusedError),
    (0xC0000238, "STATUS_ADDRESS_ALREADY_ASSOCIATED", ndpy.ConnectionActiveError),
    (0xC000023A, "ND_CONNECTION_INVALID", ndpy.NotConnectedError),
    (0xC000023B, "ND_CONNECTION_ACTIVE", ndpy.ConnectionActiveError),
    (0xC000023C, "ND_NETWORK_UNREACHABLE", ndpy.AddressUnreachableError),
    (0xC000023D, "ND_HOST_UNREACHABLE", ndpy.AddressUnreachableError),
    (0xC0000241, "ND_CONNECTION_ABORTED", ndpy.ConnectionAbortedError),
    (0xC00002B6, "ND_DEVICE_REMOVED", ndpy.DeviceRemovedError),
    # Contract B.1.7.
    (0x80004001, "E_NOTIMPL", ndpy.UnsupportedError),
    (0x80004002, "E_NOINTERFACE", ndpy.UnsupportedError),
    (0x80004003, "E_POINTER", ndpy.ProviderError),
    (0x80070057, "E_INVALIDARG", ndpy.ProviderError),
    (0xC00000EF, "ND_INVALID_PARAMETER_1", ndpy.ProviderError),
    (0xC00000F8, "ND_INVALID_PARAMETER_10", ndpy.ProviderError),
    (0x80040111, "CLASS_E_CLASSNOTAVAILABLE", ndpy.UnsupportedError),
]

# Contract B.6: size, then each field and its offset.
_LAYOUTS = """
nd_overlapped 32 internal:0 internal_high:8 offset:16 offset_high:20 event:24
nd2_sge 16 buffer:0 buffer_length:8 memory_region_token:12
nd2_result 32 status:0 bytes_transferred:4 queue_pair_context:8 request_context:16 request_type:24
nd2_adapter_info 96 info_version:0 vendor_id:4 device_id:6 adapter_id:8 max_registration_size:16 max_window_size:24
    max_initiator_sge:32 max_receive_sge:36 max_read_sge:40 max_transfer_length:44 max_inline_data_size:48
    max_inbound_read_limit:52 max_outbound_read_limit:56 max_receive_queue_depth:60 max_initiator_queue_depth:64
    max_shared_receive_queue_depth:68 max_completion_queue_depth:72 inline_request_threshold:76
    large_request_threshold:80 max_caller_data:84 max_callee_data:88 adapter_flags:92
nd_sge 24 address:0 length:8 region:16
nd_result 16 status:0 bytes_transferred:8
nd_adapter_info1 128 vendor_id:0 device_id:4 max_inbound_sge:8 max_inbound_requests:16 max_inbound_length:24
    max_outbound_sge:32 max_outbound_requests:40 max_outbound_length:48 max_inline_data:56 max_inbound_read_limit:64
    max_outbound_read_limit:72 max_cq_entries:80 max_registration_size:88 max_window_size:96 large_request_threshold:104
    max_caller_data:112 max_callee_data:120
"""

LAYOUTS = {
    f"struct {name}": ({field: int(offset) for field, offset in (word.split(":") for word in words)}, int(size))
    for name, size, *words in map(str.split, re.split(r"\n(?=\w)", _LAYOUTS.strip()))
}


def parts() -> tuple[str, ...]:
    """The files that cffi reads. This does not import the builder, which needs cffi's parser."""
    for node in ast.parse((CDEFS / "build_networkdirect.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS":
            found: tuple[str, ...] = ast.literal_eval(node.value)
            return found
    raise AssertionError("build_networkdirect.py has no PARTS")


def declarations() -> str:
    """The text of all declarations that cffi reads, without comments."""
    text = "\n".join((CDEFS / name).read_text() for name in parts())
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def declared_types(*kinds: str) -> set[str]:
    return {" ".join(found) for found in re.findall(rf"\b({'|'.join(kinds)})\s+(\w+)\s*\{{", declarations())}


def test_every_declared_name_can_be_reached():
    """cffi notices a wrong declaration only when its name is first used."""
    names = set(dir(lib))
    for name in names:
        thing = getattr(lib, name)
        assert isinstance(thing, int) or callable(thing), name
    functions = set(re.findall(r"^[\w *]*?\b(\w+)\([^;{]*\);", declarations(), flags=re.MULTILINE))
    assert functions <= names, functions - names
    enums = re.findall(r"\benum\s+\w+\s*\{(.*?)\}", declarations(), flags=re.DOTALL)
    constants = {name for enum in enums for name in re.findall(r"\bNDP?Y?_\w+", enum)}
    assert constants <= names, constants - names
    assert {"NDPY_HEADED", "NDPY_INLINE", "NDPY_UNALIGNED"} <= constants
    assert {"IND2QueuePair_Write", "ndpy_take_packets", "CreateIoCompletionPort", "ndpy_poll"} <= functions


def test_every_declared_type_has_a_size():
    structures = declared_types("struct", "union")
    assert len(structures) >= 10
    for name in structures:
        size = ffi.sizeof(name)
        fields = ffi.typeof(name).fields
        assert fields, name
        for field, description in fields:
            assert description.offset + ffi.sizeof(description.type) <= size, (name, field)
    for name in declared_types("enum"):
        assert ffi.sizeof(name) == 4, name


@pytest.mark.parametrize("interface", INTERFACES)
def test_interfaces_are_opaque_to_python(interface):
    assert ffi.sizeof(f"struct {interface} *") == 8
    with pytest.raises(ffi.error):
        ffi.sizeof(f"struct {interface}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_b_6_1_layouts(name):
    offsets, size = LAYOUTS[name]
    assert ffi.sizeof(name) == size
    assert {field: description.offset for field, description in ffi.typeof(name).fields} == offsets


def test_b_2_1_numbers():
    assert {name: getattr(lib, name) for name in NUMBERS} == NUMBERS


def test_b_2_flags_of_the_api_are_those_of_the_provider():
    assert int(ndpy.Notify.ERRORS) == 0
    assert int(ndpy.Notify.ANY) == 1
    assert int(ndpy.Notify.SOLICITED) == 2
    assert int(ndpy.Flags.SILENT_SUCCESS) == 0x1
    assert int(ndpy.Flags.READ_FENCE) == 0x2
    assert int(ndpy.Access.LOCAL_WRITE) == 0x1
    assert int(ndpy.Access.REMOTE_READ) == 0x2
    assert int(ndpy.Access.REMOTE_WRITE) == 0x5
    assert int(ndpy.Access.READ_SINK) == 0x8
    assert int(ndpy.Access.DO_NOT_SECURE_VM) == 0x80000000


@pytest.mark.parametrize("interface", INTERFACES)
def test_b_3_interface_identifiers(interface):
    iid = lib.ndpy_iid(interface.encode())
    assert iid != ffi.NULL
    assert uuid.UUID(bytes_le=bytes(ffi.buffer(iid, 16))) == uuid.UUID(INTERFACES[interface][0])


def test_an_interface_that_is_none_has_no_identifier():
    assert lib.ndpy_iid(b"IND3Adapter") == ffi.NULL


def test_b_4_2_methods_stand_in_the_order_of_their_slots():
    """build_networkdirect.py makes the tables of slots from these comments and declarations, in this order."""
    table = "".join((CDEFS / name).read_text() for name in parts() if name.endswith("interfaces.h"))
    head = r"/\* interface (\w+)(?: : (\w+))?, (\d+) slots \{([0-9A-F-]+)\} \*/"
    found = list(re.finditer(rf"{head}(.*?)(?=/\* interface|\Z)", table, re.DOTALL))
    assert {match[1] for match in found} == set(INTERFACES)
    slots = {"": 0}
    for match in found:
        interface, base, count, identifier, text = match.groups()
        methods = re.findall(rf"\b{interface}_(\w+)\(", text)
        slots[interface] = slots[base or ""] + len(methods)
        assert (identifier, int(count), " ".join(methods)) == INTERFACES[interface]
        assert slots[interface] == int(count)
        for method in methods:
            assert callable(getattr(lib, f"{interface}_{method}"))


@pytest.mark.parametrize(("number", "name", "kind"), STATUSES, ids=[name for _, name, _ in STATUSES])
def test_b_1_3_each_status_has_its_name_exception_and_sentence(number, name, kind):
    # Native calls return a status as a signed number.
    for status in (number, number - (1 << 32)):
        error = status_error("register", status)
        assert type(error) is kind
        assert (error.operation, error.native, error.native_name) == ("register", number, name)
        assert status_name(status) == name
    shown = str(error)
    assert shown.startswith("register: ")
    digits = str(number) if number < 0x10000 else f"0x{number:08x}"
    assert shown.endswith(f" [native status {digits} ({name})] (ndpy explain {error.problem})")
    assert len(error.message) > 5
    assert name not in error.message


def test_a_status_is_told_with_its_place_and_its_meaning():
    error = status_error("bind", 0xC0000043, where="192.0.2.1 port 7")
    assert (
        str(error) == "bind: 192.0.2.1 port 7: the address is in use [native status 0xc0000043 (ND_SHARING_VIOLATION)] "
        "(ndpy explain address-in-use)"
    )
    with pytest.raises(ndpy.AddressInUseError, match=r"^listen: here: the address is in use"):
        native_calls.check("listen", 0xC0000043, where="here")


def test_b_1_3_success_is_no_error():
    native_calls.check("register", 0)
    assert status_name(0) == "ND_SUCCESS"


@pytest.mark.parametrize("number", [0xC0001234, 0x40000001, 0x8007054F])
def test_an_unknown_status_passes_through_with_its_number(number):
    error = status_error("bind", number - (1 << 32) if number >> 31 else number)
    assert type(error) is ndpy.ProviderError
    assert (error.native, error.native_name) == (number, "")
    text = f"bind: a status that ndpy has no name for [native status 0x{number:08x}] (ndpy explain provider-error)"
    assert str(error) == text
    with pytest.raises(ndpy.ProviderError):
        native_calls.check("bind", number)


def test_b_1_2_pending_is_not_taken_for_success():
    assert native_calls.PENDING == 0x103
    with pytest.raises(ndpy.ProviderError):
        native_calls.check("register", 0x103)


def test_a_5_5_an_address_is_whole_or_none():
    packed = pack_resolved(socket.AF_INET6, ("2001:db8::1", 4791, 0, 0))
    assert unpack_address(packed) == ("2001:db8::1", 4791)
    assert unpack_address(packed + bytes(100)) == ("2001:db8::1", 4791)
    assert unpack_address(packed[:27]) is None
    packed = pack_resolved(socket.AF_INET, ("192.0.2.1", 4791))
    assert unpack_address(packed) == ("192.0.2.1", 4791)
    assert unpack_address(packed[:15]) is None


def test_an_ipv6_address_is_laid_out_as_sockaddr_in6():
    """Family, port and flow are the first 8 bytes. The address follows, then the scope in the machine's byte order."""
    packed = pack_resolved(socket.AF_INET6, ("fe80::1", 0x1234, 5, 7))
    assert packed == bytes.fromhex("1700 1234 00000005 fe80 000000000000 0000000000000001 07000000")
    assert unpack_address(packed) == ("fe80::1%7", 0x1234)
    assert pack_resolved(socket.AF_INET, ("192.0.2.1", 0x1234)) == bytes.fromhex("0200 1234 c0000201") + bytes(8)
