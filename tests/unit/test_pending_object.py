"""Pending by itself. It ends once, tells everybody who waits, and can be awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from kit.walking import Elsewhere

import ndpy
from ndpy import Pending
from ndpy.objects.pending import wait_or_cancel


@pytest.fixture
def pending() -> Pending[int]:
    return Pending("work")


def test_it_ends_once(pending):
    assert not pending.done()
    assert pending.succeed(1)
    assert not pending.succeed(2)
    assert not pending.fail(ValueError("late"))
    assert pending.done()
    assert pending.result() == 1


def test_what_prepares_a_value_is_done_before_anybody_sees_it_and_only_if_somebody_will():
    calls = []
    pending = Pending("work")
    pending.add_done_callback(lambda _: calls.append("told"))

    def prepare() -> None:
        assert not pending.done()
        calls.append("prepared")

    assert pending.succeed(7, prepare=prepare)
    assert not pending.succeed(8, prepare=prepare)
    assert (calls, pending.result(0)) == (["prepared", "told"], 7)


def test_a_failure_is_raised_with_every_result(pending):
    assert pending.fail(ValueError("why"))
    for _ in range(2):
        with pytest.raises(ValueError, match="why"):
            pending.result(0)


def test_result_times_out_naming_the_operation():
    pending: Pending[int] = Pending("accept")
    begin = time.monotonic()
    with pytest.raises(ndpy.TimeoutError, match="accept") as raised:
        pending.result(0.05)
    assert time.monotonic() - begin >= 0.05
    assert isinstance(raised.value, TimeoutError)
    pending.succeed(3)
    assert pending.result(0) == 3


def test_cancel_asks_once_and_ends_it():
    asked = []
    pending: Pending[int] = Pending("work", lambda: asked.append(1))
    assert pending.cancel()
    assert not pending.cancel()
    assert asked == [1]
    with pytest.raises(ndpy.CanceledError):
        pending.result(0)


def test_cancel_after_the_end_does_nothing():
    asked = []
    pending: Pending[int] = Pending("work", lambda: asked.append(1))
    pending.succeed(1)
    assert pending.cancel() is False
    assert not asked
    assert pending.result(0) == 1


def test_an_operation_that_ends_while_it_is_cancelled_keeps_its_value():
    pending: Pending[int] = Pending("work", lambda: pending.succeed(5) and None)
    assert not pending.cancel()
    assert pending.result(0) == 5


def test_callbacks_run_once_each_and_at_once_when_late(pending):
    seen: list[Pending[int]] = []
    pending.add_done_callback(seen.append)
    assert not seen
    pending.succeed(1)
    pending.add_done_callback(seen.append)
    assert seen == [pending, pending]


def test_waiting_threads_wake(pending):
    waiting = [Elsewhere(lambda: pending.result(10)).start() for _ in range(3)]
    pending.succeed(4)
    assert [thread.result() for thread in waiting] == [4, 4, 4]


def test_repr_tells_the_state():
    pending: Pending[int] = Pending("accept")
    assert "accept" in repr(pending)
    assert "running" in repr(pending)
    pending.fail(ValueError("why"))
    assert "why" in repr(pending)


def test_it_can_be_awaited_from_before_and_after_its_end():
    async def main() -> list[int]:
        early: Pending[int] = Pending("early")
        early.succeed(1)
        late: Pending[int] = Pending("late")
        threading.Timer(0.05, late.succeed, [2]).start()
        return [await early, await late, await late]

    assert asyncio.run(asyncio.wait_for(main(), 10)) == [1, 2, 2]


def test_a_failure_reaches_the_await(pending):
    async def main() -> None:
        threading.Timer(0.05, pending.fail, [ValueError("why")]).start()
        await pending

    with pytest.raises(ValueError, match="why"):
        asyncio.run(asyncio.wait_for(main(), 10))


def test_cancelling_the_await_cancels_the_operation():
    asked = []
    pending: Pending[int] = Pending("work", lambda: asked.append(1))

    async def wait() -> int:
        return await pending

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 10))
    assert asked == [1]
    assert pending.done()


def test_an_operation_that_outlives_its_loop_ends_quietly(pending):

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()

    async def wait() -> int:
        return await pending

    asyncio.run(main())
    pending.succeed(1)
    assert pending.done()


# ---- memory and failures ----


class Memory:
    """Memory that a caller refers to while it waits."""


def refused() -> ndpy.NdpyError:
    """An error that was raised after another one, in frames that refer to memory."""
    memory = Memory()
    try:
        try:
            raise OSError(5, "the first")
        except OSError as error:
            raise ndpy.ProviderError("refused", operation="register", native=12) from error
    except ndpy.NdpyError as error:
        assert memory
        return error


def wait_for(pending: Pending[int]) -> weakref.ref[Memory]:
    """Wait twice, in a frame that refers to memory. Returns a weak reference to that memory."""
    memory = Memory()
    for _ in range(2):
        with contextlib.suppress(Exception):
            pending.result(0)
    with contextlib.suppress(Exception):
        wait_or_cancel(pending, 0)
    return weakref.ref(memory)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free objects here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "fail",
    [
        lambda pending: pending.fail(ValueError("why")),
        lambda pending: pending.fail(refused()),
        Pending.cancel,
        lambda pending: None,
    ],
    ids=["failed", "failed with what was raised", "cancelled", "timed out"],
)
def test_a_failure_keeps_nothing_of_those_who_waited_for_it(no_collector, fail, pending):
    fail(pending)
    assert wait_for(pending)() is None


def test_a_dropped_pending_goes_at_once_although_its_failure_was_raised(no_collector):
    def wait() -> weakref.ref[Pending[int]]:
        pending: Pending[int] = Pending("work")
        pending.fail(refused())
        with contextlib.suppress(ndpy.NdpyError):
            pending.result()
        return weakref.ref(pending)

    assert wait()() is None


def test_a_failure_keeps_nothing_of_where_it_was_raised(no_collector, pending):
    def make(pending: Pending[int]) -> weakref.ref[Memory]:
        memory = Memory()
        try:
            raise ValueError("why")
        except ValueError as error:
            pending.fail(error)
        return weakref.ref(memory)

    assert make(pending)() is None


def test_every_result_raises_an_exception_of_its_own_that_says_the_same(pending):
    original = refused()
    pending.fail(original)
    raised = []
    for _ in range(2):
        with pytest.raises(ndpy.ProviderError) as caught:
            pending.result(0)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    for error in raised:
        assert (str(error), error.native, error.operation) == (str(original), 12, "register")
        assert isinstance(error.__cause__, OSError)


class Particular(Exception):
    """Its constructor takes other arguments than those it passes to Exception."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_an_exception_that_cannot_be_copied_is_raised_itself(pending):
    pending.fail(Particular("this", "that"))
    for _ in range(2):
        with pytest.raises(Particular, match="this and that"):
            pending.result(0)


