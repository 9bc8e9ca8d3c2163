"""What a platform supplies: every native step, with its locks and errors, and the classes of its objects.

A public class derives from its steps here, does all the rest, and calls them. ndpy/platforms/verbs and
ndpy/platforms/networkdirect have a class for each, which implements them. What has a body here may be left as it is,
and what raises NotImplementedError is called only on adapters that claim the capability.

One file, so that the author of a platform finds all of them in one place.

A step raises NdpyError, made by ndpy.errors from the provider's number, and has changed nothing then, unless it says
otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ndpy import errors

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.arrays import ArrayMemory
    from ndpy.objects.completion import PostedRequests
    from ndpy.objects.completion_queue import CompletionQueue
    from ndpy.objects.connection import Connector
    from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy
    from ndpy.objects.connection_states import State
    from ndpy.objects.datagram_listener import DatagramListener
    from ndpy.objects.datagram_queue_pair import DatagramQueuePair, Destination
    from ndpy.objects.device_memory import DeviceMemory
    from ndpy.objects.listener import Listener
    from ndpy.objects.memory import Binding, MemoryRegion, MemoryWindow
    from ndpy.objects.multicast_group import MulticastGroup
    from ndpy.objects.pending import Pending
    from ndpy.objects.poller import Poller
    from ndpy.objects.protection_domain import ProtectionDomain
    from ndpy.objects.queue_pair import QueuePair
    from ndpy.objects.shared_receive_queue import SharedReceiveQueue
    from ndpy.objects.window_requests import BindRequest
    from ndpy.objects.xrc import XrcDomain, XrcSender
    from ndpy.vocabulary.addresses import Address
    from ndpy.vocabulary.clock import DeviceClock
    from ndpy.vocabulary.counters import Counters
    from ndpy.vocabulary.endpoint import Endpoint
    from ndpy.vocabulary.flags import Access, Notify, Operation, Status
    from ndpy.vocabulary.info import AdapterInfo, PathInfo
    from ndpy.vocabulary.queue_pair_attributes import QueuePairAttributes, QueuePairState


class Platform(Protocol):
    """What the module platform of each platform has. implementation() of ndpy/platforms/__init__.py returns one of the
    two.
    """

    @property
    def Poller(self) -> type[Poller]: ...

    @property
    def open_adapter(self) -> Callable[[Any], Adapter]:
        """Open what list_adapters() or list_named() described."""

    def list_adapters(self, provider: str | None = None, version: int | None = None, /) -> list[AdapterInfo]:
        """See ndpy.list_adapters()."""

    def list_named(self, which: str | None) -> list[AdapterInfo] | None:
        """The adapters among which `which` chooses. None if it is those of list_adapters()."""

    def is_listed_by_name_only(self, which: str | None) -> bool:
        """Whether list_adapters() lists this adapter only if the environment names it."""

    def describe_unlisted(self) -> dict[str, str]:
        """A sentence about each such adapter, by its name."""

    def why_no_adapter(self) -> str:
        """Say what is missing on a machine without an adapter, and what to do."""

    def explain_absence(self, name: str) -> None:
        """Raise the reason why list_adapters() leaves out the adapter of this name, if there is such an adapter."""

    def read_counters(self, name: str) -> Counters:
        """Read the counters of an adapter."""

    def allocate(self, length: int, alignment: int, huge_pages: bool, numa_node: int | None) -> memoryview:
        """Do alloc(), whose arguments were checked."""


def _lacking(*arguments: Any) -> Any:
    """In place of a class that needs a capability which no adapter of the platform claims."""
    raise NotImplementedError


@dataclass(frozen=True)
class Classes:
    """The platform's classes for the objects that an adapter makes."""

    region: Callable[..., MemoryRegion]
    window: type[MemoryWindow]
    completion_queue: type[CompletionQueue]
    shared_receive_queue: type[SharedReceiveQueue]
    queue_pair: type[QueuePair]
    connector: Callable[..., Connector]
    listener: type[Listener]
    datagram_queue_pair: Callable[..., DatagramQueuePair] = _lacking
    datagram_listener: Callable[..., DatagramListener] = _lacking
    protection_domain: Callable[..., ProtectionDomain] = _lacking
    device_memory: Callable[..., DeviceMemory] = _lacking
    xrc_domain: Callable[..., XrcDomain] = _lacking
    xrc_sender: Callable[..., XrcSender] = _lacking


