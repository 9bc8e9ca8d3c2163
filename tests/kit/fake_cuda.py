"""A CUDA driver without a device (fake_cuda.c), in place of the system's. Each test loads its own."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import linux_only as linux_only
from kit.compiling import compiled
from kit.helpers import has_kernel_driver, require
from ndpy import Adapter, Capability
from ndpy.objects import cuda as layer

SOURCE = Path(__file__).with_name("fake_cuda.c")
SIZE = 64 * 4096


class FakeCuda:
    """The driver of one test.

    Attributes:
        path: its file.
        settings, seen: how it behaves, and what it saw. See fake_cuda.c.
        address: where its SIZE bytes of memory are.
        view: the same bytes, for the test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        for call in (library.fake_cuda_memory, library.fake_cuda_view):
            call.restype = ctypes.c_uint64
        self.settings = _structure("fake_cuda_settings").in_dll(library, "fake_cuda_settings")
        self.seen = _structure("fake_cuda_seen").in_dll(library, "fake_cuda_seen")
        self.address = int(library.fake_cuda_memory())
        self.view = memoryview((ctypes.c_ubyte * SIZE).from_address(library.fake_cuda_view())).cast("B")


def _structure(name: str) -> Any:
    kinds = {"int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64}
    declared = re.search(rf"struct {name} \{{(.*?)\n\}}", SOURCE.read_text(), re.DOTALL)
    assert declared
    fields = re.findall(r"^ +(\w+) (\w+);", declared[1], re.MULTILINE)
    return type(name, (ctypes.Structure,), {"_fields_": [(field, kinds[kind]) for kind, field in fields]})


class CudaArray:
    """An array with a __cuda_array_interface__ of these entries."""

    def __init__(self, address: int, length: int, readonly: bool = False, **entries: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, readonly),
            "strides": None,
            "stream": None,
            **entries,
        }


@pytest.fixture(scope="session")
def fake_cuda_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Whoever loads it leaves a trace.
    options = "-std=gnu11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -shared -fPIC -Wl,-z,nodelete"
    return compiled(tmp_path_factory.mktemp("cuda") / "libcuda.so.1", *options.split(), SOURCE)


@pytest.fixture(scope="session")
def unmappable() -> Iterator[int]:
    """A descriptor in place of a dma-buf that no process can map: a directory in memory that is said to be as long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        first = Path(folder, "0")
        first.touch()
        # tmpfs counts 20 bytes for each name.
        for number in range(1, SIZE // 20 + 1):
            os.link(first, Path(folder, str(number)))
        fd = os.open(folder, os.O_RDONLY)
        try:
            assert os.fstat(fd).st_size >= SIZE
            yield fd
        finally:
            os.close(fd)


@pytest.fixture
def cuda(fake_cuda_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The driver. At the end it must have found no mistake, and no context may be left in use."""
    copy = Path(shutil.copy(fake_cuda_path, tmp_path / "libcuda.so.1"))
    monkeypatch.setenv("NDPY_LIBCUDA", os.fspath(copy))
    fake = FakeCuda(copy)
    yield fake
    layer._driver.cache_clear()
    assert (fake.seen.mistakes, fake.seen.contexts, fake.seen.retained) == (0, 0, 0)
    # A context that was destroyed has taken its streams along.
    assert not fake.seen.streams or fake.settings.lost


@pytest.fixture
def takes_cuda_memory(adapter: Adapter, cuda: FakeCuda) -> None:
    """Skips on adapters that cannot have this driver's memory.
    It asks for the driver first, which so outlives the regions.
    """
    require(adapter, Capability.DMABUF)
    if has_kernel_driver(adapter):
        pytest.skip(
            "the driver's memory is a memfd, or an address that it copies from: no driver of the kernel takes it"
        )
