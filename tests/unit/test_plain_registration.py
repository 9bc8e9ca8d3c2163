"""register() and close() of a region where both are one native call. Ctrl-C, failures, removal and races. The provider
is fake.
"""

from __future__ import annotations

import errno
import gc
import signal
from typing import Any

import pytest
from fake_verbs import opened
from kit.helpers import is_free
from kit.threads import in_threads
from racing import Elsewhere, Points, wait_until, walk

import ndpy
from ndpy import Access
from ndpy.platforms.verbs.memory import VerbsMemoryRegion

adapter = opened(windows=1)


@pytest.fixture
def no_python(monkeypatch):
    """Registering and closing in Python fails."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(ndpy.Adapter, "_register_in_python", refuse)
    monkeypatch.setattr(ndpy.MemoryRegion, "_release", refuse)


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("access", [Access.NONE, Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE])
@pytest.mark.parametrize(
    "buffer", [bytearray(64), memoryview(bytearray(64)), ndpy.alloc(64)], ids=lambda it: type(it).__name__
)
def test_it_is_one_native_call_each(fake, adapter, buffer, access):
    region = adapter.register(buffer, access)
    assert (fake.seen.calls, fake.seen.registered) == (1, 1)
    assert (fake.seen.address, fake.seen.length) == (region.address, 64)
    region.close()
    assert fake.seen.registered == 0


@pytest.mark.parametrize("access", [*map(Access, range(16))], ids=str)
def test_it_has_the_rights_that_a_registration_in_python_has(fake, adapter, access):
    adapter.register(bytearray(64), access).close()
    rights = fake.seen.access
    region = adapter._register_in_python(bytearray(64), access, None)
    assert fake.seen.access == rights
    region.close()


def test_it_has_the_attributes_that_a_registration_in_python_has(adapter):
    buffer = bytearray(64)

    def attributes(region: ndpy.MemoryRegion) -> list[Any]:
        with region:
            return [
                region.adapter,
                region.buffer,
                region.address,
                len(region),
                region.access,
                region.local_token + 1 == region.remote_token,
                region._writable,
                region._owner,
                repr(region),
                region.closed,
                region.remote().address,
                type(region._native),
            ]

    plain = attributes(adapter.register(buffer, Access.REMOTE_READ))
    assert plain == attributes(adapter._register_in_python(buffer, Access.REMOTE_READ, None))


# ---- failures ----


def test_a_refusal_is_explained(fake, adapter):
    fake.settings.reg_errno = errno.EFAULT
    buffer = bytearray(64)
    with pytest.raises(ndpy.AccessViolationError, match=r"the 64 bytes at 0x[0-9a-f]+ are not all mapped and writable"):
        adapter.register(buffer)
    gc.collect()
    assert is_free(buffer)
    assert adapter._open_children() == []


def test_memory_that_windows_cannot_have_is_registered_without_them(fake, adapter):
    fake.settings.reg_errno_windows = errno.EFAULT
    with adapter.register(bytearray(64), Access.REMOTE_READ):
        assert fake.seen.registered == 1


def test_a_region_that_cannot_be_deregistered_stays_as_it_is(fake, adapter):
    buffer = bytearray(64)
    region = adapter.register(buffer, Access.REMOTE_READ)
    fake.settings.dereg_errno = errno.EBUSY
    for close in (region.close, region.deregister):
        with pytest.raises(ndpy.ProviderError, match="deregister") as raised:
            close()
        assert raised.value.native == errno.EBUSY
        assert region.remote().length == 64
        assert not is_free(buffer)
    with pytest.raises(ndpy.DeviceBusyError, match="MemoryRegion of 64 bytes"):
        adapter.close()
    fake.settings.dereg_errno = 0
    region.close()
    assert is_free(buffer)
    with pytest.raises(ndpy.ClosedError, match=r"MemoryRegion of 64 bytes at 0x[0-9a-f]+ is closed"):
        region.remote()


# ---- Ctrl-C ----


def test_ctrl_c_during_the_call_that_closes_comes_when_it_is_closed(fake, adapter):
    buffer = bytearray(64)
    region = adapter.register(buffer)
    fake.settings.signal = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        region.close()
    assert region.closed
    assert is_free(buffer)
    region.close()


def test_ctrl_c_during_the_call_that_registers_leaves_a_region_to_the_adapter(fake, adapter):
    buffer = bytearray(64)
    fake.settings.signal = signal.SIGINT
    with pytest.warns(ResourceWarning, match="unclosed <MemoryRegion"), pytest.raises(KeyboardInterrupt):
        adapter.register(buffer)
    wait_until(lambda: not fake.seen.registered, "the adapter closes it")
    wait_until(lambda: is_free(buffer), "the buffer is free")


# ---- other threads ----


def test_two_threads_close_a_region_once_at_any_point(fake, points: Points, adapter):
    """The provider takes note of a region that is deregistered twice."""

    def run(chosen: int) -> bool:
        region = adapter.register(bytearray(64))
        first = Elsewhere(region.close)
        points.watch(first.thread, chosen, lambda: points.elsewhere(region.close))
        first.start().result()
        points.stop()
        region.close()
        assert fake.seen.registered == 0
        return points.reached

    walk(run, points, 2)


@pytest.mark.parametrize("what", ["region.deregister", "region.reregister", "queue_pair.bind"])
def test_whoever_uses_a_region_that_is_being_closed_waits_and_is_refused(fake, points: Points, what):
    with (
        fake.open_pair(windows=1, rereg_result=0) as (adapter, _, queue_pair),
        adapter.create_memory_window() as window,
    ):
        region = adapter.register(bytearray(64), Access.REMOTE_WRITE)
        uses = {
            "region.deregister": region.deregister,
            "region.reregister": lambda: region.reregister(bytearray(8)),
            "queue_pair.bind": lambda: queue_pair.bind(window, region),
        }
        begun = []
        closing = Elsewhere(region.close)
        points.watch(closing.thread, 0, lambda: begun.append(points.elsewhere(uses[what])))
        closing.start().result()
        points.stop()
        outcome = begun[0].outcome()
        assert outcome is None if what == "region.deregister" else isinstance(outcome, ndpy.ClosedError)
        assert region.closed
        assert not window.is_bound


def test_a_region_that_is_made_while_the_device_is_removed_can_only_be_closed(fake):
    adapter = fake.open()
    fake.hold()
    making = Elsewhere(lambda: adapter.register(bytearray(64), Access.REMOTE_READ)).start()
    wait_until(lambda: fake.seen.at_once, "it registers")
    fake.remove(adapter)
    wait_until(lambda: adapter._defunct, "the adapter knows")
    fake.release()
    region = making.result()
    with pytest.raises(ndpy.DeviceRemovedError):
        region.remote()
    region.close()
    adapter.close()


def test_regions_of_many_threads_are_all_closed(fake, adapter):
    """Each thread closes half of its regions and drops the others."""

    def work(_: int) -> None:
        for turn in range(100):
            region = adapter.register(bytearray(64))
            assert region in adapter._open_children()
            if turn % 2:
                region.close()

    with pytest.warns(ResourceWarning):
        in_threads(6, work, 60)
        wait_until(lambda: not fake.seen.registered, "all are deregistered")
    assert not adapter._is_used


def test_a_region_of_the_platforms_own_class_is_made(adapter):
    with adapter.register(bytearray(8)) as region:
        assert type(region) is VerbsMemoryRegion
