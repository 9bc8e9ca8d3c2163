"""The adapters that NetworkDirect providers serve, as AdapterInfo."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import uuid
from typing import Any

from ndpy import errors
from ndpy.platforms.networkdirect import interfaces, winsock_catalogue
from ndpy.platforms.networkdirect.native_calls import lib, query_adapter, release
from ndpy.platforms.networkdirect.provider_dll import NO_ID, Provider
from ndpy.platforms.networkdirect.version1 import adapter_info as version1
from ndpy.vocabulary.addresses import Reach, plain_address, reach
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.info import AdapterInfo, PortInfo

_CAPABILITIES = (
    (lib.ND_ADAPTER_FLAG_IN_ORDER_DMA_SUPPORTED, Capability.IN_ORDER_DMA),
    (lib.ND_ADAPTER_FLAG_CQ_RESIZE_SUPPORTED, Capability.RESIZE_COMPLETION_QUEUE),
    (lib.ND_ADAPTER_FLAG_LOOPBACK_CONNECTIONS_SUPPORTED, Capability.LOOPBACK_CONNECTIONS),
)

# The fields that AdapterInfo and ND2_ADAPTER_INFO have in common.
_LIMITS = (
    "vendor_id",
    "device_id",
    "max_registration_size",
    "max_initiator_sge",
    "max_receive_sge",
    "max_read_sge",
    "max_transfer_length",
    "max_inline_data_size",
    "max_inbound_read_limit",
    "max_outbound_read_limit",
    "max_receive_queue_depth",
    "max_initiator_queue_depth",
    "max_shared_receive_queue_depth",
    "max_completion_queue_depth",
    "max_caller_data",
    "max_callee_data",
)


@dataclasses.dataclass(frozen=True)
class NetworkDirectAdapterInfo(AdapterInfo):
    """An adapter of a NetworkDirect provider.

    Parameters:
        provider_path: the path of the provider's DLL.
        provider_id: the GUID of the provider's catalogue entry.
        version: the version of NetworkDirect, 1 or 2.
        adapter_id: the provider's number for the adapter. 0 in version 1.
    """

    provider_path: str = ""
    provider_id: str = NO_ID
    version: int = 2
    adapter_id: int = 0


def query(native: Any) -> Any:
    """Return the ND2_ADAPTER_INFO of an open adapter."""

    def call(info: Any, size: Any) -> int:
        info.info_version = lib.ND_VERSION_2
        return int(lib.IND2Adapter_Query(native, info, size))

    return query_adapter("nd2_adapter_info", "uint32_t *", call)


def asked_version(version: int | None) -> int | None:
    """Return the version to use: the argument, or else NDPY_PROVIDER_VERSION. None if neither is set."""
    if version is not None:
        if version not in (1, 2):
            raise ValueError(f"NetworkDirect has the versions 1 and 2, not {version!r}")
        return version
    text = os.environ.get("NDPY_PROVIDER_VERSION", "")
    if text not in ("", "1", "2"):
        raise errors.ProviderNotFoundError(f"NDPY_PROVIDER_VERSION is {text!r}; set it to 1 or 2, or unset it")
    return int(text) if text else None


@dataclasses.dataclass(frozen=True)
class ProviderCandidate:
    """A DLL that may have adapters.

    Attributes:
        version: the version of the catalogue entry. None if there is no entry.
        named: whether the user named the DLL.
    """

    path: str
    provider_id: str
    version: int | None
    named: bool


def provider_candidates(only: str | None) -> list[ProviderCandidate]:
    """Return `only`, or the DLLs of NDPY_PROVIDER, or those of the Winsock catalogue with version 2 first."""
    paths = [only] if only is not None else os.environ.get("NDPY_PROVIDER", "").split(os.pathsep)
    named = [ProviderCandidate(path, NO_ID, None, True) for path in paths if path]
    if named:
        return named
    usable = [entry for entry in winsock_catalogue.entries() if not entry.problem]
    usable.sort(key=lambda entry: -entry.version)
    return [
        ProviderCandidate(entry.path, str(uuid.UUID(bytes_le=entry.provider_id)), entry.version, False)
        for entry in usable
    ]


def list_adapters(only: str | None = None, version: int | None = None) -> list[AdapterInfo]:
    """List the adapters of all providers, or of one DLL.

    `version` is 1, 2, or None for both. A provider that serves both versions is used as version 2. If the DLL was named
    by `only` or by NDPY_PROVIDER, a failure raises. Stale catalogue entries are skipped. So is an adapter of version 1
    at an address that version 2 serves too.
    """
    asked = asked_version(version)
    found: list[AdapterInfo] = []
    counts: dict[str, int] = {}
    served: set[str] = set()
    for candidate in provider_candidates(only):
        if asked is not None and candidate.version not in (None, asked):
            continue
        try:
            provider = Provider.use(candidate.path)
        except errors.ProviderNotFoundError:
            if candidate.named:
                raise
            continue
        try:
            used = provider.version(candidate.version or asked, candidate.provider_id)
            stem = pathlib.PureWindowsPath(candidate.path).stem.lower()
            for adapter_id, addresses in adapters_of(provider, used, candidate.provider_id):
                if used == 1 and not served.isdisjoint(addresses):
                    continue
                index = counts.get(stem, 0)
                counts[stem] = index + 1
                found.append(_describe(provider, candidate.provider_id, used, adapter_id, addresses, f"{stem}{index}"))
                if used == 2:
                    served.update(addresses)
        except errors.ProviderError:
            if candidate.named:
                raise
        finally:
            provider.drop()
    return found


def adapters_of(provider: Provider, version: int, provider_id: str) -> list[tuple[int, tuple[str, ...]]]:
    """Return (number, addresses) of each adapter. Version 1 opens adapters by address: each address is an adapter."""
    if version == 1:
        return [(0, (address,)) for address in sorted(version1.addresses(provider, provider_id), key=_rank)]
    return [
        (number, tuple(sorted(addresses, key=_rank))) for number, addresses in provider.adapters(provider_id).items()
    ]


def why_no_adapter() -> str:
    """Say what is missing on a machine without an adapter, for the error message."""
    more = "`ndpy doctor` says more"
    if named := os.environ.get("NDPY_PROVIDER"):
        return (
            f"the provider in NDPY_PROVIDER ({named}) serves no address: {winsock_catalogue.NO_ADDRESS_REMEDY}; {more}"
        )
    if silent := [candidate.path for candidate in provider_candidates(None) if _works(candidate)]:
        return f"the provider {', '.join(silent)} serves no address: {winsock_catalogue.NO_ADDRESS_REMEDY}; {more}"
    return (
        "the Winsock catalogue has no NetworkDirect provider that can be used: install the adapter's driver, or set "
        f"NDPY_PROVIDER to a provider's DLL (`ndpy softnd path` shows the one that needs no adapter); {more}"
    )


def _works(candidate: ProviderCandidate) -> bool:
    """Whether a provider of the catalogue loads and serves its entry's version."""
    try:
        provider = Provider.use(candidate.path)
    except errors.ProviderNotFoundError:
        return False
    try:
        provider.version(candidate.version, candidate.provider_id)
    except errors.ProviderError:
        return False
    finally:
        provider.drop()
    return True


