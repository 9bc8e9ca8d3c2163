"""A NetworkDirect program in small pieces: requests with deadlines, regions, sides of a connection, ports.

A Kit owns everything made through it and releases it in reverse order. It keeps memory alive while a provider may
still write to it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import version2
from kit.deadlines import PROGRAM_DEADLINE_S as DEADLINE_S
from kit.deadlines import wait_until as wait_until
from version2 import IID, NULL, Interface, Kind, Mr, Op, Status, ffi, kernel32, raw

LOOPBACK = "127.0.0.1"


class Completion(NamedTuple):
    """One entry of a completion queue."""

    kind: Kind
    status: Any
    context: int
    bytes: int
    queue_pair: int


class Request:
    """An overlapped request: what the call returned, and its result by a deadline."""

    def __init__(self, interface: Interface, overlapped: Any, event: Any, returned: Any) -> None:
        self.interface, self.overlapped, self.event, self.returned = interface, overlapped, event, returned

    def pending(self) -> bool:
        """Whether the request still runs."""
        return self.returned == Status.PENDING and self.poll() == Status.PENDING

    def poll(self) -> Any:
        return self.interface.GetOverlappedResult(self.overlapped, 0)

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """Return the final status, or the status of the call if it started nothing."""
        if self.returned != Status.PENDING:
            return self.returned
        assert self.ends(timeout_s), f"{self.interface.name}: a request does not complete within {timeout_s} s"
        return self.poll()

    def ends(self, timeout_s: float) -> bool:
        """Whether a request that was started ends by the deadline."""
        return kernel32.WaitForSingleObject(self.event, int(timeout_s * 1000)) == 0


def wait_unloadable(library: version2.Library) -> None:
    wait_until(lambda: library.can_unload() == Status.SUCCESS, "DllCanUnloadNow gives S_OK after the last release")


def open_handles() -> int:
    """Count the handles of this process. Wine's own count is 0, so this tries each number."""
    flags = ffi.new("uint32_t *")
    test = kernel32.GetHandleInformation
    return sum(test(ffi.cast("void *", number), flags) != 0 for number in range(4, 4 * 2048, 4))


def used_bytes() -> int:
    """Return the size of this process's private memory."""
    return int(psutil.Process().memory_info().vms)  # Wine does not count private bytes


class Memory:
    """Pages that only this object uses, so that tests can protect and remove them."""

    def __init__(self, size: int, protection: int = version2.PAGE_READWRITE) -> None:
        self.size = size
        self.pointer = kernel32.VirtualAlloc(NULL, size, version2.MEM_COMMIT_RESERVE, protection)
        assert self.pointer != NULL
        self.address = int(ffi.cast("uintptr_t", self.pointer))

    def protect(self, protection: int, offset: int = 0, size: int | None = None) -> None:
        old = ffi.new("uint32_t *")
        where = ffi.cast("void *", self.address + offset)
        assert kernel32.VirtualProtect(where, self.size if size is None else size, protection, old)

    def free(self) -> None:
        if self.pointer != NULL:
            kernel32.VirtualFree(self.pointer, 0, version2.MEM_RELEASE)
            self.pointer = NULL


class Region:
    """A registered buffer and its two tokens."""

    def __init__(self, mr: Interface, memory: Any, address: int, size: int) -> None:
        self.mr, self.memory, self.address, self.size = mr, memory, address, size

    @property
    def local(self) -> int:
        return int(self.mr.GetLocalToken())

    @property
    def remote(self) -> int:
        return int(self.mr.GetRemoteToken())

    def view(self) -> Any:
        return ffi.buffer(ffi.cast("char *", self.address), self.size)

    def get(self, offset: int = 0, size: int | None = None) -> bytes:
        size = self.size - offset if size is None else size
        return bytes(self.view()[offset : offset + size])

    def put(self, offset: int, data: bytes) -> None:
        self.view()[offset : offset + len(data)] = data

    def sge(self, offset: int = 0, size: int | None = None) -> tuple[int, int, int]:
        return self.address + offset, self.size - offset if size is None else size, self.local


def sges(*elements: tuple[int, int, int]) -> Any:
    """Return an array of ND2_SGE from (address, size, token) tuples."""
    if not elements:
        return NULL
    array = ffi.new("ND2_SGE[]", len(elements))
    for entry, (address, size, token) in zip(array, elements, strict=True):
        entry.Buffer = ffi.cast("void *", address)
        entry.BufferLength = size
        entry.MemoryRegionToken = token
    return array


def pointer(value: int) -> Any:
    return ffi.cast("void *", value)


