"""Notifications, and the ways a provider may answer them: at once, late, with a failure, or never."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from kit.helpers import (
    DEADLINE_S,
    connect_ends,
    connect_pair,
    create_end,
    succeed,
    wait_until,
)
from native_answers import answering, ffi, signed
from own_softnd import keep_with_adapter

import ndpy
from ndpy.platforms.networkdirect import completion_queue, shared_receive_queue
from ndpy.platforms.networkdirect.native_calls import BUFFER_OVERFLOW, DEVICE_REMOVED, INTERNAL_ERROR, SUCCESS
from ndpy.platforms.networkdirect.overlapped import cancel_all

BOTH = pytest.mark.parametrize("version", [2, 1])
NO_MORE_ENTRIES = 0x8000001A
INSUFFICIENT_RESOURCES = 0xC000009A


@pytest.fixture
def keep(softnd):
    yield from keep_with_adapter(softnd)


@BOTH
def test_c_2_1_a_notification_that_is_there_already_ends_arm_at_once(keep, version, native):
    queue = keep(keep.adapter.create_completion_queue(8))
    notify = "IND2CompletionQueue_Notify" if version == 2 else "INDCompletionQueue_Notify"
    calls = native.answer(notify, SUCCESS)
    for count in range(3):
        assert queue.arm().done()
        assert len(calls) == count + 1
    del vars(native)[notify]
    assert not queue.arm().done()


@BOTH
def test_g_2_a_completion_that_is_kept_ends_one_notification(keep, version):
    """The provider has forgotten the completion by then. Arming again asks for the next one."""
    pair = connect_pair(keep, keep.adapter)
    queue = pair.server.cq
    for count in (1, 2):
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.send([])
        succeed(pair.client.cq)
        wait_until(lambda count=count: queue._drain() == count, "it has come")
        assert queue.arm().done()
        again = queue.arm()
        with pytest.raises(ndpy.TimeoutError):
            again.result(0)
        again.cancel()


@BOTH
def test_a_queue_that_was_waited_for_in_vain_keeps_nothing(keep, version):
    """The fixture counts handles at the end. The provider still holds the notification when the wait is over."""
    for _ in range(30):
        with keep.adapter.create_completion_queue(8) as queue:
            for _ in range(2):
                with pytest.raises(ndpy.TimeoutError):
                    queue.wait(0)


@BOTH
def test_a_poller_is_told_of_completions_that_the_provider_knows_nothing_of(keep, version):
    """In version 1 ndpy itself keeps receives that are posted before the connection (contract I.6.1)."""
    queue, poller = keep(keep.adapter.create_completion_queue(8)), keep(ndpy.Poller())
    queue_pair = keep(keep.adapter.create_queue_pair(queue, receive_queue_depth=4))
    poller.add(queue)
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)
    queue_pair.receive([], context=5)
    queue_pair.flush()
    ((found, completions),) = poller.wait(DEADLINE_S)
    assert (found, [completion.context for completion in completions]) == (queue, [5])


@BOTH
def test_packets_that_a_closed_poller_has_not_taken_keep_nothing(keep, version):
    """The fixture counts handles at the end. Each notification has an event, which is a handle."""
    for _ in range(30):
        queue = keep.adapter.create_completion_queue(8)
        with ndpy.Poller() as poller:
            poller.add(queue)
            with pytest.raises(ndpy.TimeoutError):
                poller.wait(0)
            (request,) = queue._requests
            assert request.cancel()
            # The next request's packet comes after this one's, so the thread has passed this one on.
            keep.adapter.begin_register(bytearray(8)).result(DEADLINE_S).close()
        queue.close()


@BOTH
def test_g_2_10_a_queue_that_was_overrun_says_so_whoever_asks(keep, version, native):
    queue = keep(keep.adapter.create_completion_queue(8))
    poller = keep(ndpy.Poller())
    poller.add(queue)
    native.answer("IND2CompletionQueue_Notify" if version == 2 else "INDCompletionQueue_Notify", BUFFER_OVERFLOW)
    for ask_for in (queue.arm, lambda: queue.wait(DEADLINE_S), lambda: poller.wait(DEADLINE_S)):
        with pytest.raises(ndpy.CompletionQueueOverrunError, match="depth 8") as caught:
            ask_for()
        assert (caught.value.native, caught.value.native_name) == (BUFFER_OVERFLOW, "ND_BUFFER_OVERFLOW")


@BOTH
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (BUFFER_OVERFLOW, ndpy.CompletionQueueOverrunError),
        (INTERNAL_ERROR, ndpy.ProviderError),
        (DEVICE_REMOVED, ndpy.DeviceRemovedError),
    ],
)
def test_g_2_10_who_polls_learns_what_a_notification_has_told_another(keep, version, native, status, kind):
    queue = keep(keep.adapter.create_completion_queue(8))
    queue_pair = keep(keep.adapter.create_queue_pair(queue))
    assert queue.poll() == []
    native.answer("IND2CompletionQueue_Notify" if version == 2 else "INDCompletionQueue_Notify", status)
    with pytest.raises(kind):
        queue.wait(DEADLINE_S)

    def told() -> bool:
        try:
            return bool(queue.poll())
        except kind:
            return True

    wait_until(told, "a poll raises")
    with pytest.raises(kind):
        queue_pair.receive([])


@BOTH
def test_a_notification_that_was_refused_is_not_outstanding(keep, version, native):
    queue = keep(keep.adapter.create_completion_queue(8))
    notify = "IND2CompletionQueue_Notify" if version == 2 else "INDCompletionQueue_Notify"
    native.answer(notify, INSUFFICIENT_RESOURCES)
    for ask_for in (queue.arm, lambda: queue.wait(DEADLINE_S)):
        with pytest.raises(ndpy.InsufficientResourcesError) as caught:
            ask_for()
        assert caught.value.native == INSUFFICIENT_RESOURCES
    del vars(native)[notify]
    assert queue._requests == set()
    with pytest.raises(ndpy.TimeoutError):
        queue.wait(0)
    pending = queue.arm()
    with pytest.raises(ndpy.TimeoutError):
        pending.result(0)


def test_g_6_4_a_shared_queue_that_is_short_already_ends_arm_at_once(keep, native):
    queue = keep(keep.adapter.create_shared_receive_queue(8, threshold=2))
    native.answer("IND2SharedReceiveQueue_Notify", SUCCESS)
    assert queue.arm().done()
    assert queue.arm().done()
    native.answer("IND2SharedReceiveQueue_Notify", INSUFFICIENT_RESOURCES)
    with pytest.raises(ndpy.InsufficientResourcesError):
        queue.arm()
    del native.IND2SharedReceiveQueue_Notify
    for _ in range(4):
        queue.receive([])
    pending = queue.arm()
    with pytest.raises(ndpy.TimeoutError):
        pending.result(0)


@pytest.mark.parametrize("status", [NO_MORE_ENTRIES, INSUFFICIENT_RESOURCES])
def test_g_6_1_a_receive_that_a_shared_queue_refuses_is_none(keep, status):
    queue = keep(keep.adapter.create_shared_receive_queue(4))
    kind = ndpy.QueueFullError if status == NO_MORE_ENTRIES else ndpy.InsufficientResourcesError
    with answering(queue._srq, "Receive", status) as calls:
        for _ in range(6):
            with pytest.raises(kind):
                queue.receive([])
    assert len(calls) == 6
    for _ in range(4):
        queue.receive([])
    with pytest.raises(ndpy.QueueFullError):
        queue.receive([])


@BOTH
def test_m_19_a_notification_that_the_provider_cancels_ends_with_its_status(keep, version, native):
    """For example, another notification may displace it."""
    queue = keep(keep.adapter.create_completion_queue(8))
    kind = "IND2Overlapped" if version == 2 else "INDOverlapped"
    pending = queue.arm()
    getattr(native, f"{kind}_CancelOverlappedRequests")(ffi.cast(f"struct {kind} *", queue._cq))
    with pytest.raises(ndpy.CanceledError) as caught:
        pending.result(DEADLINE_S)
    assert (caught.value.native, caught.value.native_name) == (0xC0000120, "ND_CANCELED")
    again = queue.arm()
    with pytest.raises(ndpy.TimeoutError):
        again.result(0)


@BOTH
def test_a_close_that_fails_after_some_requests_were_cancelled_costs_nobody_a_completion(keep, version, monkeypatch):
    queue = keep(keep.adapter.create_completion_queue(8))
    pair = connect_ends(keep, keep.adapter, create_end(keep, keep.adapter), create_end(keep, keep.adapter, cq=queue))
    poller = keep(ndpy.Poller())
    poller.add(queue)
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)
    armed = [queue.arm(), queue.arm(ndpy.Notify.SOLICITED), queue.arm()]

    def fail(requests):
        cancel_all(requests)
        raise ndpy.DeviceBusyError("the provider did not let go", operation="cancel")

    with monkeypatch.context() as broken:
        broken.setattr(completion_queue, "cancel_all", fail)
        broken.setattr(queue, "_users", 0)
        with pytest.raises(ndpy.DeviceBusyError, match="did not let go"):
            queue.close()
    assert not any(pending.done() for pending in armed)
    pair.server.queue_pair.receive([], context=5)
    pair.client.queue_pair.send([])
    for pending in (armed[0], armed[2]):
        assert pending.result(DEADLINE_S) is None
    ((found, completions),) = poller.wait(DEADLINE_S)
    assert (found, [completion.context for completion in completions]) == (queue, [5])


def full(keep):
    """A shared queue with enough receives, so its notification does not end."""
    queue = keep(keep.adapter.create_shared_receive_queue(8, threshold=2))
    for _ in range(4):
        queue.receive([])
    return queue


@BOTH
def test_b_7_7_a_request_that_ends_because_the_adapter_has_gone_tells_everybody(keep, version, native):
    result = "ndpy_request_result" if version == 2 else "version1_request_result"
    kind = "IND2Overlapped" if version == 2 else "INDOverlapped"
    real = getattr(native, result)

    def gone(target, request):
        given = real(target, request) & 0xFFFFFFFF
        return given if given == 0x103 else signed(0xC00002B6)

    setattr(native, result, gone)
    first, other = (keep(keep.adapter.create_completion_queue(8)) for _ in range(2))
    pendings = [first.arm(), other.arm()]
    getattr(native, f"{kind}_CancelOverlappedRequests")(ffi.cast(f"struct {kind} *", first._cq))
    for pending in pendings:
        with pytest.raises(ndpy.DeviceRemovedError):
            pending.result(DEADLINE_S)
    with pytest.raises(ndpy.DeviceRemovedError):
        keep.adapter.create_completion_queue(8)
    delattr(native, result)


def test_m_19_the_same_of_a_shared_queue(keep, native):
    queue = full(keep)
    pending = queue.arm()
    native.IND2Overlapped_CancelOverlappedRequests(ffi.cast("struct IND2Overlapped *", queue._srq))
    with pytest.raises(ndpy.CanceledError) as caught:
        pending.result(DEADLINE_S)
    assert (caught.value.native, caught.value.native_name) == (0xC0000120, "ND_CANCELED")
    again = queue.arm()
    with pytest.raises(ndpy.TimeoutError):
        again.result(0)


def test_g_6_4_a_shared_queues_notification_that_fails_says_why(keep, native):
    queue, status = full(keep), 0xC00000E5
    result = native.ndpy_request_result

    def failing(target, request):
        given = result(target, request) & 0xFFFFFFFF
        return given if given == 0x103 else signed(status)

    native.ndpy_request_result = failing
    pending = queue.arm()
    native.IND2Overlapped_CancelOverlappedRequests(ffi.cast("struct IND2Overlapped *", queue._srq))
    with pytest.raises(ndpy.ProviderError) as caught:
        pending.result(DEADLINE_S)
    assert caught.value.native == status


def test_a_shared_queue_without_a_threshold_cannot_be_armed(keep):
    queue = keep(keep.adapter.create_shared_receive_queue(8))
    with pytest.raises(ndpy.InvalidFlagsError, match="no threshold"):
        queue.arm()
    queue.modify(threshold=2)
    queue.arm().result(DEADLINE_S)


def test_a_shared_queue_whose_close_fails_stays_as_it_was(keep, monkeypatch):
    queue = full(keep)
    pending = queue.arm()

    def fail(requests) -> None:
        raise ndpy.DeviceBusyError("the provider did not let go", operation="cancel")

    with monkeypatch.context() as broken:
        broken.setattr(shared_receive_queue, "cancel_all", fail)
        with pytest.raises(ndpy.DeviceBusyError):
            queue.close()
    assert not queue.closed
    queue.receive([])
    assert not pending.done()
    queue.close()
    with pytest.raises(ndpy.CanceledError, match="was closed"):
        pending.result(0)


@BOTH
def test_a_queue_that_somebody_does_not_leave_is_not_closed(keep, version, monkeypatch):
    queue = keep.adapter.create_completion_queue(8)
    with monkeypatch.context() as stuck:
        stuck.setattr(threading.Condition, "wait_for", lambda self, predicate, timeout: False)
        with pytest.raises(ndpy.DeviceBusyError, match="does not leave"):
            queue.close()
    assert not queue.closed
    assert queue.poll() == []
    queue.close()
    assert queue.closed


def test_a_queue_of_an_adapter_that_cannot_resize_says_so(keep, monkeypatch):
    queue = keep(keep.adapter.create_completion_queue(8))
    capabilities = keep.adapter.info.capabilities & ~ndpy.Capability.RESIZE_COMPLETION_QUEUE
    monkeypatch.setattr(keep.adapter, "info", dataclasses.replace(keep.adapter.info, capabilities=capabilities))
    with pytest.raises(ndpy.UnsupportedError, match="cannot resize"):
        queue.resize(16)
    assert queue.depth == 8


@BOTH
def test_g_1_a_resize_is_the_providers(keep, version, native):
    """If the provider refuses to enlarge the queue, the depth stays the same."""
    queue = keep(keep.adapter.create_completion_queue(8))
    resize = "IND2CompletionQueue_Resize" if version == 2 else "INDCompletionQueue_Resize"
    calls = native.answer(resize, INSUFFICIENT_RESOURCES)
    with pytest.raises(ndpy.InsufficientResourcesError) as caught:
        queue.resize(500)
    assert (caught.value.operation, caught.value.native) == ("resize", INSUFFICIENT_RESOURCES)
    assert calls[0][1] >= 500
    assert queue.depth == 8
    delattr(native, resize)
    queue.resize(500)
    assert queue.depth == 500


def test_c_1_5_a_program_with_its_own_port_is_told_when_no_packet_comes(keep, native):
    adapter = keep.adapter
    queue = keep(adapter.create_completion_queue(16, overlapped_file=adapter.overlapped_file))
    native.answer("IND2CompletionQueue_Notify", SUCCESS)
    assert queue.notify() == 0
    del native.IND2CompletionQueue_Notify
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, cq=queue))
    for _ in range(2):
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.send([])
    succeed(pair.client.cq, 2)
    # ndpy takes both from the provider and keeps one of them.
    wait_until(lambda: queue._drain() == 2, "both have come")
    assert len(queue.poll(1)) == 1
    assert queue.notify() == 0
    assert len(queue.poll()) == 1
    assert queue.notify() != 0
