"""Group notification: waiting for completions."""

from __future__ import annotations

import threading
import time

import ndpy
from ndpy import Flags, Notify, Operation
from ndpy.cli.smoke.catalog import check
from ndpy.cli.smoke.lab import QUIET_S, Lab, Pair, expect, expect_ok, refusal

#: How long a notification may take that a known defect keeps back for ever.
_SOON_S = 3.0


def _expecting(lab: Lab, receives: int) -> Pair:
    """A connection with receives posted on this side."""
    pair = lab.connect(greet=True)
    memory = lab.memory(receives * 64)
    pair.near.post_receives(memory, receives)
    return pair


@check("notification", "wait")
def wait(lab: Lab) -> str:
    """wait() sleeps until a message comes, and ends with TimeoutError at its deadline; it burns no processor time."""
    pair = _expecting(lab, 1)
    used, started = time.process_time(), time.monotonic()
    with refusal(ndpy.TimeoutError, "waiting on an empty completion queue"):
        pair.near.cq.wait(0.5)
    seconds, busy = time.monotonic() - started, time.process_time() - used
    expect(0.45 <= seconds < 5, f"wait(0.5) ended after {seconds:.2f} s")
    expect(busy < 0.25, f"waiting {seconds:.2f} s took {busy:.2f} s of processor time")
    pair.far.post(Operation.SEND, lab.far_memory(64))
    expect_ok(pair.near.cq.wait(lab.step()), "the message")
    return f"TimeoutError after {seconds:.2f} s of 0.5, with {busy * 1e3:.0f} ms of processor time; then a message"


@check("notification", "any")
def any_completion(lab: Lab) -> str:
    """A notification for any completion comes with the next one, once."""
    pair = _expecting(lab, 3)
    far = lab.far_memory(64)
    armed = pair.near.cq.arm(Notify.ANY)
    time.sleep(QUIET_S)
    expect(not armed.done(), "the notification came before any completion")
    pair.far.post(Operation.SEND, far)
    armed.result(lab.step())
    expect_ok(pair.take(1, "the message"), "the message")
    again = pair.near.cq.arm(Notify.ANY)
    time.sleep(QUIET_S)
    expect(not again.done(), "a second notification came for the same completion")
    pair.far.post(Operation.SEND, far)
    again.result(lab.step())
    return "2 notifications for 2 messages"


@check("notification", "not-lost")
def not_lost(lab: Lab) -> str:
    """A completion that came before the queue was armed, unseen, satisfies the notification."""
    pair = _expecting(lab, 1)
    expect(not pair.near.cq.poll(), "a completion came out of nothing")
    pair.far.post(Operation.SEND, lab.far_memory(64))
    pair.take_far(1, "the peer's send")
    time.sleep(QUIET_S)
    pair.near.cq.arm(Notify.ANY).result(lab.step())
    expect_ok(pair.take(1, "the message"), "the message")
    return "armed after the message came"


@check("notification", "solicited")
def solicited(lab: Lab) -> str:
    """A notification for solicited messages passes over a plain one and comes with a solicited one."""
    pair = _expecting(lab, 3)
    far = lab.far_memory(64)
    # A wait() may have left the queue armed for any completion, which outranks solicited ones: this one uses that up.
    pair.far.post(Operation.SEND, far)
    pair.take_far(1, "a plain send")
    deadline = time.monotonic() + lab.step()
    while not (taken := pair.near.cq.poll()):
        expect(time.monotonic() < deadline, "a plain message did not come")
        time.sleep(0.01)
    expect_ok(taken, "a plain message")
    armed = pair.near.cq.arm(Notify.SOLICITED)
    pair.far.post(Operation.SEND, far)
    pair.take_far(1, "the plain send")
    time.sleep(QUIET_S)
    expect(not armed.done(), "a plain message satisfied a notification for solicited ones")
    pair.far.post(Operation.SEND, far, flags=Flags.SOLICITED)
    armed.result(lab.step(_SOON_S))
    expect_ok(pair.take(2, "both messages"), "both messages")
    return "the plain message passed over, the solicited one told"


@check("notification", "failure-tells")
def failure_tells(lab: Lab) -> str:
    """A failed completion satisfies a notification for solicited messages."""
    pair = _expecting(lab, 1)
    armed = pair.near.cq.arm(Notify.SOLICITED)
    pair.far.disconnect(lab.step())
    armed.result(lab.step(_SOON_S))
    return "the receive that was cancelled told"


@check("notification", "poller")
def poller(lab: Lab) -> str:
    """A poller over two queues says which of them has completions, and wake() ends its wait."""
    first, second = _expecting(lab, 1), _expecting(lab, 1)
    with ndpy.Poller() as waiting:
        waiting.add(first.near.cq)
        waiting.add(second.near.cq)
        with refusal(ndpy.TimeoutError, "a poller with nothing to tell"):
            waiting.wait(0.1)
        second.far.post(Operation.SEND, lab.far_memory(64))
        told = waiting.wait(lab.step())
        expect([queue for queue, _ in told] == [second.near.cq], "the poller names the wrong queue")
        expect_ok(told[0][1], "the message")
        timer = threading.Timer(0.1, waiting.wake)
        timer.start()
        started = time.monotonic()
        told = waiting.wait(lab.step())
        seconds = time.monotonic() - started
        timer.join()
        expect(not told, f"the woken poller told {told}")
    return f"the right one of two queues; woken after {seconds:.2f} s of 0.1"
