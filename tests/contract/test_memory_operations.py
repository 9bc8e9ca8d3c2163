"""Atomic writes, and requests that flush memory of the peer."""

from __future__ import annotations

import sys

import pytest
from kit.helpers import assert_refused, assert_works, contents, memory, require, succeed

import ndpy
from ndpy import Access, Batch, Capability, CompletionArray, FlushKind, Operation

VALUE = 0x0102030405060708
FLUSHABLE = Access.REMOTE_WRITE | Access.FLUSH_GLOBAL


def bytes_of(value):
    return value.to_bytes(8, sys.byteorder)


@pytest.fixture
def target(pair, keep):
    require(pair.adapter, Capability.ATOMIC_WRITE)
    return memory(keep, pair.server.adapter, 64, Access.REMOTE_WRITE)


@pytest.fixture
def flushable(pair, keep):
    require(pair.adapter, Capability.FLUSH)
    return memory(keep, pair.server.adapter, 8192, FLUSHABLE)


def test_an_adapter_without_them_says_so(adapter, keep):
    queue_pair = keep(adapter.create_queue_pair(keep(adapter.create_completion_queue(16))))
    remote = ndpy.RemoteMemory(4096, 64, 1)
    calls = {
        Capability.ATOMIC_WRITE: lambda to: to.atomic_write(remote, 1),
        Capability.FLUSH: lambda to: to.flush_memory(remote),
    }
    absent = {capability: call for capability, call in calls.items() if capability not in adapter.info.capabilities}
    for call in absent.values():
        with pytest.raises(ndpy.UnsupportedError):
            call(queue_pair)
        batch = Batch(1)
        call(batch)
        with pytest.raises(ndpy.UnsupportedError):
            queue_pair.post(batch)
    for right, capability in (
        (Access.FLUSH_GLOBAL, Capability.FLUSH),
        (Access.FLUSH_PERSISTENT, Capability.FLUSH_PERSISTENT),
    ):
        if capability not in adapter.info.capabilities:
            with pytest.raises(ndpy.UnsupportedError, match=str(capability.name)):
                adapter.register(bytearray(8), right)
    if not absent:
        pytest.skip(f"{adapter.info.name} has both")


# ---- atomic writes ----


def test_an_atomic_write_writes_8_bytes(pair, target):
    pair.client.queue_pair.atomic_write(target.remote(8), VALUE, context=5)
    (written,) = succeed(pair.client.cq)
    assert (written.operation, written.context) == (Operation.ATOMIC_WRITE, 5)
    assert contents(target) == bytes(8) + bytes_of(VALUE) + bytes(48)
    assert pair.server.cq.poll() == []


def test_atomic_writes_and_others_are_in_order(pair, keep, target):
    source = memory(keep, pair.adapter, b"plain...")
    for turn in range(20):
        pair.client.queue_pair.write(source, target.remote(), context=2 * turn)
        pair.client.queue_pair.atomic_write(target.remote(), turn, context=2 * turn + 1)
        done = succeed(pair.client.cq, 2)
        assert [completion.context for completion in done] == [2 * turn, 2 * turn + 1]
        assert contents(target)[:8] == bytes_of(turn)


def test_atomic_writes_in_a_batch(pair, keep, target):
    source, array = memory(keep, pair.adapter, b"A" * 8), CompletionArray(8)
    batch = Batch(3, signal_all=True)
    batch.write(source, target.remote(32), context=1)
    batch.atomic_write(target.remote(), VALUE, context=2)
    batch.atomic_write(target.remote(8), 9, context=3)
    for _ in range(2):
        pair.client.queue_pair.post(batch)
        assert pair.client.cq.poll_into(array, at_least=3, spin_s=20.0) == 3
        assert list(array.contexts) == [1, 2, 3]
        assert list(array.operations) == [Operation.WRITE, Operation.ATOMIC_WRITE, Operation.ATOMIC_WRITE]
        assert contents(target)[:40] == bytes_of(VALUE) + bytes_of(9) + bytes(16) + b"A" * 8
    batch.remote_addresses = [target.remote(32).address, target.remote(48).address, target.remote(56).address]
    pair.client.queue_pair.post(batch)
    succeed(pair.client.cq, 3)
    assert contents(target)[48:] == bytes_of(VALUE) + bytes_of(9)


