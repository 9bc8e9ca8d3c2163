"""Version 1: how to get its provider, the shape of its objects, the adapter's file (sections A, B.5 and I.1)."""

from __future__ import annotations

import pytest
import version1
import version2
from consumer import Kit, Port, address_list, wait_unloadable
from consumer_version1 import (
    UNTOUCHED,
    Node,
    Side,
    accept,
    address_of,
    connect,
    do,
    endpoint,
    establish,
    issue,
    make_pair,
)
from kit.scenarios import removal
from version2 import IID, NOTIFY_ANY, NULL, ORDER, Interface, Status, ffi, query_interface, raw, sockaddr

OVERLAPPED_OBJECTS = ["INDAdapter", "INDCompletionQueue", "INDConnector", "INDListen"]


def every_object(node):
    """One object of each kind of version 1, by interface."""
    side = Side(node)
    return {
        "INDProvider": node.kit.own(version1.provider(node.kit.library)),
        "INDAdapter": node.adapter,
        "INDCompletionQueue": side.cq,
        "INDMemoryWindow": node.window()[0],
        "INDEndpoint": side.endpoint,
        "INDConnector": side.connector,
        "INDListen": node.listen()[0],
    }


def test_a_3_2_the_class_factory_makes_providers_and_may_go_first():
    factory = version1.class_factory(version2.softnd())
    made = []
    for _ in range(2):
        out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
        assert factory.CreateInstance(NULL, IID["INDProvider"], out) == Status.SUCCESS
        made.append(Interface("INDProvider", out[0]))
    assert factory.release() == 0
    assert made[0].address != made[1].address, "A.3.4: each counts its own references"
    size = ffi.new("size_t *", 0)
    assert made[1].QueryAddressList(NULL, size) == Status.BUFFER_OVERFLOW
    assert [provider.release() for provider in made] == [0, 0]


def test_a_3_3_what_the_factory_does_not_make(kit):
    code, pointer = version2.softnd().class_object(IID["INDProvider"])
    assert (code, pointer) == (Status.E_NOINTERFACE, NULL), "the provider comes from the factory only"
    factory = kit.own(version1.class_factory(version2.softnd()))
    for iid in (version2.IID_unknown, IID["IND2Provider"], IID["INDAdapter"]):
        out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
        assert factory.CreateInstance(NULL, iid, out) == Status.E_NOINTERFACE
        assert out[0] == NULL
    assert factory.CreateInstance(factory.pointer, IID["INDProvider"], out) == Status.CLASS_E_NOAGGREGATION
    assert out[0] == NULL
    assert factory.CreateInstance(NULL, IID["INDProvider"], NULL) == Status.E_POINTER


def test_a_3_6_query_interface_answers_unknown_own_and_overlapped_only(kit):
    for name, thing in every_object(Node(kit)).items():
        known = {"IUnknown", name} | ({"INDOverlapped"} if name in OVERLAPPED_OBJECTS else set())
        if name == "INDMemoryWindow":
            known.add("IND2MemoryWindow")  # B.3.1: one identifier
        identities = set()
        for asked in (*ORDER, "IClassFactory"):
            code, pointer = query_interface(thing, asked)
            assert (code == Status.SUCCESS) == (asked in known), (name, asked, code)
            if asked in known:
                identities.add(address_of(pointer))
                Interface("IUnknown", pointer).release()
            else:
                assert (code, pointer) == (Status.E_NOINTERFACE, NULL)
        assert identities == {thing.address}


@pytest.mark.parametrize("kind", ["factory", "INDProvider", *sorted(set(OVERLAPPED_OBJECTS) | {"INDEndpoint"})])
def test_a_4_3_any_object_keeps_the_library(own_library, kind):
    kit = Kit(own_library)
    last = kit.own(version1.class_factory(own_library)) if kind == "factory" else every_object(Node(kit))[kind]
    last.AddRef()
    kit.close()
    assert own_library.can_unload() == Status.S_FALSE
    last.pointer.methods.Release(last.pointer)
    wait_unloadable(own_library)


def test_a_4_3_a_locked_server_stays(own_library):
    factory = version1.class_factory(own_library)
    assert factory.LockServer(1) == Status.SUCCESS
    assert factory.release() == 0
    assert own_library.can_unload() == Status.S_FALSE
    factory = version1.class_factory(own_library)
    assert factory.LockServer(0) == Status.SUCCESS
    factory.release()
    wait_unloadable(own_library)


