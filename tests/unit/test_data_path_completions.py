"""Completions in the data path in C: their status, their order, and how the data path stores some of them."""

from __future__ import annotations

import errno
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from data_path_provider import (
    NUMBER,
    WC_IP_CSUM_OK,
    WC_RECV,
    WC_SEND,
    WC_WITH_INV,
    Provider,
    bind,
    elements,
    in_flight,
    post,
    post_any,
    silent,
)
from kit.compiling import compiled

from ndpy.platforms.verbs.native_calls import ffi, lib


def test_a_receive_has_the_bytes_that_came_and_a_failure_has_none(provider):
    qp = provider.queue_pair()
    provider.carry_out(qp, lib.NDPY_RECEIVE, 500, context=1, nbytes=123)
    provider.carry_out(qp, lib.NDPY_RECEIVE, 500, context=2, status=lib.IBV_WC_WR_FLUSH_ERR, nbytes=123)
    provider.carry_out(qp, lib.NDPY_SEND, 40, context=3, status=lib.IBV_WC_RETRY_EXC_ERR)
    came, flushed, failed = provider.poll()
    assert (came.nbytes, came.status, came.vendor_status, came.native_status) == (123, lib.NDPY_SUCCESS, 0, 0)
    assert (flushed.nbytes, flushed.status, flushed.vendor_status) == (0, lib.NDPY_CANCELED, 88)
    assert (failed.nbytes, failed.status, failed.vendor_status) == (0, lib.NDPY_IO_TIMEOUT, 88)
    assert (failed.native_status, failed.queue_pair) == (lib.IBV_WC_RETRY_EXC_ERR, NUMBER)
    assert [each.context for each in (came, flushed, failed)] == [1, 2, 3]
    assert [each.retired for each in (came, flushed, failed)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("native", "operation", "status"),
    [
        ("LOC_PROT_ERR", "SEND", "ACCESS_VIOLATION"),
        ("LOC_ACCESS_ERR", "SEND", "ACCESS_VIOLATION"),
        ("REM_ACCESS_ERR", "READ", "ACCESS_VIOLATION"),
        ("LOC_LEN_ERR", "RECEIVE", "BUFFER_OVERFLOW"),
        ("LOC_LEN_ERR", "SEND", "DATA_OVERRUN"),
        ("REM_INV_REQ_ERR", "SEND", "DATA_OVERRUN"),
        ("REM_INV_REQ_ERR", "READ", "REMOTE_ERROR"),
        ("RETRY_EXC_ERR", "SEND", "IO_TIMEOUT"),
        ("RNR_RETRY_EXC_ERR", "SEND", "IO_TIMEOUT"),
        ("RESP_TIMEOUT_ERR", "SEND", "IO_TIMEOUT"),
        ("REM_OP_ERR", "SEND", "REMOTE_ERROR"),
        ("REM_INV_RD_REQ_ERR", "READ", "REMOTE_ERROR"),
        ("REM_ABORT_ERR", "SEND", "REMOTE_ERROR"),
        ("LOC_QP_OP_ERR", "RECEIVE", "BUFFER_OVERFLOW"),
        ("LOC_QP_OP_ERR", "SEND", "ACCESS_VIOLATION"),
        ("LOC_QP_OP_ERR", "BIND", "INVALID_REQUEST"),
        ("LOC_QP_OP_ERR", "INVALIDATE", "INVALID_REQUEST"),
        ("MW_BIND_ERR", "BIND", "INVALID_REQUEST"),
        ("LOC_EEC_OP_ERR", "SEND", "INTERNAL_ERROR"),
        ("BAD_RESP_ERR", "SEND", "INTERNAL_ERROR"),
        ("FATAL_ERR", "SEND", "INTERNAL_ERROR"),
        ("GENERAL_ERR", "SEND", "INTERNAL_ERROR"),
        ("LOC_RDD_VIOL_ERR", "SEND", "UNKNOWN"),
    ],
)
def test_each_native_status_has_its_own_for_the_operation(provider, native, operation, status):
    qp = provider.queue_pair()
    assert post_any(qp, getattr(lib, f"NDPY_{operation}")) == 0
    provider.complete(status=getattr(lib, f"IBV_WC_{native}"))
    assert [each.status for each in provider.poll()] == [getattr(lib, f"NDPY_{status}")]


