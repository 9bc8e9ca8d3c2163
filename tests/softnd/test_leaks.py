"""Creating and releasing each kind of object many times leaves the numbers of handles and bytes unchanged."""

from __future__ import annotations

import gc

import consumer_version1
import pytest
import version1
from conftest import share
from consumer import (
    Kit,
    Memory,
    Side,
    accept,
    connect,
    establish,
    get_address,
    get_results,
    make_pair,
    open_handles,
    used_bytes,
    wait_until,
)
from version2 import IID, NOTIFY_ANY, NULL, Interface, Op, Status, ffi, kernel32, raw, sockaddr

CYCLES = share(10_000, 500)

pytestmark = pytest.mark.timeout(1800)


class Cheap:
    """Overlapped requests that keep nothing alive."""

    def __init__(self, kit):
        self.event = kit.event(manual=False)
        self.overlapped = kit.overlapped(self.event)

    def __call__(self, interface, method, *arguments):
        code = getattr(interface, method)(*[raw(a) for a in arguments], self.overlapped)
        if code != Status.PENDING:
            return code
        assert kernel32.WaitForSingleObject(self.event, 20000) == 0
        return interface.GetOverlappedResult(self.overlapped, 0)


def make(node, what, *arguments, name=None):
    """Create an object without the Kit's bookkeeping."""
    name = name or f"IND2{what}"
    out = ffi.new("void **")
    code = getattr(node.adapter, f"Create{what}")(IID[name], *[raw(a) for a in arguments], out)
    assert code == Status.SUCCESS
    return Interface(name, out[0])


