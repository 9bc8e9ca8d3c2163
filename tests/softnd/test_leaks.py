"""Creating and releasing each kind of object, over and over, leaves handles and memory where they were."""

from __future__ import annotations

import gc

import pytest
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
from nd2 import IID, NOTIFY_ANY, NULL, Interface, Status, ffi, kernel32, raw, sockaddr

CYCLES = share(10_000, 500)

pytestmark = pytest.mark.timeout(1800)


class Cheap:
    """Overlapped requests without anything kept for each of them."""

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
    """Create without the Kit's bookkeeping."""
    name = name or f"IND2{what}"
    out = ffi.new("void **")
    code = getattr(node.adapter, f"Create{what}")(IID[name], *[raw(a) for a in arguments], out)
    assert code == Status.SUCCESS
    return Interface(name, out[0])


def cycles(kit, node, kind):
    """A function that creates and releases one object, used in between as far as that is quick."""
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
    cycle = cycles(kit, node, kind)
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


def test_the_whole_life_over_and_over(kit):
    def life():
        own = Kit()
        active, passive = make_pair(own)
        window = passive.bound_window(0, 4096)
        passive.receive(passive.region.sge(0, 64))
        active.write(active.region.sge(0, 64), to=passive.region.address, token=window.GetRemoteToken())
        active.send(active.region.sge(0, 8))
        assert [d.status for d in active.take(2)] == [Status.SUCCESS] * 2
        own.close()

    for _ in range(10):
        life()
    handles = open_handles()
    for _ in range(share(1000, 50)):
        life()
    wait_until(lambda: open_handles() <= handles + 10, "handles are where they were")


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

    for i in range(12):
        abandon(i)
    handles = open_handles()
    for i in range(share(2000, 80)):
        abandon(i)
    wait_until(lambda: open_handles() <= handles + 10, "handles are where they were")
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    establish(active, passive)
