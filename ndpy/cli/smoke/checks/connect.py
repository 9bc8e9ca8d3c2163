"""Group connect: making connections, and not making them."""

from __future__ import annotations

import contextlib
import time

import ndpy
from ndpy import Capability
from ndpy.cli.smoke.catalog import Skip, check
from ndpy.cli.smoke.channel import encode
from ndpy.cli.smoke.lab import PATIENCE_S, Lab, expect, expect_same, refusal
from ndpy.cli.smoke.line import pattern
from ndpy.cli.smoke.remote import PeerRefused


def _by_version(lab: Lab, version: int) -> str:
    if lab.address(version) is None:
        # Not a capability, but nothing that the adapter claims: AdapterInfo.addresses has none.
        raise Skip(f"{lab.info.name} and its peer have no IPv{version} address in common")
    pair = lab.connect(version=version)
    near, far = pair.connector.local_address, pair.connector.peer_address
    expect(pair.connector.state == "established", f"the connector is {pair.connector.state}")
    expect(near[1] > 0, f"this side's port is {near[1]}")
    expect(
        near[0].partition("%")[0] == pair.far.peer_address[0].partition("%")[0] and near[1] == pair.far.peer_address[1],
        f"this side is {near}, the peer sees {pair.far.peer_address}",
    )
    pair.alive()
    return f"{near[0]} port {near[1]} to {far[0]} port {far[1]}"


@check("connect", "ipv4")
def ipv4(lab: Lab) -> str:
    """A connection over IPv4 comes up, carries a message, and both sides see the same addresses."""
    return _by_version(lab, 4)


@check("connect", "ipv6")
def ipv6(lab: Lab) -> str:
    """A connection over IPv6 comes up, carries a message, and both sides see the same addresses."""
    return _by_version(lab, 6)


@check("connect", "private-data")
def private_data(lab: Lab) -> str:
    """Private data of the greatest length arrives both ways, the server's before the connection is complete."""
    there, back = pattern(5, lab.info.max_caller_data), pattern(6, lab.info.max_callee_data)
    offered: list[bytes] = []
    pair = lab.connect(
        private_data=there, answer_data=back, offered=lambda connector: offered.append(connector.private_data)
    )
    expect_same(pair.far.private_data[: len(there)], there, "private data of connect()")
    expect_same(offered[0][: len(back)], back, "private data of accept()")
    expect(not any(pair.far.private_data[len(there) :]) and not any(offered[0][len(back) :]), "the padding is not zero")
    pair.alive()
    return f"{len(there)} bytes there, {len(back)} back"


@check("connect", "private-data-too-long")
def private_data_too_long(lab: Lab) -> str:
    """One byte more private data than the limit is refused, and the same connector then connects with less."""
    line = lab.line()
    connector = lab.connector()
    _, address = lab.far_listener()
    with refusal(ndpy.LimitExceededError, "private data one byte too long"):
        connector.connect(
            line.queue_pair, address, private_data=bytes(lab.info.max_caller_data + 1), timeout_s=lab.step()
        )
    expect(connector.state in ("idle", "bound"), f"the connector is {connector.state} after the refusal")
    lab.connect(line).alive()
    return f"{lab.info.max_caller_data + 1} bytes refused, the queue pair connects without"


@check("connect", "read-limits")
def read_limits(lab: Lab) -> str:
    """Read limits are negotiated: each side is told what the other asks for, no more."""
    seen: list[ndpy.ReadLimits] = []
    pair = lab.connect(
        inbound=2,
        outbound=3,
        far_inbound=1,
        far_outbound=1,
        offered=lambda connector: seen.append(connector.read_limits),
    )
    far, near = pair.far.read_limits, seen[0]
    expect(
        far.inbound <= 3 and far.outbound <= 2, f"the peer was told {far}, this side asked for inbound 2, outbound 3"
    )
    # What the peer wants to issue is not passed on by every transport; what it serves must be.
    expect(
        near.inbound <= 2 and near.outbound <= 1, f"this side was told {near}, the peer answered inbound 1, outbound 1"
    )
    pair.alive()
    return (
        f"the peer was told inbound {far.inbound}, outbound {far.outbound}; this side {near.inbound}, {near.outbound}"
    )


