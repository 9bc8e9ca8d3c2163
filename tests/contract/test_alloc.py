"""alloc(): memory for registering."""

from __future__ import annotations

import gc

import pytest
from kit.documentation import example
from kit.helpers import address_of, assert_works, contents, expose, memory, succeed

import ndpy
from ndpy import Access


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 1 << 20])
def test_memory_is_writable_zeroed_and_begins_at_a_page(length):
    buffer = ndpy.alloc(length)
    assert isinstance(buffer, ndpy.Buffer)
    assert (len(buffer), buffer.readonly, buffer.format) == (length, False, "B")
    assert address_of(buffer) % 4096 == 0
    assert not any(buffer)
    buffer[-1] = 7
    assert buffer[length - 1] == 7


@pytest.mark.parametrize("alignment", [1, 64, 8192, 1 << 16, 1 << 21])
def test_the_first_byte_is_aligned_as_asked_for(alignment):
    buffer = ndpy.alloc(10000, alignment=alignment)
    assert len(buffer) == 10000
    assert address_of(buffer) % alignment == 0
    assert not any(buffer)


def test_what_cannot_be_is_refused():
    for length in (0, -1):
        with pytest.raises(ndpy.InvalidBufferError):
            ndpy.alloc(length)
    for alignment in (0, -8, 24):
        with pytest.raises(ndpy.InvalidBufferError, match="power of two"):
            ndpy.alloc(64, alignment=alignment)


@pytest.mark.parametrize("length", [1 << 52, 1 << 70])
def test_more_than_the_address_space_has_is_a_lack_of_resources(length):
    with pytest.raises(ndpy.InsufficientResourcesError, match=r"bytes could not be (mapped|allocated)"):
        ndpy.alloc(length)


def test_a_view_keeps_the_memory():
    view = ndpy.alloc(1 << 20)[4096:8192]
    gc.collect()
    view[:] = bytes(range(256)) * 16
    others = [ndpy.alloc(1 << 20) for _ in range(8)]
    for other in others:
        other[:] = bytes(1 << 20)
    assert bytes(view) == bytes(range(256)) * 16


def test_numpy_uses_it_and_it_registers(pair, keep):
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    array = numpy.frombuffer(ndpy.alloc(8 * 1000), dtype="f8")
    assert array.flags.writeable
    assert not array.any()
    array[:] = numpy.arange(1000)
    sink = numpy.frombuffer(ndpy.alloc(8 * 1000), dtype="f8").reshape(10, 100)
    target = keep(pair.adapter.register(sink, Access.REMOTE_WRITE))
    pair.client.queue_pair.write(keep(pair.adapter.register(array, Access.NONE)), expose(keep, pair.server, target))
    succeed(pair.client.cq)
    assert (sink.reshape(1000) == numpy.arange(1000)).all()


def test_the_example_of_the_documentation_works(adapter, keep):
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    names = {"ndpy": ndpy, "numpy": numpy, "adapter": adapter}
    exec(example("howto/memory.md", "ndpy.alloc"), names)
    regions = [keep(region) for region in names["regions"]]
    assert [region.length for region in regions] == [800_000] * 10
    assert regions[3].address == regions[0].address + 3 * 800_000


def test_the_region_keeps_the_memory(pair, keep):
    region = keep(pair.adapter.register(ndpy.alloc(4096), Access.REMOTE_WRITE))
    gc.collect()
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"still mapped"), expose(keep, pair.server, region))
    succeed(pair.client.cq)
    assert contents(region)[:12] == b"still mapped"
    assert_works(keep, pair)


def test_huge_pages_are_given_or_the_error_says_how_to_get_them(adapter):
    """Both are right on a machine that nobody prepared. tests/verbs prepares a machine with huge pages."""
    try:
        buffer = ndpy.alloc(10000, huge_pages=True)
    except ndpy.InsufficientResourcesError as error:
        assert "/proc/sys/vm/nr_hugepages" in str(error) or "SeLockMemoryPrivilege" in str(error)
    except ndpy.UnsupportedError as error:
        assert "pages" in str(error)
    else:
        assert address_of(buffer) % (1 << 21) == 0
        assert not any(buffer)
        adapter.register(buffer).close()


def test_memory_is_put_on_a_node_or_the_error_says_why_not(adapter):
    try:
        buffer = ndpy.alloc(100_000, numa_node=0)
    except ndpy.UnsupportedError as error:
        assert "node" in str(error)
    else:
        assert len(buffer) == 100_000
        assert not any(buffer)
        adapter.register(buffer).close()
    for absent in (-1, 1000, 1 << 40):
        with pytest.raises((ndpy.UnsupportedError, ndpy.InsufficientResourcesError)):
            ndpy.alloc(4096, numa_node=absent)
