"""Memory windows of verbs' type 1, for adapters without type 2. The provider has no device."""

from __future__ import annotations

import pytest
from fake_verbs import connected, opened
from kit import linux_only as linux_only
from kit.deadlines import DEADLINE_S

import ndpy
from ndpy import Access, Capability, Operation, Status
from ndpy.platforms.verbs.native_calls import lib

SERVER = ("127.0.0.1", 4791)
REMOTE_WRITE, REMOTE_READ = 2, 4  # enum ibv_access_flags


adapter = opened(windows=2)


queue_pair = connected


@pytest.fixture
def region(adapter):
    with adapter.register(bytearray(64)) as region:
        yield region


def complete(fake, queue, queue_pair, **options):
    assert fake.complete(queue_pair, receive=False, **options)
    (completion,) = queue.poll()
    return completion


def test_the_capabilities_tell_the_type(fake, adapter):
    both = Capability.MEMORY_WINDOWS | Capability.TYPE_1_WINDOWS
    assert adapter.info.capabilities & (both | Capability.SEND_INVALIDATE) == both
    for windows, claimed in ((0, Capability.NONE), (1, Capability.MEMORY_WINDOWS)):
        with fake.open(windows=windows) as other:
            assert other.info.capabilities & both == claimed


def test_each_bind_gives_a_new_token_and_an_invalidation_takes_it_back(fake, adapter, queue, queue_pair, region):
    tokens = set()
    with adapter.create_memory_window() as window:
        for turn in range(600):
            queue_pair.bind(window, region[8:24], Access.REMOTE_READ, context=turn)
            assert (fake.extended.bound_length, fake.extended.bound_access) == (16, REMOTE_READ)
            remote = window.remote()
            assert (remote.address, remote.length) == (region.address + 8, 16)
            tokens.add(remote.token)
            bound = complete(fake, queue, queue_pair)
            assert (bound.operation, bound.context, bound.ok) == (Operation.BIND, turn, True)
            with pytest.raises(ndpy.DeviceBusyError):
                region.close()
            queue_pair.invalidate(window, context=turn)
            assert fake.extended.bound_length == 0
            ended = complete(fake, queue, queue_pair)
            assert (ended.operation, ended.ok, window.is_bound) == (Operation.INVALIDATE, True, False)
    assert len(tokens) == 600


def test_a_failed_bind_leaves_the_window_unbound(fake, adapter, queue, queue_pair, region):
    with adapter.create_memory_window() as window:
        queue_pair.bind(window, region, Access.REMOTE_WRITE)
        assert fake.extended.bound_access == REMOTE_WRITE
        failed = complete(fake, queue, queue_pair, status=lib.IBV_WC_MW_BIND_ERR)
        assert (failed.status, window.is_bound) == (Status.INVALID_REQUEST, False)


def test_after_a_failed_bind_another_queue_pair_can_bind_it(fake, adapter, queue, queue_pair, region):
    with (
        adapter.create_queue_pair(queue) as other,
        adapter.connect(other, SERVER, timeout_s=DEADLINE_S),
        adapter.create_memory_window() as window,
    ):
        queue_pair.bind(window, region)
        assert not complete(fake, queue, queue_pair, status=lib.IBV_WC_MW_BIND_ERR).ok
        other.bind(window, region)
        assert complete(fake, queue, other).ok


def test_binding_a_bound_window_binds_it_anew(fake, adapter, queue, queue_pair, region):
    with adapter.create_memory_window() as window, adapter.register(bytearray(8)) as other:
        queue_pair.bind(window, region)
        assert complete(fake, queue, queue_pair).ok
        former = window.remote_token
        queue_pair.bind(window, other)
        assert complete(fake, queue, queue_pair).ok
        assert (window.region, window.remote_token != former) == (other, True)
        queue_pair.invalidate(window)
        assert complete(fake, queue, queue_pair).ok


def test_a_full_queue_leaves_the_window_as_it_was(fake, adapter, queue, region):
    with (
        adapter.create_queue_pair(queue, initiator_queue_depth=1) as queue_pair,
        adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S),
        adapter.create_memory_window() as window,
    ):
        queue_pair.bind(window, region)
        assert complete(fake, queue, queue_pair).ok
        token = window.remote_token
        queue_pair.send([])
        with pytest.raises(ndpy.QueueFullError):
            queue_pair.bind(window, region)
        with pytest.raises(ndpy.QueueFullError):
            queue_pair.invalidate(window)
        assert (window.remote_token, window.is_bound) == (token, True)
