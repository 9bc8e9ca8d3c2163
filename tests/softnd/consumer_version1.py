"""A NetworkDirect 1 program in small pieces. consumer.py has what both versions share.

An ND_RESULT identifies a request. Each posting method creates one and fills it with values that no request writes.
The Kit keeps it, and the method returns it. get_results and take return the results that came out of the queue.
"""

from __future__ import annotations

import struct
import time
from typing import Any, NamedTuple

import consumer
import version1
import version2
from consumer import DEADLINE_S, LOOPBACK, Kit, Memory, pointer
from version2 import NULL, Interface, Op, Status, ffi, kernel32, raw

UNTOUCHED = 0x5A5A5A5A


class Done(NamedTuple):
    """An ND_RESULT from a completion queue: its address, and its content at that time."""

    address: int
    status: Any
    bytes: int


def address_of(cdata: Any) -> int:
    return int(ffi.cast("uintptr_t", cdata))


def result_of(cdata: Any) -> Any:
    """Return the status in an ND_RESULT, or UNTOUCHED if nothing was written."""
    return version2.status(cdata.Status)


class Request(consumer.Request):
    """An overlapped request of version 1. Its result has a byte count."""

    def poll(self) -> Any:
        return self.interface.GetOverlappedResult(self.overlapped, ffi.new("size_t *"), 0)


def issue(kit: Kit, interface: Interface, method: str, *arguments: Any, last: tuple[Any, ...] = ()) -> Request:
    """Start an overlapped request with its own event. `last` follows the OVERLAPPED."""
    event = kit.event()
    overlapped = kit.overlapped(event)
    returned = getattr(interface, method)(*[raw(a) for a in arguments], overlapped, *last)
    return Request(interface, overlapped, event, returned)


def do(kit: Kit, interface: Interface, method: str, *arguments: Any) -> Any:
    return issue(kit, interface, method, *arguments).result()


class MemoryRegion:
    """Registered memory."""

    def __init__(self, node: Node, memory: Any, address: int, size: int, handle: int) -> None:
        self.node, self.memory, self.address, self.size, self.handle = node, memory, address, size, handle

    view = consumer.Region.view
    get = consumer.Region.get
    put = consumer.Region.put

    def sge(self, offset: int = 0, size: int | None = None) -> tuple[int, int, int]:
        return self.address + offset, self.size - offset if size is None else size, self.handle

    def deregister(self) -> Any:
        return do(self.node.kit, self.node.adapter, "DeregisterMemory", self.handle)


def sgl(*elements: tuple[int, int, int]) -> Any:
    """Return an array of ND_SGE from (address, size, handle) tuples."""
    if not elements:
        return NULL
    array = ffi.new("ND_SGE[]", len(elements))
    for entry, (address, size, handle) in zip(array, elements, strict=True):
        entry.pAddr, entry.Length, entry.hMr = ffi.cast("void *", address), size, handle
    return array


def descriptor(base: int, length: int, token: bytes) -> Any:
    """Return an ND_MW_DESCRIPTOR for numbers in host order."""
    made = ffi.new("ND_MW_DESCRIPTOR *")
    ffi.buffer(made)[:] = struct.pack(">QQ", base, length) + token
    return made


def fields(made: Any) -> tuple[int, int, bytes]:
    """Return (base, length, token) of an ND_MW_DESCRIPTOR in host order."""
    data = bytes(ffi.buffer(made))
    assert len(data) == 20
    return *struct.unpack_from(">QQ", data), data[16:]


def get_results(cq: Interface, count: int) -> list[Done]:
    """Call GetResults once."""
    array = ffi.new("ND_RESULT *[]", max(count, 1))
    got = cq.GetResults(array, count)
    assert got <= count
    return [Done(address_of(array[i]), result_of(array[i]), array[i].BytesTransferred) for i in range(got)]


def take(cq: Interface, count: int, timeout_s: float = DEADLINE_S) -> list[Done]:
    """Return exactly `count` results; fail after the deadline."""
    found: list[Done] = []
    end = time.monotonic() + timeout_s
    while len(found) < count:
        new = get_results(cq, count - len(found))
        found += new
        if not new:
            assert time.monotonic() < end, f"{len(found)} of {count} results within {timeout_s} s: {found}"
            kernel32.Sleep(1)
    return found


def get_address(connector: Interface, method: str) -> tuple[str, int]:
    size, data = ffi.new("size_t *", 28), ffi.new("char[28]")
    assert getattr(connector, method)(data, size) == Status.SUCCESS
    return version2.parse_sockaddr(bytes(ffi.buffer(data, size[0])))


def connection_data(connector: Interface) -> tuple[int, int, bytes]:
    """Return (inbound limit, outbound limit, private data)."""
    inbound, outbound = ffi.new("size_t *"), ffi.new("size_t *")
    size, data = ffi.new("size_t *", 1024), ffi.new("char[1024]")
    assert connector.GetConnectionData(inbound, outbound, data, size) == Status.SUCCESS
    return inbound[0], outbound[0], bytes(ffi.buffer(data, size[0]))


