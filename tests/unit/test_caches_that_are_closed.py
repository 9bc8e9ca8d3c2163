"""close() of a registration cache, while another thread uses it and when a step fails. The provider has no device."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

from helpers import wait_until
from racing import Elsewhere

import ndpy


@pytest.fixture
def adapter(fake):
    fake.have_address()
    with fake.open(windows=1) as adapter:
        yield adapter


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
