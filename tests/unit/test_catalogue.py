"""The rules of the Winsock catalogue (contract A.1, A.2) and the header of a DLL. Runs on any system."""

from __future__ import annotations

import dataclasses
import struct
import sys
import uuid
from pathlib import Path

import pytest
from kit.winsock import GUID, TCP, VERSION_1, VERSION_2, fake_winsock

import ndpy
from ndpy.platforms.networkdirect import dll_header, winsock_catalogue
from ndpy.platforms.networkdirect.winsock_catalogue import Entry, WinsockProtocol, judge, once

ROOT = Path(__file__).resolve().parent.parent.parent


def changed(entry: WinsockProtocol, **values: int) -> WinsockProtocol:
    return dataclasses.replace(entry, **values)


@pytest.mark.parametrize(("entry", "version"), [(VERSION_2, 2), (VERSION_1, 1)])
def test_a_1_2_to_a_1_5_the_right_values_are_accepted(entry, version):
    verdict = judge(entry)
    assert verdict.problem == ""
    assert (verdict.meant, verdict.version) == (True, version)


@pytest.mark.parametrize("missing", [0x02, 0x04, 0x08, 0x80])
def test_a_1_2_each_missing_service_flag_disqualifies(missing):
    verdict = judge(changed(VERSION_2, service_flags=0x8E & ~missing))
    assert f"{missing:#x}" in verdict.problem
    assert verdict.meant


@pytest.mark.parametrize("extra", [0x01, 0x10, 0x20000, 0x80000000])
def test_a_1_2_further_service_flags_are_allowed(extra):
    assert judge(changed(VERSION_2, service_flags=0x8E | extra)).problem == ""


@pytest.mark.parametrize(("value", "version"), [(0x1, 1), (0x20000, 2), (0x2, 2)])
def test_a_1_3_and_m_1_the_version_is_read_from_0x1_0x20000_and_plain_2(value, version):
    verdict = judge(changed(VERSION_2, version=value))
    assert (verdict.version, verdict.problem) == (version, "")


@pytest.mark.parametrize("value", [0, 3, 0x10000, 0x20001, 0x30000, -1])
def test_a_1_3_any_other_version_disqualifies(value):
    verdict = judge(changed(VERSION_2, version=value))
    assert verdict.version == 0
    assert "version" in verdict.problem
    assert verdict.meant


@pytest.mark.parametrize("flags", [0x10, 0x04, 0x00, 0xEB])
def test_a_1_4_version_2_needs_both_provider_flags(flags):
    assert "provider flags" in judge(changed(VERSION_2, provider_flags=flags)).problem


@pytest.mark.parametrize(("flags", "good"), [(0x04, True), (0x14, True), (0x44, True), (0x10, False), (0x00, False)])
def test_a_1_4_version_1_needs_the_hidden_flag_only(flags, good):
    assert (judge(changed(VERSION_1, provider_flags=flags)).problem == "") is good


@pytest.mark.parametrize(("family", "families"), [(2, ("IPv4",)), (23, ("IPv4", "IPv6"))])
def test_a_1_5_and_a_1_6_both_families_are_accepted_and_ipv6_stands_for_both(family, families):
    verdict = judge(changed(VERSION_2, address_family=family))
    assert (verdict.families, verdict.problem) == (families, "")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("address_family", 0, "address family"),
        ("address_family", 10, "address family"),
        ("socket_type", 1, "socket type"),
        ("socket_type", 0, "socket type"),
        ("protocol", 6, "protocol is 6"),
        ("protocol_max_offset", 255, "protocol offset"),
    ],
)
def test_a_1_5_each_wrong_value_alone_disqualifies(field, value, words):
    for entry in (VERSION_2, VERSION_1):
        assert words in judge(changed(entry, **{field: value})).problem


def test_every_wrong_value_is_told():
    problem = judge(changed(VERSION_2, version=7, socket_type=1, protocol=6)).problem
    assert all(words in problem for words in ("version is 0x7", "socket type is 1", "protocol is 6"))


def test_ordinary_protocols_were_never_meant():
    assert not judge(TCP).meant
    assert not judge(changed(TCP, address_family=6, protocol_max_offset=255)).meant


def test_nearly_right_entries_were_meant():
    for values in ({"provider_flags": 0x10}, {"provider_flags": 0}, {"socket_type": 1}, {"service_flags": 0}):
        assert judge(changed(VERSION_2, **values)).meant


def test_hidden_entries_and_raw_sockets_of_others_were_never_meant():
    for values in (
        {"provider_flags": 0x4, "socket_type": 1},
        {"provider_flags": 0, "socket_type": 1},
        {"provider_flags": 0, "service_flags": 0},
        {"provider_flags": 0x8, "service_flags": 0x06},
    ):
        assert not judge(changed(VERSION_2, **values)).meant


def entry(name: str, identifier: int = 1, version: int = 2, families=("IPv4",), problem: str = "") -> Entry:
    return Entry(name, uuid.UUID(int=identifier).bytes_le, version, families, f"C:\\{name}.dll", problem)


def test_a_1_7_a_guid_seen_twice_is_one_provider():
    assert [kept.name for kept in once([entry("a"), entry("b", 2), entry("c")])] == ["a", "b"]


