"""Atomic writes, and flushing memory of the peer: what the provider gets. It has no device."""

from __future__ import annotations

import errno

import pytest
from fake_verbs import connected
from kit import linux_only as linux_only
from kit.deadlines import DEADLINE_S

import ndpy
from ndpy import Access, Batch, Capability, Flags, FlushKind, Operation, RemoteMemory, Status
from ndpy.platforms.verbs.native_calls import lib

SERVER = ("127.0.0.1", 4791)
# Numbers of the interface of rdma-core 65.
WITH_FLUSH, WITH_ATOMIC_WRITE = 1 << 11, 1 << 12
CAN_WRITE, CAN_FLUSH, CAN_PERSIST = 1, 2, 4  # of fake_extended.capabilities
LEVEL_RANGE, LEVEL_MR = 0, 1
SIGNALED, FENCE = 2, 1
ACCESS_FLUSH_GLOBAL, ACCESS_FLUSH_PERSISTENT = 1 << 8, 1 << 9
ALL = Capability.ATOMIC_WRITE | Capability.FLUSH | Capability.FLUSH_PERSISTENT
REMOTE = RemoteMemory(0x10000, 64, 0x77)


@pytest.fixture
def adapter(fake):
    fake.have_address()
    fake.extended.capabilities = CAN_WRITE | CAN_FLUSH | CAN_PERSIST
    fake.extended.operations = WITH_FLUSH | WITH_ATOMIC_WRITE
    with fake.open() as adapter:
        yield adapter


queue_pair = connected


def posted(fake):
    seen = fake.extended
    return seen.posted_address, seen.posted_token, seen.posted_value


@pytest.mark.parametrize(
    ("device", "library", "claimed"),
    [
        (7, WITH_FLUSH | WITH_ATOMIC_WRITE, ALL),
        (7, WITH_ATOMIC_WRITE, Capability.ATOMIC_WRITE),
        (7, 0, Capability.NONE),
        (CAN_WRITE, WITH_FLUSH | WITH_ATOMIC_WRITE, Capability.ATOMIC_WRITE),
        (CAN_FLUSH, WITH_FLUSH, Capability.FLUSH),
        (CAN_FLUSH | CAN_PERSIST, WITH_FLUSH, Capability.FLUSH | Capability.FLUSH_PERSISTENT),
        (0, WITH_FLUSH | WITH_ATOMIC_WRITE, Capability.NONE),
    ],
)
def test_device_and_library_must_both_have_it(fake, device, library, claimed):
    """A queue pair is created for what there is, and by the plain call if there is nothing."""
    fake.extended.capabilities, fake.extended.operations = device, library
    with fake.open() as adapter, adapter.create_completion_queue(8) as queue:
        assert adapter.info.capabilities & ALL == claimed
        fake.extended.created_for = 0
        adapter.create_queue_pair(queue).close()
        wanted = WITH_ATOMIC_WRITE if Capability.ATOMIC_WRITE in claimed else 0
        assert fake.extended.created_for == wanted | (WITH_FLUSH if Capability.FLUSH in claimed else 0)


def test_an_atomic_write_is_posted_with_its_value(fake, queue, queue_pair):
    queue_pair.atomic_write(REMOTE[8:], 0x8000000000000001, context=5)
    assert posted(fake) == (0x10008, 0x77, 0x8000000000000001)
    assert fake.extended.posted_flags == SIGNALED
    assert fake.complete(queue_pair, receive=False)
    (completion,) = queue.poll()
    assert (completion.operation, completion.context, completion.ok) == (Operation.ATOMIC_WRITE, 5, True)


def test_a_flush_is_posted_with_its_kind_and_level(fake, queue, queue_pair):
    cases = {
        (FlushKind.GLOBAL, False): (1, LEVEL_RANGE),
        (FlushKind.PERSISTENT, False): (2, LEVEL_RANGE),
        (FlushKind.GLOBAL | FlushKind.PERSISTENT, True): (3, LEVEL_MR),
    }
    for (kind, whole), native in cases.items():
        queue_pair.flush_memory(REMOTE[16:24], kind, whole_region=whole, flags=Flags.READ_FENCE)
        assert posted(fake) == (0x10010, 0x77, 8)
        assert (fake.extended.posted_kinds, fake.extended.posted_level) == native
        assert fake.extended.posted_flags == SIGNALED | FENCE
        assert fake.complete(queue_pair, receive=False)
        (completion,) = queue.poll()
        assert (completion.operation, completion.ok) == (Operation.FLUSH_MEMORY, True)