class AdapterSteps(abc.ABC):
    """The steps of an open adapter."""

    __slots__ = ()

    _classes: ClassVar[Classes]
    #: The result of an operation of this adapter. A platform may need another way to wait.
    _pending_type: ClassVar[type[Pending[Any]]]
    #: Whether its regions can be of memory of a CUDA device.
    _takes_devices: ClassVar[bool] = False

    @abc.abstractmethod
    def _native_open(self) -> None:
        """Open the adapter and start its thread. If it raises, _native_close() follows."""

    @abc.abstractmethod
    def _native_close(self) -> None:
        """Stop the thread and free everything that _native_open() made, even if it failed half-way."""

    @abc.abstractmethod
    def _native_stop_registering(self) -> None:
        """Cancel the registrations that are under way, and wait until the provider has let go of them."""

    def _native_resume_registering(self) -> None:
        """Allow registrations again, because the adapter stays open."""

    def _native_counters(self) -> Counters:
        """Do counters(). Called only with Capability.COUNTERS."""
        raise NotImplementedError

    def _native_register_implicit(self, access: Access) -> MemoryRegion:
        """Called only if info.capabilities has IMPLICIT_ON_DEMAND."""
        raise NotImplementedError

    def _native_clock(self) -> DeviceClock:
        """Called only if info.capabilities has CLOCK."""
        raise NotImplementedError

    def _native_register_null(self) -> MemoryRegion:
        """Called only if info.capabilities has NULL_REGIONS."""
        raise NotImplementedError

    def _native_register_at(
        self, owner: Any, buffer: Any, start: int, length: int, address: int, access: Access
    ) -> MemoryRegion:
        """Called only if info.capabilities has CHOSEN_ADDRESS."""
        raise NotImplementedError

    def _native_register_dmabuf(self, fd: int, offset: int, length: int, iova: int, access: Access) -> MemoryRegion:
        """Called only if info.capabilities has DMABUF."""
        raise NotImplementedError

    @abc.abstractmethod
    def _native_port_state(self) -> str:
        """Do port_state, or raise what _lacks() makes, as the next two."""

    @abc.abstractmethod
    def _native_completion_port(self) -> int:
        """Do completion_port."""

    @abc.abstractmethod
    def _native_overlapped_file(self) -> int:
        """Do overlapped_file."""

    @abc.abstractmethod
    def _monitor(self, on_change: Callable[[], None]) -> Any:
        """Make a monitor of memory for one cache (ndpy/cache/monitor.py).

        Raises UnsupportedError, with the reason, if this system has none.
        """


class ThreadSteps(abc.ABC):
    """The steps of the thread that waits for an adapter's events."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_turn(self) -> bool:
        """Wait for events or _native_wake(), and handle what has come. False after the thread was told to stop."""

    @abc.abstractmethod
    def _native_wake(self) -> None:
        """Make the present or next _native_turn() return, after it has called _on_woken(). Under _waking."""

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free what the thread waits on. Under _waking."""


