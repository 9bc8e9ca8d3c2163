"""Asks a provider of version 1 for its addresses, and for the abilities of the adapter at each address."""

from __future__ import annotations

from typing import Any

from ndpy import errors
from ndpy.platforms.networkdirect.addresses import address_list, pack_address, unpack_address
from ndpy.platforms.networkdirect.native_calls import check, create_version1, ffi, lib, query_adapter, release
from ndpy.platforms.networkdirect.provider_dll import Provider
from ndpy.vocabulary.flags import Capability

# ND_ADAPTER_INFO1 has no flags. Every adapter of the version has windows, CompleteConnect and Reject, SendAndInvalidate
# and Resize. ndpy assumes that an adapter can connect to itself. It does not assume that bytes arrive in order.
_CAPABILITIES = (
    Capability.RELIABLE_CONNECTIONS
    | Capability.MEMORY_WINDOWS
    | Capability.REFUSE_OFFER
    | Capability.SEND_INVALIDATE
    | Capability.RESIZE_COMPLETION_QUEUE
    | Capability.LOOPBACK_CONNECTIONS
)

# Depths and sizes have 64 bits in version 1, but 32 in requests.
_MOST = 0xFFFFFFFF


def _provider_object(provider: Provider, provider_id: str) -> Any:
    """Make an INDProvider with the provider's class factory (contract A.3.2)."""
    factory = provider.class_object("IClassFactory", provider_id)
    try:
        out = ffi.new("void **")
        status = lib.IClassFactory_CreateInstance(factory, ffi.NULL, lib.ndpy_iid(b"INDProvider"), out)
        check("load provider", status, f"{provider.path} gives no INDProvider")
    finally:
        release(factory)
    if out[0] == ffi.NULL:
        raise errors.ProviderError(
            f"{provider.path} reports success, but gave no INDProvider", operation="load provider"
        )
    return ffi.cast("struct INDProvider *", out[0])


def addresses(provider: Provider, provider_id: str) -> list[str]:
    """Return the addresses by which a provider's adapters can be opened."""
    native = _provider_object(provider, provider_id)
    try:
        found = address_list(
            "list adapters", lambda out, size: lib.INDProvider_QueryAddressList(native, out, size), "size_t *"
        )
    except errors.ProviderError as failure:
        raise provider.named(failure) from None
    finally:
        release(native)
    return list(dict.fromkeys(address[0] for data in found if (address := unpack_address(data)) is not None))


def open_native(provider: Provider, provider_id: str, address: str) -> Any:
    """Open the INDAdapter at an address (contract A.6.8)."""
    native = _provider_object(provider, provider_id)
    packed = pack_address((address, 0))
    try:
        return create_version1("open adapter", "INDAdapter", lib.INDProvider_OpenAdapter, native, packed, len(packed))
    except errors.ProviderError as failure:
        raise provider.named(failure) from None
    finally:
        release(native)


def examine(provider: Provider, provider_id: str, address: str) -> tuple[dict[str, int], Capability]:
    """Return (identity and limits, capabilities) of the adapter at an address."""
    native = open_native(provider, provider_id, address)
    try:
        info = query_adapter(
            "nd_adapter_info1",
            "size_t *",
            lambda info, size: lib.INDAdapter_Query(native, lib.ND_VERSION_1, info, size),
        )
    except errors.ProviderError as failure:
        raise provider.named(failure) from None
    finally:
        release(native)
    limits = {
        "vendor_id": info.vendor_id,
        "device_id": info.device_id,
        "max_registration_size": info.max_registration_size,
        "max_window_size": min(info.max_window_size, info.max_registration_size),
        "max_initiator_sge": info.max_outbound_sge,
        "max_receive_sge": info.max_inbound_sge,
        "max_read_sge": info.max_outbound_sge,
        "max_transfer_length": min(info.max_outbound_length, info.max_inbound_length),
        # The provider decides which requests it inlines. A request cannot ask for it (contract I.4.3).
        "max_inline_data_size": 0,
        "max_inbound_read_limit": info.max_inbound_read_limit,
        "max_outbound_read_limit": info.max_outbound_read_limit,
        "max_receive_queue_depth": info.max_inbound_requests,
        "max_initiator_queue_depth": info.max_outbound_requests,
        "max_shared_receive_queue_depth": 0,
        "max_completion_queue_depth": info.max_cq_entries,
        "max_caller_data": info.max_caller_data,
        "max_callee_data": info.max_callee_data,
    }
    whole = ("max_registration_size", "max_window_size")
    return {
        name: int(value) if name in whole else min(int(value), _MOST) for name, value in limits.items()
    }, _CAPABILITIES