def test_a_5_1_the_provider_lists_the_addresses_of_version_2(kit):
    provider = kit.own(version1.provider(kit.library))
    size = ffi.new("size_t *", 0)
    assert provider.QueryAddressList(NULL, size) == Status.BUFFER_OVERFLOW
    needed = size[0]
    for given in (0, 8, needed - 1):
        data, size[0] = ffi.new("unsigned char[]", b"\xa5" * needed), given
        assert provider.QueryAddressList(data, size) == Status.BUFFER_OVERFLOW
        assert (size[0], bytes(ffi.buffer(data, needed))) == (needed, b"\xa5" * needed)
    data = ffi.new("char[]", needed)
    assert provider.QueryAddressList(data, size) == Status.SUCCESS
    assert ffi.cast("int32_t *", data)[0] == len(address_list(kit.provider))
    assert provider.QueryAddressList(data, NULL).failed


def open_adapter(provider, name, size=None):
    out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
    code = provider.OpenAdapter(name, len(name) if size is None else size, out)
    assert (out[0] == NULL) == (code != Status.SUCCESS)
    return code, out[0]


def test_a_6_8_an_adapter_is_opened_by_its_address(kit):
    provider = kit.own(version1.provider(kit.library))
    for name in (sockaddr("127.0.0.1"), sockaddr("127.0.0.1", 7471), sockaddr("::1", 9)):
        code, pointer = open_adapter(provider, name)
        assert code == Status.SUCCESS, "ports are ignored"
        assert Interface("INDAdapter", pointer).release() == 0
    for address in ("198.51.100.77", "2001:db8::77", "0.0.0.0"):
        assert open_adapter(provider, sockaddr(address))[0] == Status.INVALID_ADDRESS
    assert open_adapter(provider, sockaddr("127.0.0.1"), 15)[0] == Status.INVALID_PARAMETER_2
    assert open_adapter(provider, sockaddr("::1"), 27)[0] == Status.INVALID_PARAMETER_2
    assert open_adapter(provider, ffi.new("unsigned char[28]", b"\x11\x00" + bytes(26)))[0] == Status.INVALID_ADDRESS
    assert provider.OpenAdapter(sockaddr("127.0.0.1"), 16, NULL).failed
    assert provider.OpenAdapter(ffi.cast("void *", 8), 16, ffi.new("void **")).failed


@pytest.mark.parametrize(("only", "served"), [("1", {1}), ("2", {2}), (None, {1, 2})])
def test_the_versions_that_are_served_can_be_chosen(monkeypatch, only, served):
    library = version2.softnd()
    if only:
        monkeypatch.setenv("SOFTND_VERSION", only)
    for version, name in ((1, "IClassFactory"), (2, "IND2Provider")):
        code, pointer = library.class_object(IID[name])
        assert code == (Status.SUCCESS if version in served else Status.E_NOINTERFACE)
        if pointer != NULL:
            Interface(name, pointer).release()
    code, pointer = library.class_object(IID["IUnknown"])
    assert code == Status.SUCCESS
    unknown = Interface("IUnknown", pointer)
    code, _ = query_interface(unknown, "IND2Provider" if 2 in served else "IClassFactory")
    assert code == Status.SUCCESS
    assert unknown.Release() == 1
    assert unknown.release() == 0


def test_b_3_1_a_window_has_the_shape_of_version_2(kit):
    window, _ = Node(kit).window()
    code, pointer = query_interface(window, "INDMemoryWindow")
    assert code == Status.SUCCESS
    second = Interface("IND2MemoryWindow", pointer)
    assert isinstance(second.GetRemoteToken(), int)
    second.release()


def test_b_6_the_structures_are_what_the_adapter_writes(kit):
    sizes = {"ND_ADAPTER_INFO1": 128, "ND_RESULT": 16, "ND_MW_DESCRIPTOR": 20, "ND_SGE": 24}
    assert {name: ffi.sizeof(name) for name in sizes} == sizes
    first, second = Node(kit).info, kit.node().info
    assert (first.VendorId, first.DeviceId) == (second.VendorId, second.DeviceId)
    assert first.MaxInboundSge == second.MaxReceiveSge
    assert first.MaxOutboundSge == second.MaxInitiatorSge
    assert first.MaxInboundRequests == second.MaxReceiveQueueDepth
    assert first.MaxOutboundRequests == second.MaxInitiatorQueueDepth
    assert first.MaxInboundLength == first.MaxOutboundLength == second.MaxTransferLength
    assert first.MaxInlineData == second.MaxInlineDataSize
    assert first.MaxInboundReadLimit == second.MaxInboundReadLimit
    assert first.MaxOutboundReadLimit == second.MaxOutboundReadLimit
    assert first.MaxCqEntries == second.MaxCompletionQueueDepth
    assert first.MaxRegistrationSize == second.MaxRegistrationSize
    assert first.MaxWindowSize == second.MaxWindowSize
    assert first.LargeRequestThreshold == second.LargeRequestThreshold
    assert (first.MaxCallerData, first.MaxCalleeData) == (second.MaxCallerData, second.MaxCalleeData)


