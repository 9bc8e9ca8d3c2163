"""The Winsock catalogue, in which NetworkDirect providers are registered.

A provider is not a COM server. Programs find it by values in its catalogue entry, and all of them have to be right
(contract A.1). judge() checks them, on any system. entries() checks the catalogue of this machine.
"""

from __future__ import annotations

import dataclasses
import uuid

# XP1_GUARANTEED_DELIVERY, XP1_GUARANTEED_ORDER, XP1_MESSAGE_ORIENTED, XP1_CONNECT_DATA (contract A.1.2).
SERVICE_FLAGS = 0x02 | 0x04 | 0x08 | 0x80
PFL_HIDDEN = 0x04
PFL_NETWORKDIRECT_PROVIDER = 0x10
SOCKET_TYPE = -1
# Microsoft's documentation says 2, but its code compares with 0x20000 (contract A.1.3, M.1).
VERSIONS = {0x1: 1, 0x2: 2, 0x20000: 2}
# A provider that serves both families registers once, for IPv6 (contract A.1.6).
FAMILIES = {2: ("IPv4",), 23: ("IPv4", "IPv6")}

#: What to do if a provider works but serves no address.
NO_ADDRESS_REMEDY = "see that the adapter is there, has RDMA enabled (Enable-NetAdapterRdma) and an IP address"

# The longest path on Windows, in characters.
_PATH_LENGTH = 32768


@dataclasses.dataclass(frozen=True)
class WinsockProtocol:
    """The fields of a WSAPROTOCOL_INFOW that matter here. provider_id is the GUID's 16 bytes in memory order."""

    name: str
    provider_id: bytes
    service_flags: int
    provider_flags: int
    version: int
    address_family: int
    socket_type: int
    protocol: int
    protocol_max_offset: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of judge().

    Attributes:
        meant: whether the entry is, or was meant to be, for NetworkDirect.
        version: 0 if the entry has no valid version.
        problem: a sentence that names every wrong value. "" if all are right.
    """

    meant: bool
    version: int
    families: tuple[str, ...]
    problem: str


def judge(entry: WinsockProtocol) -> Verdict:
    """Check an entry of the catalogue against contract A.1.2 to A.1.6."""
    version = VERSIONS.get(entry.version, 0)
    wrong = []
    if entry.service_flags & SERVICE_FLAGS != SERVICE_FLAGS:
        wrong.append(f"its service flags {entry.service_flags:#x} lack {SERVICE_FLAGS & ~entry.service_flags:#x}")
    if not version:
        wrong.append(f"its version is {entry.version:#x}, not 0x1 or 0x20000")
    # Some providers of version 1 do not set NetworkDirect's flag.
    needed = PFL_HIDDEN if version == 1 else PFL_HIDDEN | PFL_NETWORKDIRECT_PROVIDER
    if entry.provider_flags & needed != needed:
        wrong.append(f"its provider flags {entry.provider_flags:#x} lack {needed & ~entry.provider_flags:#x}")
    if entry.address_family not in FAMILIES:
        wrong.append(f"its address family is {entry.address_family}, not 2 or 23")
    for name, value, right in (
        ("socket type", entry.socket_type, SOCKET_TYPE),
        ("protocol", entry.protocol, 0),
        ("protocol offset", entry.protocol_max_offset, 0),
    ):
        if value != right:
            wrong.append(f"its {name} is {value}, not {right}")
    # Ordinary Winsock providers have neither the flag nor the socket type.
    marked = bool(entry.provider_flags & PFL_NETWORKDIRECT_PROVIDER)
    alike = entry.socket_type == SOCKET_TYPE and (
        entry.service_flags & SERVICE_FLAGS == SERVICE_FLAGS or bool(entry.provider_flags & PFL_HIDDEN)
    )
    return Verdict(
        meant=not wrong or marked or alike,
        version=version,
        families=FAMILIES.get(entry.address_family, ()),
        problem=f"NetworkDirect programs overlook it: {', '.join(wrong)}" if wrong else "",
    )


@dataclasses.dataclass(frozen=True)
class Entry:
    """A catalogue entry that is, or was meant to be, for a NetworkDirect provider.

    Attributes:
        name: the name in the catalogue.
        provider_id: the GUID's 16 bytes in memory order. `guid` has it as text.
        version: 1 or 2. 0 if the entry has neither.
        families: "IPv4", "IPv6" or both.
        path: the DLL's path, with environment variables expanded.
        problem: a sentence that says why programs overlook the entry. "" if they use it.
    """

    name: str
    provider_id: bytes
    version: int
    families: tuple[str, ...]
    path: str
    problem: str

    @property
    def guid(self) -> str:
        return "{" + str(uuid.UUID(bytes_le=self.provider_id)).upper() + "}"


def once(found: list[Entry]) -> list[Entry]:
    """Keep one entry of each GUID, in the catalogue's order (contract A.1.7).

    That is the first entry without a problem. If all have problems, it is the first one.
    """
    kept: dict[bytes, Entry] = {}
    for entry in found:
        known = kept.get(entry.provider_id)
        if known is None or (known.problem and not entry.problem):
            kept[entry.provider_id] = entry
        elif not known.problem and not entry.problem and known.version == entry.version:
            families = tuple(dict.fromkeys((*known.families, *entry.families)))
            kept[entry.provider_id] = dataclasses.replace(known, families=families)
    return list(kept.values())


def entries() -> list[Entry]:
    """Return this machine's catalogue entries that are, or were meant to be, for NetworkDirect. See Entry.problem.

    Raises ProviderError if the catalogue cannot be read.
    Source: WSCEnumProtocols, WSCGetProviderPath.
    """
    found = []
    for protocol in protocols():
        verdict = judge(protocol)
        if verdict.meant:
            path, missing = provider_path(protocol.provider_id)
            found.append(
                Entry(
                    protocol.name,
                    protocol.provider_id,
                    verdict.version,
                    verdict.families,
                    path,
                    verdict.problem or missing,
                )
            )
    return once(found)


def protocols() -> list[WinsockProtocol]:
    """Return all entries of the catalogue, of any kind."""
    from ndpy.platforms.networkdirect.native_calls import ffi, lib, win32_error

    room = 64
    while True:
        buffer = ffi.new("struct nd_protocol[]", room)
        count = lib.ndpy_protocols(buffer, room)
        if count < 0:
            raise win32_error("WSCEnumProtocols", -count, "the Winsock catalogue cannot be read")
        if count <= room:
            break
        room = count
    return [
        WinsockProtocol(
            name=str(ffi.string(native.name)),
            provider_id=bytes(native.provider_id),
            service_flags=native.service_flags,
            provider_flags=native.provider_flags,
            version=native.version,
            address_family=native.address_family,
            socket_type=native.socket_type,
            protocol=native.protocol,
            protocol_max_offset=native.protocol_max_offset,
        )
        for native in buffer[0:count]
    ]


def provider_path(provider_id: bytes) -> tuple[str, str]:
    """Return (path, "") for an entry's DLL, or ("", problem)."""
    from ndpy.platforms.networkdirect.native_calls import ffi, lib, win32_error

    buffer = ffi.new("wchar_t[]", _PATH_LENGTH)
    number = lib.ndpy_provider_path(provider_id, buffer, _PATH_LENGTH)
    if number:
        return "", str(win32_error("WSCGetProviderPath", number, "the catalogue has no path for it"))
    return str(ffi.string(buffer)), ""
