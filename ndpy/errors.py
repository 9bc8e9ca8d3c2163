"""The exceptions of ndpy.

All are subclasses of NdpyError. If Python has a built-in exception with the same meaning, they are subclasses of that
too.

A refused call raises a ProviderError, which is also an OSError. A failed request raises nothing: its Completion has the
status, and Completion.raise_for_status() raises the exception for it.

The text of an error ends with the command that explains it, such as (ndpy explain rnr-retry).
"""

from __future__ import annotations

import builtins
import contextlib as _contextlib
import errno as _errno
import os as _os


class NdpyError(Exception):
    """The base class of all exceptions of ndpy.

    Attributes:
        problem: the word with which `ndpy explain` finds causes and remedies. "" if there is no page.
    """

    problem: str = ""

    def __str__(self) -> str:
        text = self._text()
        # An error that repeats the text of its cause ends with the page of the cause.
        if not self.problem or (text.endswith(")") and text.rpartition(" (")[2].startswith("ndpy explain ")):
            return text
        return f"{text} (ndpy explain {self.problem})"

    def _text(self) -> str:
        return super().__str__()


class ClosedError(NdpyError, ValueError):
    """The object is closed or was inherited through fork(). Only close() still works."""

    problem = "closed"


class ForeignObjectError(NdpyError, ValueError):
    """The object belongs to another adapter than the one that was called."""

    problem = "foreign-object"


class InvalidBufferError(NdpyError, ValueError):
    """The buffer cannot be used: it is empty, not C-contiguous, not memory, or holds Python objects."""

    problem = "invalid-buffer"


class LimitExceededError(NdpyError, ValueError):
    """A value exceeds a limit of the adapter or of the queue. The message has the value and the limit."""

    problem = "limit"


class ElementRangeError(NdpyError, IndexError):
    """A scatter/gather element or a remote range is outside its memory."""

    problem = "out-of-range"


class QueuePairAttributesError(NdpyError, ValueError):
    """A queue pair in this state does not take these attributes, or needs others."""

    problem = "attributes"


class InvalidFlagsError(NdpyError, ValueError):
    """The operation does not have these flags."""

    problem = "flags"


class AdapterNotFoundError(NdpyError, LookupError):
    """There is no such adapter. The message lists the adapters, says what is missing, and gives the remedy."""

    problem = "no-adapter"


class ProviderNotFoundError(NdpyError, OSError):
    """The provider's library cannot be loaded. The message names the package that contains it."""

    problem = "no-library"

    def _text(self) -> str:
        return str(self.args[0]) if self.args else "provider not found"


class ProviderError(NdpyError, OSError):
    """A provider refused a call.

    Parameters:
        message: the reason as a sentence, without the numbers.
        operation: the name of the refused call.
        native: the provider's own error number: an errno on verbs, an NTSTATUS on NetworkDirect, a CUresult of CUDA's
            driver. 0 if ndpy refused the call before it asked the provider.
        native_name: the name of that number, such as "ENOMEM". "" if it has none. None looks it up as an errno.
        problem: the word for `ndpy explain`. "" takes that of the class.
    """

    problem = "provider-error"

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        native: int = 0,
        native_name: str | None = None,
        problem: str = "",
    ) -> None:
        super().__init__(native, message)
        if problem:
            self.problem = problem
        self.message = message
        self.operation = operation
        self.native = native
        self.native_name = _errno.errorcode.get(native, "") if native_name is None else native_name

    def _text(self) -> str:
        text = f"{self.operation}: {self.message}" if self.operation else self.message
        if self.native:
            # People know an errno as a decimal number and a status of NetworkDirect as a hexadecimal one.
            number = str(self.native) if self.native < 1 << 16 else f"{self.native:#010x}"
            text += f" [native status {number}{f' ({self.native_name})' if self.native_name else ''}]"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        values = (self.message, self.operation, self.native, self.native_name, self.problem)
        return _rebuild, (type(self), *values)


def _rebuild(
    cls: type[ProviderError], message: str, operation: str, native: int, name: str, problem: str
) -> ProviderError:
    return cls(message, operation=operation, native=native, native_name=name, problem=problem)


