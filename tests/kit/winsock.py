"""A Winsock catalogue in memory, which works on any system, and entries for it."""

from __future__ import annotations

import dataclasses
import sys
import types
import uuid
from pathlib import Path

import cffi
import pytest

import ndpy
from ndpy.platforms.networkdirect.winsock_catalogue import WinsockProtocol

ROOT = Path(__file__).resolve().parents[2]
GUID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")

# Numbers of contract A.1.2 to A.1.5.
VERSION_2 = WinsockProtocol(
    name="a card",
    provider_id=GUID.bytes_le,
    service_flags=0x8E,
    provider_flags=0x14,
    version=0x20000,
    address_family=23,
    socket_type=-1,
    protocol=0,
    protocol_max_offset=0,
)
VERSION_1 = dataclasses.replace(VERSION_2, version=1, provider_flags=0x04)
TCP = dataclasses.replace(
    VERSION_2, service_flags=0x20066, provider_flags=0x8, version=2, address_family=2, socket_type=1, protocol=6
)


class Winsock:
    """The catalogue's functions in cdefs/networkdirect/shim.h, over a list. A change returns `error`."""

    def __init__(self, ffi) -> None:
        self.ffi = ffi
        self.entries: list[WinsockProtocol] = []
        self.paths: dict[bytes, str] = {}
        self.error = 0
        self.forgets = False
        self.calls: list[str] = []

    def ndpy_protocols(self, out, count):
        if self.error < 0:
            return self.error
        for native, protocol in zip(out[0:count], self.entries, strict=False):
            for field in dataclasses.fields(protocol):
                setattr(native, field.name, getattr(protocol, field.name))
        return len(self.entries)

    def ndpy_provider_path(self, provider_id, path, size):
        found = self.paths.get(provider_id)
        if found is None:
            return 2
        assert len(found) < size
        path[0 : len(found) + 1] = found + "\0"
        return 0

    def ndpy_install_provider(self, provider_id, path, native):
        self.calls.append("install")
        if self.error or self.forgets:
            return self.error
        names = [field.name for field in dataclasses.fields(WinsockProtocol)]
        values = {name: getattr(native, name) for name in names}
        values |= {"name": self.ffi.string(native.name), "provider_id": bytes(provider_id)}
        self.entries.append(WinsockProtocol(**values))
        self.paths[bytes(provider_id)] = path
        return 0

    def ndpy_deinstall_provider(self, provider_id):
        self.calls.append("deinstall")
        if self.error or self.forgets:
            return self.error
        self.entries = [protocol for protocol in self.entries if protocol.provider_id != provider_id]
        return 0


def fake_winsock(monkeypatch: pytest.MonkeyPatch) -> Winsock:
    """A catalogue with an entry that every Windows has: TCP."""
    header = (ROOT / "cdefs/networkdirect/win32.h").read_text()
    begin = header.index("struct nd_protocol {")
    ffi = cffi.FFI()
    ffi.cdef(header[begin : header.index("};", begin) + 2])
    fake = Winsock(ffi)
    fake.entries = [TCP]

    def win32_error(operation, number, message):
        return ndpy.ProviderError(message, operation=operation, native=number, native_name="")

    library = types.ModuleType("ndpy.platforms.networkdirect.native_calls")
    library.__dict__.update(ffi=ffi, lib=fake, win32_error=win32_error)
    monkeypatch.setitem(sys.modules, "ndpy.platforms.networkdirect.native_calls", library)
    return fake
