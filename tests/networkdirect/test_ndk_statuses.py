"""The kernel interface's model over a provider that really runs out of resources, takes its time, and refuses."""

from __future__ import annotations

import contextlib
import time

import pytest
from kit.helpers import connect_pair, contents, memory, take, wait_until
from kit.scenarios import refused_registrations, slow_call
from own_softnd import opened

import ndpy
from ndpy import Access
from ndpy.ndk import Mdl, NdkFlags, NdkMr, NtStatus


def test_j_15_a_provider_without_registrations_left_says_insufficient_resources(softnd):
    with opened(softnd, refused_registrations(after=3)) as (adapter, _), contextlib.ExitStack() as stack:
        seen: list[NtStatus] = []
        for number in range(5):
            mr = stack.enter_context(NdkMr(adapter))
            calls: list[tuple[object, NtStatus]] = []
            status = mr.register(Mdl(bytearray(64)), 64, 0, lambda *call, calls=calls: calls.append(call), number)
            if status is NtStatus.PENDING:
                wait_until(lambda calls=calls: calls, "the callback comes")
                ((context, status),) = calls
                assert context == number
            seen.append(status)
        assert seen == [NtStatus.SUCCESS] * 3 + [NtStatus.INSUFFICIENT_RESOURCES] * 2


def test_j_14_the_callback_comes_when_the_provider_has_registered(softnd):
    with opened(softnd, slow_call("reg_mr", 50)) as (adapter, _), NdkMr(adapter) as mr:
        calls: list[tuple[object, NtStatus]] = []
        chain = Mdl(bytearray(4096))
        assert mr.register(chain, 4096, 0, lambda *call: calls.append(call), 7) is NtStatus.PENDING
        assert mr.region is None
        with pytest.raises(ndpy.DeviceBusyError):
            chain.next = Mdl(bytearray(8))
        wait_until(lambda: calls, "the callback comes")
        assert calls == [(7, NtStatus.SUCCESS)]
        assert mr.region.length == 4096


def test_closing_while_the_provider_registers_tells_cancelled_once(softnd):
    with opened(softnd, slow_call("reg_mr", 50)) as (adapter, _):
        calls: list[tuple[object, NtStatus]] = []
        for number in range(20):
            with NdkMr(adapter) as mr:
                status = mr.register(Mdl(bytearray(64)), 64, 0, lambda *call: calls.append(call), number)
                assert status is NtStatus.PENDING
        assert calls == [(number, NtStatus.CANCELLED) for number in range(20)]


@pytest.mark.parametrize(("flags", "status"), [(0x9, ndpy.Status.SUCCESS), (0x1, ndpy.Status.ACCESS_VIOLATION)])
def test_j_11_a_provider_may_refuse_reads_into_regions_without_read_sink(softnd, flags, status):
    with opened(softnd, read_sink="strict") as (adapter, keep), NdkMr(adapter) as mr:
        pair = connect_pair(keep, adapter)
        owner = memory(keep, adapter, b"readable", Access.REMOTE_READ)
        buffer = bytearray(8)
        assert mr.register(Mdl(buffer), 8, NdkFlags(flags), lambda *call: None) in (NtStatus.SUCCESS, NtStatus.PENDING)
        wait_until(lambda: mr.region, "it is registered")
        pair.client.queue_pair.read(mr.region, owner.remote())
        (completion,) = take(pair.client.cq)
        assert completion.status is status
        assert contents(mr.region) == (b"readable" if completion.ok else bytes(8))


def test_64_registrations_at_once_take_at_most_0_7_of_the_time_of_one_after_the_other(softnd):
    """Each takes 5 ms, since the machine may be busy and Wine's clock is coarse. `make bench-register` uses 1 ms."""
    buffers = [bytearray(1 << 20) for _ in range(64)]
    ratios = []
    with opened(softnd, slow_call("reg_mr", 5)) as (adapter, _):
        for _ in range(3):
            begin = time.perf_counter()
            regions = [adapter.register(buffer) for buffer in buffers]
            middle = time.perf_counter()
            regions += [pending.result(20) for pending in [adapter.begin_register(buffer) for buffer in buffers]]
            end = time.perf_counter()
            for region in regions:
                region.close()
            ratios.append((end - middle) / (middle - begin))
    print("ratios:", *(f"{ratio:.2f}" for ratio in ratios))
    # Other programs make some runs slower. They make none faster.
    assert min(ratios) <= 0.7
