"""Memory of a device, over verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy.objects.device_memory import DeviceMemory
from ndpy.platforms.verbs.memory import VerbsMemoryRegion, native_access
from ndpy.platforms.verbs.native_calls import check, check_pointer, ffi, free_once, lib
from ndpy.vocabulary.flags import Access

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter


class VerbsDeviceMemory(DeviceMemory):
    _adapter: VerbsAdapter

    def _native_alloc(self, alignment: int) -> Any:
        call = lib.ndpy_alloc_device_memory
        bits = alignment.bit_length() - 1
        return check_pointer("alloc device memory", call(self._adapter._context, self.length, bits))

    def _native_free(self) -> None:
        free_once(self, "_native", "close device memory", lib.ndpy_free_device_memory)

    def _native_write(self, offset: int, view: memoryview, length: int) -> None:
        check("write", lib.ndpy_copy_to_device(self._native, offset, ffi.from_buffer(view), length))

    def _native_read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        check("read", lib.ndpy_copy_from_device(ffi.from_buffer(data), self._native, offset, length))
        return bytes(data)

    def _native_register(self, offset: int, length: int, access: Access) -> VerbsMemoryRegion:
        memory = self._native

        def register(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
            rights = native_access(access, False)
            number = lib.ndpy_register_device_memory(adapter._domain, memory, offset, length, rights, out)
            check("register device memory", number)

        region = VerbsMemoryRegion(self._adapter, self, None, 0, length, access)
        return region._registered_by(register, elsewhere=True)