def cycles(kit, node, kind):
    """Return functions that each create an object, use it as far as that is quick, and release it."""
    do = Cheap(kit)
    memory = Memory(1 << 16)
    kit.on_close(memory.free)
    cq, srq = node.cq(), node.srq()
    listener = node.listener()
    to = get_address(listener, "GetLocalAddress")

    def provider():
        thing = kit.library.provider()
        assert thing.release() == 0

    def adapter():
        name, number, out = sockaddr("127.0.0.1"), ffi.new("uint64_t *"), ffi.new("void **")
        assert kit.provider.ResolveAddress(name, len(name), number) == Status.SUCCESS
        assert kit.provider.OpenAdapter(IID["IND2Adapter"], number[0], out) == Status.SUCCESS
        assert Interface("IND2Adapter", out[0]).release() == 0

    def overlapped_file():
        out = ffi.new("void **")
        assert node.adapter.CreateOverlappedFile(out) == Status.SUCCESS
        assert kernel32.CloseHandle(out[0])

    def completion_queue():
        thing = make(node, "CompletionQueue", node.file, 1024, 0, 0)
        assert thing.Notify(NOTIFY_ANY, do.overlapped) == Status.PENDING
        assert thing.release() == 0
        assert kernel32.WaitForSingleObject(do.event, 20000) == 0

    def shared_receive_queue():
        thing = make(node, "SharedReceiveQueue", node.file, 64, 4, 2, 0, 0)
        assert thing.Receive(NULL, NULL, 0) == Status.SUCCESS
        assert do(thing, "Notify") == Status.SUCCESS
        assert thing.release() == 0

    def memory_region():
        thing = make(node, "MemoryRegion", node.file)
        assert do(thing, "Register", memory.pointer, memory.size, 0xF) == Status.SUCCESS
        assert do(thing, "Deregister") == Status.SUCCESS
        assert thing.release() == 0

    def registration_dropped():
        thing = make(node, "MemoryRegion", node.file)
        assert do(thing, "Register", memory.pointer, memory.size, 0xF) == Status.SUCCESS
        assert thing.release() == 0

    def memory_window():
        assert make(node, "MemoryWindow").release() == 0

    def queue_pair():
        thing = make(node, "QueuePair", cq, cq, NULL, 16, 16, 4, 4, 64)
        assert thing.Receive(NULL, NULL, 0) == Status.SUCCESS
        assert thing.release() == 0
        assert len(get_results(cq, 4)) == 1

    def queue_pair_with_srq():
        thing = make(node, "QueuePairWithSrq", cq, cq, srq, NULL, 16, 4, 64, name="IND2QueuePair")
        assert thing.release() == 0

    def connector():
        thing = make(node, "Connector", node.file)
        name = sockaddr("127.0.0.1")
        assert thing.Bind(name, len(name)) == Status.SUCCESS
        assert thing.release() == 0

    def listening():
        thing = make(node, "Listener", node.file)
        name = sockaddr("127.0.0.1")
        assert thing.Bind(name, len(name)) == Status.SUCCESS
        assert thing.Listen(0) == Status.SUCCESS
        given = make(node, "Connector", node.file)
        assert thing.GetConnectionRequest(given.pointer, do.overlapped) == Status.PENDING
        assert thing.release() == 0
        assert kernel32.WaitForSingleObject(do.event, 20000) == 0
        assert given.release() == 0

    waiting = Cheap(kit)

    def connection():
        active, passive = (make(node, "Connector", node.file) for _ in range(2))
        pairs = [make(node, "QueuePair", cq, cq, NULL, 4, 4, 1, 1, 0) for _ in range(2)]
        name = sockaddr(*to)
        assert listener.GetConnectionRequest(passive.pointer, do.overlapped) == Status.PENDING
        code = active.Connect(pairs[0].pointer, name, len(name), 1, 1, NULL, 0, waiting.overlapped)
        assert code == Status.PENDING
        assert kernel32.WaitForSingleObject(do.event, 20000) == 0
        assert passive.Accept(pairs[1].pointer, 1, 1, NULL, 0, do.overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(waiting.event, 20000) == 0
        assert active.GetOverlappedResult(waiting.overlapped, 0) == Status.SUCCESS
        assert waiting(active, "CompleteConnect") == Status.SUCCESS
        assert kernel32.WaitForSingleObject(do.event, 20000) == 0
        assert passive.GetOverlappedResult(do.overlapped, 0) == Status.SUCCESS
        assert do(active, "Disconnect") == Status.SUCCESS
        assert do(passive, "Disconnect") == Status.SUCCESS
        for thing in (active, passive, *pairs):
            assert thing.release() == 0
        get_results(cq, 16)

    def refused_connect():
        thing, pair = make(node, "Connector", node.file), make(node, "QueuePair", cq, cq, NULL, 4, 4, 1, 1, 0)
        name = sockaddr(*closed)
        assert do(thing, "Connect", pair, name, len(name), 1, 1, NULL, 0) == Status.CONNECTION_REFUSED
        assert thing.release() == 0
        assert pair.release() == 0

    other = node.listener()
    closed = get_address(other, "GetLocalAddress")
    other.release()
    return locals()[kind]


def cycles_1(kit, kind):
    """The same for version 1."""
    node = consumer_version1.Node(kit)
    cq, buffer = node.cq(), ffi.new("char[65536]")
    event = kit.event(manual=False)
    overlapped, out = kit.overlapped(event), ffi.new("void **")
    result = node.result()
    listen, to = node.listen()
    name = sockaddr(*to)

    def do(interface, method, *arguments, last=()):
        assert getattr(interface, method)(*[raw(a) for a in arguments], overlapped, *last) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 20000) == 0
        return interface.GetOverlappedResult(overlapped, NULL, 0)

    def made(name):
        return Interface(name, out[0])

    def create(what, *arguments):
        method = what if what == "Listen" else f"Create{what}"
        assert getattr(node.adapter, method)(*arguments, out) == Status.SUCCESS
        return made(f"IND{what}")

    def class_factory_and_provider():
        factory = version1.class_factory(kit.library)
        assert factory.CreateInstance(NULL, IID["INDProvider"], out) == Status.SUCCESS
        assert (factory.release(), made("INDProvider").release()) == (0, 0)

    def adapter():
        provider = version1.provider(kit.library)
        assert provider.OpenAdapter(name, len(name), out) == Status.SUCCESS
        assert (provider.release(), made("INDAdapter").release()) == (0, 0)

    handle = ffi.new("uintptr_t *")

    def registration():
        assert do(node.adapter, "RegisterMemory", buffer, 65536, last=(handle,)) == Status.SUCCESS
        assert do(node.adapter, "DeregisterMemory", handle[0]) == Status.SUCCESS

    def registrations_dropped():
        provider = version1.provider(kit.library)
        assert provider.OpenAdapter(name, len(name), out) == Status.SUCCESS
        adapter = made("INDAdapter")
        for _ in range(3):
            assert do(adapter, "RegisterMemory", buffer, 65536, last=(handle,)) == Status.SUCCESS
        assert (provider.release(), adapter.release()) == (0, 0)

    def failed_registration():
        overlapped_and_handle = (overlapped, ffi.cast("uintptr_t *", 8))
        assert node.adapter.RegisterMemory(buffer, 65536, *overlapped_and_handle).failed
        assert node.adapter.RegisterMemory(NULL, 65536, overlapped, handle).failed

    def completion_queue():
        thing = create("CompletionQueue", 1024)
        assert thing.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
        assert thing.release() == 0
        assert kernel32.WaitForSingleObject(event, 20000) == 0

    def window():
        assert create("MemoryWindow", result).release() == 0

    def connector_and_endpoint():
        connector = create("Connector")
        endpoint = consumer_version1.endpoint(connector, cq, cq)
        assert endpoint.Receive(result, NULL, 0) == Status.SUCCESS
        assert (connector.release(), endpoint.release()) == (0, 0)
        assert len(consumer_version1.get_results(cq, 4)) == 1

    def listening():
        thing = create("Listen", 0, version1.TCP, 0, ffi.new("uint16_t *"))
        given = create("Connector")
        assert thing.GetConnectionRequest(given.pointer, overlapped) == Status.PENDING
        assert thing.release() == 0
        assert kernel32.WaitForSingleObject(event, 20000) == 0
        assert given.release() == 0

    later = kit.event(manual=False)
    waiting = kit.overlapped(later)

    def connection():
        active, passive = create("Connector"), create("Connector")
        ends = [consumer_version1.endpoint(connector, cq, cq, entries=4) for connector in (active, passive)]
        assert listen.GetConnectionRequest(passive.pointer, overlapped) == Status.PENDING
        arguments = (ends[0].pointer, name, len(name), version1.TCP, 0, NULL, 0)
        assert active.Connect(*arguments, waiting) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 20000) == 0
        assert passive.Accept(ends[1].pointer, NULL, 0, overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(later, 20000) == 0
        assert active.CompleteConnect(waiting) == Status.PENDING
        assert kernel32.WaitForSingleObject(later, 20000) == 0
        assert kernel32.WaitForSingleObject(event, 20000) == 0
        # A window that the peer invalidates, and messages that succeed silently.
        thing, remote = create("MemoryWindow", result), ffi.new("ND_MW_DESCRIPTOR *")
        where = ffi.cast("void *", registered.address)
        assert ends[1].Bind(result, registered.handle, thing.pointer, where, 64, 8, remote) == Status.SUCCESS
        assert ends[1].Receive(result, NULL, 0) == Status.SUCCESS
        consumer_version1.take(cq, 1)
        silent = Op.SILENT_SUCCESS
        assert ends[0].SendAndInvalidate(result, NULL, 0, remote, silent) == Status.SUCCESS
        consumer_version1.take(cq, 2)
        assert ends[0].Send(result, NULL, 0, silent) == Status.SUCCESS
        assert do(active, "Disconnect") == Status.SUCCESS
        assert do(passive, "Disconnect") == Status.SUCCESS
        for released in (active, passive, *ends, thing):
            assert released.release() == 0
        consumer_version1.get_results(cq, 16)

    registered = node.register(4096)
    return locals()[kind]


KINDS_1 = [
    "class_factory_and_provider",
    "adapter",
    "registration",
    "registrations_dropped",
    "failed_registration",
    "completion_queue",
    "window",
    "connector_and_endpoint",
    "listening",
    "connection",
]

KINDS = [
    "provider",
    "adapter",
    "overlapped_file",
    "completion_queue",
    "shared_receive_queue",
    "memory_region",
    "registration_dropped",
    "memory_window",
    "queue_pair",
    "queue_pair_with_srq",
    "connector",
    "listening",
    "connection",
    "refused_connect",
]


@pytest.mark.parametrize("kind", KINDS)
def test_cycles_leave_handles_and_memory_where_they_were(kit, node, kind):
    run_cycles(cycles(kit, node, kind))


@pytest.mark.parametrize("kind", KINDS_1)
def test_i_cycles_of_version_1_leave_handles_and_memory_where_they_were(kit, kind):
    run_cycles(cycles_1(kit, kind))


def run_cycles(cycle):
    for _ in range(CYCLES // 5):
        cycle()
    gc.collect()
    handles, memory = open_handles(), used_bytes()
    for _ in range(CYCLES):
        cycle()
    gc.collect()
    wait_until(lambda: open_handles() <= handles + 10, f"handles go back from {open_handles()} to {handles}")
    grown = used_bytes() - memory
    assert grown < max(4 << 20, CYCLES * 200), f"{grown} bytes more after {CYCLES} cycles"


def assert_leaves_no_handles(life, count):
    for i in range(12):
        life(i)
    handles = open_handles()
    for i in range(count):
        life(i)
    wait_until(lambda: open_handles() <= handles + 10, "handles are where they were")


def test_the_whole_life_over_and_over(kit):
    def life(_):
        own = Kit()
        active, passive = make_pair(own)
        window = passive.bound_window(0, 4096)
        passive.receive(passive.region.sge(0, 64))
        active.write(active.region.sge(0, 64), to=passive.region.address, token=window.GetRemoteToken())
        active.send(active.region.sge(0, 8))
        assert [d.status for d in active.take(2)] == [Status.SUCCESS] * 2
        own.close()

    assert_leaves_no_handles(life, share(1000, 50))


def test_i_the_whole_life_of_version_1_over_and_over():
    def life(_):
        own = Kit()
        active, passive = consumer_version1.make_pair(own)
        _, invalidated, remote = passive.bound_window(0, 4096)
        active.expect(active.write(active.region.sge(0, 64), remote=remote))
        received = passive.receive(passive.region.sge(0, 64))
        active.expect(active.send_and_invalidate(active.region.sge(0, 8), remote=remote))
        passive.expect(invalidated)
        passive.expect(received)
        own.close()

    assert_leaves_no_handles(life, share(1000, 50))


def test_abandoned_connects_leave_nothing(kit):
    def abandon(i):
        own = Kit()
        active, passive = Side(own.node(), 1), Side(own.node(), 2)
        listener = passive.node.listener()
        arrived = own.issue(listener, "GetConnectionRequest", passive.connector)
        request = connect(own, active.connector, active.qp, get_address(listener, "GetLocalAddress"))
        if i % 4:
            assert arrived.result() == Status.SUCCESS
        if i % 4 == 2:
            active.connector.CancelOverlappedRequests()
            assert request.result() == Status.CANCELED
        if i % 4 == 3:
            accept(own, passive.connector, passive.qp)
            assert request.result() == Status.SUCCESS
        own.close()

    assert_leaves_no_handles(abandon, share(2000, 80))
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    establish(active, passive)
