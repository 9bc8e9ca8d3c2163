"""Memory of posted requests, dropping and closing in any order, from any thread, and leaks."""

from __future__ import annotations

import contextlib
import errno
import gc
import random
import threading
import time
import warnings
import weakref

import psutil
import pytest
from kit.helpers import (
    DEADLINE_S,
    SEED,
    STRESS,
    Replacing,
    ask,
    assert_quiet,
    connect_pair,
    create_end,
    establish,
    fill,
    has_kernel_driver,
    host_of,
    kernel_resources,
    memory,
    open_files,
    require,
    require_kernel_driver,
    resident_memory,
    statuses,
    succeed,
    take,
    wait_until,
)
from kit.threads import Elsewhere, beside, in_threads

import ndpy
from ndpy import Access, Capability, Status
from ndpy.platforms.verbs import datagram_queue_pair
from ndpy.platforms.verbs.native_calls import lib

ORDERS = 400 if STRESS else 100
# An allocator may keep this many bytes. At 10,000 cycles, a leak of one 64-byte object a cycle is more.
TOLERANCE = 600_000


@pytest.fixture(autouse=True)
def quiet():
    """Silence the warnings about objects dropped without close(). The collector sees the test's objects only."""
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
    gc.unfreeze()


# ---- memory of posted requests ----


def churn() -> list[bytearray]:
    """Use memory that was freed. A write into it would show, or crash."""
    return [bytearray(b"\xaa" * 65536) for _ in range(32)]


def test_a_posted_receive_outlives_every_reference_to_its_memory(pair, keep):
    """Buffer and region are dropped and collected. The message arrives, and nothing else is written."""
    size = 65536
    for number in range(8):
        pair.server.queue_pair.receive(pair.adapter.register(ndpy.alloc(size)), context=number)
    gc.collect()
    used = churn()
    for number in range(8):
        pair.client.queue_pair.send(memory(keep, pair.adapter, bytes([number]) * size))
        (completion,) = succeed(pair.server.cq)
        assert (completion.context, completion.nbytes) == (number, size)
        del completion
        gc.collect()
    assert all(block == b"\xaa" * 65536 for block in used)


def test_a_posted_receive_outlives_region_window_and_buffer(window_pair, keep):
    buffer = bytearray(64)
    region = window_pair.adapter.register(buffer)
    window = window_pair.adapter.create_memory_window()
    window_pair.server.queue_pair.bind(window, region[0:32])
    succeed(window_pair.server.cq)
    window_pair.server.queue_pair.receive(region, context=1)
    del buffer, region, window
    gc.collect()
    churn()
    window_pair.client.queue_pair.send(memory(keep, window_pair.adapter, b"into a window's region"))
    (completion,) = succeed(window_pair.server.cq)
    assert (completion.context, completion.nbytes) == (1, 22)


def test_posted_reads_and_writes_outlive_their_memory(pair, keep):
    size = 262_144
    owner = memory(keep, pair.adapter, size, Access.REMOTE_READ | Access.REMOTE_WRITE)
    for number in range(4):
        source = ndpy.alloc(size)
        source[:] = bytes([number + 1]) * size
        pair.client.queue_pair.write(pair.adapter.register(source), owner.remote(), context=number)
        pair.client.queue_pair.read(
            pair.adapter.register(bytearray(size), Access.LOCAL_WRITE | Access.READ_SINK), owner.remote(), context=100
        )
        del source
        gc.collect()
        used = churn()
    succeed(pair.client.cq, 8)
    assert bytes(owner.buffer) == b"\x04" * size
    assert all(block == b"\xaa" * 65536 for block in used)


def test_a_dropped_buffer_is_released_after_its_completion(pair, keep):
    """The reference goes with the completion. Then the registered buffer can be resized again."""
    buffer = bytearray(64)
    pair.server.queue_pair.receive(pair.adapter.register(buffer)[0:8])
    gc.collect()
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"message!"))
    succeed(pair.server.cq)
    gc.collect()

    def resized() -> bool:
        try:
            buffer.extend(b"x")
        except BufferError:
            return False
        return True

    wait_until(resized, "the buffer is released")