def test_i_1_2_everything_completes_on_the_adapters_one_file(kit):
    active, passive = Side(Node(kit)), Side(Node(kit))
    assert active.node.adapter.GetFileHandle() == active.node.file
    ports = {side: Port(side.node.file, key=side is active) for side in (active, passive)}
    for port in ports.values():
        kit.on_close(port.close)

    def arrived(side, request, good=True):
        packet = ports[side].get()
        assert packet is not None
        assert (packet[0], address_of(packet[1]), packet[2]) == (good, address_of(request.overlapped), side is active)

    listen, to = passive.node.listen()
    request = issue(kit, listen, "GetConnectionRequest", passive.connector)
    connecting = connect(active, to)
    arrived(passive, request)
    accepting = accept(passive)
    arrived(active, connecting)
    completing = issue(kit, active.connector, "CompleteConnect")
    arrived(active, completing)
    arrived(passive, accepting)
    leaving = issue(kit, passive.connector, "NotifyDisconnect")
    buffer = ffi.new("char[4096]")
    registering, handle = active.node.start_registration(address_of(buffer), 4096)
    arrived(active, registering)
    arrived(active, issue(kit, active.node.adapter, "DeregisterMemory", handle[0]))
    notified = issue(kit, passive.cq, "Notify", NOTIFY_ANY)
    passive.receive()
    active.send()
    arrived(passive, notified)
    arrived(active, issue(kit, active.connector, "Disconnect"))
    arrived(passive, leaving)
    waiting = issue(kit, listen, "GetConnectionRequest", passive.node.connector())
    listen.CancelOverlappedRequests()
    arrived(passive, waiting, good=False)
    assert waiting.result() == Status.CANCELED


def test_i_1_2_the_file_lives_as_long_as_anything_completes_on_it(kit):
    node = Node(kit)
    cq = node.cq()
    port = Port(node.file)
    kit.on_close(port.close)
    assert node.adapter.release() == 0
    request = issue(kit, cq, "Notify", NOTIFY_ANY)
    cq.CancelOverlappedRequests()
    packet = port.get()
    assert packet is not None and packet[1] == request.overlapped


def test_i_1_3_results_have_a_byte_count(kit):
    node = Node(kit)
    buffer = ffi.new("char[64]")
    request, handle = node.start_registration(address_of(buffer), 64)
    assert request.result() == Status.SUCCESS
    count = ffi.new("size_t *", UNTOUCHED)
    assert node.adapter.GetOverlappedResult(request.overlapped, count, 1) == Status.SUCCESS
    assert count[0] == 0
    assert node.adapter.GetOverlappedResult(request.overlapped, NULL, 1) == Status.SUCCESS
    assert node.adapter.GetOverlappedResult(request.overlapped, ffi.cast("size_t *", 8), 1).failed
    assert node.adapter.GetOverlappedResult(NULL, count, 0).failed
    assert node.cq().GetOverlappedResult(request.overlapped, count, 0) == Status.SUCCESS, "C.4.8: of any object"
    assert do(kit, node.adapter, "DeregisterMemory", handle[0]) == Status.SUCCESS
    waiting = issue(kit, node.cq(), "Notify", NOTIFY_ANY)
    count[0] = UNTOUCHED
    assert waiting.interface.GetOverlappedResult(waiting.overlapped, count, 0) == Status.PENDING
    assert count[0] == UNTOUCHED


def test_i_1_4_creation_takes_no_interface_identifier(kit):
    things = every_object(Node(kit))
    assert set(things) == {name for name in ORDER if name.startswith("IND") and not name.startswith("IND2")} - {
        "INDOverlapped"
    }
    node = Node(kit)
    for bad in (0, node.info.MaxCqEntries + 1, 1 << 40):
        assert node.try_create("CompletionQueue", bad) == (Status.INVALID_PARAMETER_1, None)
    assert node.cq(node.info.MaxCqEntries)
    assert node.adapter.CreateCompletionQueue(16, NULL).failed
    assert node.adapter.CreateConnector(NULL).failed
    assert node.adapter.CreateMemoryWindow(NULL, NULL).failed