def get_results(cq: Interface, count: int) -> list[Completion]:
    """Call GetResults once."""
    array = ffi.new("ND2_RESULT[]", max(count, 1))
    got = cq.GetResults(array, count)
    assert got <= count
    return [
        Completion(
            Kind(array[i].RequestType),
            version2.status(array[i].Status),
            int(ffi.cast("uintptr_t", array[i].RequestContext)),
            array[i].BytesTransferred,
            int(ffi.cast("uintptr_t", array[i].QueuePairContext)),
        )
        for i in range(got)
    ]


def take(cq: Interface, count: int, timeout_s: float = DEADLINE_S) -> list[Completion]:
    """Return exactly `count` completions; fail after the deadline."""
    found: list[Completion] = []
    end = time.monotonic() + timeout_s
    while len(found) < count:
        new = get_results(cq, count - len(found))
        found += new
        if not new:
            assert time.monotonic() < end, f"{len(found)} of {count} completions within {timeout_s} s: {found}"
            kernel32.Sleep(0 if time.monotonic() < end - timeout_s + 0.02 else 1)
    return found


def address_list(owner: Interface) -> list[str]:
    """Return the addresses of QueryAddressList."""
    size = ffi.new("uint32_t *", 0)
    assert owner.QueryAddressList(NULL, size) == Status.BUFFER_OVERFLOW
    data = ffi.new("char[]", size[0])
    assert owner.QueryAddressList(data, size) == Status.SUCCESS
    start = int(ffi.cast("uintptr_t", data))
    count = ffi.cast("int32_t *", data)[0]
    entries = ffi.cast("SOCKET_ADDRESS *", start + 8)
    found = []
    for i in range(count):
        where = int(ffi.cast("uintptr_t", entries[i].lpSockaddr))
        assert start + 8 + 16 * count <= where <= start + size[0] - entries[i].iSockaddrLength
        found.append(version2.parse_sockaddr(bytes(ffi.buffer(entries[i].lpSockaddr, entries[i].iSockaddrLength)))[0])
    return found


def get_address(owner: Interface, method: str) -> tuple[str, int]:
    """Return (address, port) from GetLocalAddress or GetPeerAddress."""
    size = ffi.new("uint32_t *", 28)
    data = ffi.new("char[28]")
    assert getattr(owner, method)(data, size) == Status.SUCCESS
    return version2.parse_sockaddr(bytes(ffi.buffer(data, size[0])))


def private_data(connector: Interface) -> bytes:
    size = ffi.new("uint32_t *", 1024)
    data = ffi.new("char[1024]")
    assert connector.GetPrivateData(data, size) == Status.SUCCESS
    return bytes(ffi.buffer(data, size[0]))


class Port:
    """A completion port of the consumer."""

    def __init__(self, file: Any, key: int = 0x1234) -> None:
        self.key = key
        self.handle = kernel32.CreateIoCompletionPort(file, NULL, key, 0)
        assert self.handle not in (NULL, version2.INVALID_HANDLE), version2.last_error()

    def add(self, file: Any, key: int) -> None:
        assert kernel32.CreateIoCompletionPort(file, self.handle, key, 0) == self.handle

    def get(self, timeout_s: float = DEADLINE_S) -> tuple[bool, Any, int] | None:
        """Return (whether TRUE was returned, OVERLAPPED, key) of one packet, or None after the timeout."""
        size, key, overlapped = ffi.new("uint32_t *"), ffi.new("uintptr_t *"), ffi.new("OVERLAPPED **")
        good = kernel32.GetQueuedCompletionStatus(self.handle, size, key, overlapped, int(timeout_s * 1000))
        return None if overlapped[0] == NULL else (bool(good), overlapped[0], key[0])

    def close(self) -> None:
        kernel32.CloseHandle(self.handle)


