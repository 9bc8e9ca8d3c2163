"""Completions, and the requests that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ndpy import _core, errors
from ndpy._core import Completion as Completion
from ndpy.objects.operations import TABLE
from ndpy.vocabulary.datagram import DatagramSource
from ndpy.vocabulary.flags import Operation, Status
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.objects.completion_queue import CompletionQueue
    from ndpy.objects.memory import RemoteMemory
    from ndpy.objects.queue_pair import QueuePair

_RECEIVE = int(Operation.RECEIVE)
_SUCCESS = int(Status.SUCCESS)

#: Of a status without one, ProviderError.
EXCEPTIONS: dict[Status, type[errors.ProviderError]] = {
    Status.CANCELED: errors.CanceledError,
    Status.ACCESS_VIOLATION: errors.AccessViolationError,
    Status.IO_TIMEOUT: errors.TimeoutError,
}

MEANINGS: dict[Status, str] = {
    Status.CANCELED: "cancelled: the peer has disconnected, an earlier request failed, or the queue pair was flushed",
    Status.ACCESS_VIOLATION: "memory was used beyond its rights or its bounds, here or at the peer",
    Status.BUFFER_OVERFLOW: "the message is longer than the receive that took it",
    Status.DATA_OVERRUN: "the message is longer than the adapter or the peer's receive can take",
    Status.IO_TIMEOUT: "the peer did not answer, or had no receive posted for too long",
    Status.REMOTE_ERROR: "the request broke the peer's queue pair",
    Status.INVALID_REQUEST: "the request was malformed, such as binding a window that is bound",
    Status.INTERNAL_ERROR: "the adapter failed",
    Status.UNKNOWN: "a status that ndpy has no name for",
}

#: The words of `ndpy explain`.
_PROBLEMS: dict[Status, str] = {
    Status.CANCELED: "flushed",
    Status.ACCESS_VIOLATION: "access-violation",
    Status.BUFFER_OVERFLOW: "local-length",
    Status.DATA_OVERRUN: "remote-invalid-request",
    Status.IO_TIMEOUT: "retry-exceeded",
    Status.REMOTE_ERROR: "remote-operation",
    Status.INVALID_REQUEST: "window-bind",
    Status.INTERNAL_ERROR: "adapter-fatal",
    Status.UNKNOWN: "unknown-status",
}

# So many queues, and queue pairs of each, are looked at for the error of a wait.
_MOST_COUNTED = 256
_OF_MEMORY = (Status.ACCESS_VIOLATION, Status.REMOTE_ERROR, Status.INVALID_REQUEST)


class FailedRequest(NamedTuple):
    """The request of a queue pair that failed first, and the peer's memory that it named."""

    context: int
    operation: int
    remote: RemoteMemory


class PostedRequests(_core.PostedRequests):
    """The requests of one queue pair that have not ended, oldest first. Each record keeps the memory that its request
    uses.

    It outlives the queue pair's object until the last completion of the queue pair has been taken.

    Attributes:
        initiator, receive: the records of the two queues.
        failed: whether a request has failed. Later failures are consequences of the first one.
        stored: after the queue pair was closed: how many of its completions a completion queue still stores. The key is
            the serial number of the completion queue.
        watched: whether Python code looks at each completion, because some are stored, or because the first message of
            the peer proves the connection.
        stored_shared: the same for completions of a shared receive queue.
    """

    __slots__ = ()

    def retire(self, entry: tuple[int, ...]) -> tuple[int, Any]:
        """Remove the records of the requests that a completion ends, with the silent ones before it. Update their
        windows.

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


class _Nobody:
    """Its reference ends at once."""


def requests_of_nobody() -> PostedRequests:
    """Requests whose queue pair is None: of a receiver in another process."""
    return PostedRequests(_Nobody())  # type: ignore[arg-type]


def _raise_for_status(completion: Completion) -> None:
    """Raise the exception that fits the status of a request that did not succeed."""
    status = completion.status
    message, name, problem = MEANINGS[status], "", ""
    queue_pair = completion.queue_pair
    if queue_pair is not None:
        native = completion.native_status
        message = queue_pair._native_meaning(status, native) or message
        for more in (_memory_of(completion, queue_pair), queue_pair._explain(status, native)):
            message += f"; {more}" if more else ""
        name = queue_pair._native_status_name(native)
        problem = queue_pair._native_problem(native)
    if completion.vendor_status:
        message += f" (vendor status {completion.vendor_status:#x})"
    error = EXCEPTIONS.get(status, errors.ProviderError)
    raise error(
        message,
        operation=completion.operation.name.lower(),
        native=completion.native_status,
        native_name=name,
        problem=problem or _PROBLEMS.get(status, ""),
    )


def _memory_of(completion: Completion, queue_pair: QueuePair) -> str:
    """The peer's memory that a failed request named, and the right that it needs, or ""."""
    right = TABLE[completion.operation].rights
    # On iWARP the peer of a wrong read ends the connection, and that is all that is heard of it.
    may_be = completion.status is Status.CANCELED and Quirk.IWARP_NO_ACKNOWLEDGEMENT in queue_pair._adapter._quirks
    if not right or not (may_be or completion.status in _OF_MEMORY):
        return ""
    failed = queue_pair._first_failure()
    if failed is None or (failed.context, failed.operation) != (completion.context, completion.operation):
        return "" if may_be else f"it needs {right} of the peer's memory"
    if may_be:
        return f"the peer may have refused access to its memory, {failed.remote}, of which it needs {right}"
    return f"the peer's memory was {failed.remote}, of which it needs {right}"


def no_completion(timeout_s: float | None, queues: Iterable[CompletionQueue]) -> errors.TimeoutError:
    """The error of a wait that was in vain. It says what may still come."""
    requests = receives = 0
    shares = False
    for queue in islice(queues, _MOST_COUNTED):
        with queue._lock:
            all_posted = list(islice(queue._posted_requests.values(), _MOST_COUNTED))
        for posted in all_posted:
            queue_pair = posted.queue_pair()
            if queue_pair is None:
                continue
            if queue_pair.initiator_cq is queue:
                requests += len(posted.initiator)
            if queue_pair.receive_cq is queue:
                receives += len(posted.receive)
                shares = shares or queue_pair.srq is not None
    what = "nothing is outstanding, so nothing will come until something is posted"
    if requests or receives:
        what = (
            f"outstanding are {requests} requests of this side and {receives} receives, for which the peer has not sent"
        )
    if shares:
        what += " (receives of a shared receive queue are not counted)"
    return errors.TimeoutError(
        f"no completion within {timeout_s or 0:g} s; {what}", operation="wait", problem="no-completion"
    )


def _describe(completion: Completion) -> str:
    return (
        f"<Completion {completion.operation.name} {completion.status.name} context={completion.context:#x} "
        f"nbytes={completion.nbytes}"
        f"{'' if completion.immediate is None else f' immediate={completion.immediate:#x}'}"
        f"{'' if completion.ok else f' native_status={completion.native_status}'}>"
    )


_core.set_up_completions(tuple(Operation), tuple(Status), _raise_for_status, _describe, DatagramSource.from_native)
