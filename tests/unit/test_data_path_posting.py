"""Posting in the data path in C: what reaches the provider, what is refused, and silent requests."""

from __future__ import annotations

import errno
import socket
from random import Random

import pytest
from data_path_provider import (
    ATOMIC_OPERATIONS,
    CONTEXT,
    DEPTH,
    EVERY_OPERATION,
    FENCE,
    IMMEDIATE,
    INLINE,
    INLINE_SIZE,
    MAX_LENGTH,
    OFFERED,
    OPERANDS,
    SIGNALED,
    SOLICITED,
    WC_RECV,
    WC_SEND,
    WR_BIND_MW,
    WR_COMPARE_AND_SWAP,
    WR_FETCH_AND_ADD,
    WR_LOCAL_INV,
    WR_READ,
    WR_SEND,
    WR_SEND_WITH_IMM,
    WR_SEND_WITH_INV,
    WR_WRITE,
    WR_WRITE_WITH_IMM,
    bind,
    elements,
    in_flight,
    post,
    post_any,
    silent,
)

from ndpy.platforms.verbs.native_calls import lib


@pytest.mark.parametrize(
    ("operation", "opcode", "completes_as"),
    [
        (lib.NDPY_SEND, WR_SEND, lib.NDPY_SEND),
        (lib.NDPY_READ, WR_READ, lib.NDPY_READ),
        (lib.NDPY_WRITE, WR_WRITE, lib.NDPY_WRITE),
        (lib.NDPY_SEND_AND_INVALIDATE, WR_SEND_WITH_INV, lib.NDPY_SEND),
        (lib.NDPY_SEND_WITH_IMMEDIATE, WR_SEND_WITH_IMM, lib.NDPY_SEND),
        (lib.NDPY_WRITE_WITH_IMMEDIATE, WR_WRITE_WITH_IMM, lib.NDPY_WRITE),
    ],
)
def test_a_request_reaches_the_provider_as_it_was_posted(provider, operation, opcode, completes_as):
    qp = provider.queue_pair()
    assert post(qp, operation, 10, 20) == 0
    sent = provider.sent
    assert (sent.opcode, sent.flags, sent.elements, sent.address, sent.length, sent.key) == (
        opcode,
        SIGNALED,
        2,
        0x1000,
        10,
        7,
    )
    if operation in (lib.NDPY_READ, lib.NDPY_WRITE, lib.NDPY_WRITE_WITH_IMMEDIATE):
        assert (sent.remote_address, sent.remote_key) == (0xABCDE8, 0x99)
    if operation in (lib.NDPY_SEND_WITH_IMMEDIATE, lib.NDPY_WRITE_WITH_IMMEDIATE):
        assert socket.ntohl(sent.invalidated_key) == IMMEDIATE
    if operation == lib.NDPY_SEND_AND_INVALIDATE:
        assert sent.invalidated_key == 0x99
    provider.complete(opcode=WC_SEND)
    (completion,) = provider.poll()
    assert (completion.context, completion.nbytes, completion.operation) == (CONTEXT, 30, completes_as)


@pytest.mark.parametrize(
    ("operation", "opcode"),
    [(lib.NDPY_COMPARE_AND_SWAP, WR_COMPARE_AND_SWAP), (lib.NDPY_FETCH_AND_ADD, WR_FETCH_AND_ADD)],
)
def test_an_atomic_operation_reaches_the_provider_as_it_was_posted(provider, operation, opcode):
    qp = provider.queue_pair()
    assert post(qp, operation, 8) == 0
    sent = provider.sent
    assert (sent.opcode, sent.flags, sent.elements, sent.address, sent.length) == (opcode, SIGNALED, 1, 0x1000, 8)
    assert (sent.remote_address, sent.remote_key, tuple(sent.operands)) == (0xABCDE8, 0x99, OPERANDS)
    provider.complete()
    (completion,) = provider.poll()
    assert (completion.context, completion.nbytes, completion.operation) == (CONTEXT, 8, operation)


@pytest.mark.parametrize("operation", ATOMIC_OPERATIONS)
def test_an_atomic_operation_is_on_eight_aligned_bytes(provider, operation):
    qp = provider.queue_pair()
    for lengths in ((), (7,), (9,), (16,), (4, 4), (8, 0), (8, 8)):
        assert post(qp, operation, *lengths) == lib.NDPY_NOT_ATOMIC
    for place in range(1, 8):
        assert post(qp, operation, 8, address=0xABCDE8 + place) == lib.NDPY_UNALIGNED
    assert post(qp, operation, 8, flags=lib.NDPY_UNWRITABLE) == lib.NDPY_NOT_WRITABLE
    assert (in_flight(qp), provider.sent.posted) == (0, 0)


