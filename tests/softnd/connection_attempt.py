"""Connection attempts that the tests of section H share."""

from __future__ import annotations

from consumer import Kit, Side, accept, connect, get_address
from version2 import NULL, Status, ffi, sockaddr


class ConnectionAttempt:
    """A Connect that has arrived at a listener and awaits the passive side's decision."""

    def __init__(self, kit: Kit, *, limits=(16, 16), data: bytes = b"", address: str = "127.0.0.1") -> None:
        self.kit = kit
        self.active, self.passive = Side(kit.node(address), 1), Side(kit.node(address), 2)
        self.listener = self.passive.node.listener()
        self.to = get_address(self.listener, "GetLocalAddress")
        arrived = kit.issue(self.listener, "GetConnectionRequest", self.passive.connector)
        self.connecting = connect(kit, self.active.connector, self.active.qp, self.to, limits, data)
        assert arrived.result() == Status.SUCCESS

    def accept(self, limits=(16, 16), data: bytes = b""):
        self.accepting = accept(self.kit, self.passive.connector, self.passive.qp, limits, data)
        return self.accepting

    def offer(self, **arguments):
        """Accept and check that Connect succeeds."""
        self.accept(**arguments)
        assert self.connecting.result() == Status.SUCCESS

    def complete(self):
        assert self.kit.do(self.active.connector, "CompleteConnect") == Status.SUCCESS
        assert self.accepting.result() == Status.SUCCESS
        check_transfer(self.active, self.passive)


def check_transfer(active, passive):
    passive.receive(passive.region.sge(0, 64), context=1)
    active.region.put(0, b"works")
    active.send(active.region.sge(0, 5), context=2)
    assert (passive.one().bytes, active.one().status) == (5, Status.SUCCESS)


def bind(thing, address, port=0):
    name = sockaddr(address, port)
    return thing.Bind(name, len(name))


def closed_port(kit):
    """The address of a port on which nobody listens."""
    listener = kit.node().listener()
    address = get_address(listener, "GetLocalAddress")
    listener.release()
    return address


def reject(connector, data=b""):
    return connector.Reject(ffi.new("char[]", data) if data else NULL, len(data))


def limits_of(connector):
    inbound, outbound = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    assert connector.GetReadLimits(inbound, outbound) == Status.SUCCESS
    return inbound[0], outbound[0]
