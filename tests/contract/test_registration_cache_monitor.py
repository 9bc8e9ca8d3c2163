"""The registration cache with a monitor: memory that no Python object owns."""

from __future__ import annotations

import mmap
import sys

import pytest
from kit.caching import LENGTH, READ, map_raw, unmap_raw, use
from kit.helpers import wait_until

import ndpy
from ndpy.objects.memory import address_of


@pytest.mark.skipif(sys.platform == "linux", reason="Linux has a monitor")
def test_a_monitor_is_refused_where_the_system_has_none(adapter):
    with pytest.raises(ndpy.UnsupportedError, match=r"DO_NOT_SECURE_VM.*raw=True"):
        ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4, monitor=True)


def test_k_1_2_monitored_memory_is_found_until_it_is_unmapped(adapter, monitored):
    """The adapter's thread deregisters. The program need not use the cache again."""
    address = map_raw(4 * LENGTH)
    region = use(monitored, (address, LENGTH))
    beside = use(monitored, (address + 2 * LENGTH, LENGTH))
    assert use(monitored, (address, LENGTH)) is region
    assert use(monitored, (address + 8, 8)) is region
    unmap_raw(address, LENGTH)
    wait_until(lambda: region.closed, "the registration has gone with its memory")
    assert not beside.closed
    wait_until(lambda: monitored.stats.entries == 1, "the entry has gone")
    assert monitored.stats.invalidations == 1
    map_raw(LENGTH, address)
    assert use(monitored, (address, LENGTH)) is not region
    unmap_raw(address, 4 * LENGTH)


def test_k_1_8_monitored_memory_in_use_is_detached_and_deregistered_on_release(monitored):
    address = map_raw(LENGTH)
    lease = monitored.local((address, LENGTH))
    region = lease.region
    unmap_raw(address, LENGTH)
    map_raw(LENGTH, address)
    assert not region.closed
    with monitored.local((address, LENGTH)) as other:
        assert other.region is not region
    lease.release()
    assert region.closed
    unmap_raw(address, LENGTH)


def test_k_2_6_unmapping_monitored_memory_takes_the_peers_right_away(pair, monitored):
    address = map_raw(LENGTH)
    exposure = monitored.remote((address, LENGTH), pair.server.queue_pair, READ)
    unmap_raw(address, LENGTH)
    wait_until(lambda: exposure.revoked, "the peer's right has gone with the memory")
    exposure.release()
    wait_until(lambda: not monitored.stats.entries, "the registration too")


def test_overlapping_monitored_ranges_become_one_and_changed_ones_do_not_count(monitored):
    address = map_raw(4 * LENGTH)
    use(monitored, (address, 2 * LENGTH))
    merged = use(monitored, (address + LENGTH, 2 * LENGTH))
    assert (merged.address, merged.length) == (address, 3 * LENGTH)
    unmap_raw(address, LENGTH)
    region = use(monitored, (address + LENGTH, 2 * LENGTH))
    assert (region.address, region.length) == (address + LENGTH, 2 * LENGTH)
    unmap_raw(address, 4 * LENGTH)


def test_a_file_is_not_monitored_unless_the_caller_watches_it(monitored, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(LENGTH))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), LENGTH) as mapped:
        view = memoryview(mapped)
        raw = (address_of(view), LENGTH)
        view.release()
        with pytest.raises(ndpy.UnsupportedError, match="data is mapped there"):
            monitored.local(raw)
        assert monitored.stats.entries == 0
        region = use(monitored, raw, raw=True)
        monitored.invalidate(*raw)
        assert region.closed
