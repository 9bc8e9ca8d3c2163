"""What the report of a failed test says of queues and queue pairs."""

from __future__ import annotations

from kit.helpers import DEADLINE_S, memory, wait_until

from ndpy.testing.outstanding import outstanding


def lines_of(kind: str | tuple[str, ...]) -> list[str]:
    return [line.strip() for line in outstanding().splitlines() if line.strip().startswith(kind)]


def test_the_report_says_which_requests_are_outstanding(keep, adapter, pair):
    pair.client.queue_pair.receive(memory(keep, adapter, 8))
    reports = lines_of("QueuePair")
    assert any("0 initiator requests and 1 receives outstanding" in line for line in reports), reports


def test_the_report_shows_completions_that_nobody_took(keep, adapter, pair):
    pair.server.queue_pair.receive(memory(keep, adapter, 8), context=0x1267)
    pair.client.queue_pair.send(memory(keep, adapter, b"unread"))

    def shown() -> bool:
        return any("context=0x1267" in line for line in lines_of("CompletionQueue"))

    wait_until(shown, "the completion of the receive in the report", DEADLINE_S)


def test_the_report_does_not_wait_for_a_lock_that_the_test_holds(pair):
    with pair.client.cq._lock:
        reports = lines_of(("CompletionQueue", "<CompletionQueue"))
    assert len(reports) == 2, reports
    assert any("no answer" in line for line in reports), reports
