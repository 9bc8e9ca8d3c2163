"""Version 1: connectors, endpoints and listening (section I.6), and connections between the two versions."""

from __future__ import annotations

import time

import consumer
import pytest
import version1
from consumer import private_data, wait_until
from consumer_version1 import (
    Node,
    Side,
    accept,
    address_of,
    complete,
    connect,
    connection_data,
    descriptor,
    do,
    endpoint,
    establish,
    fields,
    get_address,
    issue,
    make_pair,
    swap,
)
from kit.scenarios import connect_timeouts, slow_call, slow_completions
from version2 import IID, NULL, Status, ffi, parse_sockaddr, sockaddr


def arrive(kit, active, passive, **options):
    """Return (listening object, Connect under way); the passive side's connector has the request."""
    listen, to = passive.node.listen()
    arrived = issue(kit, listen, "GetConnectionRequest", passive.connector)
    connecting = connect(active, to, **options)
    assert arrived.result() == Status.SUCCESS
    return listen, connecting


def asked(kit, limits):
    """Return (active side, passive node, its connector with the request, Connect under way)."""
    active, passive = Side(Node(kit), limits=limits), Node(kit)
    listen, to = passive.listen()
    taker = passive.connector()
    arrived = issue(kit, listen, "GetConnectionRequest", taker)
    connecting = connect(active, to)
    assert arrived.result() == Status.SUCCESS
    return active, passive, taker, connecting


def two(kit, **side):
    return Side(Node(kit), **side), Side(Node(kit), **side)


def test_i_6_1_endpoints_are_made_with_limits_of_their_own(kit):
    node = Node(kit)
    connector, cq, info = node.connector(), node.cq(), node.info

    def make(*, inbound=1, outbound=1, in_sge=1, out_sge=1, in_limit=0, out_limit=0, granted=NULL):
        out = ffi.new("void **", ffi.cast("void *", 0xDEAD))
        sizes = (inbound, outbound, in_sge, out_sge, in_limit, out_limit)
        code = connector.CreateEndpoint(cq.pointer, cq.pointer, *sizes, granted, out)
        assert (out[0] == NULL) == (code != Status.SUCCESS)
        if code == Status.SUCCESS:
            ffi.cast("INDEndpoint *", out[0]).methods.Release(out[0])
        return code

    top = {
        "inbound": (info.MaxInboundRequests, 3),
        "outbound": (info.MaxOutboundRequests, 4),
        "in_sge": (info.MaxInboundSge, 5),
        "out_sge": (info.MaxOutboundSge, 6),
    }
    assert make(**{name: limit for name, (limit, _) in top.items()}) == Status.SUCCESS, "F.1.2: all at the maximum"
    for name, (limit, position) in top.items():
        for beyond in (limit + 1, limit + (1 << 32), (1 << 64) - 1):
            assert make(**{name: beyond}) == Status[f"INVALID_PARAMETER_{position}"]
    assert make(in_limit=(1 << 64) - 1, out_limit=1 << 40) == Status.SUCCESS, "H.4.6: lowered silently"
    granted = ffi.new("size_t *")
    assert make(granted=granted) == Status.SUCCESS
    assert granted[0] <= info.MaxInlineData
    assert make(granted=ffi.cast("size_t *", 8)) == Status.INVALID_PARAMETER_9
    assert connector.CreateEndpoint(cq.pointer, cq.pointer, 1, 1, 1, 1, 0, 0, NULL, NULL).failed


def test_i_6_1_an_endpoint_goes_with_the_connector_that_made_it_only(kit):
    active, passive = two(kit)
    foreign = kit.own(endpoint(active.node.connector(), active.cq, active.cq))
    listen, to = passive.node.listen()
    name = sockaddr(*to)
    request = issue(kit, active.connector, "Connect", foreign, name, len(name), version1.TCP, 0, NULL, 0)
    assert request.returned == Status.INVALID_PARAMETER_1
    arrived = issue(kit, listen, "GetConnectionRequest", passive.connector)
    connecting = connect(active, to)
    assert arrived.result() == Status.SUCCESS
    stranger = kit.own(endpoint(passive.node.connector(), passive.cq, passive.cq))
    for wrong in (stranger.pointer, NULL, passive.cq.pointer):
        assert issue(kit, passive.connector, "Accept", wrong, NULL, 0).returned == Status.INVALID_PARAMETER_1
    complete(active, connecting, accept(passive))