class Node:
    """One adapter object, its overlapped file, and what is created from them."""

    def __init__(self, kit: Kit, address: str) -> None:
        self.kit, self.address = kit, address
        code, adapter = kit.open_adapter(address)
        assert code == Status.SUCCESS, code
        self.adapter: Interface = adapter
        self.file = self.new_file()

    @property
    def info(self) -> Any:
        info = ffi.new("ND2_ADAPTER_INFO *")
        info.InfoVersion = version2.ND_VERSION_2
        assert self.adapter.Query(info, ffi.new("uint32_t *", ffi.sizeof("ND2_ADAPTER_INFO"))) == Status.SUCCESS
        return info

    def new_file(self) -> Any:
        out = ffi.new("void **")
        assert self.adapter.CreateOverlappedFile(out) == Status.SUCCESS
        self.kit.on_close(lambda: kernel32.CloseHandle(out[0]))
        return out[0]

    def try_create(self, what: str, *arguments: Any, name: str | None = None) -> tuple[Any, Interface | None]:
        """Return (status, object or None) of Create...; after a failure the out pointer must be null."""
        name = name or f"IND2{what}"
        out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
        code = getattr(self.adapter, f"Create{what}")(IID[name], *[raw(a) for a in arguments], out)
        if code != Status.SUCCESS:
            return code, None
        made = Interface(name, out[0])
        self.kit.own(made)
        return code, made

    def create(self, what: str, *arguments: Any, name: str | None = None) -> Interface:
        code, made = self.try_create(what, *arguments, name=name)
        assert code == Status.SUCCESS and made, code
        return made

    def cq(self, depth: int = 256, file: Any = None) -> Interface:
        return self.create("CompletionQueue", file or self.file, depth, 0, 0)

    def mr(self, file: Any = None) -> Interface:
        return self.create("MemoryRegion", file or self.file)

    def window(self) -> Interface:
        return self.create("MemoryWindow")

    def connector(self, file: Any = None) -> Interface:
        return self.create("Connector", file or self.file)

    def bound_connector(self) -> Interface:
        connector = self.connector()
        address = version2.sockaddr(self.address)
        assert connector.Bind(address, len(address)) == Status.SUCCESS
        return connector

    def listener(self, port: int = 0, backlog: int = 0, file: Any = None) -> Interface:
        """Return a listener that listens on this node's address."""
        listener = self.create("Listener", file or self.file)
        address = version2.sockaddr(self.address, port)
        assert listener.Bind(address, len(address)) == Status.SUCCESS
        assert listener.Listen(backlog) == Status.SUCCESS
        return listener

    def srq(self, depth: int = 16, max_sge: int = 4, threshold: int = 0, file: Any = None) -> Interface:
        return self.create("SharedReceiveQueue", file or self.file, depth, max_sge, threshold, 0, 0)

    def qp(
        self,
        receive_cq: Interface,
        initiator_cq: Interface | None = None,
        *,
        context: int = 0,
        depth: int = 64,
        receive_depth: int | None = None,
        sge: int = 4,
        inline: int = 0,
        srq: Interface | None = None,
    ) -> Interface:
        initiator_cq = initiator_cq or receive_cq
        if srq:
            arguments = (receive_cq, initiator_cq, srq, pointer(context), depth, sge, inline)
            return self.create("QueuePairWithSrq", *arguments, name="IND2QueuePair")
        receive_depth = depth if receive_depth is None else receive_depth
        arguments = (receive_cq, initiator_cq, pointer(context), receive_depth, depth, sge, sge, inline)
        return self.create("QueuePair", *arguments)

    def region(self, what: int | Memory | Region = 65536, flags: int = Mr.EVERYTHING) -> Region:
        """Register memory: a size, some pages, or the bytes of another region."""
        mr = self.mr()
        memory: Any
        if isinstance(what, int):
            memory = ffi.new("char[]", what)
            address, size = int(ffi.cast("uintptr_t", memory)), what
        else:
            memory, address, size = what, what.address, what.size
        self.kit.kept.append(memory)
        assert self.kit.do(mr, "Register", pointer(address), size, flags) == Status.SUCCESS
        self.kit.on_close(lambda: mr.references and self.kit.issue(mr, "Deregister").result())
        return Region(mr, memory, address, size)