def _interface_of(addresses: tuple[str, ...]) -> tuple[str | None, int, bool]:
    """Return (name, MTU, whether it is up) of the network interface that has one of the addresses, of one that is up if
    possible.
    """
    wanted = {plain_address(address) for address in addresses}
    statistics = interfaces.statistics()
    found: tuple[str | None, int, bool] | None = None
    for name, entries in interfaces.addresses().items():
        for entry in entries:
            try:
                own = plain_address(entry.address)
            except ValueError:
                continue
            if own in wanted and reach(own) is not Reach.LOOPBACK:
                stats = statistics.get(name)
                if stats is None or stats.isup:
                    return name, stats.mtu if stats else 0, True
                found = found or (name, stats.mtu, False)
    return found or (None, 0, True)


def _rank(address: str) -> tuple[Reach, int]:
    """Sort key: addresses that others can reach come first, and IPv4 before IPv6."""
    return reach(address), plain_address(address).version


def _describe(
    provider: Provider, provider_id: str, version: int, adapter_id: int, addresses: tuple[str, ...], name: str
) -> AdapterInfo:
    if version == 1:
        limits, capabilities = version1.examine(provider, provider_id, addresses[0])
    else:
        limits, capabilities = _examine(provider, provider_id, adapter_id, addresses)
    netdev, mtu, up = _interface_of(addresses)
    state = "active" if addresses and up else "down"
    return NetworkDirectAdapterInfo(
        name=name,
        provider="networkdirect",
        transport="NetworkDirect",
        driver=pathlib.PureWindowsPath(provider.path).name,
        addresses=addresses,
        firmware="",
        numa_node=None,
        netdev=netdev,
        mtu=mtu,
        state=state,
        capabilities=capabilities,
        ports=(PortInfo(1, state, "unknown", mtu, mtu, 0, netdev, (), interfaces=interfaces.with_any_of(addresses)),),
        **limits,
        provider_path=provider.path,
        provider_id=provider_id,
        version=version,
        adapter_id=adapter_id,
        asked_for="",
    )


def _examine(
    provider: Provider, provider_id: str, adapter_id: int, addresses: tuple[str, ...]
) -> tuple[dict[str, int], Capability]:
    """Return (identity and limits, capabilities) of an adapter of version 2."""
    native = provider.open(adapter_id, addresses, provider_id)
    try:
        info = query(native)
    except errors.ProviderError as failure:
        raise provider.named(failure) from None
    finally:
        release(native)
    capabilities = Capability.RELIABLE_CONNECTIONS | Capability.MEMORY_WINDOWS
    capabilities |= Capability.REGION_ACCESS | Capability.BIND_RESERVES_PORT
    # A client can cancel its request, and refuse a server's offer (contract H.4.9, H.6.2).
    capabilities |= Capability.REFUSE_OFFER
    for bit, capability in _CAPABILITIES:
        if info.adapter_flags & bit:
            capabilities |= capability
    if info.max_shared_receive_queue_depth:
        capabilities |= Capability.SHARED_RECEIVE_QUEUES
    if info.max_inline_data_size:
        capabilities |= Capability.INLINE
    limits = {name: int(getattr(info, name)) for name in _LIMITS}
    return {**limits, "max_window_size": info.max_registration_size}, capabilities
