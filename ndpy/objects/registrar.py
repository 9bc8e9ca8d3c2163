"""What an adapter registers."""

from __future__ import annotations

import functools
import mmap
import operator
from typing import Any

from ndpy import _core, errors
from ndpy.objects import cuda
from ndpy.objects.arrays import ArrayMemory
from ndpy.objects.device_memory import DeviceMemory
from ndpy.objects.memory import MemoryRegion, buffer_range, is_written
from ndpy.objects.native_steps import AdapterSteps
from ndpy.objects.pending import Pending, wait_or_cancel
from ndpy.objects.resource import Resource
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.flags import Access, Capability
from ndpy.vocabulary.info import AdapterInfo
from ndpy.vocabulary.integers import integer

# Plain integers: an operation on members of an IntFlag takes a microsecond.
_NEEDED_FOR = {
    Access.ON_DEMAND.value: Capability.ON_DEMAND_PAGING,
    Access.RELAXED_ORDERING.value: Capability.RELAXED_ORDERING,
    Access.FLUSH_GLOBAL.value: Capability.FLUSH,
    Access.FLUSH_PERSISTENT.value: Capability.FLUSH_PERSISTENT,
}
_SPECIAL = functools.reduce(operator.or_, _NEEDED_FOR)
# The bits that belong to no flag.
_NO_ACCESS = ~functools.reduce(operator.or_, (int(flag) for flag in Access.__members__.values()))

#: What the error says of an adapter without a capability, if it can say more than the capability's name.
_WITHOUT = {
    Capability.COUNTERS: "has no counters",
    Capability.DATAGRAMS: "has no datagrams",
    Capability.EVENTS: "tells no events",
    Capability.MEMORY_WINDOWS: "({driver}) has no memory windows; register with remote access instead",
    Capability.MODIFY: "connects through connectors only, which set all attributes",
    Capability.ON_DEMAND_PAGING: "({driver}) has no on-demand paging; register without Access.ON_DEMAND",
    Capability.RELAXED_ORDERING: "({driver}) has no relaxed ordering; register without Access.RELAXED_ORDERING",
    Capability.RELIABLE_CONNECTIONS: "has no queue pairs of type RC",
    Capability.RESIZE_COMPLETION_QUEUE: "cannot resize completion queues",
    Capability.SHARED_RECEIVE_QUEUES: "has no shared receive queues",
    Capability.UNRELIABLE_CONNECTIONS: "has no queue pairs of type UC",
}


