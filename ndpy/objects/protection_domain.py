"""Protection domains of an adapter besides its first one."""

from __future__ import annotations

from ndpy.objects.adapter import Adapter


class ProtectionDomain(Adapter):
    """A protection domain of its own, made by Adapter.create_protection_domain(). It is an Adapter too.

    Memory regions, memory windows, shared receive queues, destinations and registration caches belong to the domain that they
    are made from, and so do queue pairs. A queue pair takes only memory of its own domain, and a peer reaches only this
    memory. So a program can keep apart what belongs to different clients of it.

    Completion queues, connectors, listeners and streams of events do not protect memory: those of the adapter and of all its
    domains work together.

    While objects that were made from it are open, close() raises DeviceBusyError. The adapter cannot be closed before it.

    Attributes:
        device: the adapter that it was made from.
    Source: ibv_alloc_pd(3).
    """

    _release_order = 98

    def __init__(self, device: Adapter) -> None:
        self.device = device
        super().__init__(device.info)

    @property
    def _device(self) -> Adapter:
        return self.device

    def create_protection_domain(self) -> ProtectionDomain:
        return self.device.create_protection_domain()

    def _opened(self) -> None:
        self._released = False
        device = self.device
        device._children[self._serial] = self
        device._open.add(self._serial)
        device._domains.add(self)
        if device._defunct is not None:
            self._defunct = device._defunct

    def _mark_closed(self) -> None:
        super()._mark_closed()
        device = self.device
        try:
            device._children.pop(self._serial, None)
        finally:
            # Without this the adapter could never be closed.
            device._open.discard(self._serial)
        if device._orphans.may_have_some:
            device._wake()

    def _describe(self) -> str:
        return f"ProtectionDomain of {self.info.name}"
