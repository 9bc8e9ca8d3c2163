"""Providers, and the adapters that they serve, as AdapterInfo."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import pathlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import psutil

from ndpy import errors
from ndpy.info import AdapterInfo, PortInfo
from ndpy.networkdirect import catalogue
from ndpy.networkdirect.addresses import address_list, pack_address, unpack_address
from ndpy.networkdirect.library import BUFFER_OVERFLOW, check, create, ffi, lib, release, status_error, win32_error

_FLAGS = (
    (lib.ND_ADAPTER_FLAG_IN_ORDER_DMA_SUPPORTED, "IN_ORDER_DMA"),
    (lib.ND_ADAPTER_FLAG_CQ_RESIZE_SUPPORTED, "RESIZE_COMPLETION_QUEUE"),
    (lib.ND_ADAPTER_FLAG_LOOPBACK_CONNECTIONS_SUPPORTED, "LOOPBACK_CONNECTIONS"),
)


# For a provider that is named by its path: it must not insist on an identifier of its own (contract A.3.1).
NO_ID = str(uuid.UUID(int=0))


@dataclasses.dataclass(frozen=True)
class NetworkDirectAdapterInfo(AdapterInfo):
    """An adapter of a NetworkDirect provider. provider_path: of its DLL; provider_id: the catalogue entry's GUID;
    adapter_id: the provider's number of the adapter."""

    provider_path: str = ""
    provider_id: str = NO_ID
    adapter_id: int = 0


