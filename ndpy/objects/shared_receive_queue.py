"""Shared receive queues: receives that several queue pairs draw from."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ndpy import _core, errors
from ndpy.objects.memory import Elements, MemoryRegion, Sge
from ndpy.objects.native_steps import SharedReceiveQueueSteps
from ndpy.objects.pending import Pending
from ndpy.objects.resource import AdapterObject, busy
from ndpy.objects.work_queues import BAD_TOKEN, QUEUE_FULL, TOO_LONG, TOO_MANY_ELEMENTS, bad_token, flatten

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter


class SharedReceiveQueue(AdapterObject, SharedReceiveQueueSteps):
    """Receives that several queue pairs draw from, made by Adapter.create_shared_receive_queue().

    A message takes the oldest receive. The completion goes to receive_cq of the queue pair that the message came for.
    If the queue is empty, senders wait, and nothing fails.

    Attributes:
        depth: how many receives may be outstanding.
        max_sge: how many elements one receive may have.
    Source: IND2SharedReceiveQueue (contract G.5, G.6); ibv_create_srq(3).
    """

    _release_order = 25

    #: The platform's extension module, with the functions of cdefs/ndpy_abi.h.
    _lib: Any
    _ffi: Any
    _post_shared: Any
    #: struct ndpy_shared_queue.
    _native: Any
    #: The native queue.
    _srq: Any

    def __init__(self, adapter: Adapter, depth: int, max_sge: int, threshold: int) -> None:
        super().__init__(adapter)
        self.depth = depth
        self.max_sge = max_sge
        self._threshold = threshold
        self._lock = threading.Lock()
        self._users = 0
        # Receives of several queue pairs complete in any order, so their records are stored by slot.
        self._capacity = depth
        self._free = list(range(depth - 1, -1, -1))
        #: Slots beyond the present depth.
        self._unused: list[int] = []
        self._records: dict[int, Any] = {}
        #: The notifications that have not come. The key is the result of _native_arm().
        self._armed: dict[Any, Pending[None]] = {}
        # A post copies the array. So one array, used under the lock, serves all posts.
        self._elements = self._ffi.new("struct ndpy_element[]", max(max_sge, 1))
        self._elements_address = int(self._ffi.cast("uintptr_t", self._elements))
        self._largest_token = int(self._lib.ndpy_provider_table().largest_token)
        self._srq = self._native_create()
        self._native = self._lib.ndpy_shared_queue_new(self._srq, depth, max_sge, adapter.info.max_transfer_length)
        if not self._native:
            self._native_destroy()
            raise errors.InsufficientResourcesError("out of memory", operation="create shared receive queue")
        self._opened()

    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Post memory for one message to any of the queue pairs. See QueuePair.receive().

        Parameters:
            sges: a region, a slice of one, or a sequence of them, up to max_sge.
            context: 0 to 2**64 - 1; comes back in the Completion.
        Raises:
            QueueFullError: `depth` receives are outstanding. Take completions, then try again.
            LimitExceededError, ForeignObjectError, ClosedError: as for QueuePair.receive().
        """
        elements = flatten(sges)
        if len(elements) > self.max_sge:
            raise self._refusal(TOO_MANY_ELEMENTS, elements)
        for element in elements:
            if not isinstance(element, (Sge, MemoryRegion)):
                raise TypeError(f"an element is a region or a slice of one, not {type(element).__name__}")
        if not isinstance(context, int) or not 0 <= context < 1 << 64:
            raise ValueError(f"context is 0 to 2**64-1, not {context!r}")
        with self._lock:
            self._check()
            if not self._free:
                raise self._refusal(QUEUE_FULL, elements)
            refused = _core.read_pieces(self, self._largest_token, elements, self._elements_address)
            if refused:
                raise self._refusal(refused, elements)
            slot = self._free.pop()
            # Record it first. Another thread may take the completion before the call returns.
            self._records[slot] = elements
            refused = self._post_shared(self._native, slot, context, self._elements, len(elements))
            if refused:
                self._free_slot(slot)
                raise self._refusal(refused, elements)

    def _free_slot(self, slot: int) -> None:
        """The receive in this slot has ended."""
        self._records.pop(slot, None)
        self._free.append(slot)

    def _refusal(self, refused: int, elements: list[Any]) -> Exception:
        if refused == QUEUE_FULL:
            return errors.QueueFullError(
                f"all {self.depth} receives are outstanding; take completions, then try again", operation="receive"
            )
        if refused == TOO_MANY_ELEMENTS:
            return errors.LimitExceededError(
                f"receive: {len(elements)} elements are more than the {self.max_sge} of this queue"
            )
        if refused == TOO_LONG:
            return errors.LimitExceededError(
                f"receive: more bytes than the {self._adapter.info.max_transfer_length} that the adapter moves at once"
            )
        if refused == BAD_TOKEN:
            return bad_token("receive", elements)
        return self._native_refusal("receive", refused)

    def modify(self, depth: int = 0, threshold: int = 0) -> None:
        """Change the depth and the threshold of arm() (contract G.5.3).

        Parameters:
            depth: 1 to info.max_shared_receive_queue_depth, and at most the depth at the creation. 0 keeps the old
                depth.
            threshold: see arm(). 0 keeps the old threshold.
        Raises:
            LimitExceededError: the depth is beyond the adapter's limit, or below the number of outstanding receives.
            UnsupportedError: the depth is more than the depth at the creation.
        """
        self._check()
        maximum = self._adapter.info.max_shared_receive_queue_depth
        if not 0 <= depth <= maximum:
            raise errors.LimitExceededError(f"a shared receive queue of this adapter holds 1 to {maximum}, not {depth}")
        with self._lock:
            self._check()
            # A thread that takes completions frees slots without the lock. So there are only more free slots.
            outstanding = self.depth - len(self._free)
            if depth and depth < outstanding:
                raise errors.LimitExceededError(f"{outstanding} receives are outstanding; the depth cannot be {depth}")
            if depth > self._capacity:
                raise errors.UnsupportedError(
                    f"the queue was created for {self._capacity} receives and cannot grow beyond that",
                    operation="modify",
                )
            self._native_modify(depth, threshold)
            if depth:
                for _ in range(self.depth, depth):
                    self._free.append(self._unused.pop())
                for _ in range(depth, self.depth):
                    self._unused.append(self._free.pop())
                self.depth = depth
            if threshold:
                self._threshold = threshold

    # ---- notifications ----

    def arm(self) -> Pending[None]:
        """Ask for one notification that fewer than `threshold` receives are outstanding (contract G.6.3).

        The threshold is that of create_shared_receive_queue() or modify().

        Returns: a Pending that ends with None.
        Raises:
            InvalidFlagsError: the queue has no threshold.
        Source: IND2SharedReceiveQueue::Notify; ibv_modify_srq(3) with IBV_SRQ_LIMIT.
        """
        self._check()
        if not self._threshold:
            raise errors.InvalidFlagsError(
                "the queue has no threshold; give one to create_shared_receive_queue() or modify()"
            )
        pending: Pending[None] = self._adapter._pending_type("arm", lambda: self._disarm(pending))
        with self._lock:
            self._check()
            key = self._native_arm()
            if key is not None:
                self._armed[key] = pending
                return pending
        pending.succeed(None)
        return pending

    def _disarm(self, pending: Pending[None]) -> None:
        """Cancel an arm(). The provider may still send the notification."""
        with self._lock:
            self._armed = {key: armed for key, armed in self._armed.items() if armed is not pending}

    def _end_armed(self, error: errors.NdpyError | None, key: Any = None) -> None:
        """End the Pending with this key, or all of them, with success or with the error."""
        with self._lock:
            if key is None:
                ended, self._armed = list(self._armed.values()), {}
            else:
                pending = self._armed.pop(key, None)
                ended = [] if pending is None else [pending]
        for pending in ended:
            pending.succeed(None) if error is None else pending.fail(error)

    # ---- the end ----

    def _on_removed(self) -> None:
        self._end_armed(self._removed_error())

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = threading.Lock()
        self._armed = {}

    def _refuse_if_used(self) -> None:
        if self._users:
            users = [
                child._describe() for child in self._adapter._open_children() if getattr(child, "srq", None) is self
            ]
            raise busy(self, users)

    def _release(self) -> None:
        with self._lock:
            self._defunct = self._closed_error
        try:
            self._native_cancel_notifications()
            with self._lock:
                if self._srq is not None:
                    self._native_destroy()
                self._before_free()
                native, self._native = self._native, None
                if native is not None:
                    self._lib.ndpy_shared_queue_free(native)
        except BaseException:
            if self._srq is not None:
                self._mark_still_open()
            raise
        self._end_armed(errors.CanceledError("the shared receive queue was closed", operation="arm"))
        self._records.clear()

    def _before_free(self) -> None:
        """The native queue has gone. Under the lock."""

    def _describe(self) -> str:
        return f"SharedReceiveQueue of depth {self.depth}"