class DeviceBusyError(ProviderError):
    """The object is in use, for example a region with a bound window, or an adapter with open objects."""

    problem = "busy"


class DeviceRemovedError(ProviderError):
    """The adapter was removed. Only close() still works."""

    problem = "device-removed"


class QueueFullError(ProviderError):
    """The queue has no free slot. Take completions, then try again."""

    problem = "queue-full"


class UnsupportedError(ProviderError):
    """This adapter, driver, library or system does not support it."""

    problem = "unsupported"


class InsufficientResourcesError(ProviderError):
    """There is not enough memory, lockable memory, or space in the adapter."""

    problem = "resources"


class CompletionQueueOverrunError(ProviderError):
    """More completions arrived than the queue can hold. The queue and its queue pairs are unusable (contract G.3.1)."""

    problem = "overrun"


class NotConnectedError(ProviderError, ConnectionError):
    """The queue pair or connector has no connection."""

    problem = "not-connected"


class ConnectionActiveError(ProviderError, ConnectionError):
    """The connector or queue pair is already connecting or connected."""

    problem = "already-connected"


class AddressInUseError(ProviderError):
    """The local address and port are in use."""

    problem = "address-in-use"


class AddressUnreachableError(ProviderError, ConnectionError):
    """This adapter has no route to that address."""

    problem = "no-route"


class PermissionError(ProviderError, builtins.PermissionError):
    """The process lacks the permission."""

    problem = "not-permitted"


class AccessViolationError(PermissionError):
    """An access exceeds the rights or the bounds of the memory."""

    problem = "access-violation"


class ConnectionRefusedError(ProviderError, builtins.ConnectionRefusedError):
    """There is no listener, or the peer rejected the connection. Then the connector has the peer's private data."""

    problem = "refused"


class ConnectionAbortedError(ProviderError, builtins.ConnectionAbortedError):
    """The connection, or the attempt to connect, was aborted."""

    problem = "connection-lost"


class TimeoutError(ProviderError, builtins.TimeoutError):
    """The deadline passed, or the provider stopped waiting for the peer."""

    problem = "timeout"


class CanceledError(ProviderError):
    """The request was cancelled by cancel(), by closing its object, or by the end of the connection."""

    problem = "flushed"


_BY_ERRNO: dict[int, type[ProviderError]] = {
    _errno.ENOMEM: InsufficientResourcesError,
    _errno.EAGAIN: InsufficientResourcesError,
    _errno.ENOSPC: InsufficientResourcesError,
    _errno.EMFILE: InsufficientResourcesError,
    _errno.ENFILE: InsufficientResourcesError,
    _errno.EACCES: PermissionError,
    _errno.EPERM: PermissionError,
    _errno.EFAULT: AccessViolationError,
    _errno.EBUSY: DeviceBusyError,
    _errno.ENODEV: DeviceRemovedError,
    _errno.EOPNOTSUPP: UnsupportedError,
    _errno.ENOSYS: UnsupportedError,
    _errno.EPROTONOSUPPORT: UnsupportedError,
    _errno.EADDRINUSE: AddressInUseError,
    _errno.EADDRNOTAVAIL: AddressUnreachableError,
    _errno.ENETUNREACH: AddressUnreachableError,
    _errno.EHOSTUNREACH: AddressUnreachableError,
    _errno.ENETDOWN: AddressUnreachableError,
    _errno.ECONNREFUSED: ConnectionRefusedError,
    _errno.ECONNABORTED: ConnectionAbortedError,
    _errno.ECONNRESET: ConnectionAbortedError,
    _errno.ETIMEDOUT: TimeoutError,
    _errno.ENOTCONN: NotConnectedError,
    _errno.ECANCELED: CanceledError,
}