class Provider:
    """A loaded provider DLL, counted by its users; unloaded after the last, when it says that it can be (contract A.4)."""

    _loaded: ClassVar[dict[str, Provider]] = {}
    _lock = threading.Lock()

    def __init__(self, path: str, provider_id: str) -> None:
        self.path = path
        self._provider_id = provider_id
        self._users = 0
        failure, missing = ffi.new("uint32_t *"), ffi.new("const char **")
        self._library = lib.ndpy_load_provider(path, failure, missing)
        if self._library == ffi.NULL:
            if missing[0]:
                export = ffi.string(missing[0]).decode()
                raise errors.ProviderNotFoundError(f"{path} is no NetworkDirect provider: it does not export {export}")
            raise errors.ProviderNotFoundError(f"{_why_not_loaded(path, failure[0])}")

    @classmethod
    def use(cls, path: str, provider_id: str = NO_ID) -> Provider:
        """The provider at a path, loaded if need be; drop() it after use."""
        with cls._lock:
            provider = cls._loaded.get(path)
            if provider is None:
                provider = cls._loaded[path] = cls(path, provider_id)
            provider._users += 1
            return provider

    def drop(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and lib.ndpy_can_unload(self._library) == 0:
                del self._loaded[self.path]
                lib.ndpy_unload_provider(self._library)

    def _object(self, interface: str) -> Any:
        out = ffi.new("void **")
        status = lib.ndpy_get_class_object(
            self._library, uuid.UUID(self._provider_id).bytes_le, lib.ndpy_iid(interface.encode()), out
        )
        if status:
            if interface == "IND2Provider" and self._is_version_1():
                raise errors.UnsupportedError(
                    f"{self.path} serves NetworkDirect version 1 only",
                    operation="load provider",
                    native=status & 0xFFFFFFFF,
                )
            raise status_error("load provider", status, f"{self.path} gives no {interface}")
        if out[0] == ffi.NULL:
            raise errors.ProviderError(
                f"{self.path} says that it succeeded, and gave no {interface}", operation="load provider"
            )
        return ffi.cast(f"struct {interface} *", out[0])

    def _is_version_1(self) -> bool:
        out = ffi.new("void **")
        status = lib.ndpy_get_class_object(
            self._library, uuid.UUID(self._provider_id).bytes_le, lib.ndpy_iid(b"IClassFactory"), out
        )
        if status:
            return False
        lib.IUnknown_Release(ffi.cast("struct IUnknown *", out[0]))
        return True

    def adapters(self) -> dict[int, list[str]]:
        """The addresses of each adapter, by the provider's number."""
        native = self._object("IND2Provider")
        found: dict[int, list[str]] = {}
        try:
            listed = address_list(
                "list addresses", lambda out, size: lib.IND2Provider_QueryAddressList(native, out, size)
            )
            for data in listed:
                address = unpack_address(data)
                number = ffi.new("uint64_t *")
                if address and not lib.IND2Provider_ResolveAddress(native, data, len(data), number):
                    found.setdefault(int(number[0]), []).append(address[0])
        except errors.ProviderError as failure:
            raise self.named(failure) from None
        finally:
            release(native)
        return found

    def open(self, adapter_id: int, addresses: tuple[str, ...]) -> Any:
        """An IND2Adapter."""
        native = self._object("IND2Provider")
        try:
            # The number is good for a provider that has resolved it in this process.
            if addresses:
                packed = pack_address((addresses[0], 0))
                lib.IND2Provider_ResolveAddress(native, packed, len(packed), ffi.new("uint64_t *"))
            return create("open adapter", "IND2Adapter", lib.IND2Provider_OpenAdapter, native, adapter_id)
        except errors.ProviderError as failure:
            raise self.named(failure) from None
        finally:
            release(native)

    def named(self, failure: errors.ProviderError) -> errors.ProviderError:
        """The same failure in a sentence that says which provider it is."""
        return type(failure)(
            f"{self.path}: {failure.message}",
            operation=failure.operation,
            native=failure.native,
            native_name=failure.native_name,
        )


def _why_not_loaded(path: str, number: int) -> str:
    if not os.path.exists(path):
        return f"the NetworkDirect provider {path} does not exist"
    bits = catalogue.bitness(path)
    if bits:
        return f"{path} cannot be loaded: {bits}"
    return str(win32_error("load provider", number, f"{path} cannot be loaded"))


def query(native: Any) -> Any:
    """The ND2_ADAPTER_INFO of an open adapter."""
    info = ffi.new("struct nd2_adapter_info *")
    size = ffi.new("uint32_t *", ffi.sizeof("struct nd2_adapter_info"))
    info.info_version = lib.ND_VERSION_2
    status = lib.IND2Adapter_Query(native, info, size)
    if status & 0xFFFFFFFF == BUFFER_OVERFLOW:
        # The provider has more to say than the structure holds, and insists (contract B.7.2).
        larger = ffi.new("unsigned char[]", size[0])
        info = ffi.cast("struct nd2_adapter_info *", larger)
        info.info_version = lib.ND_VERSION_2
        status = lib.IND2Adapter_Query(native, info, size)
        check("query adapter", status)
        copied = ffi.new("struct nd2_adapter_info *")
        ffi.memmove(copied, larger, ffi.sizeof("struct nd2_adapter_info"))
        return copied
    check("query adapter", status)
    return info


def provider_paths() -> Iterator[tuple[str, str]]:
    """(path, identifier) of each provider: those of NDPY_PROVIDER, or of the Winsock catalogue."""
    named = os.environ.get("NDPY_PROVIDER")
    if named:
        for path in named.split(os.pathsep):
            if path:
                yield path, NO_ID
        return
    for entry in catalogue.entries():
        if not entry.problem and entry.version == 2:
            yield entry.path, str(uuid.UUID(bytes_le=entry.provider_id))


def list_adapters(only: str | None = None) -> list[AdapterInfo]:
    """The adapters of all providers, or of one DLL.

    What is named, here or in NDPY_PROVIDER, has to work; stale catalogue entries are skipped.
    """
    found: list[AdapterInfo] = []
    counts: dict[str, int] = {}
    named = only is not None or bool(os.environ.get("NDPY_PROVIDER"))
    for path, provider_id in provider_paths() if only is None else [(only, NO_ID)]:
        try:
            provider = Provider.use(path, provider_id)
        except errors.ProviderNotFoundError:
            if named:
                raise
            continue
        try:
            for adapter_id, addresses in provider.adapters().items():
                stem = pathlib.PureWindowsPath(path).stem.lower()
                index = counts.get(stem, 0)
                counts[stem] = index + 1
                found.append(_describe(provider, provider_id, adapter_id, tuple(addresses), f"{stem}{index}"))
        except errors.ProviderError:
            if named:
                raise
        finally:
            provider.drop()
    return found


def why_no_adapter() -> str:
    """What is missing, for the error of a machine without an adapter."""
    if os.environ.get("NDPY_PROVIDER"):
        return (
            f"the provider in NDPY_PROVIDER ({os.environ['NDPY_PROVIDER']}) serves no address; `ndpy doctor` says more"
        )
    return (
        "the Winsock catalogue has no NetworkDirect provider that can be used: install the adapter's driver, or set "
        "NDPY_PROVIDER to a provider's DLL (`ndpy softnd path` shows the one that needs no adapter); `ndpy doctor` says more"
    )


def _interface_of(addresses: tuple[str, ...]) -> tuple[str | None, int, bool]:
    """(name, MTU, whether it is up) of the network interface that has one of the addresses."""
    wanted = {ipaddress.ip_address(address.partition("%")[0]) for address in addresses}
    statistics = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            try:
                own = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue
            if own in wanted and not own.is_loopback:
                stats = statistics.get(name)
                return name, stats.mtu if stats else 0, bool(stats.isup) if stats else True
    return None, 0, True


def _rank(address: str) -> tuple[bool, bool, int]:
    """What others can reach comes first, and IPv4 before IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback, parsed.is_link_local, parsed.version


def _describe(
    provider: Provider, provider_id: str, adapter_id: int, addresses: tuple[str, ...], name: str
) -> AdapterInfo:
    addresses = tuple(sorted(addresses, key=_rank))
    native = provider.open(adapter_id, addresses)
    try:
        limits = query(native)
    except errors.ProviderError as failure:
        raise provider.named(failure) from None
    finally:
        release(native)
    netdev, mtu, up = _interface_of(addresses)
    state = "active" if addresses and up else "down"
    flags = {flag for bit, flag in _FLAGS if limits.adapter_flags & bit}
    # A client can take its request back, and refuse what the server accepted (contract H.4.9, H.6.2).
    flags |= {"MEMORY_WINDOWS", "REFUSE_OFFER"}
    if limits.max_shared_receive_queue_depth:
        flags.add("SHARED_RECEIVE_QUEUES")
    return NetworkDirectAdapterInfo(
        name=name,
        provider="networkdirect",
        transport="NetworkDirect",
        driver=pathlib.PureWindowsPath(provider.path).name,
        addresses=addresses,
        vendor_id=limits.vendor_id,
        device_id=limits.device_id,
        firmware="",
        numa_node=None,
        netdev=netdev,
        mtu=mtu,
        state=state,
        flags=frozenset(flags),
        ports=(PortInfo(1, state, "unknown", mtu, mtu, 0, netdev, ()),),
        max_registration_size=limits.max_registration_size,
        max_window_size=limits.max_registration_size,
        max_initiator_sge=limits.max_initiator_sge,
        max_receive_sge=limits.max_receive_sge,
        max_read_sge=limits.max_read_sge,
        max_transfer_length=limits.max_transfer_length,
        max_inline_data_size=limits.max_inline_data_size,
        max_inbound_read_limit=limits.max_inbound_read_limit,
        max_outbound_read_limit=limits.max_outbound_read_limit,
        max_receive_queue_depth=limits.max_receive_queue_depth,
        max_initiator_queue_depth=limits.max_initiator_queue_depth,
        max_shared_receive_queue_depth=limits.max_shared_receive_queue_depth,
        max_completion_queue_depth=limits.max_completion_queue_depth,
        max_caller_data=limits.max_caller_data,
        max_callee_data=limits.max_callee_data,
        provider_path=provider.path,
        provider_id=provider_id,
        adapter_id=adapter_id,
    )