class Kit:
    """Owns what a test creates."""

    def __init__(self, library: version2.Library | None = None) -> None:
        self.library = library or version2.softnd()
        self.provider = self.library.provider()
        self.kept: list[Any] = []
        self._closing: list[Any] = []

    def on_close(self, action: Any) -> None:
        self._closing.append(action)

    def own(self, thing: Interface) -> Interface:
        self._closing.append(thing.release)
        return thing

    def close(self) -> None:
        """Release everything; an object goes before what it uses."""
        while self._closing:
            self._closing.pop()()
        self.provider.release()
        self.kept.clear()

    def open_adapter(self, address: str = LOOPBACK) -> tuple[Any, Interface | None]:
        name = version2.sockaddr(address)
        number = ffi.new("uint64_t *")
        code = self.provider.ResolveAddress(name, len(name), number)
        if code != Status.SUCCESS:
            return code, None
        out = ffi.new("void **")
        code = self.provider.OpenAdapter(IID["IND2Adapter"], number[0], out)
        return code, self.own(Interface("IND2Adapter", out[0])) if code == Status.SUCCESS else None

    def node(self, address: str = LOOPBACK) -> Node:
        return Node(self, address)

    def event(self, manual: bool = True, initial: bool = False) -> Any:
        event = kernel32.CreateEventW(NULL, manual, initial, NULL)
        assert event != NULL
        self.on_close(lambda: kernel32.CloseHandle(event))
        return event

    def overlapped(self, event: Any = NULL) -> Any:
        """An OVERLAPPED with garbage in its other fields, which C.3.2 allows."""
        overlapped = ffi.new("OVERLAPPED *", (0x5A5A5A5A, 0x5A5A5A5A, 0x5A5A5A5A, 0x5A5A5A5A, event))
        self.kept.append(overlapped)
        return overlapped

    def issue(self, interface: Interface, method: str, *arguments: Any) -> Request:
        """Start an overlapped request with its own event."""
        event = self.event()
        overlapped = self.overlapped(event)
        returned = getattr(interface, method)(*[raw(a) for a in arguments], overlapped)
        return Request(interface, overlapped, event, returned)

    def do(self, interface: Interface, method: str, *arguments: Any) -> Any:
        """Return the final status of an overlapped request."""
        return self.issue(interface, method, *arguments).result()


def still_open(connector: Interface) -> bool:
    """Whether both sockets of a connection are open.

    Now and then, Wine's server keeps a socket of a killed process. No provider can distinguish such a peer from a
    silent one.
    """
    ports = [f":{get_address(connector, method)[1]:04X}" for method in ("GetLocalAddress", "GetPeerAddress")]
    table = Path("Z:/proc/net/tcp")
    lines = [line.split()[1:4] for line in table.read_text().splitlines()[1:]] if table.exists() else []
    ends = {local[-5:] for local, remote, state in lines if state == "01" and {local[-5:], remote[-5:]} == set(ports)}
    return ends == set(ports)


def connect(kit: Kit, connector: Interface, qp: Interface, to: tuple[str, int], limits=(16, 16), data=b"") -> Request:
    """Start Connect. An unbound connector binds itself (H.2.6)."""
    address = version2.sockaddr(*to)
    buffer = ffi.new("char[]", data) if data else NULL
    kit.kept += [address, buffer]
    return kit.issue(connector, "Connect", qp, address, len(address), *limits, buffer, len(data))


def accept(kit: Kit, connector: Interface, qp: Interface, limits=(16, 16), data=b"") -> Request:
    buffer = ffi.new("char[]", data) if data else NULL
    kit.kept.append(buffer)
    return kit.issue(connector, "Accept", qp, *limits, buffer, len(data))


def _taken(post: Any) -> Any:
    """Return a method that requires success. A refused request causes no completion (F.2.1)."""

    def method(self: Side, *arguments: Any, **options: Any) -> Any:
        code = post(self, *arguments, **options)
        assert code == Status.SUCCESS, f"{post.__name__.removeprefix('try_')} is refused: {code}"
        return code

    return method


