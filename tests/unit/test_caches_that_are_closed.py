"""close() of a registration cache, while another thread uses it and when a step fails. The provider has no device."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from fake_verbs import opened
from kit.helpers import Replacing, wait_until
from racing import DEADLINE_S, Elsewhere

import ndpy
from ndpy.platforms.verbs import memory
from ndpy.platforms.verbs.native_calls import lib

adapter = opened(windows=1)


@pytest.fixture
def cache(adapter):
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=8) as cache:
        yield cache


def test_a_cache_that_registers_in_another_thread_is_in_use(fake, cache):
    buffer = bytearray(4096)
    fake.hold()
    getting = Elsewhere(lambda: cache.local(buffer)).start()
    wait_until(lambda: fake.seen.at_once, "it registers")
    try:
        with pytest.raises(ndpy.DeviceBusyError, match="a registration of 4096 bytes"):
            cache.close()
    finally:
        fake.release()
    with getting.result() as lease:
        assert not lease.region.closed
    cache.close()
    assert fake.seen.registered == 0


def test_a_lease_that_is_given_just_before_the_close_is_not_deregistered(cache, monkeypatch):
    buffer = bytearray(4096)
    cache.local(buffer).release()
    refuse_if_used = cache._refuse_if_used
    leases = []

    def give_one_then() -> None:
        refuse_if_used()
        leases.append(Elsewhere(lambda: cache.local(buffer)).start().result())

    with monkeypatch.context() as patch:
        patch.setattr(type(cache), "_refuse_if_used", lambda self: give_one_then())
        with pytest.raises(ndpy.DeviceBusyError, match="1 uses"):
            cache.close()
    (lease,) = leases
    assert not lease.region.closed
    with cache.local(buffer) as second:
        assert second.region is lease.region
    lease.release()


# The window that could not be freed is dropped, and the adapter frees it later.
@pytest.mark.filterwarnings("ignore:unclosed <MemoryWindow:ResourceWarning")
def test_an_exposure_whose_window_cannot_be_freed_at_once_does_not_stay_in_use(fake, adapter, cache, monkeypatch):
    with (
        adapter.create_completion_queue(8) as queue,
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.connect(queue_pair, ("127.0.0.1", 4791), timeout_s=DEADLINE_S),
    ):
        exposure = cache.remote(bytearray(4096), queue_pair)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "lib", Replacing(lib, ndpy_free_window=lambda native: errno.EIO))
            with pytest.raises(ndpy.ProviderError):
                exposure.release()
    cache.close()
    assert fake.seen.registered == 0


class Monitor:
    """Stands in for a monitor of memory."""

    def __init__(self) -> None:
        self.watched: list[Any] = []

    def watch(self, start: int, end: int) -> Any:
        self.watched.append((start, end))
        return start, end

    def changed(self, watch: Any) -> int:
        return 0

    def unwatch(self, watch: Any) -> None:
        self.watched.remove(watch)

    def close(self) -> None:
        assert not self.watched


@pytest.mark.parametrize("how", ["invalidate", "close"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_region_that_cannot_be_deregistered_at_once_costs_no_watch_and_no_room(fake, adapter, monkeypatch, how):
    """A watch that goes on would write to a descriptor of the cache after its end. One that ends twice may be
    another's.
    """
    monitor = Monitor()
    monkeypatch.setattr(adapter, "_monitor", lambda on_change: monitor)
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=8, monitor=True)
    for address in (4096, 16384):
        cache.local((address, 4096)).release()
    assert len(monitor.watched) == 2

    def refuse_second(name: bytes, after: int) -> None:
        if name == b"ibv_dereg_mr" and after:
            fake.settings.dereg_errno = errno.EIO

    fake.call_at_points(refuse_second)
    with pytest.raises(ndpy.ProviderError):
        cache.invalidate((4096, 16384)) if how == "invalidate" else cache.close()
    fake.call_at_points(None)
    fake.settings.dereg_errno = 0
    if how == "invalidate":
        assert not monitor.watched
        assert (cache.stats.entries, cache.stats.bytes_pinned) == (0, 0)
    cache.close()
    assert not monitor.watched