def test_a_closed_region_lets_go_of_its_buffer_at_once(adapter):
    """It does not wait for the garbage collector, since buffers can be large."""

    class Buffer(bytearray):
        """A bytearray that allows weak references."""

    gc.disable()
    try:
        buffer = Buffer(64)
        gone = weakref.ref(buffer)
        region = adapter.register(buffer)
        region.close()
        del region, buffer
        assert gone() is None
    finally:
        gc.enable()


def test_a_dropped_queue_pair_lets_go_of_its_memory(adapter, keep):
    """Its requests are cancelled. The memory is free when their completions have been taken."""
    buffer = bytearray(64)
    cq = keep(adapter.create_completion_queue(64))
    create_end(lambda thing: thing, adapter, cq=cq).queue_pair.receive(adapter.register(buffer), context=6)
    gc.collect()
    (completion,) = take(cq)
    assert (completion.context, completion.status) == (6, Status.CANCELED)

    def resized() -> bool:
        try:
            buffer.extend(b"x")
        except BufferError:
            gc.collect()
            return False
        return True

    wait_until(resized, "the buffer is released")


# ---- any order ----


def build(adapter: ndpy.Adapter) -> list[object]:
    """One object of each kind, connected, with requests posted in both directions."""
    things: list[object] = []

    def note(thing):
        things.append(thing)
        return thing

    client, server = (
        create_end(note, adapter, receive_queue_depth=4, initiator_queue_depth=4),
        create_end(note, adapter),
    )
    region = note(adapter.register(bytearray(4096), Access.REMOTE_WRITE))
    offer = ask(note, adapter, client.queue_pair)
    establish(offer, server.queue_pair)
    server.queue_pair.receive(region[0:64])
    client.queue_pair.receive(region[64:128])
    client.queue_pair.write(region[0:8], region.remote(128, 8))
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        window = note(adapter.create_memory_window())
        server.queue_pair.bind(window, region[0:2048])
    return things


def unmade(adapter: ndpy.Adapter) -> list[object]:
    """One object of each kind, not connected. They are cheap enough for many orders."""
    cq = adapter.create_completion_queue(8)
    queue_pair = adapter.create_queue_pair(cq, receive_queue_depth=4, initiator_queue_depth=4)
    region = adapter.register(bytearray(4096), Access.REMOTE_WRITE)
    queue_pair.receive(region[0:64])
    things = [cq, queue_pair, region, adapter.create_connector(), adapter.listen((host_of(adapter), 0))]
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        things.append(adapter.create_memory_window())
    if ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
        srq = adapter.create_shared_receive_queue(4)
        srq.receive(region[64:128])
        things += [srq, adapter.create_queue_pair(cq, srq=srq)]
    return things


def take_apart(things: list[object], rng: random.Random) -> None:
    """Close or drop everything in a random order. Objects in use may refuse. Nothing may crash."""
    rng.shuffle(things)
    while things:
        thing = things.pop()
        if rng.random() < 0.5:
            try:
                thing.close()  # type: ignore[attr-defined]
            except ndpy.DeviceBusyError:
                if rng.random() < 0.5:
                    things.insert(0, thing)
        del thing
        if rng.random() < 0.2:
            gc.collect()


def assert_all_gone(before: dict[str, int], files: int) -> None:

    def collected() -> bool:
        # Objects that the adapter's thread closes after the first collection may hold the last references to others.
        gc.collect()
        return kernel_resources() == before and open_files() <= files

    def left() -> str:
        return (
            f"the kernel has {kernel_resources()}, not {before}; there are {open_files()} file descriptors, not {files}"
        )

    wait_until(collected, left)