@pytest.mark.parametrize(
    ("native", "status"),
    [
        ("SUCCESS", "SUCCESS"),
        ("WR_FLUSH_ERR", "CANCELED"),
        ("LOC_LEN_ERR", "ACCESS_VIOLATION"),
        ("GENERAL_ERR", "ACCESS_VIOLATION"),
    ],
)
def test_a_receive_into_memory_that_may_not_be_written_fails_for_that(provider, native, status):
    qp = provider.queue_pair()
    provider.carry_out(qp, lib.NDPY_RECEIVE, 1, flags=lib.NDPY_UNWRITABLE, status=getattr(lib, f"IBV_WC_{native}"))
    assert [each.status for each in provider.poll()] == [getattr(lib, f"NDPY_{status}")]


@pytest.mark.parametrize(("flag", "told"), [(WC_WITH_INV, True), (WC_IP_CSUM_OK, True), (0, False)])
def test_a_receive_tells_which_window_its_message_took_back(provider, flag, told):
    """rxe passes on the kernel's number for this flag. In libibverbs that number is a flag of datagrams."""
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    provider.complete(WC_RECV, flags=flag, key=0x55)
    (completion,) = provider.poll()
    assert (completion.flags, completion.vendor_status) == ((lib.NDPY_INVALIDATED, 0x55) if told else (0, 0))
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    provider.complete(WC_RECV, lib.IBV_WC_WR_FLUSH_ERR, flags=flag, key=0x55)
    (completion,) = provider.poll()
    assert (completion.flags, completion.vendor_status) == (0, 88)


def test_a_completion_out_of_order_ends_what_came_before_and_that_ends_nothing_again(provider):
    qp = provider.queue_pair()
    ids = []
    for number in range(3):
        assert post(qp, lib.NDPY_SEND, 1, context=number) == 0
        ids.append(provider.sent.id)
    for which in (1, 0, 2):
        provider.library.complete(ids[which], WC_SEND, 0, 0, 0, 0)
    assert [(each.context, each.retired) for each in provider.poll()] == [(1, 2), (0, 0), (2, 1)]
    assert in_flight(qp) == 0


def test_a_completion_of_a_request_that_was_refused_is_internal_and_retires_nothing(provider):
    """libsiw keeps a request that the kernel has refused. In the end the kernel flushes it."""
    qp = provider.queue_pair()
    provider.set(post_result=errno.ENOMEM)
    assert post(qp, lib.NDPY_SEND, 1) == errno.ENOMEM
    provider.complete(status=lib.IBV_WC_WR_FLUSH_ERR)
    (completion,) = provider.poll()
    assert (completion.flags, completion.retired) == (lib.NDPY_INTERNAL, 0)
    assert lib.ndpy_queue_pair_ended(qp, 0) == 1


@pytest.mark.parametrize("before", [0, 2])
def test_a_request_that_is_flushed_twice_is_told_once(provider, before):
    """See Quirk.SIW_FLUSHES_A_QUEUED_READ_TWICE."""
    qp = provider.queue_pair()
    for _ in range(before):
        provider.carry_out(qp, lib.NDPY_SEND, 1)
    provider.poll()
    ids = []
    for context in range(3):
        assert post(qp, lib.NDPY_READ, 1, context=context) == 0
        ids.append(provider.sent.id)
    for which in (0, 1, 1, 2, 2):
        provider.library.complete(ids[which], WC_SEND, lib.IBV_WC_WR_FLUSH_ERR, 0, 0, 0)
    told = [(each.context, each.retired) for each in provider.poll() if not each.flags & lib.NDPY_INTERNAL]
    assert told == [(0, 1), (1, 1), (2, 1)]
    assert in_flight(qp) == 0


