"""Overlapped requests. Each is issued once and ends once. The thread that learns of the end first takes the result.

If a provider accepts a request (ND_PENDING), one packet comes to the completion port of the file that its object was
created on. No packet comes for a request that ended inline (contract C.2). ndpy asks for the result after the packet
has come. The result may be that another phase began (C.4.5).

Closing an object cancels its requests and takes their results. Only then is the object released. ndpy ignores packets
that come later. The structure that a packet points to lives until the packet has come (requests.c).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ndpy import errors
from ndpy.objects.pending import Pending
from ndpy.objects.resource import Owned, Uncopied, next_serial
from ndpy.platforms.networkdirect.native_calls import CANCELED, PENDING, SUCCESS, check, ffi, lib, status_error

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.events import EventThread

T = TypeVar("T")

_FOR_EVER = 0xFFFFFFFF
_WAIT_TIMEOUT = 0x102
# Ctrl-C sets a flag, and the main thread looks at the flag between two calls. It ends no wait of Windows.
_SLICE_MS = 200
# How long a provider may take to end a request that was cancelled.
_CANCEL_S = 10.0
# A cancelled request may begin another phase. After this time ndpy looks, and cancels it again.
_PHASE_S = 0.2

# The interfaces of version 1 that have overlapped requests.
_VERSION_1 = {
    ffi.typeof(f"struct {name} *") for name in ("INDAdapter", "INDCompletionQueue", "INDConnector", "INDListen")
}
# All registrations of version 1 are requests of the adapter.
_ADAPTER = ffi.typeof("struct INDAdapter *")


def _cancel_nothing(target: Any) -> None:
    """Do not cancel: cancelling one request of the adapter would cancel all."""


def next_wait(deadline: float | None) -> tuple[int, bool]:
    """How long to wait now. No wait in the main thread may be long.

    Returns: milliseconds, and whether the deadline is reached after them.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if deadline is None:
        return (_SLICE_MS, False) if in_main else (_FOR_EVER, True)
    left_ms = max(0.0, (deadline - time.monotonic()) * 1000)
    # The longest finite wait of Windows is 1 ms less than _FOR_EVER.
    longest_ms = _SLICE_MS if in_main else _FOR_EVER - 1
    return round(min(left_ms, longest_ms)), left_ms <= longest_ms


def wait_for_event(event: Any, deadline: float | None) -> bool:
    """Wait until an event is set. Returns False at the deadline. In the main thread Ctrl-C ends the wait."""
    while True:
        wait_ms, last = next_wait(deadline)
        if lib.WaitForSingleObject(event, wait_ms) != _WAIT_TIMEOUT:
            return True
        if last:
            return False


class OverlappedPending(Pending[T]):
    """A Pending that Ctrl-C interrupts in the main thread. On Windows Ctrl-C does not interrupt the wait for a lock."""

    def _at_a_stretch(self, left_s: float | None) -> float | None:
        if threading.current_thread() is not threading.main_thread():
            return left_s
        return _SLICE_MS / 1000 if left_s is None else min(left_s, _SLICE_MS / 1000)


