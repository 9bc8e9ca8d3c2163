"""Waiting for completions and connections in an event loop of asyncio."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from kit.aio_ends import until
from kit.helpers import DEADLINE_S, connect_pair, contexts, host_of, memory, succeed, wait_until
from kit.threads import Elsewhere, beside

import ndpy
from ndpy.objects.event_loop import poller_of_loop

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("each_loop")]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


@pytest.fixture
def message(keep, pair):
    """message(context) sends a message to the server, whose queue gets a completion of this context."""
    source, target = memory(keep, pair.client.adapter, b"message"), memory(keep, pair.server.adapter, 64)

    def send(context: int) -> None:
        pair.server.queue_pair.receive(target, context=context)
        pair.client.queue_pair.send(source, context=context)
        succeed(pair.client.cq)

    return send


async def test_a_task_waits_for_completions(pair, message):
    waiting = asyncio.ensure_future(pair.server.cq.wait_async())
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(message, 5)
    assert contexts(await waiting) == [5]


async def test_completions_that_are_there_are_taken_at_once(pair, message):
    message(1)
    assert contexts(await pair.server.cq.wait_async(max_entries=1)) == [1]


async def test_no_wake_up_is_lost_between_two_waits(pair, message):
    for context in range(20):
        sending = asyncio.ensure_future(asyncio.to_thread(message, context))
        assert contexts(await pair.server.cq.wait_async()) == [context]
        await sending


async def test_two_tasks_share_the_completions(pair, message):
    waiting = [asyncio.ensure_future(pair.server.cq.wait_async(max_entries=1)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.to_thread(message, 1)
    await asyncio.to_thread(message, 2)
    taken = [contexts(completions) for completions in await asyncio.gather(*waiting)]
    assert sorted(taken) == [[1], [2]]


async def test_a_task_and_a_thread_share_the_completions(pair, message):
    taken = []
    thread = Elsewhere(lambda: pair.server.cq.wait(DEADLINE_S, 1)).start()
    waiting = asyncio.ensure_future(pair.server.cq.wait_async(max_entries=1))
    await asyncio.sleep(0)
    await asyncio.to_thread(message, 1)
    await asyncio.to_thread(message, 2)
    taken.extend(await waiting)
    taken.extend(await asyncio.to_thread(thread.result))
    assert sorted(contexts(taken)) == [1, 2]


async def test_a_wait_ends_at_its_deadline(pair, message):
    with pytest.raises(ndpy.TimeoutError, match="no completion"):
        await pair.server.cq.wait_async(0.01)
    await asyncio.to_thread(message, 3)
    assert contexts(await pair.server.cq.wait_async(DEADLINE_S)) == [3]


async def test_a_cancelled_wait_loses_no_completion(pair, message):
    waiting = asyncio.ensure_future(pair.server.cq.wait_async())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.to_thread(message, 4)
    assert contexts(await pair.server.cq.wait_async()) == [4]


async def test_a_task_that_was_woken_and_cancelled_at_once_passes_the_completion_on(pair, message):
    import ndpy.objects.event_loop

    first, second = (asyncio.ensure_future(pair.server.cq.wait_async()) for _ in range(2))
    await asyncio.sleep(0)
    message(7)  # the loop stands still meanwhile
    poller = ndpy.objects.event_loop.poller_of_loop()
    if hasattr(poller._poller, "_epoll"):
        poller._on_readable()
    else:
        wait_until(lambda: poller._poller._maybe_ready, "the poller's thread has the notification")
        poller.wake_tasks()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert contexts(await second) == [7]


async def test_closing_the_queue_ends_the_wait(keep, adapter):
    queue = keep(adapter.create_completion_queue(4))
    waiting = asyncio.ensure_future(queue.wait_async())
    await asyncio.sleep(0)
    queue.close()
    with pytest.raises(ndpy.ClosedError):
        await waiting


async def test_closing_the_queue_in_another_thread_ends_the_iteration(keep, adapter):
    queue = keep(adapter.create_completion_queue(4))

    async def iterate():
        return [completions async for completions in queue]

    iterating = asyncio.ensure_future(iterate())
    await asyncio.sleep(0)
    await asyncio.to_thread(queue.close)
    assert await iterating == []


async def test_a_queue_is_iterated(pair, message):
    taken = []
    for context in range(3):
        await asyncio.to_thread(message, context)
    async for completions in pair.server.cq:
        taken += contexts(completions)
        if len(taken) == 3:
            break
    assert taken == [0, 1, 2]


async def test_a_busy_queue_lets_other_tasks_run(pair, message):
    """A task that always finds completions must not keep the loop."""
    ran = []

    async def other():
        while True:
            ran.append(True)
            await asyncio.sleep(0)

    running = asyncio.ensure_future(other())
    for context in range(40):
        message(context)
        assert contexts(await pair.server.cq.wait_async()) == [context]
    running.cancel()
    assert len(ran) >= 2


def test_one_queue_serves_one_loop_after_the_other(pair, message):
    async def main(context):
        waiting = asyncio.ensure_future(pair.server.cq.wait_async())
        await asyncio.sleep(0)
        await asyncio.to_thread(message, context)
        assert contexts(await waiting) == [context]

    for context in range(3):
        run(main(context))


def test_two_loops_in_two_threads_wait_for_two_queues(keep, adapter):
    """Each loop is woken for its own queue."""
    pairs = [connect_pair(keep, adapter) for _ in range(2)]
    started, taken = threading.Barrier(3), {}

    def loop_of(index):
        async def main():
            waiting = asyncio.ensure_future(pairs[index].server.cq.wait_async(DEADLINE_S))
            await asyncio.sleep(0)
            await asyncio.to_thread(started.wait)
            taken[index] = contexts(await waiting)

        asyncio.run(main())

    with beside(lambda: loop_of(0), lambda: loop_of(1)):
        started.wait(DEADLINE_S)
        for index, pair in enumerate(pairs):
            pair.server.queue_pair.receive(memory(keep, adapter, 16), context=index)
            pair.client.queue_pair.send(memory(keep, adapter, b"x"))
    assert taken == {0: [0], 1: [1]}


def test_a_loop_that_is_closed_with_waiting_tasks_leaves_the_queue_usable(pair, message):
    loop = asyncio.new_event_loop()
    task = loop.create_task(pair.server.cq.wait_async())
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    message(9)
    assert contexts(succeed(pair.server.cq)) == [9]
    run(_idle(pair.server.cq))


async def _idle(queue):
    with pytest.raises(ndpy.TimeoutError):
        await queue.wait_async(0.01)


async def test_requests_are_awaited_and_iterated(keep, adapter):
    ndpy_host = host_of(adapter)
    with adapter.listen((ndpy_host, 0)) as listener:
        with pytest.raises(ndpy.TimeoutError):
            await listener.get_request_async(0.01)
        queue = keep(adapter.create_completion_queue(8))
        connectors = [keep(adapter.create_connector()) for _ in range(2)]
        pending = [
            connector.begin_connect(keep(adapter.create_queue_pair(queue)), listener.address)
            for connector in connectors
        ]
        keep(await listener.get_request_async(DEADLINE_S)).reject()
        async for request in listener:
            keep(request).reject()
            break
        for one in pending:
            with pytest.raises(ndpy.ConnectionRefusedError):
                await one


async def test_a_cancelled_get_request_loses_no_request(keep, adapter):
    with adapter.listen((host_of(adapter), 0)) as listener:
        waiting = asyncio.ensure_future(listener.get_request_async())
        await asyncio.sleep(0)
        queue = keep(adapter.create_completion_queue(8))
        connector = keep(adapter.create_connector())
        connecting = connector.begin_connect(keep(adapter.create_queue_pair(queue)), listener.address)
        # Let the request arrive while the loop stands still, so that it and the cancellation come together.
        wait_until(lambda: not listener._calls, "the call has its request")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        keep(await listener.get_request_async(DEADLINE_S)).reject()
        with pytest.raises(ndpy.ConnectionRefusedError):
            await connecting


async def test_a_request_goes_to_the_next_task_if_the_first_is_cancelled_as_it_is_served(keep, adapter, monkeypatch):
    loop = asyncio.get_running_loop()
    with adapter.listen((host_of(adapter), 0)) as listener:
        first, second = (asyncio.ensure_future(listener.get_request_async()) for _ in range(2))
        await asyncio.sleep(0)
        serve = listener._give_or_queue

        def serve_and_cancel(connector):
            stopped, go_on = threading.Event(), threading.Event()

            def stop():
                stopped.set()
                assert go_on.wait(DEADLINE_S)

            # The loop stands still, so the task cannot run before it is cancelled: the request is in its hands
            # then.
            loop.call_soon_threadsafe(stop)
            assert stopped.wait(DEADLINE_S)
            given = serve(connector)
            loop.call_soon_threadsafe(first.cancel)
            go_on.set()
            return given

        monkeypatch.setattr(listener, "_give_or_queue", serve_and_cancel)
        queue = keep(adapter.create_completion_queue(8))
        connector = keep(adapter.create_connector())
        connecting = connector.begin_connect(keep(adapter.create_queue_pair(queue)), listener.address)
        keep(await asyncio.wait_for(second, DEADLINE_S)).reject()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(ndpy.ConnectionRefusedError):
            await connecting


async def test_closing_the_listener_ends_the_iteration(keep, adapter):
    listener = keep(adapter.listen((host_of(adapter), 0)))

    async def iterate():
        return [request async for request in listener]

    iterating = asyncio.ensure_future(iterate())
    await asyncio.sleep(0)
    await asyncio.to_thread(listener.close)
    assert await iterating == []


async def test_a_watcher_is_called_for_what_comes_between_its_renewal_and_its_poll(pair, message):
    poller, cq, taken, calls = poller_of_loop(), pair.server.cq, [], []
    between = [lambda: message(1), lambda: message(2), lambda: None]

    def watcher(renew):
        calls.append(len(taken))
        renew()
        if between:
            between.pop(0)()
        while completions := cq.poll(1):
            taken.extend(completions)

    poller.watch(cq, watcher)
    for context in range(3, 20):
        await asyncio.to_thread(message, context)
        await until(lambda context=context: context in contexts(taken))
    # The second message and the third are sent in two threads.
    assert sorted(contexts(taken)) == [*range(1, 20)]
    poller.unwatch(cq)
    seen = len(calls)
    await asyncio.to_thread(message, 20)
    await asyncio.sleep(0.01)
    assert len(calls) == seen
    assert contexts(cq.poll()) == [20]


async def test_a_watcher_is_called_when_its_queue_fails(pair):
    poller, cq, failures = poller_of_loop(), pair.server.cq, []

    def watcher(renew):
        try:
            renew()
            cq.poll()
        except ndpy.NdpyError as error:
            failures.append(type(error))

    poller.watch(cq, watcher)
    await asyncio.sleep(0)
    assert failures == []
    await asyncio.to_thread(cq._on_failure, lambda: ndpy.CompletionQueueOverrunError("too many", operation="poll"))
    await until(lambda: failures)
    assert set(failures) == {ndpy.CompletionQueueOverrunError}
    poller.unwatch(cq)


def test_the_loop_is_of_the_kind_that_the_test_names(request):
    async def kind():
        return type(asyncio.get_running_loop())

    name = request.node.callspec.params["each_loop"]
    assert name in {run(kind()).__name__, run(kind()).__module__.partition(".")[0]} or issubclass(
        run(kind()), getattr(asyncio, name)
    )


def test_a_loop_that_is_collected_in_the_middle_of_a_call_leaves_the_queue_usable(pair, message):
    async def main():
        waiting = asyncio.ensure_future(pair.server.cq.wait_async())
        await asyncio.sleep(0)
        waiting.cancel()
        return poller_of_loop()

    poller = run(main())
    native = weakref.ref(poller._poller)
    with pair.server.cq._lock:
        del poller
        gc.collect()
    # On Windows its thread closes it.
    wait_until(lambda: native() is None, "the poller is closed")
    message(6)
    assert contexts(succeed(pair.server.cq)) == [6]
