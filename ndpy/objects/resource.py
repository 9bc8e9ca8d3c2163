"""What the objects have in common that hold a provider's resource. cdefs/core/resource.c has the table of their lives.

An object that is dropped without close() goes to its adapter, whose background thread closes it. A finalizer may run in
any thread, with any lock held, so it calls no provider. Nor does the end of a block whose generator or coroutine is
closed, because the garbage collector closes these too.

When the interpreter ends, nothing is closed, and memory that is still registered is never freed: until the process has
gone, peers may write to it, and receives are posted to it. _on_exit() keeps it before the interpreter takes anything
apart, because finalizers may free memory that something still refers to. What daemon threads register after that is
kept when it is dropped. Only memory that was given as (address, length) is not ndpy's to keep: _on_exit() deregisters
it.
"""

from __future__ import annotations

import abc
import contextlib
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ndpy import _core
from ndpy._core import Owned as Owned
from ndpy._core import Uncopied as Uncopied
from ndpy._core import next_serial as next_serial
from ndpy._core import with_own_methods as with_own_methods
from ndpy.errors import ClosedError, DeviceBusyError, DeviceRemovedError, ForeignObjectError, NdpyError
from ndpy.vocabulary.unraisable import report

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter

R = TypeVar("R", bound="Resource")


# What makes the objects of the public classes.
_MAKERS = {
    "Adapter": "ndpy.open_adapter()",
    "CompletionQueue": "Adapter.create_completion_queue()",
    "Connector": "Adapter.create_connector()",
    "DatagramListener": "Adapter.listen_for_datagrams()",
    "DatagramQueuePair": "Adapter.create_datagram_queue_pair()",
    "Destination": "DatagramQueuePair.resolve() or create_destination()",
    "DeviceMemory": "Adapter.alloc_device_memory()",
    "Listener": "Adapter.listen()",
    "MemoryRegion": "Adapter.register()",
    "MemoryWindow": "Adapter.create_memory_window()",
    "MulticastGroup": "DatagramQueuePair.join_multicast()",
    "ProtectionDomain": "Adapter.create_protection_domain()",
    "QueuePair": "Adapter.create_queue_pair()",
    "SharedReceiveQueue": "Adapter.create_shared_receive_queue()",
    "XrcDomain": "Adapter.open_xrc_domain()",
    "XrcReceiveQueue": "XrcDomain.create_shared_receive_queue()",
    "XrcReceiver": "XrcDomain.create_receiver()",
    "XrcSender": "Adapter.create_xrc_sender()",
}


class _Made(abc.ABCMeta):
    """The type of classes whose objects are made by other objects. If a program calls such a class, the error names the
    right call.
    """

    # Not for type checkers, which take the parameters from __init__().
    if not TYPE_CHECKING:

        def __call__(cls, *arguments, **named):
            maker = _MAKERS.get(cls.__name__)
            if maker and cls.__abstractmethods__:
                raise TypeError(f"{cls.__name__} objects are made by {maker}, not by calling the class")
            return super().__call__(*arguments, **named)