class RegionSteps(abc.ABC):
    """The steps of a region, under its lifetime's lock."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def _native(self) -> Any:
        """The native object. None when there is nothing left to free."""

    @abc.abstractmethod
    def _native_register(self) -> None:
        """Register, wait, and read the tokens. If it raises, _native_free() follows."""

    def _native_is_on_device(self, memory: ArrayMemory) -> None:
        """A CUDA device has the memory. Called before it is registered, and only if the adapter _takes_devices."""
        raise NotImplementedError

    @abc.abstractmethod
    def _native_begin_register(self) -> Pending[Any]:
        """Start to register. _on_registered() follows. The request holds the region until then."""

    @abc.abstractmethod
    def _native_deregister(self) -> None:
        """Deregister and wait. Harmless if the adapter has been removed."""

    def _native_begin_deregister(self, on_end: Callable[[errors.NdpyError | None], None]) -> bool:
        """Start to deregister. False if it has ended. Otherwise on_end(failure) follows and takes the region's lock."""
        self._native_deregister()
        return False

    def _native_finish_deregister(self) -> bool:
        """Wait for the end of _native_begin_deregister(), and finish. Returns False if nothing was begun."""
        return False

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free the native object, registered or not. Harmless when repeated, and before the first registration."""

    def _native_reregister(
        self, owner: Any, memory: tuple[int, int] | None, access: Access | None, domain: Adapter | None
    ) -> None:
        """Give it this (address, length), these rights or this protection domain. Only if info.capabilities has
        REREGISTRATION.

        It may mark the region as unusable until reregister() has noted the new memory.

        owner: the object that keeps the new memory in place.
        """
        raise NotImplementedError

    def _native_prefetch(self, address: int, length: int, write: bool) -> None:
        """Do prefetch(). Called only for memory on demand."""
        raise NotImplementedError


class WindowSteps(abc.ABC):
    """The steps of a memory window."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_create(self) -> Any:
        """Make a native window. None if bind() makes it."""

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free the native window, bound or not."""


class CompletionQueueSteps(abc.ABC):
    """The steps of a completion queue."""

    __slots__ = ()

    #: The platform's ffi, and functions of its extension module: see cdefs/ndpy_abi.h.
    _ffi: Any
    _native_provider: Any
    _native_drain: Any
    _native_undelivered: Any

    @abc.abstractmethod
    def _native_create(self, depth: int) -> None:
        """Set _cq and _native. If it raises, _native_free() frees the parts that exist."""

    @abc.abstractmethod
    def _native_sleep(self, deadline: float | None) -> bool:
        """Ask for a notification, and sleep on a waiter in _waiters until it comes, or _native_wake(). Returns False at
        the deadline. Otherwise there may be completions, or the next poll raises.
        """

    @abc.abstractmethod
    def _native_wake(self, waiter: Any) -> None:
        """Wake the thread that sleeps on it, or else the next one that does. Under the lock."""

    @abc.abstractmethod
    def _native_arm(self, kind: Notify, pending: Pending[None]) -> bool:
        """Ask for a notification that ends this Pending. Returns whether there are completions already.
        Under the lock.
        """

    @abc.abstractmethod
    def _native_rearm(self) -> list[Pending[None]]:
        """Ask for the notifications again after a close that failed. Returns the Pendings to end at once. Under the
        lock.
        """

    @abc.abstractmethod
    def _native_resize(self, depth: int) -> None:
        """Change the depth of the native queue. Under the lock."""

    def _refine_status(self, entry: tuple[int, ...], record: Any, posted: PostedRequests) -> tuple[int, ...]:
        """Correct the status of a failed request's completion where the driver reports a wrong or imprecise one.

        record: the elements of the request, or None if they are not known.
        """
        return entry

    def _native_end_requests(self) -> None:
        """Have the provider end the notifications that it was asked for."""

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free the native objects, and set each to None once it is freed. If one fails, _cq is not None. Under the
        lock.
        """