def test_whether_the_first_requests_have_ended_and_how(provider):
    qp = provider.queue_pair()
    for _ in range(3):
        provider.carry_out(qp, lib.NDPY_SEND, 1)
    assert lib.ndpy_queue_pair_posted(qp) == 3
    assert [lib.ndpy_queue_pair_ended(qp, count) for count in (0, 1, 3)] == [1, 0, 0]
    provider.poll(2)
    assert [lib.ndpy_queue_pair_ended(qp, count) for count in (1, 2, 3)] == [1, 1, 0]
    provider.carry_out(qp, lib.NDPY_SEND, 1, status=lib.IBV_WC_RETRY_EXC_ERR)
    provider.poll()
    assert [lib.ndpy_queue_pair_ended(qp, count) for count in (3, 4, 5)] == [-1, -1, 0]


def flood(provider: Provider, count: int) -> Any:
    """This many requests that have ended. The context of each is its number."""
    qp = provider.queue_pair(depth=count)
    for number in range(count):
        provider.carry_out(qp, lib.NDPY_SEND, 1, context=number)
    return qp


@pytest.mark.parametrize("wanted", [0, 1, 63, 64, 65, 99, 100, 101, 200])
def test_a_poll_takes_up_to_what_is_wanted_oldest_first(provider, wanted):
    flood(provider, 100)
    taken = provider.poll(wanted)
    assert [each.context for each in taken] == [*range(min(wanted, 100))]
    rest = provider.poll(200)
    assert [each.context for each in rest] == [*range(len(taken), 100)]


def test_a_poll_that_gets_less_than_it_asked_for_does_not_ask_again(provider):
    flood(provider, 3)
    provider.poll(64)
    assert provider.get("polled") == 1


def test_a_poll_that_fails_says_so_unless_it_has_something(provider):
    flood(provider, 2)
    out = ffi.new("struct ndpy_completion[]", 4)
    assert lib.ndpy_drain(provider.cq) == 2
    provider.set(poll_error=errno.EINVAL)
    assert lib.ndpy_drain(provider.cq) == -errno.EIO
    alike = ffi.new("uint32_t *")
    assert lib.ndpy_poll(provider.cq, out, 4, alike) == 2
    assert lib.ndpy_poll(provider.cq, out, 4, alike) == -errno.EIO
    assert lib.ndpy_poll(provider.cq, out, 0, alike) == 0


def script(rng: random.Random, length: int) -> list[tuple[Any, ...]]:
    """Posts to three queues, and their completions: runs of receives that succeed, with everything else between
    them.
    """
    steps: list[tuple[Any, ...]] = []
    waiting: list[list[int]] = [[], [], []]
    total = 0
    while total < length:
        which = rng.randrange(3)
        for _ in range(rng.choice([1, 2, 10])):
            steps.append(("post", which, total, lib.NDPY_UNWRITABLE if which < 2 and rng.random() < 0.05 else 0))
            waiting[which].append(total)
            total += 1
        which = rng.randrange(3)
        while waiting[which] and rng.random() < 0.9:
            place = 0 if rng.random() < 0.95 else rng.randrange(len(waiting[which]))
            status = 0 if rng.random() < 0.95 else rng.choice([lib.IBV_WC_WR_FLUSH_ERR, lib.IBV_WC_LOC_LEN_ERR])
            flags = WC_WITH_INV if which < 2 and rng.random() < 0.05 else 0
            steps.append(("complete", which, waiting[which].pop(place), status, flags))
    return steps


def play(provider: Provider, steps: list[tuple[Any, ...]], number: int, at_once: int) -> list[Any]:
    """All completions of a script, which is polled so many at once."""
    queue_pairs = [provider.queue_pair(depth=1000, number=number), provider.queue_pair(depth=1000, number=number + 1)]
    ids, taken = {}, []
    for step in steps:
        kind, which, request = step[:3]
        if kind == "post":
            operation = lib.NDPY_SEND if which == 2 else lib.NDPY_RECEIVE
            assert post(queue_pairs[which % 2], operation, 1, context=request, flags=step[3]) == 0
            ids[request] = provider.sent.id
        else:
            provider.library.complete(ids[request], WC_SEND if which == 2 else WC_RECV, step[3], request, step[4], 0x55)
    while found := provider.poll(at_once):
        taken += [
            (
                *(each.context, each.nbytes, each.operation, each.status, each.native_status, each.vendor_status),
                *(each.queue_pair - number, each.retired, each.flags),
            )
            for each in found
        ]
    return taken


