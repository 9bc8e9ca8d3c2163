"""Memory of a CUDA device on adapters without dma-bufs, and through the kernel's module for peer memory."""

from __future__ import annotations

import pytest
from kit.deadlines import DEADLINE_S
from kit.fake_cuda import CudaArray

import ndpy
from ndpy.vocabulary import system_files


def load(module):
    system_files.path("/sys/module", module).mkdir(parents=True)


def test_an_adapter_without_dma_bufs_and_without_the_module_says_what_to_load(fake, cuda):
    with fake.open() as adapter, pytest.raises(ndpy.UnsupportedError, match=r"`modprobe nvidia_peermem`, or copy"):
        adapter.register(CudaArray(cuda.address, 64))
    assert cuda.seen.exports == 0


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem"])
def test_with_the_module_the_address_is_registered_when_the_stream_has_ended(fake, cuda, module):
    cuda.settings.busy = 3
    with fake.open() as adapter:
        load(module)
        with adapter.register(CudaArray(cuda.address + 64, 64, stream=7)) as region:
            assert (fake.seen.address, fake.seen.length) == (cuda.address + 64, 64)
            assert region.address == cuda.address + 64
    assert (cuda.seen.stream, cuda.seen.queries, cuda.seen.exports) == (7, 4, 0)


def test_a_dma_buf_goes_before_the_module(fake, cuda):
    with fake.open(dmabuf_errno=0) as adapter:
        load("nvidia_peermem")
        with adapter.register(CudaArray(cuda.address + 64, 64)):
            assert (fake.seen.offset, fake.seen.length, fake.seen.address) == (64, 64, cuda.address + 64)
            assert cuda.seen.exports == 1


def test_memory_that_the_driver_does_not_export_goes_through_the_module(fake, cuda):
    cuda.settings.export_error = 801
    with fake.open(dmabuf_errno=0) as adapter:
        with pytest.raises(ndpy.ProviderError, match="CUDA_ERROR_NOT_SUPPORTED"):
            adapter.register(CudaArray(cuda.address, 64))
        load("nvidia_peermem")
        with adapter.register(CudaArray(cuda.address, 64)):
            assert (fake.seen.address, fake.seen.length) == (cuda.address, 64)


NOT_EXPORTED = {
    "managed": ({"export_error": 1, "managed": 1}, r"managed memory, .*cudaMalloc\(\)"),
    "pooled": ({"export_error": 1, "pool": 0xABC0, "shareable": 0}, r"pool \(cudaMallocAsync"),
    "of another process": ({"export_error": 1, "shareable": 0}, "another process's memory"),
    "short": ({"export_error": 1, "range_size": 64}, "are not all in the 64 bytes"),
    "no dma-bufs": ({"export_error": 801}, r"nvidia_peermem \[native status 801 \(CUDA_ERROR_NOT_SUPPORTED"),
}


@pytest.mark.parametrize("kind", NOT_EXPORTED)
def test_why_the_driver_exports_no_dma_buf_is_named_with_a_remedy(fake, cuda, kind):
    settings, match = NOT_EXPORTED[kind]
    for name, value in settings.items():
        setattr(cuda.settings, name, value)
    with fake.open(dmabuf_errno=0) as adapter:
        for call in (adapter.register, lambda array: adapter.begin_register(array).result(timeout_s=DEADLINE_S)):
            with pytest.raises(ndpy.ProviderError, match=match):
                call(CudaArray(cuda.address, 4096))


def test_a_platform_that_takes_no_devices_says_so_before_it_makes_anything(fake, cuda, monkeypatch):
    with fake.open() as adapter:
        monkeypatch.setattr(type(adapter), "_takes_devices", False)
        for call in (adapter.register, adapter.begin_register):
            with pytest.raises(ndpy.UnsupportedError, match="takes no memory of a CUDA device; copy the array"):
                call(CudaArray(cuda.address, 64))
    assert (cuda.seen.inits, fake.seen.length) == (0, 0)