class Request(Uncopied):
    """One overlapped request of an object. It can be issued again when it has ended.

    Parameters:
        target: the object. Its GetOverlappedResult gives the result.
        thread: the adapter's thread, whose port gets the packet. None for a request that only sets its event, and for a
            request whose packet goes to the program's own port.
        on_end: the thread calls on_end(status) without locks when the packet has come.
        forward: a completion port that gets the packet instead.
        quiet: no packet comes at all. None stands for "there is no thread".
    Attributes:
        event: a Windows event that is set when the request has ended.
        running: whether the provider accepted it and nobody has taken its result.
    """

    __slots__ = (
        "__weakref__",
        "_cancel",
        "_lock",
        "_native",
        "_owner",
        "_result",
        "_target",
        "_thread",
        "event",
        "key",
        "on_end",
        "overlapped",
        "running",
    )

    def __init__(
        self,
        target: Any,
        thread: EventThread | None = None,
        on_end: Callable[[int], None] | None = None,
        forward: Any = ffi.NULL,
        quiet: bool | None = None,
    ) -> None:
        self.key = next_serial()
        native = lib.ndpy_request_new(self.key, forward, thread is None if quiet is None else quiet)
        if native == ffi.NULL:
            raise errors.InsufficientResourcesError(
                "no event for an overlapped request", operation="overlapped request"
            )
        self._native = native
        self._owner = Owned(lib.ndpy_request_drop, (native,))
        self.overlapped = ffi.addressof(native, "overlapped")
        self.event = native.event
        # The type of the interface says which version it belongs to.
        kind = ffi.typeof(target)
        if kind in _VERSION_1:
            self._target = ffi.cast("struct INDOverlapped *", target)
            self._result = lib.version1_request_result
            self._cancel = _cancel_nothing if kind == _ADAPTER else lib.INDOverlapped_CancelOverlappedRequests
        else:
            self._target = ffi.cast("struct IND2Overlapped *", target)
            self._result = lib.ndpy_request_result
            self._cancel = lib.IND2Overlapped_CancelOverlappedRequests
        self._thread = thread
        self.on_end = on_end
        self._lock = threading.Lock()
        self.running = False

    def call_at_end(self, owner: Any, method: Callable[[Any, Request, int], None]) -> None:
        """Call method(owner, request, status) at the end, unless the owner has gone by then.
        This keeps neither alive.
        """
        owner, own = weakref.ref(owner), weakref.ref(self)

        def on_end(status: int) -> None:
            living, request = owner(), own()
            if living is not None and request is not None:
                method(living, request, status)

        self.on_end = on_end

    @property
    def region_handle(self) -> Any:
        """Where version 1 writes the handle of a new region. Valid as long as the provider may write to it."""
        return ffi.addressof(self._native, "region")

    def issue(self, call: Callable[[Any], int]) -> int:
        """Start the request with call(overlapped).

        Returns: PENDING, SUCCESS, or the status of a refusal. Nothing follows after the last two (contract C.2).
        """
        with self._lock:
            self.running = True
        lib.ndpy_request_start(self._native)
        if self._thread is not None:
            self._thread.expect(self)
        status = call(self.overlapped) & 0xFFFFFFFF
        if status != PENDING:
            if self._thread is not None:
                self._thread.forget(self)
            with self._lock:
                self.running = False
            # It refers to the owner of the request, and often to the request itself.
            self.on_end = None
            lib.ndpy_request_stop(self._native)
        return status

    def take(self) -> int | None:
        """Take its status. None if the request still runs, or if somebody has taken its status before."""
        with self._lock:
            if not self.running:
                return None
            status: int = self._result(self._target, self._native) & 0xFFFFFFFF
            if status == PENDING:
                return None
            self.running = False
        if self._thread is None:
            lib.ndpy_request_stop(self._native)
        else:
            self._thread.forget(self)
        return status

    def wait(self, deadline: float | None = None) -> int | None:
        """Wait for its end and take its status. None at the deadline, or if another thread took the status."""
        while True:
            lib.ResetEvent(self.event)
            status = self.take()
            if status is not None or not self.running:
                return status
            if not wait_for_event(self.event, deadline):
                return self.take()

    def cancel(self) -> bool:
        """If this request runs, ask the provider to end all requests of the object.

        A registration of version 1 runs on, because it has no object of its own. The object of a request cannot go
        meanwhile. It is released only after all its requests have ended and somebody has taken their statuses.

        Returns: whether this request runs.
        """
        with self._lock:
            if self.running:
                self._cancel(self._target)
            return self.running

    def finish(self, status: int) -> None:
        """Call on_end(status). The thread that took the status calls this."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(status)

    def ignore_end(self) -> None:
        """Drop on_end, which often refers to the request itself."""
        self.on_end = None

    def forward_to(self, port: Any) -> None:
        """Let this completion port get its packet, if nobody has got it yet. ffi.NULL: the adapter's thread gets it."""
        lib.ndpy_request_forward(self._native, port)


def run(operation: str, request: Request, call: Callable[[Any], int], undo: Callable[[], None] | None = None) -> None:
    """Issue a request and wait for its end. Raises unless it succeeded.

    Ctrl-C cancels the request and waits until it has ended. If the request has succeeded anyway, it calls undo().
    """
    status: int | None = request.issue(call)
    if status == PENDING:
        try:
            status = request.wait()
        except BaseException:
            ended = cancel_all([request])
            if undo is not None and ended == [(request, SUCCESS)]:
                undo()
            raise
    check(operation, SUCCESS if status is None else status)


def cancel_all(requests: list[Request]) -> list[tuple[Request, int]]:
    """Cancel the requests of one object, and wait until the provider has ended all of them.

    Returns: the requests whose status this call took, each with its status.
    Raises:
        DeviceBusyError: the provider did not end one in time.
    """
    ended = []
    deadline = time.monotonic() + _CANCEL_S
    if not any(request.cancel() for request in requests):
        return []
    for request in requests:
        while True:
            status = request.wait(min(deadline, time.monotonic() + _PHASE_S))
            if status is not None:
                ended.append((request, status))
            # If another phase began after cancel(), it runs on.
            if not request.cancel():
                break
            if time.monotonic() >= deadline:
                raise errors.DeviceBusyError(
                    f"the provider did not let go of a cancelled request within {_CANCEL_S:g} s", operation="cancel"
                )
    return ended


def request_error(operation: str, status: int) -> errors.ProviderError:
    """The exception for a request that failed or was cancelled."""
    if status == CANCELED:
        return errors.CanceledError("cancelled", operation=operation, native=status, native_name="ND_CANCELED")
    return status_error(operation, status)