@pytest.mark.parametrize("seed", range(30))
def test_completions_that_are_polled_together_are_those_that_are_polled_one_by_one(provider, seed):
    steps = script(random.Random(seed), 250)
    one_by_one = play(provider, steps, 10, 1)
    assert len(one_by_one) == sum(step[0] == "complete" for step in steps)
    assert play(provider, steps, 20, 64) == one_by_one
    assert play(provider, steps, 30, 5) == one_by_one


# ---- stored completions ----


@pytest.mark.parametrize("count", [1, 63, 64, 65, 100])
def test_all_that_the_provider_has_is_stored_and_comes_first_and_once(provider, count):
    flood(provider, count)
    assert lib.ndpy_drain(provider.cq) == count
    assert lib.ndpy_undelivered(provider.cq) == count
    assert lib.ndpy_drain(provider.cq) == 0
    qp = provider.queue_pair(number=6)
    provider.carry_out(qp, lib.NDPY_SEND, 1, context=count)
    assert [each.context for each in provider.poll(count - 1)] == [*range(count - 1)]
    assert lib.ndpy_undelivered(provider.cq) == 1
    assert [each.context for each in provider.poll()] == [count - 1, count]
    assert lib.ndpy_undelivered(provider.cq) == 0
    assert provider.poll() == []


def test_what_is_stored_stays_in_order_while_more_comes(provider):
    qp = provider.queue_pair(depth=200)
    taken, posted = [], 0
    for step in range(60):
        for _ in range(step % 7):
            provider.carry_out(qp, lib.NDPY_SEND, 1, context=posted)
            posted += 1
        assert lib.ndpy_drain(provider.cq) == step % 7
        taken += [each.context for each in provider.poll(step % 5)]
        assert lib.ndpy_undelivered(provider.cq) == posted - len(taken)
    while some := provider.poll(50):
        taken += [each.context for each in some]
    assert taken == [*range(posted)]


def hide_some(provider: Provider) -> Any:
    """Store four completions: two internal ones, one for the program, and an internal one."""
    qp = provider.queue_pair(depth=2)
    for context, internal in enumerate((True, True, False, True)):
        provider.carry_out(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS if internal else 0, context=context)
        assert lib.ndpy_drain(provider.cq) == int(not internal)
    return qp


def test_internal_ones_are_taken_up_to_the_first_that_is_for_the_program(provider):
    hide_some(provider)
    assert lib.ndpy_undelivered(provider.cq) == 1
    assert [each.flags for each in provider.poll_internal(0)] == []
    assert [each.context for each in provider.poll_internal(1)] == [0]
    assert [each.context for each in provider.poll_internal(9)] == [1]
    assert provider.poll_internal(9) == []
    assert lib.ndpy_undelivered(provider.cq) == 1
    assert [(each.context, each.flags) for each in provider.poll(1)] == [(2, 0)]
    assert lib.ndpy_undelivered(provider.cq) == 0
    assert [each.context for each in provider.poll_internal(9)] == [3]
    assert provider.poll() == []
    flood(provider, 3)
    assert lib.ndpy_drain(provider.cq) == 3
    assert [each.context for each in provider.poll()] == [0, 1, 2]


def test_stored_completions_are_counted_by_their_queue_pair(provider):
    hide_some(provider)
    queue = provider.shared_queue()
    for slot in range(3):
        assert lib.ndpy_post_shared(queue, slot, slot, elements(1), 1) == 0
        provider.complete(WC_RECV)
    lib.ndpy_drain(provider.cq)
    flood(provider, 2)
    lib.ndpy_drain(provider.cq)
    assert [lib.ndpy_stored_of(provider.cq, number) for number in (NUMBER, 77, 6)] == [6, 0, 0]
    provider.poll_internal(1)
    assert lib.ndpy_stored_of(provider.cq, NUMBER) == 5
    assert lib.ndpy_renumber_stored(provider.cq, NUMBER, 99) == 0
    assert lib.ndpy_renumber_stored(provider.cq, 77, 99) == 3
    assert lib.ndpy_renumber_stored(provider.cq, 77, 98) == 0
    shared = [each for each in provider.poll() if each.flags & lib.NDPY_FROM_SHARED_QUEUE]
    assert [(each.queue_pair, each.slot) for each in shared] == [(99, 0), (99, 1), (99, 2)]


