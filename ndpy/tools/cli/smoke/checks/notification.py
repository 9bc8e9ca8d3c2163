"""Group notification: waiting for completions."""

from __future__ import annotations

import threading
import time

import ndpy
from ndpy import Flags, Notify, Operation
from ndpy.tools.cli.smoke.catalog import check
from ndpy.tools.cli.smoke.testbed import QUIET_S, Connection, Testbed, expect, expect_ok, refusal

#: The time limit for a notification that never comes on drivers with a known quirk.
_SOON_S = 3.0
_EVENT_S = 0.05


def _expecting(testbed: Testbed, receives: int) -> Connection:
    """A connection with receives posted on this side."""
    connection = testbed.connect(send_first=True)
    memory = testbed.memory(receives * 64)
    connection.near.post_receives(memory, receives)
    return connection


@check("notification", "wait")
def wait(testbed: Testbed) -> str:
    """wait() returns when a message arrives and raises TimeoutError at its deadline. It uses no processor time
    meanwhile.
    """
    connection = _expecting(testbed, 1)
    used, started = time.process_time(), time.monotonic()
    with refusal(ndpy.TimeoutError, "waiting on an empty completion queue"):
        connection.near.cq.wait(0.5)
    seconds, busy = time.monotonic() - started, time.process_time() - used
    expect(0.45 <= seconds < 5, f"wait(0.5) ended after {seconds:.2f} s")
    expect(busy < 0.25, f"waiting {seconds:.2f} s took {busy:.2f} s of processor time")
    connection.far.post(Operation.SEND, testbed.peer_memory(64))
    expect_ok(connection.near.cq.wait(testbed.step()), "the message")
    return f"TimeoutError after {seconds:.2f} s of 0.5, with {busy * 1e3:.0f} ms of processor time; then a message"


@check("notification", "any")
def any_completion(testbed: Testbed) -> str:
    """arm(Notify.ANY) is satisfied by the next completion, and by no earlier one."""
    connection = _expecting(testbed, 3)
    far = testbed.peer_memory(64)
    armed = connection.near.cq.arm(Notify.ANY)
    time.sleep(QUIET_S)
    expect(not armed.done(), "the notification came before any completion")
    connection.far.post(Operation.SEND, far)
    armed.result(testbed.step())
    connection.take_ok(1, "the message")
    again = connection.near.cq.arm(Notify.ANY)
    time.sleep(QUIET_S)
    expect(not again.done(), "a second notification came for the same completion")
    connection.far.post(Operation.SEND, far)
    again.result(testbed.step())
    return "2 notifications for 2 messages"


@check("notification", "not-lost")
def not_lost(testbed: Testbed) -> str:
    """A completion that came before arm() and was not polled satisfies the notification."""
    connection = _expecting(testbed, 1)
    expect(not connection.near.cq.poll(), "a completion came although nothing was sent")
    connection.far.post(Operation.SEND, testbed.peer_memory(64))
    connection.take_at_peer(1, "the peer's send")
    time.sleep(QUIET_S)
    connection.near.cq.arm(Notify.ANY).result(testbed.step())
    connection.take_ok(1, "the message")
    return "armed after the message came"


@check("notification", "solicited")
def solicited(testbed: Testbed) -> str:
    """arm(Notify.SOLICITED) is satisfied by a solicited message, not by another one."""
    connection = _expecting(testbed, 3)
    far = testbed.peer_memory(64)
    # An earlier wait() may have left the queue armed for any completion, which includes plain messages. This message
    # satisfies that. Its event may come a little later than its completion.
    connection.far.post(Operation.SEND, far)
    connection.take_at_peer(1, "a plain send")
    deadline = time.monotonic() + testbed.step()
    while not (taken := connection.near.cq.poll()):
        expect(time.monotonic() < deadline, "a plain message did not come")
        time.sleep(0.01)
    expect_ok(taken, "a plain message")
    time.sleep(_EVENT_S)
    armed = connection.near.cq.arm(Notify.SOLICITED)
    connection.far.post(Operation.SEND, far)
    connection.take_at_peer(1, "the plain send")
    time.sleep(QUIET_S)
    expect(not armed.done(), "a plain message satisfied a notification for solicited ones")
    connection.far.post(Operation.SEND, far, flags=Flags.SOLICITED)
    armed.result(testbed.step(_SOON_S))
    connection.take_ok(2, "both messages")
    return "the plain message was passed over, the solicited one was notified"


@check("notification", "failure-tells")
def failure_tells(testbed: Testbed) -> str:
    """arm(Notify.SOLICITED) is satisfied by a failed completion."""
    connection = _expecting(testbed, 1)
    armed = connection.near.cq.arm(Notify.SOLICITED)
    connection.far.disconnect(testbed.step())
    armed.result(testbed.step(_SOON_S))
    return "the cancelled receive was notified"


@check("notification", "poller")
def poller(testbed: Testbed) -> str:
    """A poller for two queues says which of them has completions. wake() ends its wait."""
    first, second = _expecting(testbed, 1), _expecting(testbed, 1)
    with ndpy.Poller() as waiting:
        waiting.add(first.near.cq)
        waiting.add(second.near.cq)
        with refusal(ndpy.TimeoutError, "a poller without completions"):
            waiting.wait(0.1)
        second.far.post(Operation.SEND, testbed.peer_memory(64))
        told = waiting.wait(testbed.step())
        expect([queue for queue, _ in told] == [second.near.cq], "the poller names the wrong queue")
        expect_ok(told[0][1], "the message")
        timer = threading.Timer(0.1, waiting.wake)
        timer.start()
        started = time.monotonic()
        told = waiting.wait(testbed.step())
        seconds = time.monotonic() - started
        timer.join()
        expect(not told, f"the woken poller returned {told}")
    return f"the right one of two queues; woken after {seconds:.2f} s of 0.1"