def test_an_operation_that_is_not_offered_is_refused(provider):
    qp = provider.queue_pair()
    for left_out in EVERY_OPERATION:
        lib.ndpy_queue_pair_offer(qp, OFFERED & ~(1 << left_out))
        for operation in EVERY_OPERATION:
            assert post_any(qp, operation) == (lib.NDPY_UNSUPPORTED if operation == left_out else 0)
            if operation != left_out:
                provider.complete()
                provider.poll()


def test_binding_and_invalidating_reach_the_provider_as_they_were_posted(provider):
    qp = provider.queue_pair()
    assert bind(qp, length=5000) == 0
    sent = provider.sent
    assert (sent.opcode, sent.window, sent.region, sent.bind_key) == (WR_BIND_MW, 0x111, 0x222, 0x77)
    assert (sent.bind_address, sent.bind_length, sent.bind_access) == (0x3000, 5000, 0x1F)
    provider.complete()
    assert lib.ndpy_post_invalidate(qp, 0, CONTEXT, 0x66) == 0
    assert (sent.opcode, sent.invalidated_key) == (WR_LOCAL_INV, 0x66)
    provider.complete()
    bound, invalidated = provider.poll()
    assert (bound.operation, bound.nbytes) == (lib.NDPY_BIND, 5000)
    assert (invalidated.operation, invalidated.nbytes) == (lib.NDPY_INVALIDATE, 0)


@pytest.mark.parametrize(
    ("flag", "native"),
    [
        (lib.NDPY_READ_FENCE, SIGNALED | FENCE),
        (lib.NDPY_SOLICITED, SIGNALED | SOLICITED),
        (lib.NDPY_INLINE, SIGNALED | INLINE),
        (lib.NDPY_SILENT_SUCCESS, 0),
    ],
)
def test_each_flag_has_its_native_one(provider, flag, native):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_SEND, 1, flags=flag) == 0
    assert provider.sent.flags == native


@pytest.mark.parametrize("operation", EVERY_OPERATION)
def test_an_operation_takes_its_own_flags_and_refuses_the_others(provider, operation):
    allowed = lib.NDPY_SILENT_SUCCESS | lib.NDPY_READ_FENCE
    sends = (lib.NDPY_SEND, lib.NDPY_SEND_AND_INVALIDATE, lib.NDPY_SEND_WITH_IMMEDIATE, lib.NDPY_WRITE_WITH_IMMEDIATE)
    if operation in sends:
        allowed |= lib.NDPY_SOLICITED | lib.NDPY_INLINE
    elif operation == lib.NDPY_WRITE:
        allowed |= lib.NDPY_INLINE
    elif operation in (lib.NDPY_BIND, lib.NDPY_INVALIDATE):
        allowed |= lib.NDPY_MARKER
    qp = provider.queue_pair(depth=64)
    for flag in (1 << bit for bit in range(32)):
        if flag == lib.NDPY_UNWRITABLE and operation in ATOMIC_OPERATIONS:
            continue
        assert post_any(qp, operation, flag) == (0 if flag & allowed else lib.NDPY_BAD_FLAGS), hex(flag)


def test_where_all_is_fenced_only_reads_are_not(provider):
    qp = provider.queue_pair(depth=16)
    lib.ndpy_queue_pair_work_around_siw(qp)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == 0
        assert bool(provider.sent.flags & FENCE) == (operation != lib.NDPY_READ)


def test_the_number_of_elements_is_limited(provider):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_SEND, 1, 1, 1) == 0
    assert post(qp, lib.NDPY_SEND, 1, 1, 1, 1) == lib.NDPY_TOO_MANY_ELEMENTS
    assert post(qp, lib.NDPY_RECEIVE, 1, 1) == 0
    assert post(qp, lib.NDPY_RECEIVE, 1, 1, 1) == lib.NDPY_TOO_MANY_ELEMENTS
    assert (in_flight(qp), in_flight(qp, 1)) == (1, 1)


