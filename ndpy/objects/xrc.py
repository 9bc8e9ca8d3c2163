"""Extended reliable connections (XRC): one connection from a process to a host, for shared receive queues of all its
processes.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from ndpy.objects.completion import PostedRequests, requests_of_nobody
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.native_steps import XrcDomainSteps
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import AdapterObject, prevent_close, refuse_if_used
from ndpy.objects.shared_receive_queue import SharedReceiveQueue
from ndpy.objects.work_queues import QueuePairLimits
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter

_NO_LIMITS = QueuePairLimits(0, 0, 0, 0, 0)


class XrcDestination:
    """A shared receive queue of the peer's host, for XrcSender.send_to(), write_to(), and those of a Batch.

    Parameters:
        number: XrcReceiveQueue.number, which the peer has told.
    Attributes:
        length: 0, because a destination has no bytes.
    Raises:
        ValueError: the number is not 0 to 2**24 - 1.
    Source: ibv_post_send(3), qp_type.xrc.remote_srqn.
    """

    __slots__ = ("_words", "number")

    #: For an error's count of bytes, which is over all that a request uses.
    length = 0

    def __init__(self, number: int) -> None:
        if not isinstance(number, int) or not 0 <= number < 1 << 24:
            raise ValueError(f"number is 0 to {(1 << 24) - 1}, not {number!r}")
        self.number = number
        #: The operands of a request. See struct ndpy_remote.
        self._words = (0, number)

    def __eq__(self, other: object) -> bool:
        return self.number == other.number if isinstance(other, XrcDestination) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.number)

    def __reduce__(self) -> tuple[type[XrcDestination], tuple[int]]:
        return type(self), (self.number,)

    def __repr__(self) -> str:
        return f"XrcDestination({self.number:#x})"


class XrcDomain(AdapterObject, XrcDomainSteps):
    """Connects the XRC receivers and the shared receive queues of a host. Adapter.open_xrc_domain() makes one.

    Each process of a host has shared receive queues in the domain, and any of the processes has a receiver in it for
    each peer. A message that comes to a receiver names the queue that it is for. So n processes on each of two hosts
    need n connections from a host to the other one instead of n * n.

    It cannot be closed before its queues and receivers.

    ndpy's tests of XRC ran against a stand-in for a driver only, because no adapter in software has it.

    Attributes:
        path: the file that stands for it, or None.
    Source: ibv_open_xrcd(3).
    """

    _release_order = 35

    _receive_queue_class: type[XrcReceiveQueue]
    _receiver_class: type[XrcReceiver]

    _native: Any = None

    def __init__(self, adapter: Adapter, path: str | os.PathLike[str] | None) -> None:
        super().__init__(adapter)
        self.path = None if path is None else os.fspath(path)
        #: The requests of its receivers in this process, by number.
        self._receivers: dict[int, PostedRequests] = {}
        # Receivers have no completions, but every queue pair has a queue.
        self._queue = adapter.create_completion_queue(1)
        try:
            self._native = self._native_open()
        except BaseException:
            self._queue.close()
            raise
        self._opened()

    def create_shared_receive_queue(
        self, receive_cq: CompletionQueue, depth: int, *, max_sge: int = 1, threshold: int = 0
    ) -> XrcReceiveQueue:
        """Make a queue of receives for messages that peers send to its number.

        Parameters:
            receive_cq: takes the completions of the receives.
            depth, max_sge, threshold: as for Adapter.create_shared_receive_queue().
        Raises:
            LimitExceededError: a value is out of range.
            ForeignObjectError: receive_cq belongs to another adapter.
            InsufficientResourcesError: the adapter or the system has no room for it.
        Source: ibv_create_srq_ex(3) with IBV_SRQT_XRC.
        """
        self._check()
        adapter = self._adapter
        self._require_same_device(receive_cq, "the receive completion queue")
        adapter._check_shared_receive_queue(depth, max_sge, threshold)
        with prevent_close(self, receive_cq):
            made: XrcReceiveQueue = adapter._make(
                lambda _: self._receive_queue_class(self, receive_cq, depth, max_sge, threshold)
            )
            return made

    def create_receiver(self) -> XrcReceiver:
        """Make the receiving end of a connection. It is not connected yet.

        Raises:
            InsufficientResourcesError: the adapter or the system has no room for it.
        Source: ibv_create_qp_ex(3) with IBV_QPT_XRC_RECV.
        """
        self._check()
        with prevent_close(self, self._queue):
            made: XrcReceiver = self._adapter._make(lambda _: self._receiver_class(self))
            return made

    def _refuse_if_used(self) -> None:
        refuse_if_used(self, "domain")

    def _release(self) -> None:
        self._native_close()
        self._queue.close()


class XrcReceiveQueue(SharedReceiveQueue):
    """A shared receive queue that senders name by its number. XrcDomain.create_shared_receive_queue() makes one.

    Attributes:
        number: for the peers, who make an XrcDestination of it.
        domain: the XrcDomain.
        receive_cq: takes the completions. The `queue_pair` of a completion is the receiver that the message came to, or
            None if another process has that, or if it is closed.
        Others are those of SharedReceiveQueue. No queue pair can be created with it.
    Source: ibv_create_srq_ex(3), ibv_get_srq_num(3).
    """

    number = 0

    def __init__(
        self, domain: XrcDomain, receive_cq: CompletionQueue, depth: int, max_sge: int, threshold: int
    ) -> None:
        self.domain = domain
        self.receive_cq = receive_cq
        self._elsewhere = requests_of_nobody()
        self._joined = False
        super().__init__(domain.adapter, depth, max_sge, threshold)
        self._lib.ndpy_shared_queue_name(self._native, self._serial)
        with receive_cq._lock:
            if receive_cq._xrc_queues is None:
                receive_cq._xrc_queues = weakref.WeakValueDictionary()
            receive_cq._xrc_queues[self._serial] = self
            receive_cq._users += 1
            self._joined = True

    def _receiver_of(self, number: int) -> PostedRequests:
        """The requests of the receiver with this number, if it is one of this process."""
        return self.domain._receivers.get(number, self._elsewhere)

    def _before_free(self) -> None:
        # The provider's completions lead to memory that is about to be freed.
        with self.receive_cq._lock:
            self.receive_cq._drain()

    def _release(self) -> None:
        super()._release()
        with self.receive_cq._lock:
            if self._joined:
                self._joined = False
                self.receive_cq._users -= 1

    def _describe(self) -> str:
        return f"XrcReceiveQueue {self.number:#x} of depth {self.depth}"


class XrcSender(QueuePair):
    """The sending end of a connection to a host. Adapter.create_xrc_sender() makes one.

    local_endpoint() and connect_endpoint() connect it to an XrcReceiver. It sends to any shared receive queue of the
    receiver's domain, and reads, writes and does atomic operations as any queue pair. It receives nothing.

    Attributes: those of QueuePair.
    Source: ibv_create_qp(3) with IBV_QPT_XRC_SEND.
    """

    _destinations = XrcDestination

    def __init__(self, adapter: Adapter, initiator_cq: CompletionQueue, limits: QueuePairLimits) -> None:
        super().__init__(adapter, initiator_cq, initiator_cq, limits, None, QueuePairType.XRC_SEND)

    def _describe(self) -> str:
        return "XrcSender"


class XrcReceiver(QueuePair):
    """The receiving end of a connection to a host. XrcDomain.create_receiver() makes one.

    local_endpoint() and connect_endpoint() connect it to an XrcSender. What comes goes to the shared receive queues of
    its domain, and to memory with rights for the peer. It posts no requests.

    Attributes:
        domain: the XrcDomain.
    Others are those of QueuePair that are not about requests.
    Source: ibv_create_qp_ex(3) with IBV_QPT_XRC_RECV.
    """

    def __init__(self, domain: XrcDomain) -> None:
        self.domain = domain
        queue = domain._queue
        super().__init__(domain.adapter, queue, queue, _NO_LIMITS, None, QueuePairType.XRC_RECV)
        domain._receivers[self._number] = self._posted_requests

    def _set_connected(self) -> None:
        # Nothing is posted to it.
        self._never_connected = False

    def _give_up_number(self) -> None:
        """Another receiver may get the number when this one is destroyed."""
        if self.domain._receivers.get(self._number) is self._posted_requests:
            del self.domain._receivers[self._number]

    def _describe(self) -> str:
        return "XrcReceiver"
