"""rdma_connect() in a thread of its own, for drivers in which it waits for the peer's host (Quirk.SIW_CONNECT_BLOCKS).

The adapter's thread and the connector's lock stay free meanwhile. Events of the connection may come before the call has
returned.

librdmacm uses the identifier until the call returns. So whoever wants to destroy it asks give_up() first. If the call
is still running then, its thread destroys the identifier afterwards. The connector's lock decides which of the two came
first.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ndpy import errors
from ndpy.objects.resource import Owned, Uncopied
from ndpy.platforms.verbs.native_calls import ffi, lib


class ConnectCall(Uncopied):
    """One call. Make it, and give it up, under the connector's state lock, which is `lock`.

    on_failure: the connector's method that gets the errno of a call that failed by itself. Called under the lock. Held
        by a weak reference: a program that drops its connector gives the attempt up.
    """

    def __init__(
        self, identifier: Any, parameters: Any, kept: Any, lock: threading.RLock, on_failure: Callable[[int], None]
    ) -> None:
        native = lib.ndpy_connecting_new(identifier, parameters)
        if native == ffi.NULL:
            raise errors.from_errno("connect", errno.ENOMEM)
        self._native = native
        self._owner = Owned(lib.ndpy_connecting_free, (native,))
        self._kept = parameters, kept
        self._identifier = identifier
        self._lock = lock
        self._on_failure = weakref.WeakMethod(on_failure)
        self._ended = self._given_up = False

    def run(self) -> None:
        """Make the call. Returns when it has ended."""
        number = lib.ndpy_connecting_run(self._native)
        with self._lock:
            self._ended = True
            on_failure = self._on_failure()
            if number and not self._given_up and on_failure is not None:
                on_failure(number)
        if self._given_up:
            lib.rdma_destroy_id(self._identifier)

    def give_up(self) -> bool:
        """End the call if it still runs. Returns False if it does not: then the caller destroys the identifier."""
        if self._ended:
            return False
        self._given_up = True
        lib.ndpy_connecting_give_up(self._native)
        return True