def test_a_batch_posts_them_one_after_the_other(fake, adapter, queue, queue_pair):
    with adapter.register(bytearray(8)) as region:
        batch = Batch(4, signal_all=True)
        batch.write(region, REMOTE, context=1)
        batch.atomic_write(REMOTE, value=9, context=2)
        batch.flush_memory(REMOTE, context=3)
        batch.flush_memory(REMOTE, FlushKind.PERSISTENT, whole_region=True, context=4)
        for _ in range(2):
            queue_pair.post(batch)
            assert posted(fake) == (0x10000, 0x77, 64)
            assert (fake.extended.posted_kinds, fake.extended.posted_level) == (2, LEVEL_MR)
            for _ in range(4):
                assert fake.complete(queue_pair, receive=False)
            found = queue.poll()
            assert [(completion.context, completion.operation) for completion in found] == [
                (1, Operation.WRITE),
                (2, Operation.ATOMIC_WRITE),
                (3, Operation.FLUSH_MEMORY),
                (4, Operation.FLUSH_MEMORY),
            ]


@pytest.mark.parametrize(
    ("add", "error"),
    [
        (lambda batch: batch.atomic_write(REMOTE), TypeError),
        (lambda batch: batch.atomic_write(REMOTE, -(1 << 63) - 1), ValueError),
        (lambda batch: batch.atomic_write(REMOTE, 1 << 64), ValueError),
        (lambda batch: batch.flush_memory(), TypeError),
        (lambda batch: batch.flush_memory(REMOTE, 5), TypeError),
        (lambda batch: batch.flush_memory(REMOTE, context=-1), ValueError),
    ],
)
def test_a_batch_refuses_wrong_arguments(add, error):
    batch = Batch(1)
    with pytest.raises(error):
        add(batch)
    assert len(batch) == 0


def test_a_queue_pair_refuses_wrong_arguments(queue_pair):
    for value in (-(1 << 63) - 1, 1 << 64):
        with pytest.raises(ValueError, match="64 bits"):
            queue_pair.atomic_write(REMOTE, value)
    with pytest.raises(TypeError, match="FlushKind"):
        queue_pair.flush_memory(REMOTE, 1)


def test_a_negative_value_is_written_as_its_complement(fake, queue_pair):
    queue_pair.atomic_write(REMOTE, -2)
    assert posted(fake) == (0x10000, 0x77, (1 << 64) - 2)


def test_a_refused_post_takes_no_place(fake, queue, queue_pair):
    fake.failures.complete = errno.ENOMEM
    with pytest.raises(ndpy.InsufficientResourcesError):
        queue_pair.atomic_write(REMOTE, 1)
    for context in range(64):
        queue_pair.atomic_write(REMOTE, 1, context=context)
    with pytest.raises(ndpy.QueueFullError):
        queue_pair.flush_memory(REMOTE)
    for _ in range(64):
        assert fake.complete(queue_pair, receive=False)
    assert [completion.context for completion in queue.poll()] == list(range(64))


def test_a_flush_that_the_peer_refuses_is_a_violation(fake, queue, queue_pair):
    queue_pair.flush_memory(REMOTE)
    assert fake.complete(queue_pair, receive=False, status=lib.IBV_WC_REM_ACCESS_ERR)
    (completion,) = queue.poll()
    assert completion.status == Status.ACCESS_VIOLATION


def test_the_rights_go_to_the_provider(fake, adapter):
    with adapter.register(bytearray(8), Access.FLUSH_GLOBAL | Access.FLUSH_PERSISTENT) as region:
        assert fake.seen.access == ACCESS_FLUSH_GLOBAL | ACCESS_FLUSH_PERSISTENT
        assert region.remote().length == 8
    fake.extended.capabilities = CAN_WRITE
    with fake.open() as without:
        for right in (Access.FLUSH_GLOBAL, Access.FLUSH_PERSISTENT):
            with pytest.raises(ndpy.UnsupportedError, match="FLUSH"):
                without.register(bytearray(8), right)


def test_an_unconnected_queue_pair_and_one_without_reads_refuse_them(adapter, queue):
    with adapter.create_queue_pair(queue) as queue_pair:
        for post in (lambda: queue_pair.atomic_write(REMOTE, 1), lambda: queue_pair.flush_memory(REMOTE)):
            with pytest.raises(ndpy.NotConnectedError):
                post()
        with adapter.connect(queue_pair, SERVER, outbound_read_limit=0, timeout_s=DEADLINE_S):
            for post in (lambda: queue_pair.atomic_write(REMOTE, 1), lambda: queue_pair.flush_memory(REMOTE)):
                with pytest.raises(ndpy.LimitExceededError, match="read limit"):
                    post()
