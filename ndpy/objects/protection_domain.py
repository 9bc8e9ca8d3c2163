"""Protection domains of an adapter, other than its first one."""

from __future__ import annotations

from ndpy.objects.adapter import Adapter
from ndpy.objects.resource import Resource


class ProtectionDomain(Adapter):
    """A protection domain of its own, made by Adapter.create_protection_domain(). It is an Adapter too.

    Memory regions, memory windows, shared receive queues, destinations and registration caches belong to the domain
    that they are made from, and so do queue pairs. A queue pair takes only memory of its own domain, and a peer reaches
    only this memory. So a program can keep apart what belongs to different clients of it.

    Completion queues, connectors, listeners and streams of events do not protect memory: those of the adapter and of
    all its domains work together.

    While objects that were made from it are open, close() raises DeviceBusyError. The adapter cannot be closed before
    it.

    Attributes:
        device: the adapter that it was made from.
    Source: ibv_alloc_pd(3).
    """

    _release_order = 98

    def __init__(self, device: Adapter) -> None:
        self.device = self._device = device
        super().__init__(device.info)

    def create_protection_domain(self) -> ProtectionDomain:
        return self.device.create_protection_domain()

    def _opened(self) -> None:
        Resource._opened(self)
        self.device._domains.add(self)

    def _describe(self) -> str:
        return f"ProtectionDomain of {self.info.name}"
