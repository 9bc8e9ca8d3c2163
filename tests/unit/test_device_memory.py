"""Memory of the adapter itself. The provider has no device; it copies multiples of 4 bytes."""

from __future__ import annotations

import errno
import gc

import pytest
from fake_verbs import opened
from kit import linux_only as linux_only

import ndpy
from ndpy import Access, Capability

# enum ibv_access_flags.
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, ZERO_BASED = 1, 2, 4, 1 << 5
SIZE = 4096


adapter = opened(device_memory=SIZE)


@pytest.fixture
def memory(adapter):
    with adapter.alloc_device_memory(256) as memory:
        yield memory


def test_the_capability_and_the_limit_say_what_there_is(fake, adapter):
    assert Capability.DEVICE_MEMORY in adapter.info.capabilities
    assert adapter.info.max_device_memory_size == SIZE
    with fake.open(device_memory=0) as other:
        assert Capability.DEVICE_MEMORY not in other.info.capabilities
        assert other.info.max_device_memory_size == 0
        with pytest.raises(ndpy.UnsupportedError, match="DEVICE_MEMORY"):
            other.alloc_device_memory(8)


def test_it_is_allocated_as_asked(fake, adapter):
    with adapter.alloc_device_memory(128, alignment=64) as memory:
        assert (fake.seen.length, fake.seen.flags) == (128, 6)
        assert (memory.length, len(memory), memory.adapter) == (128, 128, adapter)
        assert repr(memory) == "<DeviceMemory of 128 bytes>"
    memory.close()


@pytest.mark.parametrize("length", [0, -1, SIZE + 1])
def test_a_length_out_of_range_is_refused(adapter, length):
    with pytest.raises(ndpy.LimitExceededError):
        adapter.alloc_device_memory(length)


@pytest.mark.parametrize("alignment", [0, -8, 24])
def test_an_alignment_is_a_power_of_two(adapter, alignment):
    with pytest.raises(ValueError, match="power of two"):
        adapter.alloc_device_memory(8, alignment=alignment)


def test_too_much_in_all_is_refused(adapter):
    with adapter.alloc_device_memory(SIZE), pytest.raises(ndpy.InsufficientResourcesError):
        adapter.alloc_device_memory(8)


def test_bytes_go_in_and_out(memory):
    assert memory.read() == bytes(256)
    memory.write(b"12345678", 16)
    memory.write(bytearray(b"ABCD"), offset=252)
    memory.write(memoryview(b"abcd"))
    assert (memory.read(4), memory.read(8, 16), memory.read(offset=252)) == (b"abcd", b"12345678", b"ABCD")
    assert memory.read(0) == b""
    with pytest.raises(ndpy.ProviderError) as caught:
        memory.write(b"123")
    assert caught.value.native == errno.EINVAL


@pytest.mark.parametrize(
    "use",
    [
        lambda memory: memory.write(bytes(8), 252),
        lambda memory: memory.read(8, 252),
        lambda memory: memory.read(4, 256),
        lambda memory: memory.register(offset=128, length=129),
    ],
)
def test_bytes_outside_of_it_are_refused(memory, use):
    with pytest.raises(ndpy.ElementRangeError):
        use(memory)


def test_a_region_of_it_begins_at_address_0(fake, memory):
    with memory.register(Access.REMOTE_WRITE | Access.REMOTE_READ, offset=64, length=32) as region:
        assert (fake.seen.offset, fake.seen.length) == (64, 32)
        assert fake.seen.access == LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | ZERO_BASED
        assert (region.address, region.length, region.buffer) == (0, 32, None)
        assert (region.remote(8).address, region.remote(8).length) == (8, 24)
        assert (region[4:8].address, region[4:8].length) == (4, 4)
        with pytest.raises(ndpy.ElementRangeError):
            region[0:33]
        if Capability.REREGISTRATION in region.adapter.info.capabilities:
            with pytest.raises(ndpy.UnsupportedError):
                region.reregister(access=Access.LOCAL_WRITE)


def test_an_empty_region_is_refused(memory):
    with pytest.raises(ndpy.AccessViolationError):
        memory.register(offset=256)
    with pytest.raises(ndpy.InvalidFlagsError):
        memory.register(1 << 28)


def test_it_outlives_its_regions(fake, adapter):
    memory = adapter.alloc_device_memory(64)
    first, second = memory.register(), memory.register(length=8)
    for region in (first, second):
        with pytest.raises(ndpy.DeviceBusyError, match="MemoryRegion"):
            memory.close()
        region.close()
    memory.close()
    with pytest.raises(ndpy.ClosedError):
        memory.register()
    with pytest.raises(ndpy.ClosedError):
        memory.read()
    with pytest.raises(ndpy.ClosedError):
        memory.write(b"1234")


def test_the_adapter_does_not_close_before_it(adapter, memory):
    with pytest.raises(ndpy.DeviceBusyError, match="DeviceMemory"):
        adapter.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_dropped_is_released_in_order(fake):
    """The fixture looks whether all of it has gone."""
    with fake.open(device_memory=SIZE) as adapter:
        memory = adapter.alloc_device_memory(64)
        region = memory.register()
        del memory, region
        gc.collect()
