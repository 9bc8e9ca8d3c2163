"""Memory of an adapter itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import _core
from ndpy.errors import AccessViolationError
from ndpy.objects.memory import MemoryRegion, plain_view
from ndpy.objects.native_steps import DeviceMemorySteps
from ndpy.objects.resource import AdapterObject, refuse_if_used
from ndpy.vocabulary.flags import Access

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter


class DeviceMemory(AdapterObject, DeviceMemorySteps):
    """Memory of the adapter itself, made by Adapter.alloc_device_memory(). Requests use it through regions, as any
    memory.

    Transfers from and to it need not cross the bus of the machine. The program copies with read() and write().

    It cannot be closed before its regions.

    ndpy's tests of it ran against a stand-in for a driver only, because no adapter in software has such memory.

    Attributes:
        length: its length in bytes.
    Source: ibv_alloc_dm(3).
    """

    _release_order = 60

    def __init__(self, adapter: Adapter, length: int, alignment: int) -> None:
        super().__init__(adapter)
        self.length = length
        self._native: Any = self._native_alloc(alignment)
        self._opened()

    def __len__(self) -> int:
        return self.length

    def write(self, data: Any, offset: int = 0) -> None:
        """Copy bytes from a buffer into it.

        Parameters:
            data: any contiguous buffer or array.
            offset: where they go. Some adapters copy multiples of 4 bytes only, to multiples of 4.
        Raises:
            ElementRangeError: the bytes are not all inside the memory.
            ProviderError: the adapter refused, such as with EINVAL.
        Source: ibv_memcpy_to_dm(3).
        """
        view = plain_view(data)
        offset, length = _core.slice_bounds(slice(offset, offset + view.nbytes), self.length, self._describe())
        with self._lifetime:
            self._check()
            self._native_write(offset, view, length)

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes out of it.

        Parameters:
            length: how many. None stands for all from the offset on.
            offset: as for write().
        Raises:
            ElementRangeError, ProviderError: as for write().
        Source: ibv_memcpy_from_dm(3).
        """
        stop = self.length if length is None else offset + length
        offset, count = _core.slice_bounds(slice(offset, stop), self.length, self._describe())
        with self._lifetime:
            self._check()
            return self._native_read(offset, count)

    def register(
        self, access: Access = Access.LOCAL_WRITE, *, offset: int = 0, length: int | None = None
    ) -> MemoryRegion:
        """Make a region of it, for requests of this side and of peers.

        Elements and peers name the first byte of the region by the address 0. The region's buffer is None, and windows
        cannot be bound to it. It can be made again and again, and for several parts at once.

        Parameters:
            access: see Access.
            offset, length: the part of the memory. A length of None stands for all bytes from the offset on.
        Raises:
            ElementRangeError: the bytes are not all inside the memory.
            AccessViolationError: the part is empty.
            Otherwise what Adapter.register() raises.
        Source: ibv_reg_dm_mr(3).
        """
        stop = self.length if length is None else offset + length
        offset, count = _core.slice_bounds(slice(offset, stop), self.length, self._describe())
        if not count:
            raise AccessViolationError("a region has at least one byte", operation="register device memory")
        with self._lifetime:
            self._check()
            access = self._adapter._known_access(access)
            region: MemoryRegion = self._adapter._make(lambda adapter: self._native_register(offset, count, access))
        return region

    def _refuse_if_used(self) -> None:
        refuse_if_used(self, "_owner")

    def _release(self) -> None:
        self._native_free()

    def _describe(self) -> str:
        return f"DeviceMemory of {self.length} bytes"
