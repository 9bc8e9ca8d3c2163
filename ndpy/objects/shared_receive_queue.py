"""Shared receive queues: receives that several queue pairs draw from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import _core, errors
from ndpy.objects.native_steps import SharedReceiveQueueSteps
from ndpy.objects.operations import RECEIVE
from ndpy.objects.pending import Pending
from ndpy.objects.resource import busy
from ndpy.objects.work_queues import QUEUE_FULL, PostingQueue

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter


class SharedReceiveQueue(PostingQueue, SharedReceiveQueueSteps):
    """Receives that several queue pairs draw from, made by Adapter.create_shared_receive_queue().

    A message takes the oldest receive. The completion goes to receive_cq of the queue pair that the message came for.
    If the queue is empty, senders wait, and nothing fails.

    Attributes:
        depth: how many receives may be outstanding.
        max_sge: how many elements one receive may have.
    Source: IND2SharedReceiveQueue (contract G.5, G.6); ibv_create_srq(3).
    """

    _release_order = 25

    #: struct ndpy_shared_queue.
    _native: Any
    #: The native queue.
    _srq: Any

    def __init__(self, adapter: Adapter, depth: int, max_sge: int, threshold: int) -> None:
        super().__init__(adapter)
        self.depth = depth
        self.max_sge = max_sge
        self._threshold = threshold
        self._lock = _core.Lock()
        self._users = 0
        # Receives of several queue pairs complete in any order, so their records are stored by slot.
        self._capacity = depth
        self._free = list(range(depth - 1, -1, -1))
        self._records: dict[int, Any] = {}
        #: The notifications that have not come. The key is the result of _native_arm().
        self._armed: dict[Any, Pending[None]] = {}
        self._srq = self._native_create()
        self._native = self._lib.ndpy_shared_queue_new(self._srq, depth, max_sge, adapter.info.max_transfer_length)
        if not self._native:
            self._native_destroy()
            raise errors.InsufficientResourcesError("out of memory", operation="create shared receive queue")
        self._post_to(self._native)
        self._opened()

    def _take_slot(self, record: Any) -> int:
        """Keep the memory of a receive that is about to be posted. Under the lock."""
        if not self._free or len(self._records) >= self.depth:
            raise self._refusal(RECEIVE, QUEUE_FULL, [], 0)
        slot = self._free.pop()
        self._records[slot] = record
        return slot

    def _free_slot(self, slot: int) -> None:
        """The receive in this slot has ended."""
        self._records.pop(slot, None)
        self._free.append(slot)

    def _queue_of(self, operation: int) -> tuple[str, int]:
        return "shared receive", self.depth

    def _most_elements(self, operation: int) -> int:
        return self.max_sge

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
            # A thread that takes completions frees slots without the lock. So there are only fewer of them.
            outstanding = len(self._records)
            if depth and depth < outstanding:
                raise errors.LimitExceededError(f"{outstanding} receives are outstanding; the depth cannot be {depth}")
            if depth > self._capacity:
                raise errors.UnsupportedError(
                    f"the queue was created for {self._capacity} receives and cannot grow beyond that",
                    operation="modify",
                )
            self._native_modify(depth, threshold)
            self.depth = depth or self.depth
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
        self._lock = _core.Lock()
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
                self._detach()
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