class Node:
    """One adapter object and what is created from it."""

    def __init__(self, kit: Kit, address: str = LOOPBACK) -> None:
        self.kit, self.address = kit, address
        provider = version1.provider(kit.library)
        name, out = version2.sockaddr(address), ffi.new("void **")
        code = provider.OpenAdapter(name, len(name), out)
        provider.release()
        assert code == Status.SUCCESS, code
        self.adapter = kit.own(Interface("INDAdapter", out[0]))
        self.file = self.adapter.GetFileHandle()

    def try_create(self, what: str, *arguments: Any) -> tuple[Any, Interface | None]:
        out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
        name = what if what == "Listen" else f"Create{what}"
        code = getattr(self.adapter, name)(*[raw(a) for a in arguments], out)
        if code != Status.SUCCESS:
            assert out[0] == NULL
            return code, None
        return code, self.kit.own(Interface(f"IND{what}", out[0]))

    def create(self, what: str, *arguments: Any) -> Interface:
        code, made = self.try_create(what, *arguments)
        assert code == Status.SUCCESS and made, code
        return made

    @property
    def info(self) -> Any:
        info = ffi.new("ND_ADAPTER_INFO1 *")
        assert self.adapter.Query(1, info, ffi.new("size_t *", 128)) == Status.SUCCESS
        return info

    def cq(self, entries: int = 256) -> Interface:
        return self.create("CompletionQueue", entries)

    def connector(self) -> Interface:
        return self.create("Connector")

    def result(self) -> Any:
        """Return an ND_RESULT that nothing has written to."""
        made = ffi.new("ND_RESULT *", (UNTOUCHED, UNTOUCHED))
        self.kit.kept.append(made)
        return made

    def window(self) -> tuple[Interface, Any]:
        """Return a window and the ND_RESULT that its invalidation by the peer will write."""
        result = self.result()
        return self.create("MemoryWindow", result), result

    def listen(
        self, port: int = 0, backlog: int = 0, protocol: int = version1.TCP
    ) -> tuple[Interface, tuple[str, int]]:
        """Return a listening object and its address."""
        assigned = ffi.new("uint16_t *")
        made = self.create("Listen", backlog, protocol, swap(port), assigned)
        return made, (self.address, swap(assigned[0]))

    def start_registration(self, address: int, size: int) -> tuple[Request, Any]:
        handle = ffi.new("uintptr_t *", UNTOUCHED)
        self.kit.kept.append(handle)
        request = issue(self.kit, self.adapter, "RegisterMemory", pointer(address), size, last=(handle,))
        return request, handle

    def register(self, what: int | Memory | MemoryRegion = 65536) -> MemoryRegion:
        memory: Any
        if isinstance(what, int):
            memory = ffi.new("char[]", what)
            address, size = address_of(memory), what
        else:
            memory, address, size = what, what.address, what.size
        self.kit.kept.append(memory)
        request, handle = self.start_registration(address, size)
        assert request.result() == Status.SUCCESS
        made = MemoryRegion(self, memory, address, size, handle[0])
        self.kit.on_close(lambda: self.adapter.references and made.deregister())
        return made


def swap(port: int) -> int:
    """Convert a port between host and network order."""
    return int(struct.unpack("<H", struct.pack(">H", port))[0])