def test_i_6_1_an_endpoint_outlives_its_connector(kit):
    node = Node(kit)
    connector, cq = node.connector(), node.cq()
    made = endpoint(connector, cq, cq)
    assert connector.release() == 0
    assert made.Receive(node.result(), NULL, 0) == Status.SUCCESS
    assert made.release() == 0
    assert cq.release() == 0


def test_i_6_1_the_endpoints_read_limits_are_negotiated(kit):
    active, passive, taker, connecting = asked(kit, (4, 7))
    cq = passive.cq()
    assert connection_data(taker)[:2] == (7, 4), "H.7.5: as the caller sees them"
    made = kit.own(endpoint(taker, cq, cq, limits=(5, 3)))
    accepting = issue(kit, taker, "Accept", made, NULL, 0)
    assert connecting.result() == Status.SUCCESS
    assert connection_data(active.connector)[:2] == (3, 5)
    complete(active, connecting, accepting)


def test_i_6_1_no_reads_with_a_limit_of_0(kit):
    active, passive = two(kit, limits=(0, 0))
    establish(active, passive)
    done = active.read(active.region.sge(0, 8), remote=descriptor(0, 64, bytes(4)))
    active.expect(done, Status.INVALID_DEVICE_REQUEST)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("protocol", [version1.TCP, version1.UDP])
def test_i_6_2_connect_takes_the_port_in_the_address_and_a_local_port(kit, address, protocol):
    active, passive = Side(Node(kit, address)), Side(Node(kit, address))
    listen, to = passive.node.listen(protocol=protocol)
    assert to[1] != 0, "M.14"
    probe, (_, free) = passive.node.listen()
    probe.release()
    for port in (0, free):
        arrived = issue(kit, listen, "GetConnectionRequest", passive.connector)
        connecting = connect(active, to, local_port=port, protocol=protocol)
        assert arrived.result() == Status.SUCCESS
        seen = get_address(passive.connector, "GetPeerAddress")
        assert seen[0] == address
        assert seen[1] == port if port else 49152 <= seen[1] <= 65535
        assert get_address(passive.connector, "GetLocalAddress") == (address, to[1])
        assert passive.connector.Reject(NULL, 0) == Status.SUCCESS
        assert connecting.result() == Status.CONNECTION_REFUSED


def test_i_6_2_what_connect_refuses(kit):
    active, passive = two(kit)
    _, to = passive.node.listen()
    name = sockaddr(*to)

    def attempt(name=name, size=None, protocol=version1.TCP, data=NULL, data_size=0):
        size = len(name) if size is None else size
        return issue(
            kit, active.connector, "Connect", active.endpoint, name, size, protocol, 0, data, data_size
        ).result()

    for protocol in (0, 1, 5, 255, -1):
        assert attempt(protocol=protocol) == Status.INVALID_PARAMETER_4
    assert attempt(sockaddr("0.0.0.0", 5)) == Status.BAD_NETWORK_NAME
    assert attempt(sockaddr("127.0.0.1", 0)) == Status.INVALID_ADDRESS
    assert attempt(size=15) == Status.INVALID_ADDRESS
    limit = active.node.info.MaxCallerData
    buffer = ffi.new("char[]", limit + 1)
    for size in (limit + 1, 1 << 32, (1 << 64) - 1):
        assert attempt(data=buffer, data_size=size) == Status.INVALID_BUFFER_SIZE
    assert attempt(data_size=1) == Status.ACCESS_VIOLATION
    code = active.connector.Connect(active.endpoint.pointer, name, len(name), version1.TCP, 0, NULL, 0, NULL)
    assert code == Status.INVALID_PARAMETER
    establish(active, passive)  # none of these calls did any harm


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_i_6_3_listen_assigns_a_port_or_takes_the_one_it_is_given(kit, address):
    node = Node(kit, address)
    first, (_, port) = node.listen()
    assert 49152 <= port <= 65535
    assigned = ffi.new("uint16_t *")
    arguments = (0, version1.TCP, swap(port), assigned)
    code, none = node.try_create("Listen", *arguments)
    assert (code, none) == (Status.SHARING_VIOLATION, None)
    assert first.release() == 0
    code, again = node.try_create("Listen", *arguments)
    assert code == Status.SUCCESS
    assert swap(assigned[0]) == port
    again.release()
    assert node.try_create("Listen", 0, version1.TCP, swap(port), NULL)[0] == Status.SUCCESS, (
        "the port needs no second notice"
    )
    for bad in (NULL, ffi.cast("uint16_t *", 8)):
        assert node.try_create("Listen", 0, version1.TCP, 0, bad) == (Status.INVALID_PARAMETER_4, None)
    for protocol in (0, 4, -1):
        assert node.try_create("Listen", 0, protocol, 0, assigned) == (Status.INVALID_PARAMETER_2, None)
    assert node.adapter.Listen(0, version1.TCP, 0, assigned, NULL).failed