class Resource(_core.Resource, metaclass=_Made):
    """Base of the public classes that have close()."""

    #: Orphans are closed in ascending order, so that users go before what they use.
    _release_order = 0
    #: Whether it is an orphan that could not be closed, of which the program was warned.
    _close_failed = False

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def __enter__(self: R) -> R:
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is GeneratorExit:
            # The garbage collector may be closing a generator or a coroutine that was dropped, which is a finalizer
            # too.
            if not self.closed:
                self._adapter._adopt(self)
            return
        try:
            self.close()
        except DeviceBusyError:
            # The exception of the body matters more than objects that it left open. They are closed when they are
            # dropped.
            if error is None:
                raise

    # By the interpreter's end the names of a module may have gone, so the finalizer has its own.
    def _on_dropped(
        self,
        interpreter_ends: Callable[[], bool] = sys.is_finalizing,
        keep_for_ever: Callable[[object], None] = _core.keep_for_ever,
    ) -> None:
        """The finalizer of an open object calls this. If it raises, the memory stays for ever."""
        if interpreter_ends():
            keep_for_ever(self._owner)
            return
        message = f"unclosed {self!r}"
        # This comes first: if warnings are errors, the next line raises.
        self._adapter._adopt(self)
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def _check(self) -> None:
        if self._defunct is not None:
            raise self._defunct()

    def _closed_maker(self) -> Callable[[], NdpyError]:
        """What makes the error for a use after close()."""
        # Not a bound method: the cycle would keep a region's buffer until the garbage collector runs.
        return partial(ClosedError, f"{self._describe()} is closed")

    def _closed_error(self) -> NdpyError:
        return ClosedError(f"{self._describe()} is closed")

    def _forked_error(self) -> NdpyError:
        error = ClosedError(
            f"{self._describe()} was opened by the parent process and does not work in a forked child; "
            "start workers with the 'spawn' method and open the adapter there"
        )
        error.problem = "fork"
        return error

    def _removed_error(self) -> NdpyError:
        return DeviceRemovedError(
            f"adapter {self._adapter.info.name} was removed; close all of its objects, and open it again when it is "
            f"back",
            operation=self._describe(),
        )

    def _on_forked(self) -> None:
        """In a forked child, nobody may use or free it. Renew the locks, and forget what is under way."""
        if not self.closed:
            self._defunct = self._forked_error
        self._inherit()

    def _on_exit(self) -> None:
        """The interpreter is about to end. See above."""
        _core.keep_for_ever(self._owner)

    def _on_removed(self) -> None:
        """The adapter has been removed: wake all waiting threads. The adapter's thread calls this once."""

    def _require_same_adapter(self, other: Resource, what: str) -> None:
        """Raise unless `other` is open and belongs to this adapter; `what` names it in the error."""
        self._require_same_device(other, what)
        if other._adapter is not self._adapter:
            raise ForeignObjectError(
                f"{what} belongs to another protection domain of {self._adapter.info.name} than this "
                f"{self._describe()}; memory "
                "and what uses it work together only within one domain"
            )

    def _require_same_device(self, other: Resource, what: str) -> None:
        """The same for an object that works with all protection domains of an adapter."""
        if not isinstance(other, Resource):
            raise TypeError(f"{what} is an object that this adapter has made, not {other!r:.80}")
        other._check()
        if other._adapter._device is not self._adapter._device:
            raise ForeignObjectError(
                f"{what} belongs to another open adapter ({other._adapter.info.name}, opened separately) than this "
                f"{self._describe()} ({self._adapter.info.name}); objects work together only within one open adapter"
            )

    def _describe(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        return f"<{self._describe()}{' closed' if self.closed else ''}>"

    def _refuse_if_used(self) -> None:
        """Raise DeviceBusyError while something depends on this."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Free the native resource. If it raises, the object stays open."""


class AdapterObject(Resource):
    """Base of the public classes that tell their adapter."""

    @property
    def adapter(self) -> Adapter:
        """The adapter, or the protection domain, that it was made from."""
        return self._adapter


class Orphans(_core.Orphans):
    """Objects that were dropped without close(). They are closed in a thread that may call a provider."""

    def __init__(self) -> None:
        self._dropped: deque[Resource] = deque()
        #: Those whose close() raised. A try may take long, so only the adapter's own close() tries again.
        self._failed: deque[Resource] = deque()
        self._closing_lock = threading.RLock()
        self._is_closing = False

    def add(self, orphan: Resource) -> None:
        """Add one. This takes no lock, since finalizers call it."""
        self._dropped.append(orphan)
        self.may_have_some = True

    def waiting(self) -> list[Resource]:
        """Those that have not been closed."""
        return [*self._dropped, *self._failed]

    def take_all_in_child(self) -> list[Resource]:
        """Take out all of them, in a forked child. They are the parent's, and no thread of the child closes any."""
        self._closing_lock = threading.RLock()
        self._is_closing = self.may_have_some = False
        left = self.waiting()
        self._dropped.clear()
        self._failed.clear()
        return left

    def close(self, *, again: bool = False) -> None:
        """Close them, users before what they use. If another thread is doing that, wait for it.

        An orphan that is still in use stays for the next time. When all have had their turn, this warns of each that
        cannot be closed, once.

        Parameters:
            again: whether to try again those whose close() has raised.
        """
        failures: list[str] = []
        with self._closing_lock:
            nested, self._is_closing = self._is_closing, True
            self.may_have_some = True
            taken: list[Resource] = []
            try:
                # At every step an orphan is in `taken` or in `source`: Ctrl-C may come between any two steps.
                for source in (self._dropped, self._failed) if again else (self._dropped,):
                    while source:
                        taken.append(source[0])
                        source.popleft()
                taken.sort(key=_release_order, reverse=True)
                while taken:
                    self._close_one(taken[-1], failures)
                    taken.pop()
            finally:
                self._dropped.extend(taken)
                self._is_closing = nested
                if not nested and not self._dropped:
                    self.may_have_some = False
                    # A finalizer may have added one just before that.
                    if self._dropped:
                        self.may_have_some = True
        for message in failures:
            warnings.warn(message, ResourceWarning, stacklevel=2)

    def _close_one(self, orphan: Resource, failures: list[str]) -> None:
        try:
            orphan.close()
        except DeviceBusyError:
            self._dropped.append(orphan)
        except Exception as error:
            self._failed.append(orphan)
            if not orphan._close_failed:
                orphan._close_failed = True
                failures.append(f"{orphan!r} was dropped and cannot be closed: {error}")

    def close_in_thread(self) -> None:
        """close() in the adapter's thread, which no exception may end. Exceptions go to sys.unraisablehook."""
        try:
            self.close()
        except BaseException as error:
            report(error, "the thread of an adapter, which closes what was dropped")


_release_order = attrgetter("_release_order")


def busy(resource: Resource, users: list[str]) -> DeviceBusyError:
    """The error for closing an object that is in use. It names up to five users."""
    shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
    return DeviceBusyError(f"{resource._describe()} is in use by {shown}; close these first", operation="close")


def refuse_if_used(resource: Resource, attribute: str) -> None:
    """Raise DeviceBusyError if an open object of the same adapter has the resource as this attribute.

    The adapter's list has also what was dropped and waits for its turn to be closed. A weak reference would not: the
    garbage collector clears it before that.
    """
    children = resource._adapter._own_children()
    users = [child._describe() for child in children if getattr(child, attribute, None) is resource]
    if users:
        raise busy(resource, users)


@contextlib.contextmanager
def prevent_close(*resources: Resource | None) -> Iterator[None]:
    """Let no other thread close one of these while the block lasts. Raises ClosedError if one is closed."""
    with contextlib.ExitStack() as stack:
        # All threads take the locks in the same order.
        for resource in sorted({resource for resource in resources if resource is not None}, key=_serial):
            stack.enter_context(resource._lifetime)
            resource._check()
        yield


_serial = attrgetter("_serial")