class Side:
    """One end of a connection: a connector, its endpoint, one completion queue and 64 KiB of memory."""

    def __init__(
        self, node: Node, *, size: int = 65536, cq: Interface | None = None, limits=(16, 16), entries: int = 64,
        elements: int = 4,
    ) -> None:  # fmt: skip
        self.node, self.kit = node, node.kit
        self.cq = cq or node.cq()
        self.connector = node.connector()
        self.endpoint = endpoint(self.connector, self.cq, self.cq, limits=limits, entries=entries, elements=elements)
        self.kit.own(self.endpoint)
        self.region = node.register(size)

    def _post(self, method: str, elements: Any, *more: Any) -> tuple[Any, Any]:
        result, array = self.node.result(), sgl(*elements)
        code = getattr(self.endpoint, method)(result, array, len(elements), *more)
        return code, result

    def _posted(self, method: str, elements: Any, *more: Any) -> Any:
        code, result = self._post(method, elements, *more)
        assert code == Status.SUCCESS, f"{method} is refused: {code}"
        return result

    def receive(self, *elements: tuple[int, int, int]) -> Any:
        return self._posted("Receive", elements)

    def send(self, *elements: tuple[int, int, int], flags: int = 0) -> Any:
        return self._posted("Send", elements, flags)

    def send_and_invalidate(self, *elements: tuple[int, int, int], remote: Any, flags: int = 0) -> Any:
        return self._posted("SendAndInvalidate", elements, remote, flags)

    def read(self, *elements: tuple[int, int, int], remote: Any, offset: int = 0, flags: int = 0) -> Any:
        return self._posted("Read", elements, remote, offset, flags)

    def write(self, *elements: tuple[int, int, int], remote: Any, offset: int = 0, flags: int = 0) -> Any:
        return self._posted("Write", elements, remote, offset, flags)

    def try_send(self, *elements: tuple[int, int, int], flags: int = 0) -> Any:
        return self._post("Send", elements, flags)[0]

    def try_read(self, *elements: tuple[int, int, int], remote: Any, offset: int = 0, flags: int = 0) -> Any:
        return self._post("Read", elements, remote, offset, flags)[0]

    def try_write(self, *elements: tuple[int, int, int], remote: Any, offset: int = 0, flags: int = 0) -> Any:
        return self._post("Write", elements, remote, offset, flags)[0]

    def try_bind(
        self, window: Any, offset: int = 0, size: int | None = None, flags: int = 24, region: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return (status, result, descriptor) of a Bind to a range of a registration."""
        region = region or self.region
        result, made = self.node.result(), ffi.new("ND_MW_DESCRIPTOR *")
        self.kit.kept.append(made)
        size = region.size - offset if size is None else size
        where = pointer(region.address + offset)
        return self.endpoint.Bind(result, region.handle, raw(window), where, size, flags, made), result, made

    def bound_window(self, offset: int = 0, size: int | None = None, flags: int = 24) -> tuple[Interface, Any, Any]:
        """Return (window, its invalidation result, descriptor) of a bound window."""
        window, invalidated = self.node.window()
        code, result, made = self.try_bind(window, offset, size, flags)
        assert code == Status.SUCCESS
        assert self.one()[:2] == (address_of(result), Status.SUCCESS)
        return window, invalidated, made

    def take(self, count: int = 1, timeout_s: float = DEADLINE_S) -> list[Done]:
        return take(self.cq, count, timeout_s)

    def one(self, timeout_s: float = DEADLINE_S) -> Done:
        return take(self.cq, 1, timeout_s)[0]

    def expect(self, result: Any, status: Any = Status.SUCCESS) -> Done:
        """Check that the next result is this one, with this status."""
        done = self.one()
        assert (done.address, done.status) == (address_of(result), status)
        return done

    def disconnect(self) -> Any:
        return do(self.kit, self.connector, "Disconnect")


def endpoint(
    connector: Interface, inbound: Interface, outbound: Interface, *, limits=(16, 16), entries: int = 64,
    elements: int = 4,
) -> Interface:  # fmt: skip
    out, max_inline = ffi.new("void **"), ffi.new("size_t *")
    sizes = (entries, entries, elements, elements, *limits)
    code = connector.CreateEndpoint(raw(inbound), raw(outbound), *sizes, max_inline, out)
    assert code == Status.SUCCESS, code
    return Interface("INDEndpoint", out[0])


def connect(
    side: Side, to: tuple[str, int], data: bytes = b"", local_port: int = 0, protocol: int = version1.TCP
) -> Request:
    address, buffer = version2.sockaddr(*to), ffi.new("char[]", data) if data else NULL
    side.kit.kept += [address, buffer]
    where = (address, len(address), protocol, swap(local_port))
    return issue(side.kit, side.connector, "Connect", side.endpoint, *where, buffer, len(data))


def accept(side: Side, data: bytes = b"") -> Request:
    buffer = ffi.new("char[]", data) if data else NULL
    side.kit.kept.append(buffer)
    return issue(side.kit, side.connector, "Accept", side.endpoint, buffer, len(data))


def _ask(side: Any, to: tuple[str, int], data: bytes) -> consumer.Request:
    if isinstance(side, Side):
        return connect(side, to, data)
    return consumer.connect(side.kit, side.connector, side.qp, to, data=data)


def _answer(side: Any, data: bytes) -> consumer.Request:
    return (
        accept(side, data) if isinstance(side, Side) else consumer.accept(side.kit, side.connector, side.qp, data=data)
    )


def _issue(side: Any, interface: Interface, method: str, *arguments: Any) -> consumer.Request:
    return (issue if isinstance(side, Side) else Kit.issue)(side.kit, interface, method, *arguments)


def complete(active: Any, connecting: consumer.Request, accepting: consumer.Request) -> None:
    """Make the connection, once both sides have begun."""
    assert connecting.result() == Status.SUCCESS
    assert _issue(active, active.connector, "CompleteConnect").result() == Status.SUCCESS
    assert accepting.result() == Status.SUCCESS


def establish(active: Any, passive: Any, asked: bytes = b"", answered: bytes = b"") -> None:
    """Connect two sides. Each is of version 1 or a consumer.Side of version 2."""
    if isinstance(passive, Side):
        listen, to = passive.node.listen()
    else:
        listen = passive.node.listener()
        to = consumer.get_address(listen, "GetLocalAddress")
    arrived = _issue(passive, listen, "GetConnectionRequest", passive.connector)
    connecting = _ask(active, to, asked)
    assert arrived.result() == Status.SUCCESS
    complete(active, connecting, _answer(passive, answered))


def make_pair(kit: Kit, address: str = LOOPBACK, **side: Any) -> tuple[Side, Side]:
    """Return (active, passive): two connected sides on two adapter objects of this process."""
    active, passive = Side(Node(kit, address), **side), Side(Node(kit, address), **side)
    establish(active, passive)
    return active, passive


ALLOW_BOTH = Op.ALLOW_READ | Op.ALLOW_WRITE