def run_orders(adapter_name: str, make, count: int) -> None:
    """Every eighth order has an adapter of its own and takes that apart too. Opening one takes time."""
    files = open_files()
    before = kernel_resources()
    shared = ndpy.open_adapter(adapter_name)
    for number in range(count):
        rng = random.Random(SEED + number)
        try:
            if number % 8:
                take_apart(make(shared), rng)
            else:
                own = ndpy.open_adapter(adapter_name)
                things = [*make(own), own]
                del own
                take_apart(things, rng)
        except BaseException:
            print(f"order {number}: seed {SEED + number}")
            raise
    del shared
    assert_all_gone(before, files)


def test_dropping_and_closing_in_any_order(adapter_name):
    """Hundreds of orders of all that one adapter can have."""
    run_orders(adapter_name, unmade, ORDERS)


def test_dropping_and_closing_connections_in_any_order(adapter_name, adapter):
    """The same with both ends of a connection that is in use."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    run_orders(adapter_name, build, ORDERS // 8)


def test_closing_twice_from_several_threads(adapter, rng):
    for _ in range(10):
        things = unmade(adapter)
        orders = [rng.sample(things, len(things)) for _ in range(3)]

        def close_all(number, orders=orders) -> None:
            left = orders[number]
            deadline = time.monotonic() + DEADLINE_S
            while left and time.monotonic() < deadline:
                for thing in list(left):
                    try:
                        thing.close()
                        left.remove(thing)
                    except ndpy.DeviceBusyError:
                        continue

        in_threads(3, close_all)
        assert all(thing.closed for thing in things)


def test_an_interpreter_that_ends_with_everything_open(adapter_name):
    """The interpreter exits without a hang or a crash, whatever is still open."""
    import subprocess
    import sys

    code = (
        "import ndpy, sys; a = ndpy.open_adapter(sys.argv[1]); r = a.register(bytearray(64));"
        "cq = a.create_completion_queue(8); q = a.create_queue_pair(cq); q.receive(r); p = cq.arm();"
        "l = a.listen(('', 0)); g = l.begin_get_request(); poller = ndpy.Poller(); poller.add(cq)"
    )
    done = subprocess.run([sys.executable, "-c", code, adapter_name], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# ---- leaks ----


def cycle_adapter(adapter: ndpy.Adapter) -> None:
    ndpy.open_adapter(adapter.info.name).close()


def cycle_region(adapter: ndpy.Adapter) -> None:
    adapter.register(bytearray(4096)).close()


def cycle_completion_queue(adapter: ndpy.Adapter) -> None:
    cq = adapter.create_completion_queue(8)
    cq.arm()
    cq.close()


def cycle_queue_pair(adapter: ndpy.Adapter) -> None:
    with adapter.create_completion_queue(8) as cq, adapter.create_queue_pair(cq, receive_queue_depth=4) as queue_pair:
        queue_pair.receive([])
        queue_pair.flush()
        assert statuses(cq.poll()) == [Status.CANCELED]


def cycle_shared_receive_queue(adapter: ndpy.Adapter) -> None:
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    with adapter.create_shared_receive_queue(8) as srq:
        srq.receive([])


def cycle_connector(adapter: ndpy.Adapter) -> None:
    with adapter.create_connector() as connector:
        connector.bind((host_of(adapter), 0))


def cycle_listener(adapter: ndpy.Adapter) -> None:
    with adapter.listen((host_of(adapter), 0)) as listener:
        listener.begin_get_request()


def cycle_poller(adapter: ndpy.Adapter) -> None:
    with ndpy.Poller() as poller, adapter.create_completion_queue(8) as cq:
        poller.add(cq)
        poller.wake()
        assert poller.wait(DEADLINE_S) == []


def cycle_window(adapter: ndpy.Adapter) -> None:
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)
    adapter.create_memory_window().close()


CYCLED = {
    name.removeprefix("cycle_"): function for name, function in list(globals().items()) if name.startswith("cycle_")
}
# Each of these opens a device or tears down a queue pair, which takes milliseconds. On a driver the numbers divide the
# count.
SLOW = {"adapter": 10, "queue_pair": 3}


def cycles_on(adapter: ndpy.Adapter) -> int:
    """With NDPY_STRESS=1 10,000, or 2,000 on a driver, which is slow in an emulated machine."""
    if not STRESS:
        return 150
    return 2000 if has_kernel_driver(adapter) else 10_000


def assert_no_leak(cycle, count: int) -> None:
    """Files, kernel resources and memory are the same after many cycles as after the first ones.

    Resident memory can grow once by a huge page. A leak grows every time.
    """
    for _ in range(max(20, count // 10)):
        cycle()
    gc.collect()
    files, held = open_files(), kernel_resources()
    threads = psutil.Process().num_threads()
    growths: list[int] = []
    while len(growths) < 3 and (not growths or growths[-1] >= TOLERANCE):
        used = resident_memory()
        for _ in range(count):
            cycle()
        gc.collect()
        assert open_files() == files
        assert kernel_resources() == held
        assert psutil.Process().num_threads() <= threads
        growths.append(resident_memory() - used)
    assert growths[-1] < TOLERANCE, f"{growths} bytes more after {count} cycles each"


@pytest.mark.timeout(3600 if STRESS else 120)
@pytest.mark.parametrize("name", CYCLED)
def test_cycles_of_create_and_close_leave_nothing(adapter, name):
    divisor = SLOW.get(name, 1) if has_kernel_driver(adapter) or not STRESS else 1
    assert_no_leak(lambda: CYCLED[name](adapter), cycles_on(adapter) // divisor)


@pytest.mark.timeout(3600 if STRESS else 120)
def test_cycles_of_bind_and_invalidate_leave_nothing(window_pair, keep):
    region = memory(keep, window_pair.adapter, 4096)

    def cycle() -> None:
        with window_pair.adapter.create_memory_window() as window:
            window_pair.server.queue_pair.bind(window, region)
            window_pair.server.queue_pair.invalidate(window)
            succeed(window_pair.server.cq, 2)

    assert_no_leak(cycle, cycles_on(window_pair.adapter))


@pytest.mark.timeout(3600 if STRESS else 120)
def test_cycles_of_messages_leave_nothing(pair, keep):
    region = memory(keep, pair.adapter, 64, Access.REMOTE_WRITE)
    # The first wait that has to sleep makes a waiter, which has a file. On a quick adapter that may be a late one.
    for end in pair:
        assert_quiet(end.cq, 0.01)

    def cycle() -> None:
        pair.server.queue_pair.receive(region[0:8])
        pair.client.queue_pair.write(region[8:16], region.remote(16, 8))
        pair.client.queue_pair.send(region[8:16])
        succeed(pair.client.cq, 2)
        succeed(pair.server.cq)

    assert_no_leak(cycle, cycles_on(pair.adapter))


@pytest.mark.timeout(3600 if STRESS else 120)
def test_cycles_of_connections_leave_nothing(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def cycle() -> None:
        things: list[object] = []

        def note(thing):
            things.append(thing)
            return thing

        pair = connect_pair(note, adapter, receive_queue_depth=2, initiator_queue_depth=2)
        pair.client.connector.disconnect(DEADLINE_S)
        for kind in (ndpy.Connector, ndpy.Listener, ndpy.QueuePair, ndpy.CompletionQueue):
            for thing in things:
                if isinstance(thing, kind):
                    thing.close()

    # After a connection the kernel keeps an identifier for a while (TIMEWAIT). It does not belong to the process.
    assert_no_leak(cycle, cycles_on(adapter) // 10)


# ---- threads ----


def test_threads_hammer_one_queue_pair(adapter, keep):
    """Several threads write, several others take completions. Each completion comes exactly once."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter, initiator_queue_depth=32, cq_depth=64)
    owner = memory(keep, adapter, 4096, Access.REMOTE_WRITE)
    local = memory(keep, adapter, b"x" * 4096)
    count, writers = (2000 if STRESS else 120), 3
    seen: list[int] = []
    finished = threading.Event()

    def post(writer: int) -> None:
        for number in range(count * writer, count * (writer + 1)):
            while True:
                try:
                    pair.client.queue_pair.write(local[0:16], owner.remote(0, 16), context=number)
                    break
                except ndpy.QueueFullError:
                    time.sleep(0.001)

    def poll() -> None:
        while not finished.is_set():
            with contextlib.suppress(ndpy.TimeoutError):
                for completion in pair.client.cq.wait(0.5, 5):
                    completion.raise_for_status()
                    seen.append(completion.context)

    with beside(poll, poll):
        try:
            in_threads(writers, post, 2 * DEADLINE_S)
            wait_until(lambda: len(seen) >= writers * count, "all writes have completed")
        finally:
            finished.set()
    assert sorted(seen) == list(range(writers * count))