class SharedReceiveQueueSteps(abc.ABC):
    """The steps of a shared receive queue. All are called under its lock, unless they say otherwise."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_create(self) -> Any:
        """Create the native queue. Called by the constructor."""

    @abc.abstractmethod
    def _native_destroy(self) -> None:
        """Destroy the native queue. Raises if the system refuses."""

    @abc.abstractmethod
    def _native_modify(self, depth: int, threshold: int) -> None:
        """Tell the provider the new depth and threshold. 0 keeps the old one."""

    @abc.abstractmethod
    def _native_arm(self) -> Any:
        """Ask the provider for a notification. Returns its key, or None if there already are fewer receives."""

    def _native_cancel_notifications(self) -> None:
        """Have the provider cancel the notifications that have not come. Not under the lock."""


class ConnectorSteps(abc.ABC):
    """The steps of a connector. All are called under the state lock, unless they say otherwise."""

    __slots__ = ()

    #: Whether an offer that is not taken leaves the queue pair unusable.
    _offer_spends_queue_pair = False
    #: Whether an accept() that was refused at once leaves the queue pair unusable.
    _refused_accept_spends_queue_pair = False

    @abc.abstractmethod
    def _native_address(self, peer: bool) -> Address | None:
        """The peer's address or this side's. None before there is one."""

    @abc.abstractmethod
    def _native_bind(self, address: Address) -> Address:
        """Choose the local address. Returns it with the real port."""

    @abc.abstractmethod
    def _native_connect(self, queue_pair: QueuePair, family: int, destination: tuple[Any, ...]) -> None:
        """Start to connect with _parameters. Leads to _on_offered() or _on_connect_failed(). Raises if refused."""

    @abc.abstractmethod
    def _native_abandon_attempt(self, error: errors.NdpyError) -> None:
        """Give up an attempt that gets no answer, and call _try_next(error)."""

    def _native_no_answer(self, target: str, timeout_s: float) -> errors.TimeoutError:
        """Return the error of a connect() whose target has not answered in time. Not called under the lock."""
        message = f"{target} has not answered within {timeout_s:g} s"
        return errors.TimeoutError(message, operation="connect", problem="connect-timeout")

    @abc.abstractmethod
    def _native_complete(self, queue_pair: QueuePair) -> None:
        """Take the offer. Leads to _on_established() or _on_lost(). Raises if refused."""

    @abc.abstractmethod
    def _native_accept(self, queue_pair: QueuePair) -> None:
        """Accept with _parameters. Leads to _on_established() or _on_lost(). Raises if refused."""

    def _native_established(self) -> None:
        """The connection was just made. The program does not know yet."""

    @abc.abstractmethod
    def _native_reject(self, private_data: bytes) -> None:
        """Refuse the request or the offer."""

    def _native_forget_attempt(self) -> None:
        """Free the resources that only a failed connect() or a rejected request used."""

    @abc.abstractmethod
    def _native_withdraw(self, former: State) -> None:
        """Take back the step that led to the former state."""

    @abc.abstractmethod
    def _native_disconnect(self) -> None:
        """Start to disconnect. Leads to _on_disconnected(). Raises if the peer cannot be told now."""

    def _native_tell_peer(self) -> None:
        """Tell the peer that the connection ends. The connector or the queue pair is being closed."""

    @abc.abstractmethod
    def _native_on_failed_completion(self) -> None:
        """A request of the established connection has failed."""

    def _native_end_requests(self) -> None:
        """Have the provider end all requests of this connector. Not called under the state lock."""

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free the native connector."""


class ListenerSteps(abc.ABC):
    """The steps of a listener."""

    __slots__ = ()

    def _native_expect_request(self) -> None:
        """Have the provider take the next request. Called under the lifetime's lock."""

    @abc.abstractmethod
    def _native_close(self) -> list[Connector]:
        """Stop listening and free the native listener, unless that was done before. Returns the requests that came
        meanwhile.

        If it raises, nothing has changed.
        """