def test_what_is_wrong_with_an_atomic_write_is_said_before_posting(pair, keep, target):
    queue_pair = pair.client.queue_pair
    with pytest.raises(ndpy.ElementRangeError, match="multiple of 8"):
        queue_pair.atomic_write(target.remote(4), 1)
    with pytest.raises(ndpy.ElementRangeError, match="8 bytes do not fit the 4 bytes"):
        queue_pair.atomic_write(target.remote(60), 1)
    for value in (-(1 << 63) - 1, 1 << 64):
        with pytest.raises(ValueError, match="value is"):
            queue_pair.atomic_write(target.remote(), value)
    with pytest.raises(ndpy.InvalidFlagsError):
        queue_pair.atomic_write(target.remote(), 1, flags=ndpy.Flags.INLINE)
    assert_works(keep, pair)


def test_silent_atomic_writes_leave_no_completion(pair, target):
    for turn in range(40):
        silent = turn % 4 < 3
        pair.client.queue_pair.atomic_write(
            target.remote(), turn, context=turn, flags=ndpy.Flags.SILENT_SUCCESS if silent else 0
        )
        if not silent:
            (completion,) = succeed(pair.client.cq)
            assert completion.context == turn


def test_an_atomic_write_without_the_right_is_refused(pair, keep, target):
    private = memory(keep, pair.server.adapter, 8, Access.REMOTE_READ)
    pair.client.queue_pair.atomic_write(private.remote(), VALUE, context=3)
    assert_refused(pair.client, Operation.ATOMIC_WRITE, 3)
    assert contents(private) == bytes(8)


# ---- flushing ----


@pytest.mark.parametrize("whole_region", [False, True])
def test_a_flush_follows_a_write(pair, keep, flushable, whole_region):
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"durable?"), flushable.remote(4092), context=1)
    pair.client.queue_pair.flush_memory(flushable.remote(4092, 8), whole_region=whole_region, context=2)
    written, flushed = succeed(pair.client.cq, 2)
    assert (written.context, flushed.context, flushed.operation) == (1, 2, Operation.FLUSH_MEMORY)
    assert contents(flushable)[4092:4100] == b"durable?"
    assert_works(keep, pair)


def test_flushes_in_a_batch(pair, keep, flushable):
    batch = Batch(3, signal_all=True)
    batch.write(memory(keep, pair.adapter, b"durable?"), flushable.remote(), context=1)
    batch.flush_memory(flushable.remote(0, 8), context=2)
    batch.flush_memory(flushable.remote(), FlushKind.GLOBAL, whole_region=True, context=3)
    for _ in range(2):
        pair.client.queue_pair.post(batch)
        done = succeed(pair.client.cq, 3)
        assert [completion.context for completion in done] == [1, 2, 3]
    assert contents(flushable)[:8] == b"durable?"


def test_a_flush_of_memory_without_the_right_is_refused(pair, keep, flushable):
    plain = memory(keep, pair.server.adapter, 64, Access.REMOTE_WRITE)
    pair.client.queue_pair.flush_memory(plain.remote(), context=3)
    assert_refused(pair.client, Operation.FLUSH_MEMORY, 3)


def test_a_flush_of_another_kind_than_the_right_is_refused(pair, flushable):
    pair.client.queue_pair.flush_memory(flushable.remote(), FlushKind.PERSISTENT, context=4)
    assert_refused(pair.client, Operation.FLUSH_MEMORY, 4)


def test_a_flush_beyond_the_region_is_refused(pair, flushable):
    beyond = ndpy.RemoteMemory(flushable.address + 8190, 64, flushable.remote_token)
    pair.client.queue_pair.flush_memory(beyond, context=5)
    assert_refused(pair.client, Operation.FLUSH_MEMORY, 5)


def test_queue_pairs_for_these_do_everything_else_too(pair_with, keep, adapter):
    require(adapter, Capability.ATOMIC_WRITE)
    pair = pair_with(max_initiator_sge=2)
    assert_works(keep, pair)