def test_threads_create_and_close_on_one_adapter(adapter):
    def work(_) -> None:
        for _ in range(15):
            cycle_region(adapter)
            cycle_completion_queue(adapter)
            cycle_connector(adapter)

    in_threads(4, work, 2 * DEADLINE_S)


def test_closing_under_a_posting_thread_ends_in_closed_error(pair, keep):
    owner = memory(keep, pair.adapter, 64, Access.REMOTE_WRITE)
    local = memory(keep, pair.adapter, 64)
    started = threading.Event()

    def post() -> None:
        while True:
            try:
                pair.client.queue_pair.write(local, owner.remote())
            except ndpy.QueueFullError:
                pair.client.cq.poll()
            started.set()

    posting = Elsewhere(post).start()
    started.wait(DEADLINE_S)
    time.sleep(0.05)
    pair.client.connector.close()
    pair.client.queue_pair.close()
    with pytest.raises(ndpy.ClosedError):
        posting.result()
    completions = pair.client.cq.poll()
    assert all(status in (Status.SUCCESS, Status.CANCELED) for status in statuses(completions))


def test_a_window_dropped_while_bound_stays_bound_until_its_queue_pair_ends(window_pair, keep):
    region = memory(keep, window_pair.adapter, b"original")
    window = window_pair.adapter.create_memory_window()
    window_pair.server.queue_pair.bind(window, region)
    succeed(window_pair.server.cq)
    remote = window.remote()
    del window
    gc.collect()
    fill(region, b"still my")
    window_pair.client.queue_pair.write(memory(keep, window_pair.adapter, b"granted!"), remote)
    (completion,) = take(window_pair.client.cq)
    assert completion.status in (Status.SUCCESS, Status.ACCESS_VIOLATION)
    window_pair.server.connector.close()
    window_pair.server.queue_pair.close()
    region.deregister(timeout_s=DEADLINE_S)