class Side:
    """One end of a connection, with a completion queue, a queue pair and 64 KiB of memory.

    The try_ methods return the queue pair's status; the other methods require success.
    """

    def __init__(
        self, node: Node, context: int, *, size: int = 65536, cq: Interface | None = None, cq_depth: int = 256, **qp
    ) -> None:
        self.node, self.kit, self.context = node, node.kit, context
        self.cq = cq or node.cq(cq_depth)
        self.qp = node.qp(self.cq, context=context, **qp)
        self.connector = node.connector()
        self.region = node.region(size)

    def _sges(self, elements: Any) -> Any:
        array = sges(*elements)
        self.kit.kept.append(array)
        return array

    def try_receive(self, *elements: tuple[int, int, int], context: int = 0) -> Any:
        return self.qp.Receive(pointer(context), self._sges(elements), len(elements))

    def try_send(self, *elements: tuple[int, int, int], context: int = 0, flags: int = 0) -> Any:
        return self.qp.Send(pointer(context), self._sges(elements), len(elements), flags)

    def try_write(self, *elements, to: int, token: int, context: int = 0, flags: int = 0) -> Any:
        return self.qp.Write(pointer(context), self._sges(elements), len(elements), to, token, flags)

    def try_read(self, *elements, at: int, token: int, context: int = 0, flags: int = 0) -> Any:
        return self.qp.Read(pointer(context), self._sges(elements), len(elements), at, token, flags)

    def try_bind(
        self, region: Any, window: Interface, address: int, size: int, flags: int = Op.ALLOW_READ | Op.ALLOW_WRITE,
        context: int = 0,
    ) -> Any:  # fmt: skip
        mr = region.mr if isinstance(region, Region) else region
        return self.qp.Bind(pointer(context), raw(mr), raw(window), pointer(address), size, flags)

    def try_invalidate(self, window: Interface, context: int = 0, flags: int = 0) -> Any:
        return self.qp.Invalidate(pointer(context), raw(window), flags)

    receive = _taken(try_receive)
    send = _taken(try_send)
    write = _taken(try_write)
    read = _taken(try_read)
    bind = _taken(try_bind)
    invalidate = _taken(try_invalidate)

    def send_when_free(self, *elements: tuple[int, int, int], context: int = 0, flags: int = 0) -> None:
        """Send once a slot is free.
        The queue stays full while the thread that handles acknowledgements does not run.
        """
        wait_until(
            lambda: self.try_send(*elements, context=context, flags=flags) == Status.SUCCESS, "a slot becomes free"
        )

    def take(self, count: int = 1, timeout_s: float = DEADLINE_S) -> list[Completion]:
        return take(self.cq, count, timeout_s)

    def one(self, timeout_s: float = DEADLINE_S) -> Completion:
        return take(self.cq, 1, timeout_s)[0]

    def transfer(
        self, kind: Kind, element: tuple[int, int, int], address: int, token: int, status: Any = Status.SUCCESS
    ) -> None:
        """Read from the peer's memory or Write to it. The next completion is that of this request, with this status."""
        if kind == Kind.READ:
            self.read(element, at=address, token=token)
        else:
            self.write(element, to=address, token=token)
        assert self.one()[:2] == (kind, status)

    def invalidated(self, window: Interface) -> None:
        """Invalidate the window, and wait for that."""
        self.invalidate(window)
        assert self.one().status == Status.SUCCESS

    def bound_window(self, offset: int = 0, size: int | None = None, flags: int = 24, region: Any = None) -> Interface:
        """Return a window over a range of the region, bound through this side's queue pair."""
        region = region or self.region
        window = self.node.window()
        size = region.size - offset if size is None else size
        assert self.bind(region, window, region.address + offset, size, flags, context=0xB1) == Status.SUCCESS
        done = self.one()
        assert (done.kind, done.status, done.context) == (Kind.BIND, Status.SUCCESS, 0xB1)
        return window

    def disconnect(self) -> Any:
        return self.kit.do(self.connector, "Disconnect")


def establish(active: Side, passive: Side, listener: Interface | None = None, limits=(16, 16)) -> None:
    """Connect the two sides."""
    kit = active.kit
    listener = listener or passive.node.listener()
    request = passive.kit.issue(listener, "GetConnectionRequest", passive.connector)
    connecting = connect(kit, active.connector, active.qp, get_address(listener, "GetLocalAddress"), limits)
    assert request.result() == Status.SUCCESS
    accepting = accept(passive.kit, passive.connector, passive.qp, limits)
    assert accepting.returned == Status.PENDING
    assert connecting.result() == Status.SUCCESS
    assert kit.do(active.connector, "CompleteConnect") == Status.SUCCESS
    assert accepting.result() == Status.SUCCESS


def make_pair(kit: Kit, address: str = LOOPBACK, *, limits=(16, 16), **side: Any) -> tuple[Side, Side]:
    """Return (active, passive): two connected sides on two adapter objects of this process."""
    active = Side(kit.node(address), 0xA, **side)
    passive = Side(kit.node(address), 0xB, **side)
    establish(active, passive, limits=limits)
    return active, passive


def no_completion(cq: Interface) -> bool:
    return not get_results(cq, 1)


def ended(side):
    """Whether the connection of this side has ended: a Receive posted now is canceled."""
    side.receive(context=0xE0)
    done = side.one()
    return (done.kind, done.status, done.context) == (Kind.RECEIVE, Status.CANCELED, 0xE0)


def brief(done):
    return [(d.kind, d.status, d.context) for d in done]


def one_way(active, passive, data, flags=0):
    """Send data and check that they arrive."""
    active.region.put(0, data)
    assert passive.receive(passive.region.sge(0, 4096), context=1) == Status.SUCCESS
    assert active.send(active.region.sge(0, len(data)), context=2, flags=flags) == Status.SUCCESS
    got = passive.one()
    assert (got.kind, got.status, got.context, got.bytes) == (Kind.RECEIVE, Status.SUCCESS, 1, len(data))
    assert passive.region.get(0, len(data)) == data