def test_i_6_3_many_requests_wait_or_are_refused_over_the_backlog(kit):
    node, sides = Node(kit), [Side(Node(kit), size=64) for _ in range(6)]
    listen, to = node.listen(backlog=3)
    connecting = []
    for side in sides:
        connecting.append(connect(side, to))
    wait_until(lambda: sum(not request.pending() for request in connecting) == 3, "three are refused")
    refused = [request for request in connecting if not request.pending()]
    assert [request.result() for request in refused] == [Status.CONNECTION_REFUSED] * 3
    for _ in range(3):
        taker = node.connector()
        assert do(kit, listen, "GetConnectionRequest", taker) == Status.SUCCESS
        assert taker.Reject(NULL, 0) == Status.SUCCESS
    assert [request.result() for request in connecting] == [Status.CONNECTION_REFUSED] * 6


def test_i_6_3_the_end_of_a_listening_object(kit):
    active, passive = two(kit)
    listen, to = passive.node.listen()
    waiting = [issue(kit, listen, "GetConnectionRequest", passive.node.connector()) for _ in range(3)]
    assert listen.CancelOverlappedRequests() == Status.SUCCESS
    assert [request.result() for request in waiting] == [Status.CANCELED] * 3
    taker = passive.node.connector()
    last = issue(kit, listen, "GetConnectionRequest", taker)
    assert listen.release() == 0
    assert last.result() == Status.CANCELED
    assert connect(active, to).result() == Status.CONNECTION_REFUSED
    listen, to = passive.node.listen()
    assert issue(kit, listen, "GetConnectionRequest", active.connector).returned == Status.INVALID_PARAMETER_1
    busy = issue(kit, listen, "GetConnectionRequest", passive.connector)
    assert busy.pending()
    assert issue(kit, listen, "GetConnectionRequest", passive.connector).returned == Status.CONNECTION_ACTIVE


def test_i_6_4_connection_data_has_limits_and_private_data_each_optional(kit):
    active, passive = two(kit)
    data = bytes(i % 256 for i in range(508))
    for side in (active, passive):
        buffer, size = ffi.new("char[600]"), ffi.new("size_t *", 600)
        assert side.connector.GetConnectionData(NULL, NULL, buffer, size) == Status.CONNECTION_INVALID
    arrive(kit, active, passive, data=data)
    get = passive.connector.GetConnectionData
    assert get(NULL, NULL, NULL, NULL) == Status.SUCCESS
    inbound, outbound, size = ffi.new("size_t *"), ffi.new("size_t *"), ffi.new("size_t *", 0)
    assert get(NULL, outbound, NULL, NULL) == Status.SUCCESS
    assert get(inbound, NULL, NULL, NULL) == Status.SUCCESS
    assert (inbound[0], outbound[0]) == (16, 16)
    inbound[0] = 0
    assert get(inbound, NULL, NULL, size) == Status.BUFFER_OVERFLOW
    assert (size[0], inbound[0]) == (508, 16), "the limits come all the same"
    buffer = ffi.new("unsigned char[600]", b"\xa5" * 600)
    size[0] = 100
    assert get(NULL, NULL, buffer, size) == Status.BUFFER_OVERFLOW
    assert (size[0], bytes(buffer)) == (508, data[:100] + b"\xa5" * 500), "H.7.2: the part that fits"
    for given in (508, 600, 1 << 40):
        size[0] = given
        assert get(inbound, outbound, buffer, size) == Status.SUCCESS
        assert (size[0], bytes(buffer)[:508]) == (508, data)
    bad = ffi.cast("size_t *", 8)
    for arguments in ((bad, NULL, NULL, NULL), (NULL, bad, NULL, NULL), (NULL, NULL, buffer, bad)):
        assert get(*arguments) == Status.ACCESS_VIOLATION
    size[0] = 600
    assert get(NULL, NULL, ffi.cast("void *", 8), size) == Status.ACCESS_VIOLATION