@pytest.mark.parametrize("operation", [lib.NDPY_SEND, lib.NDPY_READ, lib.NDPY_WRITE, lib.NDPY_RECEIVE])
def test_the_length_of_all_elements_is_limited(provider, operation):
    qp = provider.queue_pair()
    assert post(qp, operation, MAX_LENGTH - 10, 10) == 0
    assert post(qp, operation, MAX_LENGTH - 10, 11) == lib.NDPY_TOO_LONG
    assert post(qp, operation, MAX_LENGTH + 1) == lib.NDPY_TOO_LONG
    assert provider.sent.posted == 1


@pytest.mark.parametrize(
    "operation",
    [
        lib.NDPY_SEND,
        lib.NDPY_WRITE,
        lib.NDPY_SEND_AND_INVALIDATE,
        lib.NDPY_SEND_WITH_IMMEDIATE,
        lib.NDPY_WRITE_WITH_IMMEDIATE,
    ],
)
def test_the_length_of_inline_data_is_limited(provider, operation):
    qp = provider.queue_pair()
    assert post(qp, operation, INLINE_SIZE - 10, 10, flags=lib.NDPY_INLINE) == 0
    assert post(qp, operation, INLINE_SIZE - 10, 11, flags=lib.NDPY_INLINE) == lib.NDPY_INLINE_TOO_LONG
    assert post(qp, operation, INLINE_SIZE + 1) == 0


def test_before_a_connection_only_receives_are_taken(provider):
    qp = provider.queue_pair(depth=16, connection=lib.NDPY_NEVER_CONNECTED)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == lib.NDPY_NOT_CONNECTED
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    lib.ndpy_queue_pair_set_connection(qp, lib.NDPY_ENDED)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == 0


def test_a_peer_that_serves_no_reads_gets_none(provider):
    qp = provider.queue_pair(depth=16)
    lib.ndpy_queue_pair_refuse_reads(qp)
    for operation in EVERY_OPERATION:
        is_read = operation == lib.NDPY_READ or operation in ATOMIC_OPERATIONS
        assert post_any(qp, operation) == (lib.NDPY_NO_READS if is_read else 0)


@pytest.mark.parametrize("depth", [1, 2, DEPTH])
def test_each_direction_takes_as_many_requests_as_it_was_made_for(provider, depth):
    qp = provider.queue_pair(depth=depth)
    for operation, receive, most in ((lib.NDPY_SEND, 0, depth), (lib.NDPY_RECEIVE, 1, depth + 1)):
        for number in range(3 * most):
            posted = post(qp, operation, 1, context=number)
            assert posted == (0 if number < most else lib.NDPY_QUEUE_FULL)
        assert in_flight(qp, receive) == most


def test_a_place_is_free_again_once_its_completion_was_taken(provider):
    qp = provider.queue_pair(depth=2)
    for number in range(50):
        provider.carry_out(qp, lib.NDPY_SEND, 1, context=number)
        if number % 2:
            assert post(qp, lib.NDPY_SEND, 1) == lib.NDPY_QUEUE_FULL
            assert [completion.context for completion in provider.poll()] == [number - 1, number]
    assert lib.ndpy_queue_pair_posted(qp) == 50


@pytest.mark.parametrize(
    ("result", "number", "seen"),
    [
        (errno.ENOMEM, 0, errno.ENOMEM),
        (-errno.ENOMEM, 0, errno.ENOMEM),
        (-1, errno.EINVAL, errno.EINVAL),
        (-1, 0, errno.EIO),
        (1, errno.EINVAL, 1),
        (errno.ENOTCONN, 0, errno.ENOTCONN),
    ],
)
def test_what_the_provider_refuses_is_said_and_takes_no_place(provider, result, number, seen):
    qp = provider.queue_pair()
    provider.set(post_result=result, post_errno=number)
    assert post(qp, lib.NDPY_SEND, 1) == seen
    assert post(qp, lib.NDPY_RECEIVE, 1) == seen
    assert post(qp, lib.NDPY_RECEIVE) == seen
    queue = provider.shared_queue()
    assert lib.ndpy_post_shared(queue, 0, CONTEXT, elements(1), 1) == seen
    assert (in_flight(qp), in_flight(qp, 1), lib.ndpy_queue_pair_posted(qp)) == (0, 0, 0)
    assert lib.ndpy_post_marker(qp) == 0


def test_a_request_that_the_lost_connection_will_never_complete_is_cancelled_in_the_end(provider):
    """siw knows of the connection's end before the connection manager has reported it."""
    qp = provider.queue_pair()
    lib.ndpy_queue_pair_work_around_siw(qp)
    provider.set(post_result=errno.ENOTCONN)
    assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS) == 0
    assert bind(qp, lib.NDPY_SILENT_SUCCESS | lib.NDPY_MARKER) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 2
    lost, marker = provider.poll()
    # Although it was silent, it completes, since it did not succeed.
    assert (lost.status, lost.flags, lost.operation) == (lib.NDPY_CANCELED, 0, lib.NDPY_SEND)
    assert marker.flags == lib.NDPY_INTERNAL