def test_i_1_5_query_takes_the_version_and_a_size(kit):
    adapter = Node(kit).adapter
    size, info = ffi.new("size_t *", 0), ffi.new("unsigned char[136]", b"\xa5" * 136)
    where = ffi.cast("ND_ADAPTER_INFO1 *", info)
    assert adapter.Query(1, NULL, size) == Status.BUFFER_OVERFLOW
    assert size[0] == 128
    size[0] = 127
    assert adapter.Query(1, where, size) == Status.BUFFER_OVERFLOW
    assert (size[0], bytes(info)) == (128, b"\xa5" * 136), "B.7.1: the buffer is not touched"
    assert adapter.Query(1, where, size) == Status.SUCCESS
    assert bytes(info)[128:] == b"\xa5" * 8
    assert adapter.Query(1, where, NULL) == Status.SUCCESS, "the size may be left out"
    for version in (0, 2, 0x20000):
        assert adapter.Query(version, where, size).failed
    for bad in (ffi.cast("ND_ADAPTER_INFO1 *", 8), where):
        assert adapter.Query(1, bad, ffi.cast("size_t *", 8) if bad == where else size).failed


def test_i_1_5_control_is_not_supported(kit):
    node = Node(kit)
    returned, overlapped = ffi.new("size_t *"), kit.overlapped()
    before = bytes(ffi.buffer(overlapped))
    assert node.adapter.Control(7, NULL, 0, NULL, 0, returned, overlapped) == Status.NOT_SUPPORTED
    assert bytes(ffi.buffer(overlapped)) == before


def test_h_4_10_the_last_release_of_each_object_returns_0(kit):
    active, passive = make_pair(kit)
    window, _, _ = passive.bound_window()
    things = [active.connector, active.endpoint, active.cq, window, passive.endpoint, passive.connector, passive.cq]
    assert [thing.release() for thing in things] == [0] * len(things)


def test_a_removed_adapter_gives_device_removed(faults, kit):
    passive = Side(Node(kit))
    with faults(removal(after=3)):
        active = Side(Node(kit))
    establish(active, passive)
    removed = Status.DEVICE_REMOVED
    waiting = issue(kit, active.cq, "Notify", NOTIFY_ANY)
    for _ in range(3):
        active.receive()
    assert active.try_send() == removed
    assert waiting.result() in (removed, Status.SUCCESS)
    adapter, buffer = active.node.adapter, ffi.new("char[64]")
    assert adapter.Query(1, ffi.new("ND_ADAPTER_INFO1 *"), ffi.new("size_t *", 128)) == removed
    assert active.node.start_registration(address_of(buffer), 64)[0].returned == removed
    assert active.node.try_create("CompletionQueue", 4) == (removed, None)
    assert active.node.try_create("Connector") == (removed, None)
    assert active.node.try_create("MemoryWindow", NULL) == (removed, None)
    assert active.node.try_create("Listen", 0, version1.TCP, 0, ffi.new("uint16_t *")) == (removed, None)
    assert active.region.deregister() == Status.SUCCESS, "cleaning up works"
    for thing in (active.connector, active.endpoint, active.cq):
        assert thing.release() == 0


def test_other_things_are_refused_where_an_object_belongs(kit):
    node, second = Node(kit), kit.node()
    side, other = Side(node), Node(kit)
    cq, connector, listen = side.cq, side.connector, node.listen()[0]
    page = ffi.new("char[4096]")
    bad = [NULL, ffi.cast("void *", 8), page, raw(connector), raw(second.cq()), raw(other.cq())]
    for wrong in bad:
        for arguments, code in (((wrong, raw(cq)), 1), ((raw(cq), wrong), 2)):
            out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
            answer = connector.CreateEndpoint(*arguments, 4, 4, 1, 1, 1, 1, NULL, out)
            assert (answer, out[0]) == (Status[f"INVALID_PARAMETER_{code}"], NULL)
    for wrong in (NULL, ffi.cast("void *", 8), page, raw(cq), raw(second.connector()), raw(other.connector())):
        assert issue(kit, listen, "GetConnectionRequest", wrong).returned == Status.INVALID_PARAMETER_1
    name = sockaddr("127.0.0.1", 9)
    mine = kit.own(endpoint(node.connector(), cq, cq))  # of another connector
    for wrong in (NULL, ffi.cast("void *", 8), page, raw(cq), raw(mine), raw(second.qp(second.cq()))):
        request = issue(kit, connector, "Connect", wrong, name, len(name), version1.TCP, 0, NULL, 0)
        assert request.returned == Status.INVALID_PARAMETER_1
    assert Side(node).try_bind(cq)[0] == Status.INVALID_PARAMETER_3
