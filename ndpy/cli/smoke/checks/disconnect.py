"""Group disconnect: flushing, and the end of connections."""

from __future__ import annotations

import ndpy
from ndpy import Status
from ndpy.cli.smoke.catalog import check
from ndpy.cli.smoke.lab import Lab, Pair, contexts, expect, expect_ok, expect_status, refusal


def _with_receives(lab: Lab, count: int) -> Pair:
    pair = lab.connect(receives=4, size=64)
    pair.near.post_receives(lab.memory(count * 64), count)
    return pair


def _swept(pair: Pair, count: int, what: str) -> None:
    ended = pair.take(count, what)
    for completion in ended:
        expect_status(completion, Status.CANCELED, what)
    expect(contexts(ended) == list(range(count)), f"{what}: in the order {contexts(ended)}")


@check("disconnect", "by-this-side")
def by_this_side(lab: Lab) -> str:
    """A disconnect cancels what both sides have posted, and the peer is told."""
    pair = _with_receives(lab, 3)
    pair.connector.disconnect(lab.step())
    expect(pair.connector.state == "disconnected", f"the connector is {pair.connector.state}")
    _swept(pair, 3, "this side's receives")
    pair.far.wait_disconnected(lab.step())
    for ended in pair.take_far(4, "the peer's receives"):
        expect_status(ended, Status.CANCELED, "the peer's receives")
    return "3 receives here and 4 at the peer CANCELED"


@check("disconnect", "by-the-peer")
def by_the_peer(lab: Lab) -> str:
    """The peer's disconnect is notified here, cancels what is posted, and later requests complete CANCELED."""
    pair = _with_receives(lab, 3)
    notice = pair.connector.begin_wait_disconnected()
    expect(not notice.done(), "the end was notified before it came")
    pair.far.disconnect(lab.step())
    notice.result(lab.step())
    _swept(pair, 3, "this side's receives")
    pair.queue_pair.send(lab.ping.region, context=50)
    (late,) = pair.take(1, "a send after the end")
    expect_status(late, Status.CANCELED, "a send after the end")
    pair.connector.disconnect(lab.step())
    return "notified, 3 receives and a later send CANCELED, own disconnect() succeeds"


@check("disconnect", "released-by-the-peer")
def released_by_the_peer(lab: Lab) -> str:
    """A peer that closes its queue pair without a disconnect ends the connection here too."""
    pair = _with_receives(lab, 2)
    failures = pair.far.close()
    expect(not failures, f"closing at the peer: {'; '.join(failures)}")
    pair.connector.wait_disconnected(lab.step())
    _swept(pair, 2, "this side's receives")
    return "notified, 2 receives CANCELED"


@check("disconnect", "delivered-first")
def delivered_first(lab: Lab) -> str:
    """What was sent before a disconnect, and completed, has arrived at the peer before its receives are cancelled."""
    pair = lab.connect(receives=4, size=64)
    pair.queue_pair.send(lab.ping.region, context=1)
    expect_ok(pair.take(1, "the send"), "the send")
    pair.connector.disconnect(lab.step())
    ended = pair.take_far(4, "the peer's receives")
    statuses = [completion.status.name for completion in ended]
    expect(statuses == ["SUCCESS", "CANCELED", "CANCELED", "CANCELED"], f"the peer's receives completed {statuses}")
    return "one message, then 3 receives CANCELED"


@check("disconnect", "flush")
def flush(lab: Lab) -> str:
    """flush() cancels what a queue pair has posted, in order, and leaves another one on the same adapter alone."""
    other = lab.connect()
    pair = _with_receives(lab, 4)
    pair.queue_pair.flush()
    _swept(pair, 4, "flushed receives")
    lab.nothing_more(pair.near, "after a flush")
    other.alive()
    return "4 receives CANCELED, another connection works"


@check("disconnect", "flush-unconnected")
def flush_unconnected(lab: Lab) -> str:
    """flush() works on a queue pair that was never connected, which can then still be used."""
    line = lab.line()
    memory = lab.memory(128)
    line.post_receives(memory, 2)
    line.queue_pair.flush()
    for completion in lab.take(line, 2, "flushed receives"):
        expect_status(completion, Status.CANCELED, "flushed receives")
    line.queue_pair.receive(memory.region)
    if lab.iwarp:
        return "2 receives CANCELED, another one posted"
    lab.connect(line).alive()
    return "2 receives CANCELED, another one posted, then connected"


@check("disconnect", "never-connected")
def never_connected(lab: Lab) -> str:
    """disconnect() without a connection is refused."""
    with refusal(ndpy.NotConnectedError, "disconnect() of an idle connector"):
        lab.connector().disconnect(lab.step())
    return "NotConnectedError"


@check("disconnect", "again-and-again")
def again_and_again(lab: Lab) -> str:
    """Ten connections are made, used and closed one after the other."""
    for _ in range(10):
        pair = lab.connect(receives=1, size=64)
        pair.alive()
        pair.connector.disconnect(lab.step())
        pair.far.close()
    return "10 connections"
