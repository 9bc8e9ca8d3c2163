"""Requests that bind and invalidate memory windows: how they are posted, withdrawn, and what happens when they end.

The window has its binding as soon as the bind is posted. So a record of each posted request stays in the initiator
queue, and ended() corrects the window when the request turns out to have failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndpy import errors
from ndpy.objects.memory import Binding, MemoryRegion, MemoryWindow, Sge
from ndpy.vocabulary.flags import Access, Operation, Status

if TYPE_CHECKING:
    from ndpy.objects.queue_pair import QueuePair

_SUCCESS = int(Status.SUCCESS)
# As numbers, because operators of flags are slow.
_LOCAL_WRITE = int(Access.LOCAL_WRITE)
_REMOTE_RIGHTS = int(Access.REMOTE_READ | Access.REMOTE_WRITE)
_REMOTE_WRITE_ALONE = int(Access.REMOTE_WRITE) & ~_LOCAL_WRITE


class BindRequest:
    """A posted bind. It keeps window and region alive, and undoes the binding if it failed."""

    __slots__ = ("binding", "failed", "former_key", "of_bound_window")

    def __init__(self, binding: Binding, of_bound_window: bool) -> None:
        self.binding = binding
        #: The window was bound as far as this side knew. Then the request fails, unless the peer had invalidated the
        #: window.
        self.of_bound_window = of_bound_window
        self.failed = False
        #: On verbs: the key by which the provider found the window before.
        self.former_key = 0

    def ended(self, status: int) -> int:
        """The request has ended with this status. Returns the status for the program.

        Another thread may still be in the middle of posting it.
        """
        binding = self.binding
        queue_pair = binding.queue_pair
        if self.of_bound_window:
            if status != _SUCCESS:
                return status if queue_pair._status_if_forbidden is None else queue_pair._status_if_forbidden
            # The peer had invalidated the former binding, and this side did not know it yet.
            self.of_bound_window = False
            former = binding.window._binding
            if former is not None:
                former.end()
            if queue_pair._rings is not None:
                binding.begin()
                queue_pair._native_bind_took_effect(self)
        elif status != _SUCCESS:
            self.failed = True
            queue_pair._native_bind_failed(self)
            binding.end()
        return status


class InvalidateRequest:
    """A posted invalidate. It keeps the window alive, and ends the binding if it succeeded."""

    __slots__ = ("binding", "status_if_forbidden", "window")

    def __init__(self, window: MemoryWindow, binding: Binding | None, status_if_forbidden: int | None) -> None:
        self.window = window
        #: None: the window is not bound to this queue pair, so that the request fails.
        self.binding = binding
        self.status_if_forbidden = status_if_forbidden

    def ended(self, status: int) -> int:
        """The request has ended with this status. Returns the status for the program."""
        if self.binding is None:
            return status if status == _SUCCESS or self.status_if_forbidden is None else self.status_if_forbidden
        if status == _SUCCESS:
            self.binding.end()
        else:
            self.binding.invalidating = False
        return status


def bind(
    queue_pair: QueuePair, window: MemoryWindow, memory: MemoryRegion | Sge, access: Access, context: int, flags: int
) -> None:
    """Check what QueuePair.bind() was given, and post it."""
    queue_pair._check()
    element = memory[:] if isinstance(memory, MemoryRegion) else memory
    if not isinstance(element, Sge):
        raise TypeError(
            f"a window is bound to a region or to a slice of one (region[a:b]), not to a {type(memory).__name__}"
        )
    region = element.region
    queue_pair._require_same_adapter(region, "the region")
    queue_pair._require_same_adapter(window, "the window")
    if not element.length:
        raise errors.ElementRangeError("a window has at least one byte")
    offset = element.address - region.address
    if not 0 <= offset <= offset + element.length <= region.length:
        raise errors.ElementRangeError(f"{element!r} is outside of {region._describe()}")
    access = Access(access)
    rights = int(access)
    if rights & ~_REMOTE_RIGHTS:
        raise errors.InvalidFlagsError(f"a window grants REMOTE_READ and REMOTE_WRITE, not {access!r}")
    if rights & _REMOTE_WRITE_ALONE and not int(region.access) & _LOCAL_WRITE:
        raise errors.AccessViolationError(
            "a window that lets the peer write needs a region with Access.LOCAL_WRITE", operation="bind"
        )
    if not region._has_windows:
        raise errors.AccessViolationError(
            "a region of a dma-buf has no windows; register it with remote rights, and give the peer region.remote()",
            operation="bind",
        )
    # Neither can be closed meanwhile.
    with window._lifetime, region._lifetime:
        window._check()
        region._check()
        _post_bind(queue_pair, window, element, access, context, flags)


def _post_bind(
    queue_pair: QueuePair, window: MemoryWindow, element: Sge, access: Access, context: int, flags: int
) -> None:
    with queue_pair._lock:
        queue_pair._check()
        former = window._binding
        token = queue_pair._native_choose_token(window)
        binding = Binding(window, queue_pair, element.region, element, access, token)
        if queue_pair._bindings is None:
            queue_pair._bindings = set()
        request = BindRequest(binding, of_bound_window=former is not None and not former.invalidating)
        if not request.of_bound_window:
            binding.begin()
        queue_pair._posted_requests.initiator.append(request)
        try:
            refused = queue_pair._native_post_bind(binding, context, flags)
        except (OverflowError, TypeError) as error:
            _withdraw_bind(request, former)
            raise queue_pair._bad_argument(error, context, flags) from None
        if refused:
            _withdraw_bind(request, former)
        else:
            queue_pair._native_bind_posted(request)
    if refused:
        raise queue_pair._refusal(Operation.BIND, refused, [], flags)


def _withdraw_bind(request: BindRequest, former: Binding | None) -> None:
    """The request was not posted: the window is as it was before."""
    binding = request.binding
    binding.queue_pair._posted_requests.initiator.pop()
    binding.queue_pair._native_return_token(binding)
    if not request.of_bound_window:
        binding.end()
        binding.window._binding = former


def invalidate(queue_pair: QueuePair, window: MemoryWindow, context: int, flags: int) -> None:
    """Post QueuePair.invalidate()."""
    queue_pair._check()
    queue_pair._require_same_adapter(window, "the window")
    # The window cannot be closed meanwhile.
    with window._lifetime, queue_pair._lock:
        window._check()
        queue_pair._check()
        binding = window._binding
        if binding is not None and (binding.queue_pair is not queue_pair or binding.invalidating):
            binding = None
        queue_pair._posted_requests.initiator.append(
            InvalidateRequest(window, binding, queue_pair._status_if_forbidden)
        )
        try:
            refused = queue_pair._native_post_invalidate(window, binding, context, flags)
        except (OverflowError, TypeError) as error:
            queue_pair._posted_requests.initiator.pop()
            raise queue_pair._bad_argument(error, context, flags) from None
        if not refused:
            if binding is not None:
                binding.invalidating = True
            return
        queue_pair._posted_requests.initiator.pop()
    raise queue_pair._refusal(Operation.INVALIDATE, refused, [], flags)
