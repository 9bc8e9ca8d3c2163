"""Group disconnect: flush(), and the end of connections."""

from __future__ import annotations

import ndpy
from ndpy import Status
from ndpy.tools.cli.smoke.catalog import check
from ndpy.tools.cli.smoke.testbed import Connection, Testbed, contexts, expect, expect_status, refusal
from ndpy.vocabulary.quirks import Quirk


def _with_receives(testbed: Testbed, count: int) -> Connection:
    connection = testbed.connect(receives=4, size=64)
    connection.near.post_receives(testbed.memory(count * 64), count)
    return connection


def _expect_canceled(connection: Connection, count: int, what: str) -> None:
    ended = connection.take(count, what)
    for completion in ended:
        expect_status(completion, Status.CANCELED, what)
    expect(contexts(ended) == list(range(count)), f"{what}: in the order {contexts(ended)}")


@check("disconnect", "by-this-side")
def by_this_side(testbed: Testbed) -> str:
    """disconnect() cancels the posted receives of both sides and notifies the peer."""
    connection = _with_receives(testbed, 3)
    connection.connector.disconnect(testbed.step())
    expect(connection.connector.state == "disconnected", f"the connector is {connection.connector.state}")
    _expect_canceled(connection, 3, "this side's receives")
    connection.far.wait_disconnected(testbed.step())
    for ended in connection.take_at_peer(4, "the peer's receives"):
        expect_status(ended, Status.CANCELED, "the peer's receives")
    return "3 receives here and 4 at the peer CANCELED"


@check("disconnect", "by-the-peer")
def by_the_peer(testbed: Testbed) -> str:
    """The peer's disconnect() notifies this side and cancels its posted receives. Later requests complete CANCELED."""
    connection = _with_receives(testbed, 3)
    notice = connection.connector.begin_wait_disconnected()
    expect(not notice.done(), "the end was notified before it came")
    connection.far.disconnect(testbed.step())
    notice.result(testbed.step())
    _expect_canceled(connection, 3, "this side's receives")
    connection.queue_pair.send(testbed.ping.region, context=50)
    (late,) = connection.take(1, "a send after the end")
    expect_status(late, Status.CANCELED, "a send after the end")
    connection.connector.disconnect(testbed.step())
    return "notified; 3 receives and a later send CANCELED; disconnect() of this side succeeds"


@check("disconnect", "released-by-the-peer")
def released_by_the_peer(testbed: Testbed) -> str:
    """A peer that closes its queue pair without disconnect() also ends the connection."""
    connection = _with_receives(testbed, 2)
    failures = connection.far.close()
    expect(not failures, f"closing at the peer: {'; '.join(failures)}")
    connection.connector.wait_disconnected(testbed.step())
    _expect_canceled(connection, 2, "this side's receives")
    return "notified, 2 receives CANCELED"


@check("disconnect", "delivered-first")
def delivered_first(testbed: Testbed) -> str:
    """A message that completed before disconnect() arrives at the peer before the peer's receives are cancelled."""
    connection = testbed.connect(receives=4, size=64)
    connection.queue_pair.send(testbed.ping.region, context=1)
    connection.take_ok(1, "the send")
    connection.connector.disconnect(testbed.step())
    ended = connection.take_at_peer(4, "the peer's receives")
    statuses = [completion.status.name for completion in ended]
    expect(statuses == ["SUCCESS", "CANCELED", "CANCELED", "CANCELED"], f"the peer's receives completed {statuses}")
    return "one message, then 3 receives CANCELED"


@check("disconnect", "flush")
def flush(testbed: Testbed) -> str:
    """flush() cancels the posted receives of a queue pair, in order.
    Another queue pair of the adapter is not affected.
    """
    other = testbed.connect()
    connection = _with_receives(testbed, 4)
    connection.queue_pair.flush()
    _expect_canceled(connection, 4, "flushed receives")
    testbed.expect_no_completion(connection.near, "after a flush")
    other.expect_alive()
    return "4 receives CANCELED, another connection works"


@check("disconnect", "flush-unconnected")
def flush_unconnected(testbed: Testbed) -> str:
    """flush() works on a queue pair that was never connected. The queue pair can still be used."""
    end = testbed.new_end()
    memory = testbed.memory(128)
    end.post_receives(memory, 2)
    end.queue_pair.flush()
    for completion in testbed.take(end, 2, "flushed receives"):
        expect_status(completion, Status.CANCELED, "flushed receives")
    end.queue_pair.receive(memory.region)
    if testbed.has(Quirk.IWARP_KERNEL_MOVES_QUEUE_PAIRS):
        return "2 receives CANCELED, another one posted"
    testbed.connect(end).expect_alive()
    return "2 receives CANCELED, another one posted, then connected"


@check("disconnect", "never-connected")
def never_connected(testbed: Testbed) -> str:
    """disconnect() of a connector without a connection is refused."""
    with refusal(ndpy.NotConnectedError, "disconnect() of an idle connector"):
        testbed.connector().disconnect(testbed.step())
    return "NotConnectedError"


@check("disconnect", "again-and-again")
def again_and_again(testbed: Testbed) -> str:
    """Ten connections can be made, used and closed, one after the other."""
    for _ in range(10):
        connection = testbed.connect(receives=1, size=64)
        connection.expect_alive()
        connection.connector.disconnect(testbed.step())
        connection.far.close()
    return "10 connections"