def test_what_ends_at_the_very_deadline_is_not_lost():
    pending: Pending[int] = Pending("get_request", lambda: pending.succeed(7) and None)
    assert wait_or_cancel(pending, 0) == 7


# ---- as a concurrent.futures.Future ----


def test_wait_and_as_completed_take_it():
    first, second = Pending[int]("first"), Pending[int]("second")
    threading.Timer(0.05, second.succeed, [2]).start()
    done, left = concurrent.futures.wait([first, second], 10, concurrent.futures.FIRST_COMPLETED)
    assert (done, left) == ({second}, {first})
    threading.Timer(0.05, first.fail, [ValueError("why")]).start()
    assert list(concurrent.futures.as_completed([first, second], 10)) == [second, first]


def test_wait_ends_at_its_deadline():
    pending = Pending[int]("work")
    assert concurrent.futures.wait([pending], 0.05) == (set(), {pending})


def test_its_states_are_those_of_a_future():
    pending, failed, cancelled = Pending[int]("work"), Pending[int]("work"), Pending[int]("work")
    assert pending.running()
    assert not pending.cancelled()
    pending.succeed(1)
    failed.fail(ValueError("why"))
    cancelled.cancel()
    assert [each.running() for each in (pending, failed, cancelled)] == [False] * 3
    assert [each.cancelled() for each in (pending, failed, cancelled)] == [False, False, True]


def test_exception_waits_and_returns_what_result_raises():
    pending, failed = Pending[int]("work"), Pending[int]("work")
    with pytest.raises(ndpy.TimeoutError, match="work"):
        failed.exception(0.01)
    pending.succeed(1)
    threading.Timer(0.05, failed.fail, [ValueError("why")]).start()
    assert pending.exception() is None
    error = failed.exception(10)
    assert isinstance(error, ValueError)
    assert error is not failed.exception()


def test_wrap_future_takes_values_and_failures():
    async def main() -> None:
        pending, failed = Pending[int]("work"), Pending[int]("work")
        threading.Timer(0.05, pending.succeed, [1]).start()
        threading.Timer(0.05, failed.fail, [ValueError("why")]).start()
        assert await asyncio.wrap_future(pending) == 1
        with pytest.raises(ValueError, match="why"):
            await asyncio.wrap_future(failed)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_cancelling_what_wraps_it_cancels_the_operation():
    asked = []
    pending: Pending[int] = Pending("work", lambda: asked.append(1))

    async def main() -> None:
        wrapped = asyncio.wrap_future(pending)
        wrapped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wrapped

    asyncio.run(asyncio.wait_for(main(), 10))
    assert asked == [1]
    assert pending.cancelled()


def test_what_a_callback_raises_is_reported_and_the_others_are_called(unraisable, pending):
    seen = []
    pending.add_done_callback(lambda _: 1 // 0)
    pending.add_done_callback(seen.append)
    pending.succeed(1)
    pending.add_done_callback(lambda _: 1 // 0)
    assert seen == [pending]
    assert [kind for kind, _ in unraisable] == [ZeroDivisionError] * 2


def test_sys_exit_in_a_callback_is_reported_unless_it_is_the_main_thread(unraisable, pending):
    """In another thread it would keep that thread, which may be the adapter's, from telling the others."""
    seen = []
    pending.add_done_callback(lambda _: sys.exit())
    pending.add_done_callback(seen.append)
    Elsewhere(lambda: pending.succeed(1)).start().result()
    assert ([kind for kind, _ in unraisable], seen) == ([SystemExit], [pending])
    with pytest.raises(SystemExit):
        pending.add_done_callback(lambda _: sys.exit())