def test_i_6_4_private_data_come_with_accept_and_with_reject(kit):
    active, passive = two(kit)
    _, connecting = arrive(kit, active, passive, data=b"may I?")
    assert connection_data(passive.connector)[2] == b"may I?"
    limit = passive.node.info.MaxCalleeData
    buffer = ffi.new("char[]", limit + 1)
    for size in (limit + 1, 1 << 33):
        assert passive.connector.Reject(buffer, size) == Status.INVALID_BUFFER_SIZE
        refused = issue(kit, passive.connector, "Accept", passive.endpoint, buffer, size)
        assert refused.returned == Status.INVALID_BUFFER_SIZE
    assert passive.connector.Reject(ffi.new("char[]", b"no"), 2) == Status.SUCCESS
    assert connecting.result() == Status.CONNECTION_REFUSED
    assert connection_data(active.connector) == (0, 0, b"no"), "after a refusal there are no limits"
    # The same connector and endpoint may try again (H.4.4).
    _, connecting = arrive(kit, active, passive)
    assert connection_data(passive.connector)[2] == b""
    accepting = accept(passive, b"y" * limit)
    assert connecting.result() == Status.SUCCESS
    assert connection_data(active.connector)[2] == b"y" * limit
    complete(active, connecting, accepting)
    assert passive.connector.Reject(NULL, 0) == Status.CONNECTION_INVALID


def test_i_6_4_the_active_side_rejects_what_it_was_offered(kit):
    active, passive = two(kit)
    _, connecting = arrive(kit, active, passive)
    accepting = accept(passive)
    assert connecting.result() == Status.SUCCESS
    assert active.connector.Reject(NULL, 0) == Status.SUCCESS
    assert accepting.result() == Status.CONNECTION_REFUSED


def test_i_6_5_the_accepting_endpoint_is_made_after_the_request_was_seen(kit):
    active, passive, taker, connecting = asked(kit, (9, 9))
    cq = passive.cq()
    inbound, outbound, _ = connection_data(taker)
    made = kit.own(endpoint(taker, cq, cq, limits=(min(inbound, 2), min(outbound, 2))))
    result = passive.result()
    assert made.Receive(result, NULL, 0) == Status.SUCCESS, "before Accept"
    accepting = issue(kit, taker, "Accept", made, NULL, 0)
    assert connecting.result() == Status.SUCCESS
    assert connection_data(active.connector)[:2] == (2, 2)
    complete(active, connecting, accepting)
    active.expect(active.send())


def test_i_6_6_a_timeout_is_a_success_severity_and_the_connect_is_tried_again(faults, kit):
    with faults(connect_timeouts(2)):
        active = Side(Node(kit))
    passive = Side(Node(kit))
    port = consumer.Port(active.node.file)
    kit.on_close(port.close)
    _, to = passive.node.listen()
    for _ in range(2):
        request = connect(active, to)
        packet = port.get()
        assert packet is not None
        assert packet[0], "C.1.7: the code is one of success"
        assert request.result() == Status.TIMEOUT == 0x102
    establish(active, passive)


def test_i_6_6_version_2_has_an_error_for_a_timeout(faults, kit):
    with faults(connect_timeouts(2)):
        side = consumer.Side(kit.node(), 1)
    for _ in range(2):
        connecting = consumer.connect(kit, side.connector, side.qp, ("127.0.0.1", 9))
        assert connecting.result() == Status.IO_TIMEOUT


