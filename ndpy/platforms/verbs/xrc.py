"""XRC over verbs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.xrc import XrcDomain, XrcReceiveQueue, XrcReceiver, XrcSender
from ndpy.platforms.verbs.native_calls import ffi, free_once, lib, new_pointer
from ndpy.platforms.verbs.queue_pair import VerbsQueuePair
from ndpy.platforms.verbs.shared_receive_queue import VerbsSharedReceiveQueue
from ndpy.vocabulary.descriptors import owned

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter


class VerbsXrcReceiveQueue(XrcReceiveQueue, VerbsSharedReceiveQueue):
    def _native_create(self) -> Any:
        number = ffi.new("uint32_t *")
        made = new_pointer(
            "create shared receive queue",
            lib.ndpy_create_xrc_queue,
            self._adapter._domain,
            self.domain._native,
            self.receive_cq._cq,
            self._native_request(),
            number,
        )
        self.number = int(number[0])
        return made


class VerbsXrcSender(XrcSender, VerbsQueuePair):
    def _native_create(self) -> Any:
        request = self._native_request()
        request.recv_cq = ffi.NULL
        request.cap.max_recv_wr = request.cap.max_recv_sge = 0
        return new_pointer("create queue pair", lib.ibv_create_qp, self._adapter._domain, request)


class VerbsXrcReceiver(XrcReceiver, VerbsQueuePair):
    def _native_create(self) -> Any:
        own = ffi.cast("void *", self._serial)
        call = lib.ndpy_create_xrc_receiver
        return new_pointer("create queue pair", call, self._adapter._context, self.domain._native, own)

    def _native_destroy(self) -> None:
        self._give_up_number()
        super()._native_destroy()


class VerbsXrcDomain(XrcDomain):
    _adapter: VerbsAdapter
    _receive_queue_class = VerbsXrcReceiveQueue
    _receiver_class = VerbsXrcReceiver

    def _native_open(self) -> Any:
        if self.path is None:
            return new_pointer("open XRC domain", lib.ndpy_open_xrc_domain, self._adapter._context, -1)
        try:
            # The file's content does not matter. The domain stays when the descriptor is closed.
            file = owned(os.open, self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.from_errno("open XRC domain", error.errno or 0) from error
        with file:
            return new_pointer("open XRC domain", lib.ndpy_open_xrc_domain, self._adapter._context, file.fileno())

    def _native_close(self) -> None:
        free_once(self, "_native", "close XRC domain", lib.ndpy_close_xrc_domain)