def test_kernel_resources_are_counted(adapter, keep):
    """The counts that the leak tests compare really change."""
    require_kernel_driver(adapter, "objects that `rdma resource` counts")
    before = kernel_resources()
    memory(keep, adapter, 64)
    create_end(keep, adapter)
    now = kernel_resources()
    assert (now["mr"], now["cq"], now["qp"]) == (before["mr"] + 1, before["cq"] + 1, before["qp"] + 1)
    assert before["pd"] >= 1


@pytest.mark.parametrize("refusals", [1, 2])
def test_memory_for_the_headers_of_datagrams_goes_although_the_adapter_refuses_at_first(
    keep, adapter, monkeypatch, refusals
):
    """With two refusals the first close() raises, and the second one succeeds."""
    require(adapter, Capability.DATAGRAMS)
    queue_pair = keep(adapter.create_datagram_queue_pair(keep(adapter.create_completion_queue(8))))
    numbers = iter([errno.EBUSY] * refusals)
    freed = []

    def deregister(region):
        number = next(numbers, 0)
        if not number:
            freed.append(region)
            number = lib.ibv_dereg_mr(region)
        return number

    with monkeypatch.context() as patch:
        patch.setattr(datagram_queue_pair, "lib", Replacing(lib, ibv_dereg_mr=deregister))
        if refusals == 2:
            with pytest.raises(ndpy.DeviceBusyError):
                queue_pair.close()
            assert not queue_pair.closed
        queue_pair.close()
        assert queue_pair.closed
    assert len(freed) == 1
