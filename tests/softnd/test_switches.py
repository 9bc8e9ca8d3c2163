"""The switches for tests, which are environment variables, and the final statistics."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import threading
import time

import pytest
import version2
from consumer import (
    DEADLINE_S,
    Kit,
    Memory,
    Side,
    accept,
    address_list,
    connect,
    establish,
    get_address,
    make_pair,
    pointer,
    sges,
    wait_until,
)
from kit.scenarios import cut, refused_registrations, removal, slow_call, slow_completions
from kit.threads import Elsewhere
from peer import Peer
from version2 import NOTIFY_ANY, Kind, Mr, Status, ffi, kernel32


def slow(action):
    start = time.monotonic()
    result = action()
    return time.monotonic() - start, result


def test_addresses_limits_what_is_served(monkeypatch):
    monkeypatch.setenv("SOFTND_ADDRESSES", "127.0.0.1")
    kit = Kit()
    node = kit.node()
    assert address_list(kit.provider) == address_list(node.adapter) == ["127.0.0.1"]
    assert kit.open_adapter("::1") == (Status.INVALID_ADDRESS, None)
    kit.close()


def test_exact_sge_grants_no_more_elements_than_were_asked_for(monkeypatch, kit):
    monkeypatch.setenv("SOFTND_SGE", "exact")
    node = kit.node()
    one = Side(node, 1, sge=1)
    elements = [one.region.sge(0, 8)] * 2
    assert one.try_receive(elements[0]) == Status.SUCCESS
    assert one.try_receive(*elements) == Status.DATA_OVERRUN
    establish(Side(kit.node(), 2), one)
    assert one.try_send(*elements) == Status.DATA_OVERRUN
    shared = node.srq(max_sge=1)
    assert shared.Receive(pointer(1), sges(*elements), 2) == Status.DATA_OVERRUN
    none = Side(node, 3, sge=0)
    assert none.try_receive() == Status.SUCCESS
    assert none.try_receive(elements[0]) == Status.DATA_OVERRUN


def test_delayed_completions(faults, kit):
    faults(*slow_completions(300))
    node = kit.node()
    memory = Memory(4096)
    kit.on_close(memory.free)
    took, code = slow(lambda: kit.do(node.mr(), "Register", memory.pointer, 4096, 0))
    assert code == Status.SUCCESS
    assert took >= 0.28


def test_delayed_registration_leaves_other_requests_alone(faults, kit):
    faults(slow_call("reg_mr", 300))
    node = kit.node()
    memory = Memory(4096)
    kit.on_close(memory.free)
    mr = node.mr()
    took, code = slow(lambda: kit.do(mr, "Register", memory.pointer, 4096, 0))
    assert code == Status.SUCCESS
    assert took >= 0.28
    took, code = slow(lambda: kit.do(mr, "Deregister"))
    assert code == Status.SUCCESS
    assert took < 0.28


def test_delayed_cancel(faults, kit):
    faults(slow_call("cancel", 400))
    cq = kit.node().cq()
    request = kit.issue(cq, "Notify", NOTIFY_ANY)
    took, code = slow(cq.CancelOverlappedRequests)
    assert code == Status.SUCCESS
    assert took < 0.3, "the call does not wait"
    assert request.pending(), "the documentation permits a later completion"
    assert request.result() == Status.CANCELED


def test_a_delayed_cancel_and_a_release_write_nothing_later(faults, kit):
    faults(slow_call("cancel", 300))
    cq = kit.node().cq()
    request = kit.issue(cq, "Notify", NOTIFY_ANY)
    cq.CancelOverlappedRequests()
    cq.release()
    pattern = bytes(range(32))
    ffi.buffer(request.overlapped)[:] = pattern
    time.sleep(0.6)
    assert bytes(ffi.buffer(request.overlapped)) == pattern


def test_a_connection_is_cut_after_so_many_bytes(faults, kit):
    passive_node = kit.node()
    faults(cut(after=1_000_000))
    active, passive = Side(kit.node(), 1), Side(passive_node, 2)
    establish(active, passive)
    moved = 0
    code = Status.SUCCESS
    while code == Status.SUCCESS:
        active.write(active.region.sge(), to=passive.region.address, token=passive.region.remote)
        code = active.one().status
        moved += active.region.size
        assert moved < 3_000_000
    assert moved > 800_000
    assert code == Status.IO_TIMEOUT, "F.6.6: abrupt loss"
    passive.receive(context=1)
    assert passive.one()[:3] == (Kind.RECEIVE, Status.CANCELED, 1)


def test_the_adapter_is_gone_after_so_many_requests(faults, kit):
    other = kit.node()
    with faults(removal(after=60)):
        node = kit.node()
    active, passive = Side(node, 1), Side(other, 2)
    establish(active, passive)
    notification = kit.issue(active.cq, "Notify", NOTIFY_ANY)
    removed = Status.DEVICE_REMOVED
    for _ in range(61):
        code = active.try_write(active.region.sge(0, 8), to=passive.region.address, token=passive.region.remote)
        if code != Status.SUCCESS:
            break
    assert code == removed
    assert active.try_receive() == removed
    assert node.try_create("CompletionQueue", node.file, 4, 0, 0)[0] == removed
    assert node.try_create("MemoryRegion", node.file)[0] == removed
    assert node.try_create("MemoryWindow")[0] == removed
    assert node.try_create("Connector", node.file)[0] == removed
    assert kit.do(active.connector, "Disconnect") == removed
    assert kit.issue(active.cq, "Notify", NOTIFY_ANY).result() == removed
    assert kernel32.WaitForSingleObject(notification.event, 10000) == 0
    passive.receive(context=9)
    assert passive.one().status == Status.CANCELED
    memory = Memory(4096)
    kit.on_close(memory.free)
    assert kit.do(other.mr(), "Register", memory.pointer, 4096, 0) == Status.SUCCESS, "the other one goes on"
    for thing in (active.connector, active.qp, active.region.mr, active.cq):
        assert thing.release() == 0, "cleaning up works"


def local_port(owner):
    return get_address(owner, "GetLocalAddress")[1]


def test_ports_are_taken_from_the_range_that_is_asked_for(monkeypatch, kit):
    """Those of listeners and of connectors. Then none is left, and a port that is named may be outside."""
    monkeypatch.setenv("SOFTND_PORTS", "21770-21773")
    node = kit.node()
    node.bound_connector(), node.bound_connector()
    ports = {local_port(node.listener()) for _ in range(2)}
    assert len(ports) == 2 and ports < {21770, 21771, 21772, 21773}
    connector, address = node.connector(), version2.sockaddr(node.address)
    assert connector.Bind(address, len(address)) == Status.TOO_MANY_ADDRESSES
    assert local_port(node.listener(port=21774)) == 21774


@pytest.mark.parametrize("value", ["", "0-10", "30000", "30001-30000", "1-70000", "30000-30010x", None])
def test_ports_are_the_usual_ones_otherwise(monkeypatch, kit, value):
    if value is not None:
        monkeypatch.setenv("SOFTND_PORTS", value)
    assert 49152 <= local_port(kit.node().listener()) <= 65535


def test_every_queue_hears_of_the_removal_while_others_are_closed(faults, kit):
    """The program closes each queue as soon as it hears of it, in the order in which the provider tells."""
    with faults(removal(after=1)):
        node = kit.node()
    side = Side(node, 1)
    queues = [node.cq(depth=4) for _ in range(200)]
    requests = [kit.issue(queue, "Notify", NOTIFY_ANY) for queue in queues]
    started = threading.Event()

    def close_those_that_heard():
        closed = 0
        started.set()
        for queue, request in zip(reversed(queues), reversed(requests), strict=True):
            if not request.ends(DEADLINE_S):
                break
            queue.release()
            closed += 1
        return closed

    closer = Elsewhere(close_those_that_heard).start()
    started.wait(DEADLINE_S)
    codes = [side.try_receive() for _ in range(2)]
    assert codes == [Status.SUCCESS, Status.DEVICE_REMOVED]
    closed = closer.result(2 * DEADLINE_S)
    unheard = [number for number, request in enumerate(requests) if not request.ends(0)]
    assert unheard == [], "some queues never hear that the adapter is gone"
    assert closed == len(queues)


def test_registrations_are_refused_after_so_many(faults, kit):
    faults(refused_registrations(after=3))
    node = kit.node()
    memory = Memory(4096)
    kit.on_close(memory.free)
    codes = [kit.do(node.mr(), "Register", memory.pointer, 4096, 0) for _ in range(5)]
    assert codes == [Status.SUCCESS] * 3 + [Status.INSUFFICIENT_RESOURCES] * 2


@pytest.mark.parametrize("strict", [False, True])
def test_d_3_6_a_read_sink_can_be_insisted_on(monkeypatch, kit, strict):
    if strict:
        monkeypatch.setenv("SOFTND_READ_SINK", "strict")
    active, passive = make_pair(kit)
    sink = active.node.region(64, Mr.REMOTE_WRITE)
    good = active.node.region(64, Mr.LOCAL_WRITE | Mr.READ_SINK)
    remote = passive.region
    active.transfer(Kind.READ, good.sge(), remote.address, remote.remote)
    status = Status.ACCESS_VIOLATION if strict else Status.SUCCESS
    active.transfer(Kind.READ, sink.sge(), remote.address, remote.remote, status)


@pytest.mark.parametrize("sides", ["both", "active", "passive"])
def test_crc_required(monkeypatch, kit, sides):
    nodes = []
    for name in ("active", "passive"):
        if sides in (name, "both"):
            monkeypatch.setenv("SOFTND_CRC", "required")
        else:
            monkeypatch.delenv("SOFTND_CRC", raising=False)
        nodes.append(kit.node())
    active, passive = Side(nodes[0], 1, size=1 << 20), Side(nodes[1], 2, size=1 << 20)
    establish(active, passive)
    active.region.put(0, bytes(range(256)) * 4096)
    active.transfer(Kind.WRITE, active.region.sge(), passive.region.address, passive.region.remote)
    assert passive.region.get() == active.region.get()


def test_the_trace_tells_what_happens(kit, tmp_path):
    trace = tmp_path / "trace.txt"
    with Peer("test_switches", "one_connection", SOFTND_TRACE=str(trace)) as peer:
        assert peer.receive() == "done"
        assert peer.finish() == 0
    lines = trace.read_text().splitlines()
    assert len(lines) >= 4
    assert any("connect" in line.lower() for line in lines)


def test_the_trace_says_how_much_private_data_a_request_without_a_reply_had(tmp_path):
    trace = tmp_path / "trace.txt"
    with Peer("test_switches", "two_refused_requests", SOFTND_TRACE=str(trace)) as peer:
        assert peer.receive() == "done"
        assert peer.finish() == 0
    lines = [line for line in trace.read_text().splitlines() if "before a reply" in line]
    assert [line.partition("request with ")[2] for line in lines] == ["508 bytes of private data"] * 2


def two_refused_requests(channel):
    """The peer closes instead of answering revision 2, and again instead of answering revision 1."""
    with contextlib.closing(Kit()) as kit, socket.create_server(("127.0.0.1", 0)) as listening:
        side = Side(kit.node(), 1)
        connecting = connect(kit, side.connector, side.qp, listening.getsockname(), data=bytes(508))
        for _ in range(2):
            with listening.accept()[0] as connection:
                connection.recv(1)
        assert connecting.result() == Status.CONNECTION_REFUSED
    channel.send("done")


def one_connection(channel, leak=0):
    kit = Kit()
    active, passive = make_pair(kit)
    passive.receive(passive.region.sge(0, 8))
    active.send(active.region.sge(0, 8))
    assert passive.one().status == active.one().status == Status.SUCCESS
    leaked = Kit()
    for _ in range(leak):
        leaked.node().cq()
        leaked.node().window()
        mr = leaked.node().mr()
        buffer = ffi.new("char[4096]")
        leaked.kept.append(buffer)
        assert leaked.do(mr, "Register", buffer, 4096, 0) == Status.SUCCESS
        mr.release()  # D.6.7: without Deregister
    kit.close()
    if not leak:
        leaked.close()
    channel.send("done")


@pytest.mark.parametrize("leak", [0, 3])
def test_d_6_7_statistics_tell_what_was_never_released(tmp_path, leak):
    statistics = tmp_path / "statistics.txt"
    with Peer("test_switches", "one_connection", leak, SOFTND_STATISTICS=str(statistics)) as peer:
        assert peer.receive() == "done"
        assert peer.finish() == 0
    wait_until(statistics.exists, "the statistics are written")
    text = statistics.read_text()
    leaked = {name.strip().lower(): int(count) for name, count in re.findall(r"^(.*):.*?(\d+) leaked", text, re.M)}
    assert leaked, text
    if not leak:
        assert not any(leaked.values()), text
    else:
        expected = {"adapter": 9, "completion queue": 3, "memory window": 3, "memory region": 0, "registration": 3}
        assert {kind: leaked[kind] for kind in expected} == expected, text


def test_statistics_are_written_when_the_dll_is_unloaded(monkeypatch, tmp_path):
    statistics = tmp_path / "statistics.txt"
    monkeypatch.setenv("SOFTND_STATISTICS", str(statistics))
    shutil.copy(version2.DLL, tmp_path / "own.dll")
    library = version2.Library(tmp_path / "own.dll")
    kit = Kit(library)
    make_pair(kit)
    kit.close()
    wait_until(lambda: library.can_unload() == Status.SUCCESS, "everything is released")
    library.free()
    assert re.search(r"\d+ created, 0 leaked", statistics.read_text())


def test_closing_while_completions_are_delayed(faults, kit):
    faults(*slow_completions(200))
    node = kit.node()
    listener = node.listener()
    connector, qp = node.bound_connector(), node.qp(node.cq())
    given = node.connector()
    arrived = kit.issue(listener, "GetConnectionRequest", given)
    connecting = connect(kit, connector, qp, get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    accepting = accept(kit, given, node.qp(node.cq()))
    region = node.mr()
    buffer = ffi.new("char[64]")
    kit.kept.append(buffer)
    registering = kit.issue(region, "Register", pointer(int(ffi.cast("uintptr_t", buffer))), 64, 0)
    for thing in (given, connector, listener, region):
        thing.release()
    for request in (connecting, accepting, registering):
        assert kernel32.WaitForSingleObject(request.event, 10000) == 0
    patterns = []
    for i, request in enumerate((connecting, accepting, registering, arrived)):
        patterns.append((request.overlapped, bytes([i + 1]) * 32))
        ffi.buffer(request.overlapped)[:] = patterns[-1][1]
    time.sleep(0.5)
    for overlapped, pattern in patterns:
        assert bytes(ffi.buffer(overlapped)) == pattern