class PollerSteps:
    """The steps of a poller.
    Not abstract, because type checkers would refuse `Poller()`, which makes the platform's class.
    """

    __slots__ = ()

    def _native_add(self, queue: CompletionQueue) -> Any:
        """Prepare for notifications of this queue. Returns what _native_remove() needs. Called under both locks."""
        raise NotImplementedError

    def _native_remove(self, queue: CompletionQueue, watched: Any) -> None:
        """Stop notifications of this queue."""
        raise NotImplementedError

    def _native_arm(self, queue: CompletionQueue, watched: Any) -> bool:
        """Ask for one notification. Returns whether there are completions already. Called under the queue's lock."""
        raise NotImplementedError

    def _native_wait(self, deadline: float | None) -> bool:
        """Wait for notifications or _native_wake(), and note which queues to poll. Returns False at the deadline."""
        raise NotImplementedError

    def _native_wake(self) -> None:
        """Make the present or next _native_wait() return."""
        raise NotImplementedError

    def _native_free(self) -> None:
        """Free the native object that the poller waits on."""
        raise NotImplementedError


class QueuePairSteps(abc.ABC):
    """The steps of a queue pair. All are called under its lock, unless they say otherwise."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_create(self) -> Any:
        """Create the native queue pair."""

    def _native_set_up(self) -> None:
        """Prepare what was created, so that receives can be posted. Called by the constructor."""

    @abc.abstractmethod
    def _native_destroy(self) -> None:
        """Destroy the native queue pair, and set _qp to None. If the system refuses, it stays open, and this raises."""

    @abc.abstractmethod
    def _native_free_slots(self, native: Any) -> None:
        """Free the memory of the request slots, as soon as no completion can refer to it. Not under the lock."""

    @abc.abstractmethod
    def _native_begin_flush(self) -> None:
        """Ask the provider to end all requests. It may be unable to."""

    @abc.abstractmethod
    def _native_flush(self) -> bool:
        """Do flush(). Returns whether completions were added of which the provider does not notify."""

    @abc.abstractmethod
    def _native_post_marker(self, native: Any) -> int:
        """Post a request behind silent ones. The flush ends it. Returns whether it was posted.

        QueuePair has this and the next one as most providers need them.
        """

    @abc.abstractmethod
    def _native_flush_limit_s(self) -> float:
        """The longest time to wait for the provider's flush."""

    def _native_completes_late_requests(self) -> bool:
        """Whether the provider completes a request that is posted after it was asked to end all of them."""
        return True

    def _native_has_last_receive(self) -> bool:
        """Whether a queue pair that is flushed takes no more receives of its shared receive queue. Called under the
        lock.
        """
        return True

    def _native_end_connection(self, natively: bool) -> bool:
        """Cancel the outstanding requests. Returns as _native_flush() does. A provider may have done it itself."""
        return False

    def _native_cancel_late_request(self, operation: int) -> bool:
        """Cancel a request that was posted after the end of the connection. Returns as _native_flush() does.

        A provider may do it itself.
        """
        return False

    def _native_on_failed_completion(self) -> None:
        """A request failed. Not under the lock."""

    def _native_endpoint(self, gid: int | str | None, psn: int | None) -> Endpoint:
        """Do local_endpoint(). Called only if _has_endpoints."""
        raise NotImplementedError

    def _native_state(self) -> QueuePairState:
        """The state of the native queue pair. This and the next three are called only on adapters with
        Capability.MODIFY.
        """
        raise NotImplementedError

    def _native_modify(self, given: dict[str, Any]) -> None:
        """Set these of QueuePairAttributes."""
        raise NotImplementedError

    def _native_query(self) -> QueuePairAttributes:
        """Do query()."""
        raise NotImplementedError

    def _native_reset(self) -> None:
        """Move the native queue pair to RESET, and cancel all of its requests."""
        raise NotImplementedError

    def _native_data_in_order(self, operation: Operation) -> bool:
        """Called only if info.capabilities has DATA_IN_ORDER. Under the lock."""
        raise NotImplementedError

    def _native_path(self) -> PathInfo | None:
        """Do `path`. Called only if there is or was a connection."""
        return None

    def _native_connect_endpoint(
        self, local: Endpoint, remote: Endpoint, limits: ReadLimits, retry: RetryPolicy
    ) -> None:
        """Connect the native queue pair. Called only if _has_endpoints."""
        raise NotImplementedError

    def _native_retry(self) -> RetryPolicy:
        """Return what the native queue pair has. Called only on adapters with Capability.RETRY_POLICY."""
        raise NotImplementedError

    def _native_choose_token(self, window: MemoryWindow) -> int:
        """Return the token of the window's next binding, if this side chooses it. Otherwise the bind sets it."""
        return 0

    def _native_return_token(self, binding: Binding) -> None:
        """The bind with this token was not posted, so the token is free again."""

    @abc.abstractmethod
    def _native_post_bind(self, binding: Binding, context: int, flags: int) -> int:
        """Post a bind. Returns as ndpy_post_bind() does."""

    def _native_bind_posted(self, request: BindRequest) -> None:
        """The provider has taken the bind."""

    def _native_bind_failed(self, request: BindRequest) -> None:
        """The bind has failed, and the window is as it was before. Not under the lock."""

    def _native_bind_took_effect(self, request: BindRequest) -> None:
        """The bind has succeeded although the window seemed to be bound. Not under the lock."""

    @abc.abstractmethod
    def _native_post_invalidate(self, window: MemoryWindow, binding: Binding | None, context: int, flags: int) -> int:
        """Post an invalidate. binding is None if the window is not bound here.
        Returns as ndpy_post_invalidate() does.
        """

    @abc.abstractmethod
    def _explain(self, status: Status, native_status: int = 0) -> str:
        """Likely causes of a failed completion on this connection, or ""."""

    def _native_meaning(self, status: Status, native_status: int) -> str:
        """What a completion status means, if the provider's number says more than ndpy's, or ""."""
        return ""

    @abc.abstractmethod
    def _native_status_name(self, native_status: int) -> str:
        """The provider's name of a completion status, or ""."""

    def _native_problem(self, native_status: int) -> str:
        """The word for `ndpy explain` of a completion status, if the provider's number says more than ndpy's, or ""."""
        return ""


