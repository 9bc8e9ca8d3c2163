"""Everything ndpy raises. One root, NdpyError; where Python has a class of that meaning, it is a base as well.

Refused calls raise a ProviderError, which is an OSError: `operation` names the call, `native` keeps the provider's
own number (an errno on verbs) and `native_name` that number's name. Failed completions are data, not exceptions:
Completion.raise_for_status() turns one into an exception of the same families.
"""

from __future__ import annotations

import builtins
import errno as _errno


class NdpyError(Exception):
    """Root of every exception that ndpy raises on its own account."""


class ClosedError(NdpyError, ValueError):
    """The object was closed, or inherited through fork(), and can only be closed."""


class ForeignObjectError(NdpyError, ValueError):
    """An object of one adapter was given to a call of another."""


class InvalidBufferError(NdpyError, ValueError):
    """The buffer is empty, not contiguous, or otherwise no memory that can be registered."""


class LimitExceededError(NdpyError, ValueError):
    """A value is beyond a limit of the adapter or of the queue; the message names both."""


class ElementRangeError(NdpyError, IndexError):
    """A scatter/gather element or a remote range lies outside of its memory."""


class InvalidFlagsError(NdpyError, ValueError):
    """The operation does not take these flags."""


class AdapterNotFoundError(NdpyError, LookupError):
    """No such adapter; the message says which there are, what is missing, and the remedy."""


class ProviderNotFoundError(NdpyError, OSError):
    """The provider library cannot be loaded; the message names the package that has it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "provider not found"


class ProviderError(NdpyError, OSError):
    """A provider refused a call.

    operation: the refused call; native: the provider's number, 0 where ndpy refused before asking the provider;
    native_name: the provider's name of that number, such as "ENOMEM", or "" where it has none.
    """

    def __init__(self, message: str, *, operation: str = "", native: int = 0, native_name: str | None = None) -> None:
        super().__init__(native, message)
        self.message = message
        self.operation = operation
        self.native = native
        self.native_name = _errno.errorcode.get(native, "") if native_name is None else native_name

    def __str__(self) -> str:
        text = f"{self.operation}: {self.message}" if self.operation else self.message
        if self.native:
            # An errno is known by its decimal digits, a status of NetworkDirect by its hexadecimal ones.
            number = str(self.native) if self.native < 1 << 16 else f"{self.native:#010x}"
            text += f" [native status {number}{f' ({self.native_name})' if self.native_name else ''}]"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.operation, self.native, self.native_name)


def _rebuild(cls: type[ProviderError], message: str, operation: str, native: int, name: str) -> ProviderError:
    return cls(message, operation=operation, native=native, native_name=name)


class DeviceBusyError(ProviderError):
    """The object is in use: a region under a bound window, a parent with open children."""


class DeviceRemovedError(ProviderError):
    """The adapter has gone; only cleaning up works."""


class QueueFullError(ProviderError):
    """No free slot in the queue; take completions, then try again."""


class UnsupportedError(ProviderError):
    """This adapter, driver or library cannot do it."""


class InsufficientResourcesError(ProviderError):
    """Out of memory, lockable memory, or the adapter's own resources."""


class CompletionQueueOverrunError(ProviderError):
    """More completions arrived than the queue holds; it and its queue pairs are unusable (contract G.3.1)."""


class NotConnectedError(ProviderError, ConnectionError):
    """The queue pair or connector is not in a state that has a connection."""


class ConnectionActiveError(ProviderError, ConnectionError):
    """The connector or queue pair is connecting or connected already."""


class AddressInUseError(ProviderError):
    """The local address and port are taken."""


class AddressUnreachableError(ProviderError, ConnectionError):
    """There is no way to that address from this adapter."""


class PermissionError(ProviderError, builtins.PermissionError):
    """The process may not use this."""


class AccessViolationError(PermissionError):
    """Memory was used beyond its rights or bounds."""


class ConnectionRefusedError(ProviderError, builtins.ConnectionRefusedError):
    """Nobody listens there, or the peer rejected the request; its private data is in the connector."""


class ConnectionAbortedError(ProviderError, builtins.ConnectionAbortedError):
    """The attempt or the connection was given up."""


class TimeoutError(ProviderError, builtins.TimeoutError):
    """The deadline passed, or the provider gave up waiting for the peer."""


class CanceledError(ProviderError):
    """The request was cancelled: by cancel(), by closing its object, or by the end of the connection."""


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


def from_errno(operation: str, number: int, message: str = "") -> ProviderError:
    """The exception for errno `number` of `operation`; unknown numbers give a plain ProviderError."""
    import os

    number = abs(number)
    return _BY_ERRNO.get(number, ProviderError)(message or os.strerror(number), operation=operation, native=number)
