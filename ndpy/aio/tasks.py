"""Tasks that must end, and those that wait in a line."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Waiters(list["asyncio.Future[None]"]):
    """Tasks that wait for the same thing, the longest waiting first."""

    __slots__ = ()

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait to be woken. One who is woken and cancelled at once wakes the next."""
        future: asyncio.Future[None] = loop.create_future()
        self.append(future)
        try:
            await future
        except BaseException as error:
            # Who wakes one takes it out of the line.
            if future in self:
                self.remove(future)
            elif isinstance(error, asyncio.CancelledError) and future.done() and not future.cancelled():
                self.wake()
            raise

    def wake(self) -> bool:
        """Wake the first. Returns whether there was one."""
        while self:
            future = self.pop(0)
            if not future.done():
                future.set_result(None)
                return True
        return False

    def wake_all(self) -> None:
        while self.wake():
            pass


class Room:
    """A number of places, which tasks take and give back. Tasks get theirs in the order of their calls.

    Attributes:
        full: whether a task that takes a place now has to wait.
    """

    __slots__ = ("_free", "_line", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, places: int) -> None:
        self._loop = loop
        self._free = places
        #: How many places each wants, the longest waiting first.
        self._line: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def full(self) -> bool:
        return not self._free or bool(self._line)

    async def take(self, count: int) -> None:
        """Wait for that many places, at most as many as the room has."""
        if self._free >= count and not self._line:
            self._free -= count
            return
        future: asyncio.Future[None] = self._loop.create_future()
        place = (count, future)
        self._line.append(place)
        try:
            await future
        except BaseException as error:
            # What a future with a result has been given is for others now.
            given = count if future.done() and not future.cancelled() else 0
            if place in self._line:
                self._line.remove(place)
            if isinstance(error, asyncio.CancelledError):
                self.give(given)
            raise

    def give(self, count: int) -> None:
        self._free += count
        while self._line and self._line[0][0] <= self._free:
            wanted, future = self._line.pop(0)
            if not future.done():
                self._free -= wanted
                future.set_result(None)


class Turns:
    """Tasks take turns, in the order of their calls.

    A lock that is released is free until the next one runs, so they count.
    """

    __slots__ = ("_lock", "_loop", "count")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = asyncio.Lock()
        self.count = 0

    async def __aenter__(self) -> None:
        self.count += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self.count -= 1
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.count -= 1
        if kind is GeneratorExit:
            # See Finally in life.py. After the loop's end nobody can be woken.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._lock.release)
        else:
            self._lock.release()


class _Later(Coroutine[Any, Any, T]):
    """A coroutine that is made when its task runs for the first time. From then on the task calls it directly.

    If the loop is closed before, Python would complain of a coroutine that was never awaited.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self.__name__ = self.__qualname__ = getattr(make, "__qualname__", repr(make))

    def _begin(self, step: str, *arguments: Any) -> Any:
        coroutine = None
        try:
            coroutine = self._make()
            vars(self).update(send=coroutine.send, throw=coroutine.throw, close=coroutine.close)
            return getattr(coroutine, step)(*arguments)
        except BaseException:
            # Ctrl-C may come before its first step. Python would complain of this one too.
            if coroutine is not None and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
            raise

    def send(self, value: Any) -> Any:
        return self._begin("send", value)

    def throw(self, *error: Any) -> Any:
        return self._begin("throw", *error)

    def close(self) -> None:
        pass

    def __await__(self) -> Generator[Any, Any, T]:
        return self._make().__await__()


def start(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
    """Run what make() returns in a task."""
    return loop.create_task(_Later(make))


def start_soon(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The same from any thread. After the end of the loop nothing happens."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(start, loop, make)


async def in_thread(call: Callable[[], T]) -> T:
    """Make a call that may block in a thread. If the task is cancelled, wait for the call all the same."""
    loop = asyncio.get_running_loop()
    try:
        future = loop.run_in_executor(None, call)
    except RuntimeError:
        # asyncio.run() has ended the threads. Its loop has nothing else to do.
        return call()
    return await finish(future)


async def finish(future: asyncio.Future[T], on_cancel: Callable[[], object] | None = None) -> T:
    """Wait for a future that must end before the task does. A cancellation takes effect afterwards.

    on_cancel: called at each cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        if not future.cancelled():
            future.exception()
        raise cancelled
    return future.result()