def test_a_1_7_the_entry_that_can_be_used_counts():
    assert [kept.name for kept in once([entry("a", problem="x"), entry("b"), entry("c", problem="x")])] == ["b"]


def test_a_1_7_two_entries_for_two_families_are_one_provider_of_both():
    (kept,) = once([entry("a"), entry("a", families=("IPv6",))])
    assert kept.families == ("IPv4", "IPv6")


def test_a_1_7_entries_that_do_not_belong_together_add_no_family():
    for first, second in (("", "x"), ("x", "x")):
        (kept,) = once([entry("a", problem=first), entry("a", families=("IPv6",), problem=second)])
        assert kept.families == ("IPv4",)
    (kept,) = once([entry("a"), entry("a", version=1, families=("IPv6",))])
    assert (kept.version, kept.families) == (2, ("IPv4",))


def test_the_guid_as_text():
    assert entry("a").guid == "{00000000-0000-0000-0000-000000000001}"


@pytest.fixture
def winsock(monkeypatch):
    return fake_winsock(monkeypatch)


def test_a_1_8_and_a_2_1_entries_come_with_their_paths(winsock):
    winsock.entries += [VERSION_2, changed(TCP, protocol=17)]
    winsock.paths[VERSION_2.provider_id] = "C:\\Windows\\card.dll"
    (found,) = winsock_catalogue.entries()
    assert found == Entry("a card", GUID.bytes_le, 2, ("IPv4", "IPv6"), "C:\\Windows\\card.dll", "")
    assert found.guid == "{00112233-4455-6677-8899-AABBCCDDEEFF}"


def test_a_2_1_an_entry_without_a_path_has_a_problem(winsock):
    winsock.entries.append(VERSION_2)
    (found,) = winsock_catalogue.entries()
    assert found.path == ""
    assert "no path" in found.problem


def test_a_1_1_a_catalogue_larger_than_expected_is_read_whole(winsock):
    winsock.entries = [
        dataclasses.replace(VERSION_2, provider_id=uuid.UUID(int=number).bytes_le) for number in range(200)
    ]
    assert len(winsock_catalogue.entries()) == 200


def test_a_1_1_an_empty_catalogue_is_no_error(winsock):
    winsock.entries = []
    assert winsock_catalogue.protocols() == winsock_catalogue.entries() == []


def test_a_1_1_a_catalogue_that_cannot_be_read_is_an_error_with_winsocks_number(winsock):
    winsock.error = -10091
    with pytest.raises(ndpy.ProviderError) as caught:
        winsock_catalogue.entries()
    assert caught.value.native == 10091


# The header of a DLL.


def image(path: Path, machine: int, *, signature: bytes = b"PE\0\0", offset: int = 0x80) -> str:
    head = b"MZ" + bytes(58) + struct.pack("<I", offset)
    path.write_bytes(head.ljust(offset, b"\0") + signature + struct.pack("<H", machine) + bytes(18))
    return str(path)


@pytest.mark.parametrize(
    ("number", "name"), [(0x014C, "x86"), (0x8664, "x64"), (0xAA64, "arm64"), (0x01C4, "arm"), (0x0200, "0x0200")]
)
def test_the_processor_of_a_dll_is_read_from_its_header(tmp_path, number, name):
    assert dll_header.machine(image(tmp_path / "a.dll", number)) == name


def test_a_header_far_behind_is_found(tmp_path):
    assert dll_header.machine(image(tmp_path / "a.dll", 0x8664, offset=0x12340)) == "x64"


def test_softnd_is_for_x64():
    dll = ROOT / "softrdma/build/softnd.dll"
    if not dll.exists():
        pytest.skip("softnd.dll is not built")
    assert dll_header.machine(str(dll)) == "x64"


@pytest.mark.parametrize("data", [b"", b"MZ", b"\x7fELF" + bytes(100), b"MZ" + bytes(100)])
def test_what_is_no_dll_is_said_to_be_none(tmp_path, data):
    (tmp_path / "a.dll").write_bytes(data)
    with pytest.raises(ValueError, match="not a DLL"):
        dll_header.machine(str(tmp_path / "a.dll"))
    assert dll_header.bitness(str(tmp_path / "a.dll")).startswith("it is not a DLL")


def test_a_dll_for_another_processor_is_named_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(dll_header, "own_machine", lambda: "x64")
    assert dll_header.bitness(image(tmp_path / "a.dll", 0x8664)) == ""
    sentence = dll_header.bitness(image(tmp_path / "b.dll", 0x014C))
    assert "x86" in sentence
    assert "x64" in sentence


def test_a_dll_that_is_not_there_cannot_be_read(tmp_path):
    assert "cannot be read" in dll_header.bitness(str(tmp_path / "none.dll"))


@pytest.mark.parametrize(("pointer", "name"), [(8, "x64"), (4, "x86")])
def test_the_processor_of_this_process_is_that_of_its_program(tmp_path, monkeypatch, pointer, name):
    monkeypatch.setattr(sys, "executable", image(tmp_path / "python.exe", 0xAA64))
    assert dll_header.own_machine() == "arm64"
    # Any program may embed Python.
    (tmp_path / "python.exe").write_bytes(b"#!")
    monkeypatch.setattr(dll_header.struct, "calcsize", lambda _: pointer)
    assert dll_header.own_machine() == name
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none.exe"))
    assert dll_header.own_machine() == name
