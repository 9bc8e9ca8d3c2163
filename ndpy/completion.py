"""Completions, and the requests that they belong to."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.flags import Operation, Status

if TYPE_CHECKING:
    from ndpy.queue_pair import QueuePair

# A flag of struct ndpy_completion, as in cdefs/ndpy_abi.h.
_IMMEDIATE = 8

_RECEIVE = int(Operation.RECEIVE)
_OPERATIONS = tuple(Operation)
_STATUSES = tuple(Status)
_SUCCESS = int(Status.SUCCESS)

_EXCEPTIONS: dict[Status, type[errors.ProviderError]] = {
    Status.CANCELED: errors.CanceledError,
    Status.ACCESS_VIOLATION: errors.AccessViolationError,
    Status.IO_TIMEOUT: errors.TimeoutError,
}

_MEANINGS: dict[Status, str] = {
    Status.CANCELED: "cancelled by an earlier failure, a flush, or the end of the connection",
    Status.ACCESS_VIOLATION: "memory was used beyond its rights or its bounds, here or at the peer",
    Status.BUFFER_OVERFLOW: "the message is longer than the receive that took it",
    Status.DATA_OVERRUN: "the message is longer than the adapter or the peer's receive can take",
    Status.IO_TIMEOUT: "the peer did not answer, or had no receive posted for too long",
    Status.REMOTE_ERROR: "the request broke the peer's queue pair",
    Status.INVALID_REQUEST: "the request was malformed, such as binding a window that is bound",
    Status.INTERNAL_ERROR: "the adapter failed",
    Status.UNKNOWN: "a status that ndpy has no name for",
}


class PostedRequests:
    """The requests of one queue pair that have not ended, oldest first. Each record keeps the memory that its request uses.

    It outlives the queue pair's object until the last completion of the queue pair has been taken.
    """

    __slots__ = ("failed", "initiator", "queue_pair", "receive", "stored", "stored_shared")

    def __init__(self, queue_pair: QueuePair) -> None:
        self.queue_pair = weakref.ref(queue_pair)
        #: Whether a request has failed. Later failures are consequences of the first one.
        self.failed = False
        self.initiator: deque[Any] = deque()
        self.receive: deque[Any] = deque()
        #: After the queue pair was closed: how many of its completions a completion queue still stores. The key is the serial
        #: number of the completion queue.
        self.stored: dict[int, int] = {}
        #: The same for completions of a shared receive queue.
        self.stored_shared = 0

    def retire(self, entry: tuple[int, ...]) -> tuple[int, Any]:
        """Remove the records of the requests that a completion ends, with the silent ones before it. Update their windows.

        Returns the status and the record of the last request. The request of a window may correct the status.
        """
        records = self.receive if entry[2] == _RECEIVE else self.initiator
        status, record = entry[3], None
        for left in range(entry[7] - 1, -1, -1):
            record = records.popleft()
            ended = getattr(record, "ended", None)
            if ended is not None:
                result = ended(status if left == 0 else _SUCCESS)
                if left == 0:
                    status = result
        return status, record


class Completion:
    """The result of one request. Its fields are decoded when they are read.

    Attributes:
        context: the value that was given with the request.
        operation: an Operation.
        status: a Status.
        nbytes: how many bytes a successful request moved. For RECEIVE_RDMA_WITH_IMMEDIATE: how many the peer wrote.
        native_status: the provider's own number for the status.
        vendor_status: what the adapter adds to an error, or 0.
    """

    __slots__ = ("_entry", "_posted_requests")

    #: The fields of struct ndpy_completion.
    _entry: tuple[int, ...]
    _posted_requests: PostedRequests

    @property
    def context(self) -> int:
        return self._entry[0]

    @property
    def nbytes(self) -> int:
        return self._entry[1]

    @property
    def native_status(self) -> int:
        return self._entry[4]

    @property
    def vendor_status(self) -> int:
        return 0 if self._entry[3] == _SUCCESS else self._entry[5]

    @property
    def immediate(self) -> int | None:
        """The 32 bits that the peer sent with its message or write, in host order. None if it sent none."""
        return self._entry[5] if self._entry[9] & _IMMEDIATE else None

    @property
    def operation(self) -> Operation:
        return _OPERATIONS[self._entry[2]]

    @property
    def status(self) -> Status:
        return _STATUSES[self._entry[3]]

    @property
    def ok(self) -> bool:
        return self._entry[3] == _SUCCESS

    @property
    def queue_pair(self) -> QueuePair | None:
        """The queue pair of the request. None if the program has dropped it."""
        return self._posted_requests.queue_pair()

    def raise_for_status(self) -> None:
        """Raise the exception that fits the status. Does nothing if the request succeeded."""
        if self._entry[3] == _SUCCESS:
            return
        status = self.status
        message, name = _MEANINGS[status], ""
        queue_pair = self.queue_pair
        if queue_pair is not None:
            hint = queue_pair._explain(status)
            message += f"; {hint}" if hint else ""
            name = queue_pair._native_status_name(self.native_status)
        if self.vendor_status:
            message += f" (vendor status {self.vendor_status:#x})"
        error = _EXCEPTIONS.get(status, errors.ProviderError)
        raise error(message, operation=self.operation.name.lower(), native=self.native_status, native_name=name)

    def __repr__(self) -> str:
        return (
            f"<Completion {self.operation.name} {self.status.name} context={self.context:#x} nbytes={self.nbytes}"
            f"{'' if self.immediate is None else f' immediate={self.immediate:#x}'}"
            f"{'' if self.ok else f' native_status={self.native_status}'}>"
        )