def test_after_an_end_that_completes_nothing_requests_are_kept_from_the_provider(provider):
    qp = provider.queue_pair(connection=lib.NDPY_ENDED_UNPOSTED)
    assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS) == 0
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    assert provider.sent.posted == 0
    assert (in_flight(qp), in_flight(qp, 1)) == (1, 1)
    assert (lib.ndpy_cancel_rest(qp, 0, provider.cq), lib.ndpy_cancel_rest(qp, 1, provider.cq)) == (1, 1)
    assert [(each.status, each.flags) for each in provider.poll()] == [(lib.NDPY_CANCELED, 0)] * 2


def test_a_receive_without_elements_gets_an_empty_one_where_the_provider_asks_for_it(provider):
    """libsiw asks for it."""
    qp, queue = provider.queue_pair(), provider.shared_queue()
    assert post(qp, lib.NDPY_RECEIVE) == 0
    assert provider.sent.elements == 0
    provider.set(refuses_empty=1)
    assert post(qp, lib.NDPY_RECEIVE) == 0
    assert (provider.sent.elements, provider.sent.length) == (1, 0)
    assert post(qp, lib.NDPY_RECEIVE, 5) == 0
    assert (provider.sent.elements, provider.sent.length) == (1, 5)
    assert lib.ndpy_post_shared(queue, 0, CONTEXT, elements(), 0) == 0
    assert (provider.sent.elements, provider.sent.length, provider.sent.posted) == (1, 0, 4)


def test_receives_of_a_shared_queue_are_limited_and_complete_as_its(provider):
    queue = provider.shared_queue()
    assert lib.ndpy_post_shared(queue, 1, 1, elements(1, 1, 1), 3) == lib.NDPY_TOO_MANY_ELEMENTS
    assert lib.ndpy_post_shared(queue, 1, 1, elements(MAX_LENGTH - 10, 11), 2) == lib.NDPY_TOO_LONG
    assert provider.sent.posted == 0
    for slot in (3, 0):
        assert lib.ndpy_post_shared(queue, slot, CONTEXT + slot, elements(MAX_LENGTH - 10, 10), 2) == 0
        assert (provider.sent.elements, provider.sent.length) == (2, MAX_LENGTH - 10)
        provider.complete(WC_RECV, nbytes=123)
    first, second = provider.poll()
    assert (first.context, second.context, first.slot, second.slot) == (CONTEXT + 3, CONTEXT, 3, 0)
    # The slot belongs to no queue pair. The number is the provider's number of the queue pair.
    assert (first.operation, first.nbytes, first.queue_pair, first.retired) == (lib.NDPY_RECEIVE, 123, 77, 0)
    assert first.flags == second.flags == lib.NDPY_FROM_SHARED_QUEUE


# ---- silent requests ----


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 9])
def test_of_silent_requests_one_in_half_a_ring_is_signaled_and_internal(provider, depth):
    qp = provider.queue_pair(depth=depth)
    signaled = []
    for number in range(3 * depth):
        silent(qp, 1)
        if provider.sent.flags & SIGNALED:
            signaled.append(number + 1)
            provider.complete()
            (internal,) = provider.poll()
            assert (internal.flags, internal.retired) == (
                lib.NDPY_INTERNAL,
                number + 1 - (signaled[-2] if signaled[1:] else 0),
            )
            assert in_flight(qp) == 0
    half = (depth + 1) // 2
    assert signaled == [*range(half, 3 * depth + 1, half)]


def test_a_signaled_request_begins_a_new_run_and_retires_the_silent_ones_before_it(provider):
    qp = provider.queue_pair()
    silent(qp, 3)
    provider.carry_out(qp, lib.NDPY_SEND, 1)
    (completion,) = provider.poll()
    assert (completion.retired, completion.flags) == (4, 0)
    silent(qp, 3)
    assert not provider.sent.flags & SIGNALED


def test_a_silent_request_that_fails_shows(provider):
    qp = provider.queue_pair()
    silent(qp, 1)
    provider.complete(status=lib.IBV_WC_REM_ACCESS_ERR)
    (completion,) = provider.poll()
    assert (completion.flags, completion.status) == (0, lib.NDPY_ACCESS_VIOLATION)