class Registrar(_core.Adapter, Resource, AdapterSteps):
    """The part of Adapter that makes regions. The C part registers what is plain, and leaves the rest to this."""

    info: AdapterInfo

    def _register_in_python(self, buffer: Any, access: Access, timeout_s: float | None) -> MemoryRegion:
        """What register() leaves to Python."""
        timeout_s = timeout(timeout_s)
        if timeout_s is not None:
            return wait_or_cancel(self.begin_register(buffer, access), timeout_s)

        def make(adapter: Registrar) -> MemoryRegion:
            region = adapter._new_region(buffer, access)
            region._register_now()
            return region

        return self._make(make)

    def begin_register(self, buffer: Any, access: Access = Access.LOCAL_WRITE) -> Pending[MemoryRegion]:
        """Start to register. Many registrations may run at once. Together they take less time than one after the other.

        If the Pending is cancelled, or the adapter is closed meanwhile, the Pending ends with CanceledError and there
        is no region.

        On Windows the provider's requests overlap. On Linux ibv_reg_mr(3) blocks, so up to four worker threads
        register. A thread that waits in result() without a deadline helps. If the last such registration took at most 2
        ms and no longer than a hand-off to a worker, this call registers before it returns.

        Parameters:
            buffer, access: see register().
        Returns: a Pending of the region.
        Raises: what register() raises for an impossible buffer or impossible rights. Any other error ends the Pending.
        """
        return self._make(lambda adapter: adapter._new_region(buffer, access)._native_begin_register())

    def _new_region(self, buffer: Any, access: Access) -> MemoryRegion:
        """Make a region. It is not registered yet."""
        owner, *rest = self._memory(buffer, access, on_device=True)
        is_on_device = isinstance(owner, ArrayMemory)
        if is_on_device:
            self._require_devices(owner)
        region = self._classes.region(self, owner, *rest)
        if is_on_device:
            region._native_is_on_device(owner)
            region._is_on_device = True
        return region

    def _require_devices(self, memory: ArrayMemory) -> None:
        if not self._takes_devices:
            raise errors.UnsupportedError(
                f"{self.info.name} ({self.info.driver}) takes no memory of {memory.device}; copy the array to the "
                "host's memory",
                operation="register",
                problem=cuda.PROBLEM,
            )

    def _memory(self, buffer: Any, access: Access, on_device: bool = False) -> tuple[Any, Any, int, int, Access]:
        """Check memory and rights. Returns (object that keeps the memory in place, buffer, address, length, rights).

        on_device: see buffer_range().
        """
        self._check()
        access = self._known_access(access)
        owner, address, length = buffer_range(buffer, is_written(access), on_device)
        if length > self.info.max_registration_size:
            raise errors.LimitExceededError(
                f"{length} bytes are more than the {self.info.max_registration_size} that {self.info.name} registers "
                "at once"
            )
        return owner, buffer, address, length, access

    def _known_access(self, access: int) -> Access:
        """Check rights. Raises InvalidFlagsError for an unknown bit, UnsupportedError for one without support here."""
        try:
            bits = operator.index(access)
        except TypeError:
            raise TypeError(
                "access is a combination of Access flags, such as Access.LOCAL_WRITE | Access.REMOTE_READ, not "
                f"{access!r:.80}"
            ) from None
        if bits & _NO_ACCESS:
            raise errors.InvalidFlagsError(f"register: {bits:#x} has bits that are not Access flags")
        if bits & _SPECIAL:
            for right, capability in _NEEDED_FOR.items():
                if bits & right:
                    self._require(capability, "register")
        return Access(access)

    def register_null(self) -> MemoryRegion:
        """Make a region without memory. What the adapter writes there is dropped, and what it reads there are zeros.

        So one element of a receive can skip a part of a message. Peers cannot use it. The region's address is 0 and its
        buffer is
        None: region[0:n] is an element of n bytes.

        Raises:
            UnsupportedError: info.capabilities lacks NULL_REGIONS, as on every NetworkDirect adapter.
        Source: ibv_alloc_null_mr(3).
        """
        self._require(Capability.NULL_REGIONS, "register null")
        region: MemoryRegion = self._make(lambda adapter: adapter._native_register_null())
        return region

    def alloc_device_memory(self, length: int, *, alignment: int = 1) -> DeviceMemory:
        """Allocate memory of the adapter itself. See DeviceMemory.

        Parameters:
            length: 1 to info.max_device_memory_size bytes.
            alignment: a power of two that its address in the adapter is a multiple of.
        Raises:
            UnsupportedError: info.capabilities lacks DEVICE_MEMORY, as on every NetworkDirect adapter.
            LimitExceededError: the length is out of range.
            ValueError: the alignment is not a power of two.
            InsufficientResourcesError: not enough memory is free.
        Source: ibv_alloc_dm(3).
        """
        self._require(Capability.DEVICE_MEMORY, "alloc device memory")
        self._limit("the length of device memory", length, self.info.max_device_memory_size)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment is a power of two, not {alignment}")
        return self._make(self._classes.device_memory, length, alignment)

    def register_at(self, buffer: Any, address: int, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Register memory for use at an address that the program chooses.

        Elements and peers name the first byte by this address, so region.address is `address`, and so is that of
        region.remote(). With 0 the addresses are offsets (a zero-based region). MemoryRegion.reregister() cannot change
        it. Its elements cannot be sent with Flags.INLINE, for which the processor reads at their addresses.

        Parameters:
            buffer, access: as for register().
            address: 0 to 2**64 - 1. It must have the same offset within a page as the memory; alloc() gives memory with
                the offset 0.
        Raises:
            UnsupportedError: info.capabilities lacks CHOSEN_ADDRESS, as on every NetworkDirect adapter.
            InvalidBufferError: the address is not possible for this memory.
            Otherwise what register() raises.
        Source: ibv_reg_mr_iova(3).
        """
        self._require(Capability.CHOSEN_ADDRESS, "register at")
        owner, kept, start, length, access = self._memory(buffer, access)
        if not 0 <= address <= (1 << 64) - length:
            raise errors.InvalidBufferError(f"{length} bytes from {address:#x} on are not a range of addresses")
        if (address - start) % mmap.PAGESIZE:
            raise errors.InvalidBufferError(
                f"the memory begins {start % mmap.PAGESIZE} bytes into a page, and the address {address:#x} "
                f"{address % mmap.PAGESIZE} bytes; both need the same offset (alloc() gives memory with the offset 0)"
            )
        region: MemoryRegion = self._make(
            lambda adapter: adapter._native_register_at(owner, kept, start, length, address, access)
        )
        return region

    def register_implicit(self, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Make one region of all memory of the process, present and future (implicit on-demand paging).

        No memory is pinned. The region's address is 0, so its offsets are addresses: region[address:address + length]
        is an element of any memory. The caller keeps that memory until the requests that use it have completed. The
        region's buffer is None.

        Parameters:
            access: see Access.
        Raises:
            UnsupportedError: info.capabilities lacks IMPLICIT_ON_DEMAND, as on every NetworkDirect adapter.
        Source: ibv_reg_mr(3) with IBV_ACCESS_ON_DEMAND, address 0 and the length SIZE_MAX.
        """
        self._require(Capability.IMPLICIT_ON_DEMAND, "register implicit")
        access = self._known_access(access | Access.ON_DEMAND)
        region: MemoryRegion = self._make(lambda adapter: adapter._native_register_implicit(access))
        return region

    def register_dmabuf(
        self, fd: int, offset: int, length: int, iova: int, access: Access = Access.LOCAL_WRITE
    ) -> MemoryRegion:
        """Register memory of a device, such as a GPU, that its driver exports as a dma-buf.

        The region's buffer is None. Its elements cannot be sent with Flags.INLINE, for which the processor reads them.
        No window can be bound to it. With remote rights, its remote() lets every peer use it.

        Parameters:
            fd: a descriptor of the dma-buf. The caller may close it afterwards.
            offset, length: the part of the dma-buf, in bytes.
            iova: the address that elements and peers use for the first byte. It must have the same offset within a page
                as `offset`.
            access: see Access.
        Raises:
            UnsupportedError: info.capabilities lacks DMABUF, as on every NetworkDirect adapter.
            InvalidBufferError: the offset, length or iova is not possible.
            ProviderError: with EBADF if the descriptor is not open. With EINVAL if it is not a dma-buf, or ends before
                the part does.
        Source: ibv_reg_dmabuf_mr(3).
        """
        self._require(Capability.DMABUF, "register dma-buf")
        if length < 1 or offset < 0 or iova < 0 or max(offset, iova) + length > 1 << 64:
            raise errors.InvalidBufferError(
                f"{length} bytes at offset {offset} and iova {iova:#x} are not a range of memory"
            )
        if (iova - offset) % mmap.PAGESIZE:
            raise errors.InvalidBufferError(
                f"the offset {offset} is {offset % mmap.PAGESIZE} bytes into a page, and the iova {iova:#x} "
                f"{iova % mmap.PAGESIZE} bytes; both need the same place in their pages"
            )
        access = self._known_access(access)
        region: MemoryRegion = self._make(
            lambda adapter: adapter._native_register_dmabuf(fd, offset, length, iova, access)
        )
        return region

    def _require(self, capability: Capability, operation: str) -> None:
        self._check()
        if capability not in self.info.capabilities:
            what = _WITHOUT.get(capability, f"({{driver}}) cannot do it: info.capabilities has no {capability.name}")
            raise errors.UnsupportedError(
                f"{self.info.name} {what.format(driver=self.info.driver)}", operation=operation
            )

    def _limit(self, what: str, value: int, maximum: int, least: int = 1) -> None:
        if not least <= integer(value, what) <= maximum:
            raise errors.LimitExceededError(f"{what} is {least} to {maximum} on {self.info.name}, not {value}")
