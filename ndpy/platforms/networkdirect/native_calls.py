"""The compiled module that calls providers, and the exceptions for the statuses of NetworkDirect (contract B.1)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ndpy import errors

try:
    from ndpy._networkdirect import ffi as ffi
    from ndpy._networkdirect import lib as lib
except ImportError as failure:
    raise errors.ProviderNotFoundError(
        f"ndpy's extension module for NetworkDirect is missing ({failure}); install ndpy with pip, or run "
        "`python setup.py build_ext --inplace` in a checkout (needs a C compiler)"
    ) from None

SUCCESS = 0
PENDING = 0x103
TIMEOUT = 0x102
BUFFER_OVERFLOW = 0x80000005
DEVICE_BUSY = 0x80000011
NO_MORE_ENTRIES = 0x8000001A
ACCESS_VIOLATION = 0xC0000005
INSUFFICIENT_RESOURCES = 0xC000009A
NO_MEMORY = 0xC0000017
IO_TIMEOUT = 0xC00000B5
CANCELED = 0xC0000120
INVALID_ADDRESS = 0xC0000141
CONNECTION_REFUSED = 0xC0000236
CONNECTION_INVALID = 0xC000023A
CONNECTION_ABORTED = 0xC0000241
NETWORK_UNREACHABLE = 0xC000023C
HOST_UNREACHABLE = 0xC000023D
DEVICE_REMOVED = 0xC00002B6
INTERNAL_ERROR = 0xC00000E5

# The statuses of B.1.3, B.1.5 and B.1.7: name, exception, meaning.
_STATUSES: dict[int, tuple[str, type[errors.ProviderError], str]] = {
    TIMEOUT: ("ND_TIMEOUT", errors.TimeoutError, "no answer in time"),
    BUFFER_OVERFLOW: ("ND_BUFFER_OVERFLOW", errors.ProviderError, "too small for the result"),
    DEVICE_BUSY: ("ND_DEVICE_BUSY", errors.DeviceBusyError, "it is in use"),
    NO_MORE_ENTRIES: ("ND_NO_MORE_ENTRIES", errors.QueueFullError, "the queue is full"),
    0xC0000001: ("ND_UNSUCCESSFUL", errors.ProviderError, "the provider does not say why"),
    ACCESS_VIOLATION: ("ND_ACCESS_VIOLATION", errors.AccessViolationError, "the memory does not allow this"),
    0xC0000008: ("ND_INVALID_HANDLE", errors.ProviderError, "a handle is not valid"),
    0xC000000D: ("ND_INVALID_PARAMETER", errors.ProviderError, "a value that the provider does not take"),
    0xC0000010: ("ND_INVALID_DEVICE_REQUEST", errors.ProviderError, "the request is malformed"),
    NO_MEMORY: ("ND_NO_MEMORY", errors.InsufficientResourcesError, "out of memory"),
    0xC0000030: ("ND_INVALID_PARAMETER_MIX", errors.ProviderError, "values that do not go together"),
    0xC000003C: ("ND_DATA_OVERRUN", errors.ProviderError, "more than the adapter takes"),
    0xC000003E: ("STATUS_DATA_ERROR", errors.ProviderError, "the data could not be delivered"),
    0xC0000043: ("ND_SHARING_VIOLATION", errors.AddressInUseError, "the address is in use"),
    INSUFFICIENT_RESOURCES: (
        "ND_INSUFFICIENT_RESOURCES",
        errors.InsufficientResourcesError,
        "the adapter or the system lacks resources for this",
    ),
    0xC00000A3: ("ND_DEVICE_NOT_READY", errors.ProviderError, "the adapter is not ready"),
    IO_TIMEOUT: ("ND_IO_TIMEOUT", errors.TimeoutError, "no answer in time"),
    0xC00000BB: ("ND_NOT_SUPPORTED", errors.UnsupportedError, "the provider cannot do this"),
    0xC00000CC: ("STATUS_BAD_NETWORK_NAME", errors.AddressUnreachableError, "nothing can be reached at this address"),
    INTERNAL_ERROR: ("ND_INTERNAL_ERROR", errors.ProviderError, "the provider failed"),
    CANCELED: ("ND_CANCELED", errors.CanceledError, "cancelled"),
    0xC000013D: ("ND_REMOTE_ERROR", errors.ProviderError, "the peer's side broke"),
    INVALID_ADDRESS: ("ND_INVALID_ADDRESS", errors.AddressUnreachableError, "not an address that this adapter can use"),
    0xC0000184: ("ND_INVALID_DEVICE_STATE", errors.ProviderError, "not possible in this state"),
    0xC0000206: ("ND_INVALID_BUFFER_SIZE", errors.ProviderError, "a size that the provider does not take"),
    0xC0000209: ("ND_TOO_MANY_ADDRESSES", errors.AddressInUseError, "no port is left"),
    0xC000020A: ("ND_ADDRESS_ALREADY_EXISTS", errors.AddressInUseError, "there is such a connection already"),
    0xC000020C: ("STATUS_CONNECTION_DISCONNECTED", errors.ConnectionAbortedError, "the connection has ended"),
    CONNECTION_REFUSED: ("ND_CONNECTION_REFUSED", errors.ConnectionRefusedError, "the peer refused"),
    0xC0000238: ("STATUS_ADDRESS_ALREADY_ASSOCIATED", errors.ConnectionActiveError, "it has an address already"),
    CONNECTION_INVALID: ("ND_CONNECTION_INVALID", errors.NotConnectedError, "not in a state that has a connection"),
    0xC000023B: ("ND_CONNECTION_ACTIVE", errors.ConnectionActiveError, "it is connecting or connected"),
    NETWORK_UNREACHABLE: (
        "ND_NETWORK_UNREACHABLE",
        errors.AddressUnreachableError,
        "there is no route to that network",
    ),
    HOST_UNREACHABLE: ("ND_HOST_UNREACHABLE", errors.AddressUnreachableError, "there is no route to that host"),
    CONNECTION_ABORTED: ("ND_CONNECTION_ABORTED", errors.ConnectionAbortedError, "the peer has gone"),
    DEVICE_REMOVED: ("ND_DEVICE_REMOVED", errors.DeviceRemovedError, "the adapter has gone"),
    0x80004001: ("E_NOTIMPL", errors.UnsupportedError, "the provider does not have this call"),
    0x80004002: ("E_NOINTERFACE", errors.UnsupportedError, "the provider does not have this interface"),
    0x80004003: ("E_POINTER", errors.ProviderError, "a pointer is not valid"),
    0x80070057: ("E_INVALIDARG", errors.ProviderError, "a value that the provider does not take"),
    0x8007000E: ("E_OUTOFMEMORY", errors.InsufficientResourcesError, "out of memory"),
    0x80040111: ("CLASS_E_CLASSNOTAVAILABLE", errors.UnsupportedError, "the provider does not have this class"),
    **{
        0xC00000EF + number: (
            f"ND_INVALID_PARAMETER_{number + 1}",
            errors.ProviderError,
            f"the provider does not take the value of parameter {number + 1}",
        )
        for number in range(10)
    },
}


def status_name(status: int) -> str:
    """Return the name of a status. "" if it is unknown."""
    known = _STATUSES.get(status & 0xFFFFFFFF)
    return known[0] if known else ("ND_SUCCESS" if status == SUCCESS else "")


def status_error(operation: str, status: int, message: str = "", *, where: str = "") -> errors.ProviderError:
    """Return the exception for a failure status. An unknown status gives a plain ProviderError.

    message: the text instead of the status' meaning. where: what comes before the text.
    """
    status &= 0xFFFFFFFF
    name, kind, meaning = _STATUSES.get(status, ("", errors.ProviderError, "a status that ndpy has no name for"))
    text = message or meaning
    return kind(f"{where}: {text}" if where else text, operation=operation, native=status, native_name=name)


def check(operation: str, status: int, message: str = "", *, where: str = "") -> None:
    """Raise unless the status is ND_SUCCESS. See status_error()."""
    if status:
        raise status_error(operation, status, message, where=where)


def create(operation: str, interface: str, function: Callable[..., int], native: Any, *arguments: Any) -> Any:
    """Make an object with function(native, IID of `interface`, *arguments, out), and return it."""
    return create_version1(operation, interface, function, native, lib.ndpy_iid(interface.encode()), *arguments)


def create_version1(
    operation: str, interface: str, function: Callable[..., int], native: Any, *arguments: Any, where: str = ""
) -> Any:
    """Do what create() does, with a method that takes no IID, as in version 1.

    where: what comes before the text of the exception if the provider refuses.
    """
    out = ffi.new("void **")
    check(operation, function(native, *arguments, out), where=where)
    if out[0] == ffi.NULL:
        raise errors.ProviderError(f"the provider reports success, but gave no {interface}", operation=operation)
    return ffi.cast(f"struct {interface} *", out[0])


def release(native: Any) -> None:
    """Release the reference to an object of a provider."""
    lib.IUnknown_Release(ffi.cast("struct IUnknown *", native))


def release_once(owner: Any, field: str) -> None:
    """Release the object in a field of its owner, if there is one.

    Ctrl-C may come after the object has gone. Nobody may release it a second time.
    """
    native = getattr(owner, field)
    if native is None:
        return
    unknown = ffi.cast("struct IUnknown *", native)
    is_called = False
    try:
        # Ctrl-C may come between these two as well. Then nothing was released.
        setattr(owner, field, None)
        is_called = True
        lib.IUnknown_Release(unknown)
    except BaseException:
        if not is_called:
            setattr(owner, field, native)
        raise


def query_adapter(structure: str, size_type: str, call: Callable[[Any, Any], int]) -> Any:
    """Return the structure that call(structure, size), a Query of an adapter, has filled (contract B.7.2)."""
    length = ffi.sizeof(f"struct {structure}")
    info, size = ffi.new(f"struct {structure} *"), ffi.new(size_type, length)
    status = call(info, size)
    if status & 0xFFFFFFFF == BUFFER_OVERFLOW:
        # The provider insists on a larger buffer than the structure.
        larger = ffi.new("unsigned char[]", size[0])
        status = call(ffi.cast(f"struct {structure} *", larger), size)
        ffi.memmove(info, larger, length)
    check("query adapter", status)
    return info


def win32_error(operation: str, number: int, message: str) -> errors.ProviderError:
    """Return the exception for a Win32 error number."""
    text = ctypes.FormatError(number).strip()  # type: ignore[attr-defined, unused-ignore]
    return errors.ProviderError(f"{message}: {text}", operation=operation, native=number, native_name="")