def test_a_marker_is_signaled_and_internal_however_it_ends(provider):
    qp = provider.queue_pair()
    for status in (lib.IBV_WC_SUCCESS, lib.IBV_WC_WR_FLUSH_ERR):
        silent(qp, 2)
        assert lib.ndpy_post_marker(qp) == 1
        sent = provider.sent
        assert (sent.opcode, sent.flags, sent.elements, sent.length) == (WR_SEND, SIGNALED, 0, 0)
        provider.complete(status=status)
        (marker,) = provider.poll()
        assert (marker.flags, marker.retired, marker.context, marker.nbytes) == (lib.NDPY_INTERNAL, 3, 0, 0)
        assert marker.operation == lib.NDPY_SEND


def test_there_is_no_marker_where_nothing_is_silent_or_no_place_is_left(provider):
    qp = provider.queue_pair(depth=4)
    assert lib.ndpy_post_marker(qp) == 0
    assert post(qp, lib.NDPY_SEND, 1) == 0
    assert lib.ndpy_post_marker(qp) == 0
    silent(qp, 1)
    assert lib.ndpy_post_marker(qp) == 1
    # The marker ended the run of silent requests.
    assert lib.ndpy_post_marker(qp) == 0
    silent(qp, 1)
    assert lib.ndpy_post_marker(qp) == 0
    assert in_flight(qp) == 4


def test_a_marker_that_the_provider_refuses_takes_no_place(provider):
    qp = provider.queue_pair()
    silent(qp, 1)
    provider.set(post_result=errno.ENOMEM)
    assert lib.ndpy_post_marker(qp) == 0
    assert in_flight(qp) == 1
    provider.set(post_result=0)
    assert lib.ndpy_post_marker(qp) == 1


# ---- slots ----


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 40])
def test_a_queue_pair_takes_as_many_requests_as_its_depth_however_they_come_and_go(provider, depth):
    qp = provider.queue_pair(depth)
    posted, ended = [], []
    random = Random(depth)
    for _ in range(300):
        for _ in range(random.randint(0, depth)):
            refused = post(qp, lib.NDPY_SEND, 1, context=len(posted))
            assert refused == (lib.NDPY_QUEUE_FULL if len(posted) - len(ended) == depth else 0)
            if not refused:
                posted.append(provider.sent.id)
        for _ in range(random.randint(0, len(posted) - len(ended))):
            provider.library.complete(posted[len(ended)], WC_SEND, 0, 0, 0, 0)
            (completion,) = provider.poll()
            assert (completion.context, completion.retired) == (len(ended), 1)
            ended.append(completion.context)
        assert in_flight(qp) == len(posted) - len(ended)
    assert len(set(posted)) <= depth


def test_requests_are_cancelled_in_the_order_of_posting_though_slots_were_added_in_between(provider):
    qp = provider.queue_pair(40)
    posted, ended = [], 0
    for count, completed in ((8, 5), (5, 0), (20, 3), (12, 0)):
        for _ in range(count):
            assert post(qp, lib.NDPY_SEND, 1, context=len(posted)) == 0
            posted.append(provider.sent.id)
        for _ in range(completed):
            provider.library.complete(posted[ended], WC_SEND, 0, 0, 0, 0)
            provider.poll()
            ended += 1
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == len(posted) - ended
    assert [completion.context for completion in provider.poll(256)] == list(range(ended, len(posted)))


def test_a_queue_pair_can_be_used_again_after_its_requests_were_cancelled(provider):
    qp = provider.queue_pair(20)
    for round in range(5):
        for _ in range(3 + round):
            assert post(qp, lib.NDPY_SEND, 1, context=round) == 0
        assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 3 + round
        assert {completion.context for completion in provider.poll()} == {round}


def test_a_refused_request_leaves_its_slot_to_the_next_one(provider):
    qp = provider.queue_pair(9)
    for context in range(8):
        assert post(qp, lib.NDPY_SEND, 1, context=context) == 0
    provider.set(post_result=-1, post_errno=errno.EIO)
    for _ in range(3):
        assert post(qp, lib.NDPY_SEND, 1) == errno.EIO
    provider.set(post_result=0)
    assert post(qp, lib.NDPY_SEND, 1, context=8) == 0
    assert post(qp, lib.NDPY_SEND, 1) == lib.NDPY_QUEUE_FULL
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 9
    assert [completion.context for completion in provider.poll()] == list(range(9))
