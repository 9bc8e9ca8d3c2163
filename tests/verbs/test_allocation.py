"""alloc() on a machine with huge pages and NUMA. The VM has 16 huge pages, and the kernel has at least one node."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.helpers import address_of, assert_works, contents, memory, succeed

import ndpy
from ndpy import Access

POOL = Path("/proc/sys/vm/nr_hugepages")
NODES = Path("/sys/devices/system/node")


def memory_info(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


def mapping_of(address: int) -> dict[str, str]:
    """The entry in /proc/self/smaps for the mapping that contains this address."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            inside = start <= address < stop
        elif inside:
            found[first.rstrip(":")] = rest.strip()
    return found


@pytest.fixture
def huge_kib():
    if memory_info("HugePages_Free") < 4:
        pytest.skip("the machine has fewer than 4 free huge pages")
    return memory_info("Hugepagesize")


def test_huge_pages_come_from_the_pool_and_go_back(pair, keep, huge_kib):
    """alloc() takes them at once, so no first use can fail. Every byte is 0."""
    free = memory_info("HugePages_Free")
    huge = huge_kib << 10
    buffer = ndpy.alloc(huge + 1, huge_pages=True)
    assert memory_info("HugePages_Free") == free - 2
    assert len(buffer) == huge + 1
    assert address_of(buffer) % huge == 0
    assert mapping_of(address_of(buffer))["KernelPageSize"] == f"{huge_kib} kB"
    assert not any(buffer)
    with pair.adapter.register(buffer, Access.REMOTE_WRITE) as region:
        pair.client.queue_pair.write(memory(keep, pair.adapter, b"end"), region.remote(huge - 2, 3))
        succeed(pair.client.cq)
        assert contents(region)[huge - 2 :] == b"end"
    assert_works(keep, pair)
    del region, buffer
    assert memory_info("HugePages_Free") == free


def test_an_alignment_within_a_huge_page_takes_no_second_one(huge_kib):
    free = memory_info("HugePages_Free")
    buffer = ndpy.alloc(huge_kib << 10, huge_pages=True, alignment=1 << 16)
    assert memory_info("HugePages_Free") == free - 1
    del buffer
    beyond = ndpy.alloc(10, huge_pages=True, alignment=huge_kib << 11)
    assert address_of(beyond) % (huge_kib << 11) == 0


def test_too_few_huge_pages_are_an_error_that_says_how_many_there_are(huge_kib):
    total = memory_info("HugePages_Total")
    with pytest.raises(ndpy.InsufficientResourcesError) as raised:
        ndpy.alloc((total + 1) * (huge_kib << 10), huge_pages=True)
    message = str(raised.value)
    assert str(POOL) in message
    assert f"{total + 1} huge pages of {huge_kib} KiB" in message
    assert f"{memory_info('HugePages_Free')} are free" in message


def test_memory_is_bound_to_its_node():
    if not (NODES / "node0").exists():
        pytest.skip("the kernel knows no NUMA nodes")
    buffer = ndpy.alloc(1 << 20, numa_node=0)
    buffer[0] = 1
    start = f"{address_of(buffer):08x} "
    policies = Path("/proc/self/numa_maps").read_text().splitlines()
    (policy,) = [line for line in policies if line.startswith(start)]
    assert policy.split()[1] == "bind:0"
    assert "N0=" in policy


def test_huge_pages_of_a_node(huge_kib):
    if not (NODES / "node0").exists():
        pytest.skip("the kernel knows no NUMA nodes")
    on_node = NODES / f"node0/hugepages/hugepages-{huge_kib}kB/free_hugepages"
    free = int(on_node.read_text())
    buffer = ndpy.alloc(1, huge_pages=True, numa_node=0)
    assert int(on_node.read_text()) == free - 1
    del buffer


def test_a_node_that_is_not_there_is_refused_by_name():
    with pytest.raises(ndpy.UnsupportedError, match="no NUMA node 77"):
        ndpy.alloc(4096, numa_node=77)