class DestinationSteps(abc.ABC):
    """The steps of a destination of datagrams."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_create(self) -> None:
        """Make the native handle."""

    @abc.abstractmethod
    def _native_destroy(self) -> None:
        """Destroy it. If it raises, and there still is one, the destination stays open."""


class DatagramSteps(abc.ABC):
    """The steps that only a queue pair for datagrams has."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_resolve(
        self, family: int, destination: tuple[Any, ...], target: str, private_data: bytes
    ) -> Pending[Destination]:
        """Do begin_resolve()."""

    @abc.abstractmethod
    def _native_join(self, family: int, group: tuple[Any, ...]) -> Pending[MulticastGroup]:
        """Do begin_join_multicast()."""

    @abc.abstractmethod
    def _local_port(self) -> int:
        """The number of the port that it uses."""

    @abc.abstractmethod
    def _native_multicast(self, operation: str, group: bytes, lid: int) -> None:
        """Attach to or detach from a multicast group. Under the lock."""


class DeviceMemorySteps(abc.ABC):
    """Of memory of the adapter."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_alloc(self, alignment: int) -> Any:
        """Allocate the memory."""

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free it."""

    @abc.abstractmethod
    def _native_write(self, offset: int, view: memoryview, length: int) -> None:
        """Copy `length` bytes into it. Called under the lock of its lifetime, like _native_read()."""

    @abc.abstractmethod
    def _native_read(self, offset: int, length: int) -> bytes:
        """Copy bytes out of it."""

    @abc.abstractmethod
    def _native_register(self, offset: int, length: int, access: Access) -> MemoryRegion:
        """Make a region of a part. The region keeps this object."""


class XrcDomainSteps(abc.ABC):
    """The steps of a domain of XRC."""

    __slots__ = ()

    @abc.abstractmethod
    def _native_open(self) -> Any:
        """Open the native domain."""

    @abc.abstractmethod
    def _native_close(self) -> None:
        """Close it, unless that was done before. Raises if the system refuses, and then it is still open."""