@check("connect", "four-at-once")
def four_at_once(lab: Lab) -> str:
    """Four connections live side by side, and each message arrives where it belongs."""
    pairs = [lab.connect() for _ in range(4)]
    expect(len({pair.connector.local_address for pair in pairs}) == 4, "two connections have the same local address")
    messages = [lab.memory(512) for _ in pairs]
    for pair, message in zip(pairs, messages, strict=True):
        pair.queue_pair.send(message.region)
    for pair, message in zip(pairs, messages, strict=True):
        pair.take(1, "a send")
        pair.take_far(1, "a message")
        expect_same(pair.far.slot(0, 512), message.contents(), "what arrived")
    return "4 connections, 4 messages"


@check("connect", "nobody-listens")
def nobody_listens(lab: Lab) -> str:
    """A port that nobody serves is refused soon, and the queue pair can then be connected elsewhere."""
    line = lab.line()
    listener, address = lab.far_listener()
    lab.peer.call("close", object=listener)
    started = time.monotonic()
    with refusal(ndpy.ConnectionRefusedError, "connecting to a port that nobody serves"):
        lab.connector().connect(line.queue_pair, address, timeout_s=lab.step())
    seconds = time.monotonic() - started
    lab.connect(line).alive()
    return f"refused after {seconds:.2f} s, the queue pair then connects elsewhere"


@check("connect", "rejected")
def rejected(lab: Lab) -> str:
    """A server's reject arrives with its private data, and the queue pair can try again (iWARP: a new one can)."""
    line = lab.line()
    listener, address = lab.far_listener()
    why = pattern(7, min(32, lab.info.max_callee_data))
    connector = lab.connector()
    lab.peer.begin("reject", listener=listener, private_data=encode(why), timeout_s=lab.step())
    try:
        with refusal(ndpy.ConnectionRefusedError, "connecting to a server that rejects"):
            connector.connect(line.queue_pair, address, timeout_s=lab.step())
    finally:
        lab.peer.finish(PATIENCE_S)
    expect_same(connector.private_data[: len(why)], why, "private data of reject()")
    # A rejected queue pair of iWARP is in its error state for good.
    lab.connect(None if lab.iwarp else line).alive()
    return f"refused with {len(why)} bytes of reason, then connected"


@check("connect", "refused-offer", needs=(Capability.REFUSE_OFFER,))
def refused_offer(lab: Lab) -> str:
    """A client that refuses after the server accepted makes the server's accept fail as refused."""
    line = lab.line()
    listener, address = lab.far_listener()
    connector = lab.connector()
    lab.peer.begin(
        "accept", listener=listener, receives=0, size=0, seed=0, private_data="", inbound=None, outbound=None,
        timeout_s=lab.step(),
    )  # fmt: skip
    try:
        connector.connect(line.queue_pair, address, timeout_s=lab.step())
        expect(connector.state == "offered", f"the connector is {connector.state} after connect()")
        connector.reject(b"no, thank you")
        try:
            lab.peer.finish(PATIENCE_S)
        except PeerRefused as refused:
            expect(
                refused.name == "ConnectionRefusedError",
                f"accept() at the peer failed with {refused.name}: {refused.text}",
            )
            return "the server's accept() raised ConnectionRefusedError"
    except ndpy.NdpyError:
        with contextlib.suppress(PeerRefused):
            lab.peer.finish(PATIENCE_S)
        raise
    expect(False, "the server's accept() succeeded although the client refused")
    return ""


@check("connect", "timeout")
def timeout(lab: Lab) -> str:
    """A server that does not answer leads to TimeoutError at the deadline, not later."""
    line = lab.line()
    listener, address = lab.far_listener()
    lab.peer.begin("hold", listener=listener, timeout_s=lab.step())
    started = time.monotonic()
    try:
        with refusal(ndpy.TimeoutError, "connecting to a server that does not answer"):
            lab.connector().connect(line.queue_pair, address, timeout_s=0.7)
        seconds = time.monotonic() - started
    finally:
        lab.peer.finish(PATIENCE_S)
    expect(0.6 <= seconds < 5, f"TimeoutError after {seconds:.2f} s instead of 0.7")
    return f"TimeoutError after {seconds:.2f} s of 0.7"


@check("connect", "connected-twice")
def connected_twice(lab: Lab) -> str:
    """A queue pair that is connected cannot be connected again, and its connection does not suffer."""
    pair = lab.connect()
    _, address = lab.far_listener()
    with refusal(ndpy.NdpyError, "connecting a connected queue pair"):
        lab.connector().connect(pair.queue_pair, address, timeout_s=lab.step())
    pair.alive()
    return "refused, the connection works"
