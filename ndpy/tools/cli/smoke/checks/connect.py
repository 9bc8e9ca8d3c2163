"""Group connect: connections that succeed, and attempts that fail."""

from __future__ import annotations

import contextlib
import time

import ndpy
from ndpy import Capability
from ndpy.tools.cli.channel import encode
from ndpy.tools.cli.peers import PeerRefused
from ndpy.tools.cli.smoke.catalog import Skip, check
from ndpy.tools.cli.smoke.resources import pattern
from ndpy.tools.cli.smoke.testbed import STEP_LIMIT_S, Connection, Testbed, expect, expect_same, refusal
from ndpy.vocabulary.quirks import Quirk


def _expect_that_the_peer_sees_it(connection: Connection) -> None:
    near, seen = connection.connector.local_address, connection.far.peer_address
    expect(
        (near[0].partition("%")[0], near[1]) == (seen[0].partition("%")[0], seen[1]),
        f"this side is {near}, the peer sees {seen}",
    )


def _by_version(testbed: Testbed, version: int) -> str:
    if testbed.address(version) is None:
        # AdapterInfo.addresses has no such address, so the adapter does not claim this, although it is no Capability.
        raise Skip(f"{testbed.info.name} and its peer have no IPv{version} address in common")
    connection = testbed.connect(version=version)
    near, far = connection.connector.local_address, connection.connector.peer_address
    expect(connection.connector.state == "established", f"the connector is {connection.connector.state}")
    expect(near[1] > 0, f"this side's port is {near[1]}")
    _expect_that_the_peer_sees_it(connection)
    connection.expect_alive()
    return f"{near[0]} port {near[1]} to {far[0]} port {far[1]}"


@check("connect", "ipv4")
def ipv4(testbed: Testbed) -> str:
    """A connection over IPv4 can be made and carries a message. Both sides see the same addresses."""
    return _by_version(testbed, 4)


@check("connect", "ipv6")
def ipv6(testbed: Testbed) -> str:
    """A connection over IPv6 can be made and carries a message. Both sides see the same addresses."""
    return _by_version(testbed, 6)


@check("connect", "private-data")
def private_data(testbed: Testbed) -> str:
    """Private data of maximum length arrives in both directions, the server's before the connection is complete."""
    there, back = pattern(5, testbed.info.max_caller_data), pattern(6, testbed.info.max_callee_data)
    offered: list[bytes] = []
    connection = testbed.connect(
        private_data=there, answer_data=back, offered=lambda connector: offered.append(connector.private_data)
    )
    expect_same(connection.far.private_data[: len(there)], there, "private data of connect()")
    expect_same(offered[0][: len(back)], back, "private data of accept()")
    expect(
        not any(connection.far.private_data[len(there) :]) and not any(offered[0][len(back) :]),
        "the padding is not zero",
    )
    connection.expect_alive()
    return f"{len(there)} bytes there, {len(back)} back"


@check("connect", "private-data-too-long")
def private_data_too_long(testbed: Testbed) -> str:
    """Private data that is one byte too long is refused. The queue pair can then connect without it."""
    end = testbed.new_end()
    connector = testbed.connector()
    _, address = testbed.peer_listener()
    with refusal(ndpy.LimitExceededError, "private data one byte too long"):
        connector.connect(
            end.queue_pair, address, private_data=bytes(testbed.info.max_caller_data + 1), timeout_s=testbed.step()
        )
    expect(connector.state in ("idle", "bound"), f"the connector is {connector.state} after the refusal")
    testbed.connect(end).expect_alive()
    return f"{testbed.info.max_caller_data + 1} bytes refused; the queue pair connects without them"


@check("connect", "read-limits")
def read_limits(testbed: Testbed) -> str:
    """Read limits are negotiated. Neither side is told a higher limit than the other side asked for."""
    seen: list[ndpy.ReadLimits] = []
    connection = testbed.connect(
        inbound=2,
        outbound=3,
        peer_inbound=1,
        peer_outbound=1,
        offered=lambda connector: seen.append(connector.read_limits),
    )
    far, near = connection.far.read_limits, seen[0]
    expect(
        far.inbound <= 3 and far.outbound <= 2, f"the peer was told {far}, this side asked for inbound 2, outbound 3"
    )
    # Every transport passes on how many reads the peer serves. Not every transport passes on how many it issues.
    expect(
        near.inbound <= 2 and near.outbound <= 1, f"this side was told {near}, the peer answered inbound 1, outbound 1"
    )
    connection.expect_alive()
    return (
        f"the peer was told inbound {far.inbound}, outbound {far.outbound}; this side {near.inbound}, {near.outbound}"
    )


