"""Section A of the contract: loading, the provider object, unloading, addresses, opening an adapter."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket

import psutil
import pytest
import version2
from consumer import Kit, address_list, make_pair, sges, wait_unloadable
from kit.threads import Elsewhere, in_threads
from version2 import IID, NULL, Interface, Library, Status, ffi, query_interface, sockaddr


def test_a_2_4_both_exports_are_there(own_library):
    assert own_library.get_class_object != NULL
    assert own_library.can_unload_now != NULL


def test_a_2_5_several_threads_may_load_at_once(tmp_path):
    path = tmp_path / "many.dll"
    shutil.copy(version2.DLL, path)
    loaded = []

    def load(_):
        library = Library(path)
        provider = library.provider()
        provider.release()
        loaded.append(library)

    in_threads(8, load)
    assert len({int(ffi.cast("uintptr_t", library.module)) for library in loaded}) == 1
    for library in loaded:
        library.free()


@pytest.mark.parametrize("clsid", [version2.IID_unknown, IID["IND2Provider"], version2.guid("0" * 32)])
def test_a_3_1_the_provider_itself_answers_for_any_class(clsid):
    code, pointer = version2.softnd().class_object(IID["IND2Provider"], clsid)
    assert code == Status.SUCCESS
    provider = Interface("IND2Provider", pointer)
    assert address_list(provider)
    assert provider.release() == 0


@pytest.mark.parametrize("iid", [version2.IID_unknown, IID["IND2Adapter"], IID["IND2QueuePair"]])
def test_a_3_3_an_unsupported_interface_gives_a_failure_and_null(iid):
    code, pointer = version2.softnd().class_object(iid)
    assert code in (Status.E_NOINTERFACE, Status.CLASS_E_CLASSNOTAVAILABLE)
    assert pointer == NULL


def test_a_3_4_provider_objects_count_their_references_independently():
    first, second = version2.softnd().provider(), version2.softnd().provider()
    assert first.AddRef() == 2
    assert first.Release() == 1
    assert first.release() == 0
    assert address_list(second)
    assert second.release() == 0


def test_a_3_5_interfaces_work_on_threads_that_never_initialised_com(kit):
    pair = make_pair(kit)

    def use():
        active, passive = pair
        passive.receive(passive.region.sge(0, 64), context=1)
        active.send(active.region.sge(0, 64), context=2)
        return passive.one().status, active.one().status, len(address_list(kit.provider))

    *seen, addresses = Elsewhere(use).start().result()
    assert seen == [Status.SUCCESS, Status.SUCCESS]
    assert addresses >= 1


def every_object(node):
    """One object of each kind, by interface."""
    cq = node.cq()
    srq = node.srq()
    return {
        "IND2Adapter": node.adapter,
        "IND2CompletionQueue": cq,
        "IND2SharedReceiveQueue": srq,
        "IND2MemoryWindow": node.window(),
        "IND2MemoryRegion": node.mr(),
        "IND2QueuePair": node.qp(cq),
        "IND2Connector": node.connector(),
        "IND2Listener": node.create("Listener", node.file),
        "IND2Provider": node.kit.provider,
    }


def test_a_3_6_query_interface_answers_unknown_own_and_overlapped_only(node):
    objects = every_object(node)
    overlapped = {name for name in objects if version2.BASE[name] == "IND2Overlapped"}
    for name, thing in objects.items():
        identity = []
        for _ in range(2):
            code, pointer = query_interface(thing, "IUnknown")
            assert code == Status.SUCCESS, name
            identity.append(pointer)
            Interface("IUnknown", pointer).release()
        assert identity[0] == identity[1]
        code, own = query_interface(thing, name)
        assert code == Status.SUCCESS, name
        code, unknown = query_interface(Interface(name, own), "IUnknown")
        assert unknown == identity[0], name
        Interface("IUnknown", unknown).release()
        Interface(name, own).release()
        code, pointer = query_interface(thing, "IND2Overlapped")
        if name in overlapped:
            assert code == Status.SUCCESS, name
            base = Interface("IND2Overlapped", pointer)
            assert base.CancelOverlappedRequests() == Status.SUCCESS
            base.release()
        else:
            assert (code, pointer) == (Status.E_NOINTERFACE, NULL), name
        for other in [version2.IID_unknown, *(IID[o] for o in objects if o != name)]:
            assert query_interface(thing, other) == (Status.E_NOINTERFACE, NULL), name


def test_a_4_2_a_live_adapter_keeps_the_library(own_library):
    kit = Kit(own_library)
    assert own_library.can_unload() == Status.S_FALSE
    code, adapter = kit.open_adapter()
    assert code == Status.SUCCESS
    kit.provider.release()
    assert own_library.can_unload() == Status.S_FALSE
    assert adapter.release() == 0
    wait_unloadable(own_library)


@pytest.mark.parametrize(
    "kind",
    [
        "IND2CompletionQueue",
        "IND2SharedReceiveQueue",
        "IND2MemoryWindow",
        "IND2MemoryRegion",
        "IND2QueuePair",
        "IND2Connector",
        "IND2Listener",
    ],
)
def test_a_4_3_any_object_keeps_the_library_and_the_last_release_frees_it(own_library, kind):
    kit = Kit(own_library)
    objects = every_object(kit.node())
    kept = objects[kind]
    assert kept.AddRef() == 2
    kit.close()
    assert own_library.can_unload() == Status.S_FALSE
    assert kept.Release() == 0
    wait_unloadable(own_library)


def test_a_4_3_no_thread_stays_after_the_last_release(own_library):
    kit = Kit(own_library)
    active, passive = make_pair(kit)
    passive.receive(passive.region.sge())
    active.send(active.region.sge(0, 100))
    assert passive.one().status == Status.SUCCESS
    kit.close()
    wait_unloadable(own_library)
    # Frees and loads the DLL again. This crashes if code of the first load still runs.
    own_library.free()
    again = Library(own_library.path)
    own_library.module = again.module
    own_library.get_class_object, own_library.can_unload_now = again.get_class_object, again.can_unload_now
    kit = Kit(own_library)
    make_pair(kit)
    kit.close()
    wait_unloadable(own_library)


def test_a_4_4_the_provider_may_go_before_its_adapters(kit):
    node = kit.node()
    kit.provider.release()
    assert address_list(node.adapter)
    assert node.cq()


@pytest.mark.parametrize("level", ["provider", "adapter"])
def test_a_5_1_a_small_buffer_gives_the_size_and_is_not_touched(node, level):
    owner = node.kit.provider if level == "provider" else node.adapter
    size = ffi.new("uint32_t *", 0)
    assert owner.QueryAddressList(NULL, size) == Status.BUFFER_OVERFLOW
    needed = size[0]
    assert needed >= 8 + 16 + 16
    for given in (0, 4, 8, 24, needed - 1):
        data = ffi.new("unsigned char[]", b"\xa5" * (needed + 1))
        size[0] = given
        assert owner.QueryAddressList(data, size) == Status.BUFFER_OVERFLOW
        assert size[0] == needed
        assert bytes(ffi.buffer(data, needed)) == b"\xa5" * needed


@pytest.mark.parametrize("level", ["provider", "adapter"])
def test_a_5_2_the_addresses_lie_inside_the_buffer(node, level):
    owner = node.kit.provider if level == "provider" else node.adapter
    size = ffi.new("uint32_t *", 0)
    owner.QueryAddressList(NULL, size)
    needed = size[0]
    data = ffi.new("unsigned char[]", b"\xa5" * (needed + 64))
    size[0] = needed + 60
    assert owner.QueryAddressList(data, size) == Status.SUCCESS
    assert size[0] == needed
    assert bytes(ffi.buffer(data, needed + 64))[needed:] == b"\xa5" * 64
    found = address_list(owner)
    assert len(found) == len(set(found))
    assert "127.0.0.1" in found


def test_a_5_3_an_empty_list_still_answers_overflow_to_the_sizing_call(monkeypatch, own_library):
    monkeypatch.setitem(os.environ, "SOFTND_ADDRESSES", "198.51.100.77")
    provider = own_library.provider()
    size = ffi.new("uint32_t *", 0)
    assert provider.QueryAddressList(NULL, size) == Status.BUFFER_OVERFLOW
    data = ffi.new("char[]", size[0])
    assert provider.QueryAddressList(data, size) == Status.SUCCESS
    assert ffi.cast("int32_t *", data)[0] == 0
    provider.release()


def test_a_5_5_every_entry_has_the_full_length_of_its_family(node):
    size = ffi.new("uint32_t *", 0)
    node.adapter.QueryAddressList(NULL, size)
    data = ffi.new("char[]", size[0])
    assert node.adapter.QueryAddressList(data, size) == Status.SUCCESS
    entries = ffi.cast("SOCKET_ADDRESS *", data + 8)
    for i in range(ffi.cast("int32_t *", data)[0]):
        family = ffi.cast("uint16_t *", entries[i].lpSockaddr)[0]
        assert entries[i].iSockaddrLength >= {2: 16, 23: 28}[family]


def test_a_5_7_the_lists_name_the_machines_addresses(node):
    of_adapter, of_provider = address_list(node.adapter), address_list(node.kit.provider)
    assert set(of_adapter) <= set(of_provider)
    mine = set()
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                mine.add(str(ipaddress.ip_address(entry.address.split("%")[0])))
    assert set(of_provider) <= mine | {"127.0.0.1", "::1"}
    assert "127.0.0.1" in of_provider


def test_a_6_2_resolve_then_open_gives_an_adapter(kit):
    code, adapter = kit.open_adapter("127.0.0.1")
    assert code == Status.SUCCESS
    assert address_list(adapter)


def test_a_6_3_resolving_ignores_the_port(kit):
    numbers = set()
    for port in (0, 1, 65535):
        name = sockaddr("127.0.0.1", port)
        number = ffi.new("uint64_t *")
        assert kit.provider.ResolveAddress(name, len(name), number) == Status.SUCCESS
        numbers.add(number[0])
    assert len(numbers) == 1


@pytest.mark.parametrize("address", ["198.51.100.77", "2001:db8::77", "0.0.0.0", "127.0.0.2"])
def test_a_6_3_an_address_not_served_is_refused(kit, address):
    assert kit.open_adapter(address) == (Status.INVALID_ADDRESS, None)


def test_h_2_no_connector_or_listener_is_bound_to_an_address_that_is_not_listed(node):
    assert "127.0.0.2" not in address_list(node.adapter)
    name = sockaddr("127.0.0.2")
    for thing in (node.connector(), node.create("Listener", node.file)):
        assert thing.Bind(name, len(name)) == Status.INVALID_ADDRESS


def test_a_6_3_a_short_structure_or_another_family_is_refused(kit):
    number = ffi.new("uint64_t *")
    name = sockaddr("127.0.0.1")
    for size in (0, 1, 2, 15):
        assert kit.provider.ResolveAddress(name, size, number).failed
    other = ffi.new("unsigned char[28]", b"\x11\x00" + bytes(26))
    assert kit.provider.ResolveAddress(other, 28, number).failed


def test_a_6_4_all_addresses_of_an_adapter_have_one_id(kit):
    for address in address_list(kit.provider):
        name = sockaddr(address)
        number = ffi.new("uint64_t *")
        assert kit.provider.ResolveAddress(name, len(name), number) == Status.SUCCESS
        out = ffi.new("void **")
        assert kit.provider.OpenAdapter(IID["IND2Adapter"], number[0], out) == Status.SUCCESS
        adapter = Interface("IND2Adapter", out[0])
        for sibling in address_list(adapter):
            other = ffi.new("uint64_t *")
            name = sockaddr(sibling)
            assert kit.provider.ResolveAddress(name, len(name), other) == Status.SUCCESS
            assert other[0] == number[0]
        adapter.release()


def test_a_6_5_an_id_that_was_never_given_is_refused(kit):
    out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
    assert kit.provider.OpenAdapter(IID["IND2Adapter"], 0x0BAD0BAD0BAD, out) == Status.INVALID_PARAMETER
    assert out[0] == NULL


def test_a_6_5_another_interface_than_the_adapters_is_refused(kit):
    name = sockaddr("127.0.0.1")
    number = ffi.new("uint64_t *")
    assert kit.provider.ResolveAddress(name, len(name), number) == Status.SUCCESS
    out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
    assert kit.provider.OpenAdapter(version2.IID_unknown, number[0], out) == Status.E_NOINTERFACE
    assert out[0] == NULL


def test_a_6_9_two_opens_give_two_objects_with_memory_of_their_own(kit):
    one, other = kit.node(), kit.node()
    assert one.adapter.address != other.adapter.address
    region = one.region(4096)
    active, _ = make_pair(kit)
    assert active.qp.Send(NULL, sges(region.sge(0, 16)), 1, 0) == Status.SUCCESS
    assert active.one().status == Status.ACCESS_VIOLATION
