"""Addresses of verbs: their native form, how they are told, and the one that a wildcard stands for."""

from __future__ import annotations

import socket
import struct

import pytest
from kit import linux_only as linux_only
from kit.helpers import Replacing

from ndpy.platforms.verbs import addresses
from ndpy.platforms.verbs.addresses import pack_address
from ndpy.platforms.verbs.native_calls import ffi, lib
from ndpy.vocabulary.addresses import listening_address


@pytest.mark.parametrize(
    ("addresses", "host", "own"),
    [
        ([], "", "0.0.0.0"),
        (["192.0.2.1"], "", "192.0.2.1"),
        (["2001:db8::1"], "*", "2001:db8::1"),
        (["192.0.2.1", "2001:db8::1"], "", "192.0.2.1"),
        (["192.0.2.1", "2001:db8::1"], "::", "2001:db8::1"),
        (["192.0.2.1", "192.0.2.2"], "*", "0.0.0.0"),
        (["fe80::1", "2001:db8::1"], "", "2001:db8::1"),
        (["192.0.2.1"], "192.0.2.7", "192.0.2.7"),
    ],
)
def test_the_only_address_of_a_family_stands_for_the_wildcard(addresses, host, own):
    assert listening_address(addresses, (host, 4000)) == (own, 4000)


def test_a_native_address_has_port_flow_and_scope_in_their_places():
    flow, scope = 0x12345, 7
    packed = bytes(ffi.buffer(pack_address(socket.AF_INET6, ("fe80::1%7", 4791, flow, scope)), 28))
    octets = socket.inet_pton(socket.AF_INET6, "fe80::1")
    assert packed == struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", 4791, flow) + octets + struct.pack(
        "=I", scope
    )
    packed = bytes(ffi.buffer(pack_address(socket.AF_INET, ("192.0.2.1", 4791)), 16))
    assert packed == struct.pack("=H", socket.AF_INET) + struct.pack(">H", 4791) + bytes((192, 0, 2, 1)) + bytes(8)


@pytest.mark.parametrize(
    ("family", "octets", "port", "scope", "told"),
    [
        (socket.AF_INET, "192.0.2.1", 4791, 0, ("192.0.2.1", 4791)),
        (socket.AF_INET6, "2001:db8::1", 4791, 0, ("2001:db8::1", 4791)),
        (socket.AF_INET6, "2001:db8::1", 4791, 1, ("2001:db8::1", 4791)),
        (socket.AF_INET6, "fe80::1", 1, 0, ("fe80::1", 1)),
        (socket.AF_INET6, "fe80::1", 1, 1, (f"fe80::1%{socket.if_indextoname(1)}", 1)),
        (socket.AF_INET, "192.0.2.1", 0, 0, ("192.0.2.1", 0)),
        # Its interface has gone.
        (socket.AF_INET6, "fe80::1", 1, 0x7FFFFFF0, (f"fe80::1%{0x7FFFFFF0}", 1)),
    ],
)
def test_an_address_is_told_as_it_can_be_given(monkeypatch, family, octets, port, scope, told):
    """A link-local address comes with its interface. Others need none."""
    packed = bytes(ffi.buffer(pack_address(family, (octets, port, 0, scope))))[: 16 if family == socket.AF_INET else 28]

    def cm_address(identifier, peer, data, size):
        assert (identifier, peer, size) == ("identifier", 1, 28)
        ffi.memmove(data, packed, len(packed))
        return len(packed)

    monkeypatch.setattr(addresses, "lib", Replacing(lib, ndpy_cm_address=cm_address))
    assert addresses.unpack_address("identifier", True) == told
    packed = b""
    assert addresses.unpack_address("identifier", True) is None