@pytest.mark.parametrize("ended_before", [0, 5])
def test_what_is_left_of_a_queue_pair_is_cancelled_in_order(provider, ended_before):
    qp = provider.queue_pair()
    for _ in range(ended_before):
        provider.carry_out(qp, lib.NDPY_SEND, 1)
    assert len(provider.poll()) == ended_before
    assert post(qp, lib.NDPY_SEND, 1, context=1) == 0
    silent(qp, 1)
    assert post(qp, lib.NDPY_READ, 1, context=3) == 0
    assert bind(qp, lib.NDPY_MARKER) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 4
    assert in_flight(qp) == 0
    assert lib.ndpy_queue_pair_ended(qp, ended_before + 4) == -1
    assert lib.ndpy_undelivered(provider.cq) == 2
    left = provider.poll()
    canceled, silent_success = (lib.NDPY_CANCELED, lib.IBV_WC_WR_FLUSH_ERR, 0), (lib.NDPY_SUCCESS, 0, lib.NDPY_INTERNAL)
    assert [(each.status, each.native_status, each.flags) for each in left] == [
        canceled,
        silent_success,
        canceled,
        silent_success,
    ]
    operations = [lib.NDPY_SEND, lib.NDPY_SEND, lib.NDPY_READ, lib.NDPY_BIND]
    assert [each.operation for each in left] == operations
    assert [(each.retired, each.queue_pair) for each in left] == [(1, NUMBER)] * 4
    assert (left[0].context, left[2].context, left[0].nbytes) == (1, 3, 0)


def test_a_silent_request_behind_a_failed_one_is_cancelled_aloud(provider):
    qp = provider.queue_pair()
    provider.carry_out(qp, lib.NDPY_SEND, 1, status=lib.IBV_WC_LOC_PROT_ERR)
    provider.poll()
    silent(qp, 2)
    assert bind(qp, lib.NDPY_MARKER) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 3
    canceled = (lib.NDPY_CANCELED, 0)
    marker = (lib.NDPY_SUCCESS, lib.NDPY_INTERNAL)
    assert [(each.status, each.flags) for each in provider.poll()] == [canceled, canceled, marker]


def test_cancelling_nothing_leaves_a_queue_pair_as_it_was(provider):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_RECEIVE, 1, context=7) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 0
    assert (lib.ndpy_queue_pair_ended(qp, 0), in_flight(qp, 1)) == (1, 1)
    assert lib.ndpy_cancel_rest(qp, 1, provider.cq) == 1
    assert [(each.context, each.operation) for each in provider.poll()] == [(7, lib.NDPY_RECEIVE)]


def test_what_is_cancelled_comes_behind_what_was_stored(provider):
    flood(provider, 40)
    assert lib.ndpy_drain(provider.cq) == 40
    provider.poll(10)
    qp = provider.queue_pair(depth=100, number=6)
    for number in range(100):
        assert post(qp, lib.NDPY_SEND, 1, context=100 + number) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 100
    assert lib.ndpy_stored_of(provider.cq, 6) == 100
    assert [each.context for each in provider.poll(200)] == [*range(10, 40), *range(100, 200)]


def test_a_slot_is_given_back_when_everything_of_its_request_was_read(provider_path, tmp_path):
    """Without the interpreter's lock another thread posts with it at once, and the next datagram's header comes to its
    memory.
    """
    source = Path(__file__).with_name("retiring.c")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    program = compiled(tmp_path / "retiring", *flags, f"-I{source.parents[2] / 'cdefs'}", source)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