@check("connect", "four-at-once")
def four_at_once(testbed: Testbed) -> str:
    """Four connections exist at once, and each message arrives on its own connection."""
    connections = [testbed.connect() for _ in range(4)]
    for connection in connections:
        _expect_that_the_peer_sees_it(connection)
    # Linux gives connections to different ports of the peer the same port here (cma_port_is_unique()), as TCP does.
    ends = {(connection.connector.local_address, connection.connector.peer_address) for connection in connections}
    expect(len(ends) == 4, f"4 connections have {len(ends)} pairs of addresses: {ends}")
    messages = [testbed.memory(512) for _ in connections]
    for connection, message in zip(connections, messages, strict=True):
        connection.queue_pair.send(message.region)
    for connection, message in zip(connections, messages, strict=True):
        connection.take(1, "a send")
        connection.take_at_peer(1, "a message")
        expect_same(connection.far.slot(0, 512), message.contents(), "what arrived")
    return "4 connections, 4 messages"


@check("connect", "nobody-listens")
def nobody_listens(testbed: Testbed) -> str:
    """Connecting to a port without a listener is refused quickly. The queue pair can then connect to another port."""
    end = testbed.new_end()
    listener, address = testbed.peer_listener()
    testbed.peer.call("close", object=listener)
    started = time.monotonic()
    with refusal(ndpy.ConnectionRefusedError, "connecting to a port without a listener"):
        testbed.connector().connect(end.queue_pair, address, timeout_s=testbed.step())
    seconds = time.monotonic() - started
    testbed.connect(end).expect_alive()
    return f"refused after {seconds:.2f} s, the queue pair then connects to another port"


@check("connect", "rejected")
def rejected(testbed: Testbed) -> str:
    """A server's rejection arrives with its private data. The queue pair can try again (on iWARP: a new queue pair
    can).
    """
    end = testbed.new_end()
    listener, address = testbed.peer_listener()
    why = pattern(7, min(32, testbed.info.max_callee_data))
    connector = testbed.connector()
    with (
        testbed.peer_at_work("reject", listener=listener, private_data=encode(why)),
        refusal(ndpy.ConnectionRefusedError, "connecting to a server that rejects"),
    ):
        connector.connect(end.queue_pair, address, timeout_s=testbed.step())
    expect_same(connector.private_data[: len(why)], why, "private data of reject()")
    # On iWARP a rejected queue pair stays in its error state.
    testbed.connect(None if testbed.has(Quirk.IWARP_ATTEMPT_USES_QUEUE_PAIR_UP) else end).expect_alive()
    return f"refused with {len(why)} bytes of reason, then connected"


@check("connect", "refused-offer", needs=(Capability.REFUSE_OFFER,))
def refused_offer(testbed: Testbed) -> str:
    """If the client refuses after the server accepted, the server's accept() fails as refused."""
    end = testbed.new_end()
    listener, address = testbed.peer_listener()
    connector = testbed.connector()
    testbed.peer.begin(
        "accept", listener=listener, receives=0, size=0, seed=0, private_data="", inbound=None, outbound=None,
        timeout_s=testbed.step(),
    )  # fmt: skip
    try:
        connector.connect(end.queue_pair, address, timeout_s=testbed.step())
        expect(connector.state == "offered", f"the connector is {connector.state} after connect()")
        connector.reject(b"no, thank you")
        try:
            testbed.peer.finish(STEP_LIMIT_S)
        except PeerRefused as refused:
            expect(
                refused.name == "ConnectionRefusedError",
                f"accept() at the peer failed with {refused.name}: {refused.text}",
            )
            return "the server's accept() raised ConnectionRefusedError"
    except ndpy.NdpyError:
        with contextlib.suppress(PeerRefused):
            testbed.peer.finish(STEP_LIMIT_S)
        raise
    expect(False, "the server's accept() succeeded although the client refused")
    return ""


@check("connect", "timeout")
def timeout(testbed: Testbed) -> str:
    """Connecting to a server that does not answer raises TimeoutError at the deadline, not later."""
    end = testbed.new_end()
    listener, address = testbed.peer_listener()
    with testbed.peer_at_work("hold", listener=listener):
        started = time.monotonic()
        with refusal(ndpy.TimeoutError, "connecting to a server that does not answer"):
            testbed.connector().connect(end.queue_pair, address, timeout_s=0.7)
        seconds = time.monotonic() - started
    expect(0.6 <= seconds < 5, f"TimeoutError after {seconds:.2f} s instead of 0.7")
    return f"TimeoutError after {seconds:.2f} s of 0.7"


@check("connect", "connected-twice")
def connected_twice(testbed: Testbed) -> str:
    """A connected queue pair cannot be connected again. Its connection is not affected."""
    connection = testbed.connect()
    _, address = testbed.peer_listener()
    with refusal(ndpy.NdpyError, "connecting a connected queue pair"):
        testbed.connector().connect(connection.queue_pair, address, timeout_s=testbed.step())
    connection.expect_alive()
    return "refused, the connection works"