#: The words of errnos that say more than the word of their class.
_PROBLEMS: dict[int, str] = {
    _errno.ENOMEM: "memlock",
    _errno.EMFILE: "open-files",
    _errno.ENFILE: "open-files",
    _errno.EFAULT: "bad-address",
    _errno.EINVAL: "invalid-argument",
    _errno.EIO: "io-error",
    _errno.EINTR: "interrupted",
    _errno.ENOENT: "no-adapter",
    _errno.ENOBUFS: "resources",
    _errno.EADDRNOTAVAIL: "wrong-interface",
    _errno.ENETDOWN: "port-down",
    _errno.ETIMEDOUT: "connect-timeout",
}


def from_errno(operation: str, number: int, message: str = "") -> ProviderError:
    """Create the exception for an errno. An errno without a class of its own becomes a plain ProviderError.
    For the implementation.

    Parameters:
        operation: the name of the refused call.
        number: the errno, or its negative.
        message: what failed. The reason that the errno stands for, and what to do about it, follow.
    """
    number = abs(number)
    reason = _reason(number)
    return with_errno(operation, number, f"{message}: {reason}" if message else reason)


def with_errno(operation: str, number: int, message: str) -> ProviderError:
    """Create the exception for an errno with a message that says the reason. For the implementation.

    Parameters:
        operation: the name of the refused call.
        number: the errno.
        message: the reason as a sentence.
    """
    kind = _BY_ERRNO.get(number, ProviderError)
    return kind(message, operation=operation, native=number, problem=_PROBLEMS.get(number, ""))


def not_finished(operation: str, timeout_s: float) -> TimeoutError:
    """The error for a wait that has lasted its time. A process without a free file descriptor cannot take connections.
    For the implementation.

    Parameters:
        operation: the name of the call that waited.
        timeout_s: how long it waited.
    Returns: the error.
    """
    message = f"not finished within {timeout_s:g} s"
    if number := lacks_descriptor():
        message += f"; {_no_descriptor(number)}"
    return TimeoutError(message, operation=operation)


def lacks_descriptor(count: int = 1) -> int:
    """Find out whether a file descriptor is missing. For the implementation: many calls fail for want of one, and name
    another reason.

    Parameters:
        count: how many files are to be opened.
    Returns: EMFILE if this process cannot open `count` files more, ENFILE if the system cannot, or 0.
    """
    try:
        with _contextlib.ExitStack() as opened:
            for _ in range(count):
                opened.enter_context(open(_os.devnull, "rb", buffering=0))
    except OSError as error:
        return error.errno if error.errno in NO_DESCRIPTOR else 0
    return 0


#: What this process or the system says if it has no file descriptor left.
NO_DESCRIPTOR = (_errno.EMFILE, _errno.ENFILE)
#: What this machine or this process lacks, wherever a call fails so.
SHORTAGES = (*NO_DESCRIPTOR, _errno.ENOMEM, _errno.ENOBUFS)


def _reason(number: int) -> str:
    if not number:
        return "the driver's library refused and gave no reason; the kernel's log may have one"
    if number in NO_DESCRIPTOR:
        return _no_descriptor(number)
    if number == _errno.ENOMEM:
        return (
            f"the adapter or the system has no memory left for it{_pinned()}; close what is not needed, or make it "
            "smaller"
        )
    if number == _errno.ENOBUFS:
        return "the system has no buffers left for it; close what is not needed, or try again later"
    if number == _errno.EPERM:
        return (
            f"{_os.strerror(number)}; look for a rule of the firewall, a seccomp profile or control group of the "
            "container, or a "
            "capability that is missing"
        )
    return _os.strerror(number)


def _pinned() -> str:
    """The limit of pinned memory, which queues of many adapters count against."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, AttributeError):
        return ""
    return f", or its queues do not fit into RLIMIT_MEMLOCK, {limit} bytes" if 0 <= limit < 1 << 30 else ""


def _no_descriptor(number: int) -> str:
    if number == _errno.ENFILE:
        return "the system has no file descriptor left; `sysctl fs.file-max` shows and raises its limit"
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except ImportError:
        # Windows has no such limit of a process.
        return _os.strerror(number)
    return (
        f"this process has no file descriptor left: its limit RLIMIT_NOFILE is {soft}; close what is not needed, or "
        f"raise the limit (ulimit -n, LimitNOFILE= of a service), which may go to {'unlimited' if hard < 0 else hard}"
    )
