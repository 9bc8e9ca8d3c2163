"""Memory of CUDA devices. The driver's library is opened when the first array in such memory is registered.

Source: "CUDA Driver API" of CUDA 12, "Unified Addressing", "Memory Management", "Context Management" and "Stream
Management"; "GPUDirect RDMA", "Synchronization and Memory Ordering".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from ndpy import errors

#: The word of `ndpy explain`.
PROBLEM = "device-memory"
#: The stream that DLPack and cuda.h call the legacy default stream.
LEGACY_STREAM = 1

# Of cuda.h.
_NOT_READY = 600
_MEMORY_OF_HOST = 1
_DMA_BUF_FD = 1
_SYNC_MEMOPS = 6
_CONTEXT, _MEMORY_TYPE, _IS_MANAGED, _DEVICE, _MAY_BE_SHARED = 1, 2, 8, 9, 10
_START, _SIZE, _POOL = 11, 12, 17
_ASKED = (_CONTEXT, _MEMORY_TYPE, _IS_MANAGED, _DEVICE, _MAY_BE_SHARED, _START, _SIZE, _POOL)

_pointer, _address = ctypes.c_void_p, ctypes.c_uint64
_CALLS = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuPointerGetAttributes": [ctypes.c_uint, _pointer, _pointer, _address],
    "cuPointerSetAttribute": [_pointer, ctypes.c_int, _address],
    "cuDevicePrimaryCtxRetain": [_pointer, ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuStreamQuery": [_pointer],
    "cuMemGetHandleForAddressRange": [_pointer, _address, ctypes.c_size_t, ctypes.c_int, ctypes.c_ulonglong],
}
_REMEDIES = {
    "CUDA_ERROR_INVALID_VALUE": "the driver does not know this memory, or it has been freed",
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory of the device",
    "CUDA_ERROR_NOT_INITIALIZED": "a forked child cannot use its parent's CUDA; start it with the method spawn",
    "CUDA_ERROR_DEINITIALIZED": "the process is about to end",
    "CUDA_ERROR_NO_DEVICE": "there is no CUDA device, or CUDA_VISIBLE_DEVICES hides it",
    "CUDA_ERROR_INVALID_CONTEXT": "the context of the memory has been destroyed",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the context of the memory has been destroyed",
    "CUDA_ERROR_INVALID_HANDLE": "the array's stream has been destroyed",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel of this program has failed before, so the context cannot be used",
    "CUDA_ERROR_NOT_PERMITTED": "the stream is being captured into a graph; register the memory before or afterwards",
    "CUDA_ERROR_NOT_SUPPORTED": (
        "a dma-buf of a device needs CUDA 11.7 and NVIDIA's open kernel modules; otherwise load "
        "the module nvidia_peermem"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's library and its kernel module are of different versions",
}


class _Driver:
    """The driver's library. Its functions return 0 or an error."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            self._functions = {name: getattr(self._library, name) for name in _CALLS}
        except (OSError, AttributeError) as error:
            raise errors.UnsupportedError(
                f"memory of a CUDA device needs the driver's library, and {path} cannot be used: {error}; install the "
                "driver (11.7 or later), set NDPY_LIBCUDA, or copy the array to the host's memory",
                operation="register",
                problem=PROBLEM,
            ) from None
        for name, arguments in _CALLS.items():
            self._functions[name].argtypes = arguments
        self.call("cuInit", 0)

    def result(self, name: str, *arguments: object) -> int:
        return int(self._functions[name](*arguments))

    def call(self, name: str, *arguments: object) -> None:
        """Raise if the function fails."""
        number = self.result(name, *arguments)
        if number:
            raise self.error(name, number)

    def error(self, name: str, number: int, hint: str = "") -> errors.ProviderError:
        """hint: what to do, if more is known than the number."""
        text = ctypes.c_char_p()
        self.result("cuGetErrorName", number, ctypes.byref(text))
        word = (text.value or b"").decode("ascii", "replace")
        hint = hint or _REMEDIES.get(word, "")
        return errors.ProviderError(
            f"{name}() of CUDA's driver failed" + (f"; {hint}" if hint else ""),
            operation="register",
            native=number,
            native_name=word,
            problem=PROBLEM,
        )

    @contextlib.contextmanager
    def current(self, context: int, device: int) -> Iterator[None]:
        """Make this thread use a context, or the device's primary context if it is 0."""
        with contextlib.ExitStack() as undo:
            handle = ctypes.c_void_p(context)
            if not context:
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
                undo.callback(self.result, "cuDevicePrimaryCtxRelease_v2", device)
            self.call("cuCtxPushCurrent_v2", handle)
            undo.callback(self.result, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
            yield


@functools.lru_cache(maxsize=4)
def _driver(path: str) -> _Driver:
    return _Driver(path)


class Range(NamedTuple):
    """A range of memory, and what the driver says of it."""

    driver: _Driver
    address: int
    length: int
    attributes: dict[int, int]

    @property
    def is_of_host(self) -> bool:
        return self.attributes[_MEMORY_TYPE] == _MEMORY_OF_HOST

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        device = ctypes.c_int(self.attributes[_DEVICE]).value
        with self.driver.current(self.attributes[_CONTEXT], device):
            yield

    def synchronize(self, stream: int | None) -> None:
        """Wait until the stream has done what it was given, and let later copies to the memory end before they return.

        stream: None if the memory has its contents already.
        """
        with self._current():
            on = ctypes.c_uint(1)
            # Some kinds of memory do not take it.
            self.driver.result("cuPointerSetAttribute", ctypes.byref(on), _SYNC_MEMOPS, self.address)
            pause_s = 0.0
            # cuStreamSynchronize() would not let Ctrl-C end this.
            while stream is not None and not self._has_ended(stream):
                time.sleep(pause_s)
                pause_s = min(pause_s + 20e-6, 1e-3)

    def has_ended(self, stream: int) -> bool:
        """Whether the stream has done what it was given. Does not wait."""
        with self._current():
            return self._has_ended(stream)

    def _has_ended(self, stream: int) -> bool:
        number = self.driver.result("cuStreamQuery", stream)
        if number not in (0, _NOT_READY):
            raise self.driver.error("cuStreamQuery", number)
        return number == 0

    def export(self) -> tuple[int, int]:
        """Return (a descriptor of a dma-buf, which the caller closes, and where the memory begins in it).

        The dma-buf has the whole pages of the host that have the memory.
        """
        start = self.address - self.address % mmap.PAGESIZE
        end = self.address + self.length
        end += -end % mmap.PAGESIZE
        fd = ctypes.c_int(-1)
        name = "cuMemGetHandleForAddressRange"
        with self._current():
            number = self.driver.result(name, ctypes.byref(fd), start, end - start, _DMA_BUF_FD, 0)
        if number:
            raise self.driver.error(name, number, self._why_not())
        return fd.value, self.address - start

    def _why_not(self) -> str:
        """What kind of memory it is that a driver may not export."""
        known = self.attributes
        if known[_IS_MANAGED]:
            return "it is managed memory, whose pages move; allocate it with cudaMalloc()"
        if known[_POOL]:
            return "it is memory of a pool (cudaMallocAsync()); allocate it with cudaMalloc()"
        if not known[_MAY_BE_SHARED]:
            return (
                "it may be another process's memory (CUDA IPC), or mapped by cuMemMap(); register it in the process "
                "that allocated it, or allocate it with cudaMalloc()"
            )
        start, size = known[_START], known[_SIZE]
        if not start <= self.address <= self.address + self.length <= start + size:
            return f"{self.length} bytes at {self.address:#x} are not all in the {size} bytes at {start:#x}"
        return ""


def find(address: int, length: int) -> Range:
    """Ask the driver about memory.

    Raises:
        UnsupportedError: there is no driver.
        ProviderError: the driver refused.
    """
    driver = _driver(os.environ.get("NDPY_LIBCUDA", "libcuda.so.1"))
    # Each is at most 8 bytes.
    values = (ctypes.c_uint64 * len(_ASKED))()
    places = (ctypes.c_void_p * len(_ASKED))(*(ctypes.addressof(values) + 8 * place for place in range(len(_ASKED))))
    driver.call("cuPointerGetAttributes", len(_ASKED), (ctypes.c_int * len(_ASKED))(*_ASKED), places, address)
    attributes = dict(zip(_ASKED, values, strict=True))
    if not attributes[_MEMORY_TYPE]:
        raise errors.InvalidBufferError(f"no CUDA device has memory at {address:#x}; it may have been freed")
    return Range(driver, address, length, attributes)