def test_i_6_7_disconnecting_flushes_both_sides(kit):
    active, passive = make_pair(kit)
    mine = [active.receive() for _ in range(3)]
    theirs = [passive.receive() for _ in range(3)]
    leaving = issue(kit, passive.connector, "NotifyDisconnect")
    assert leaving.pending()
    assert active.disconnect() == Status.SUCCESS
    assert leaving.result() == Status.SUCCESS
    for side, posted in ((active, mine), (passive, theirs)):
        for result in posted:
            side.expect(result, Status.CANCELED)
        side.expect(side.send(), Status.CANCELED)
    assert passive.disconnect() == Status.SUCCESS, "H.8.6"
    assert passive.disconnect() == Status.CONNECTION_INVALID


def test_i_6_7_calls_out_of_order(kit):
    active, passive = two(kit)
    for method in ("CompleteConnect", "NotifyDisconnect", "Disconnect"):
        assert issue(kit, active.connector, method).returned == Status.CONNECTION_INVALID
    assert accept(active).returned == Status.CONNECTION_INVALID
    assert active.connector.Reject(NULL, 0) == Status.CONNECTION_INVALID
    size, where = ffi.new("size_t *", 28), ffi.new("char[28]")
    assert active.connector.GetLocalAddress(where, size) == Status.CONNECTION_INVALID
    assert active.connector.GetPeerAddress(where, size) == Status.CONNECTION_INVALID
    assert active.try_send() == Status.CONNECTION_INVALID
    _, connecting = arrive(kit, active, passive)
    for getter in (passive.connector.GetLocalAddress, passive.connector.GetPeerAddress):
        for given in (0, 15):
            size[0] = given
            assert getter(where, size) == Status.BUFFER_OVERFLOW
            assert size[0] == 16
        assert getter(NULL, size) == Status.BUFFER_OVERFLOW
        assert getter(where, NULL).failed
    assert connect(active, ("127.0.0.1", 5)).returned == Status.CONNECTION_ACTIVE
    assert connecting.pending()
    assert active.connector.CancelOverlappedRequests() == Status.SUCCESS
    assert connecting.result() == Status.CANCELED
    assert accept(passive).result() == Status.CONNECTION_ABORTED, "H.4.9"


def test_h_8_9_a_release_is_a_disconnect(kit):
    for what in ("connector", "endpoint"):
        active, passive = make_pair(kit)
        leaving, received = issue(kit, passive.connector, "NotifyDisconnect"), passive.receive()
        assert getattr(active, what).release() == 0
        assert leaving.result() == Status.SUCCESS
        passive.expect(received, Status.CANCELED)


def test_delays_apply_to_every_overlapped_call(faults, kit):
    faults(*slow_completions(60))
    active, passive = two(kit)
    listen, to = passive.node.listen()
    passive.receive()

    def late(request, since=None):
        """Check that the request completes, and not before `since` plus the delay."""
        since = time.monotonic() if since is None else since
        assert request.result() == Status.SUCCESS
        assert time.monotonic() - since >= 0.05
        return request

    arrived, start = issue(kit, listen, "GetConnectionRequest", passive.connector), time.monotonic()
    connecting = connect(active, to)
    late(arrived, start)
    accepting, start = accept(passive), time.monotonic()
    late(connecting, start)
    late(issue(kit, active.connector, "CompleteConnect"))
    late(accepting, start)
    leaving, notified = issue(kit, passive.connector, "NotifyDisconnect"), issue(kit, passive.cq, "Notify", 1)
    start = time.monotonic()
    active.send()
    late(notified, start)
    buffer = ffi.new("char[64]")
    request, handle = active.node.start_registration(address_of(buffer), 64)
    late(request)
    late(issue(kit, active.node.adapter, "DeregisterMemory", handle[0]))
    start = time.monotonic()
    late(issue(kit, active.connector, "Disconnect"))
    late(leaving, start)


def test_delayed_cancels(faults, kit):
    faults(slow_call("cancel", 200))
    cq = Node(kit).cq()
    request = issue(kit, cq, "Notify", 1)
    assert cq.CancelOverlappedRequests() == Status.SUCCESS
    assert request.pending()
    assert request.result() == Status.CANCELED


# ---- Both versions ----


@pytest.mark.parametrize("active_version", [1, 2])
def test_the_two_versions_talk_to_each_other(kit, active_version):
    """Private data, limits and messages go both ways, and each side reads and writes the other's memory."""
    first, second = Side(Node(kit), limits=(6, 7)), consumer.Side(kit.node(), 0xB)
    if active_version == 2:
        listen, to = first.node.listen()
        arrived = issue(kit, listen, "GetConnectionRequest", first.connector)
        connecting = consumer.connect(kit, second.connector, second.qp, to, (3, 4), b"asked")
        assert arrived.result() == Status.SUCCESS
        assert connection_data(first.connector) == (4, 3, b"asked")
        accepting = accept(first, b"answered")
        assert connecting.result() == Status.SUCCESS
        assert private_data(second.connector) == b"answered"
        assert kit.do(second.connector, "CompleteConnect") == Status.SUCCESS
    else:
        listener = second.node.listener()
        to = consumer.get_address(listener, "GetLocalAddress")
        arrived = kit.issue(listener, "GetConnectionRequest", second.connector)
        connecting = connect(first, to, b"asked")
        assert arrived.result() == Status.SUCCESS
        assert private_data(second.connector) == b"asked"
        limits = ffi.new("uint32_t[2]")
        assert second.connector.GetReadLimits(limits, limits + 1) == Status.SUCCESS
        assert list(limits) == [7, 6]
        accepting = consumer.accept(kit, second.connector, second.qp, (3, 4), b"answered")
        assert connecting.result() == Status.SUCCESS
        assert connection_data(first.connector) == (4, 3, b"answered")
        assert do(kit, first.connector, "CompleteConnect") == Status.SUCCESS
    assert accepting.result() == Status.SUCCESS

    first.region.put(0, bytes(range(200)))
    second.receive(second.region.sge(0, 200), context=5)
    first.expect(first.send(first.region.sge(0, 200)))
    assert second.one()[1:4] == (Status.SUCCESS, 5, 200)
    received = first.receive(first.region.sge(1000, 200))
    second.send(second.region.sge(0, 200))
    assert second.one().status == Status.SUCCESS
    assert first.expect(received).bytes == 200
    assert first.region.get(1000, 200) == bytes(range(200))

    # Version 1 uses version 2's region and window. Version 2 uses version 1's window.
    region, window = second.region, second.bound_window(4096, 4096)
    for base, length, token in (
        (region.address, region.size, region.remote),
        (region.address + 4096, 4096, window.GetRemoteToken()),
    ):
        remote = descriptor(base, length, token.to_bytes(4, "little"))
        first.region.put(0, b"written by version 1")
        first.expect(first.write(first.region.sge(0, 20), remote=remote, offset=length - 20))
        assert region.get(base - region.address + length - 20, 20) == b"written by version 1"
        first.expect(first.read(first.region.sge(2000, 20), remote=remote, offset=length - 20))
        assert first.region.get(2000, 20) == b"written by version 1"
    _, _, made = first.bound_window(8192, 64)
    base, length, token = fields(made)
    remote_token = int.from_bytes(token, "little")
    region.put(0, b"written by version 2")
    second.write(region.sge(0, 20), to=base + length - 20, token=remote_token)
    assert second.one().status == Status.SUCCESS
    assert first.region.get(8192 + 44, 20) == b"written by version 2"
    second.read(region.sge(100, 1), at=base + length, token=remote_token)
    assert second.one().status == Status.ACCESS_VIOLATION
    assert kit.do(second.connector, "Disconnect") == Status.SUCCESS
    assert first.disconnect() == Status.SUCCESS


def test_objects_of_one_version_are_nothing_to_the_other(kit):
    first, second = Side(Node(kit)), consumer.Side(kit.node(), 0xB)
    node = second.node
    out = ffi.new("void **")
    for wrong in (first.cq, first.endpoint, first.connector):
        arguments = (wrong.pointer, second.cq.pointer, NULL, 4, 4, 1, 1, 0, out)
        assert node.adapter.CreateQueuePair(IID["IND2QueuePair"], *arguments) == Status.INVALID_PARAMETER_2
    name = sockaddr("127.0.0.1", 5)
    request = kit.issue(second.connector, "Connect", first.endpoint, name, len(name), 1, 1, NULL, 0)
    assert request.returned == Status.INVALID_PARAMETER_1
    listener = node.listener()
    assert kit.issue(listener, "GetConnectionRequest", first.connector).returned == Status.INVALID_PARAMETER_1
    assert parse_sockaddr(bytes(ffi.buffer(name))) == ("127.0.0.1", 5)
