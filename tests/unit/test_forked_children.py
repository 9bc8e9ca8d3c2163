"""Objects that a forked child inherits. No use hangs or reaches the parent, whichever locks were held."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.deadlines import patient
from racing import DEADLINE_S, wait_until

import ndpy
import ndpy.ndk
from ndpy import Pending, _core
from ndpy.platforms.verbs import native_calls

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

LIMIT_S = round(patient(10))
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, _core.Lock, _core.RLock)


def in_child(call: Callable[[], Any]) -> Any:
    """Call it in a forked child. Returns the result, after a trip through JSON. Fails if the child hangs or dies."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            try:
                answer = ["returned", call()]
            except BaseException as error:
                answer = ["raised", f"{type(error).__name__}: {error}"]
            os.write(write_end, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, "the child hangs" if status == -signal.SIGALRM else f"the child ended with {status}"
    how, what = json.loads(told)
    assert how == "returned", what
    return what


CLOSED_IN_TURN = (
    "mr",
    "cache",
    "poller",
    "listener",
    "connector",
    "window",
    "queue_pair",
    "queue",
    "region",
    "region_of_domain",
    "domain",
    "adapter",
)


class World:
    """An adapter with one object of each kind, and with operations under way."""

    def __init__(self, fake: Any) -> None:
        self.fake = fake
        fake.have_address()
        self.adapter: Any = fake.open(windows=1)
        adapter = self.adapter
        self.region = adapter.register(bytearray(4096))
        self.domain = adapter.create_protection_domain()
        self.region_of_domain = self.domain.register(bytearray(4096))
        self.window = adapter.create_memory_window()
        self.queue = adapter.create_completion_queue(16)
        self.queue_pair = adapter.create_queue_pair(self.queue)
        self.connector = adapter.connect(self.queue_pair, ("127.0.0.1", 4711), timeout_s=DEADLINE_S)
        self.queue_pair.receive(self.region)
        self.listener = adapter.listen(("127.0.0.1", 0))
        self.poller: Any = ndpy.Poller()
        self.poller.add(self.queue)
        self.cache: Any = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=8)
        self.lease = self.cache.local(bytearray(4096))
        self.exposure = self.cache.remote(bytearray(4096), self.queue_pair)
        self.mr = ndpy.ndk.NdkMr(adapter)
        self.pendings = {
            "end of the connection": self.connector.begin_wait_disconnected(),
            "request": self.listener.begin_get_request(),
            "notification": self.queue.arm(),
            "program's own": Pending[None]("work"),
        }
        self.done: Pending[int] = Pending("done")
        self.done.succeed(7)

    def things(self) -> dict[str, Any]:
        """The objects whose methods a program calls."""
        return {name: getattr(self, name) for name in CLOSED_IN_TURN}

    def close(self) -> None:
        self.exposure.release()
        self.lease.release()
        self.pendings["program's own"].succeed(None)
        for name in CLOSED_IN_TURN:
            getattr(self, name).close()


@pytest.fixture
def world(fake) -> Iterator[World]:
    world = World(fake)
    yield world
    world.close()


def attributes(thing: Any) -> dict[str, Any]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    # The core's types have these beside the dictionary.
    slots += ["_lifetime", "_lock"]
    return {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name, None) for name in slots}}


def locks_of(world: World) -> dict[str, Any]:
    """Each lock of ndpy that the child could meet, with the place where it was found."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def look(where: str, thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        for name, value in attributes(thing).items():
            here = f"{where}.{name}"
            if isinstance(value, LOCKS):
                found[here] = value
            elif type(value).__module__.startswith("ndpy.") or isinstance(value, Pending):
                look(here, value)

    for name, thing in world.things().items():
        look(name, thing)
    for name, pending in [*world.pendings.items(), ("done", world.done)]:
        look(f"Pending, {name}", pending)
    for name, module in list(sys.modules.items()):
        if name.startswith("ndpy") and isinstance(module, types.ModuleType):
            found.update({f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, LOCKS)})
    return found


class Holder:
    """A thread that holds these locks during a `with` block."""

    def __init__(self, locks: list[Any]) -> None:
        self._locks = locks
        self._held, self._free = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for lock in {id(lock): lock for lock in self._locks}.values():
            # Some are another view of a lock that is already held.
            lock.acquire(timeout=0.05) if not isinstance(lock, threading.Condition) else lock.acquire(blocking=False)
        self._held.set()
        self._free.wait()
        for lock in self._locks:
            try:
                lock.release()
            except RuntimeError:
                continue

    def __enter__(self) -> None:
        self._thread.start()
        assert self._held.wait(DEADLINE_S)

    def __exit__(self, *_: object) -> None:
        self._free.set()
        self._thread.join(DEADLINE_S)


def use_everything(world: World) -> list[str]:
    """Use each object in the child. Returns the uses that did not end as they should, and the calls of the provider."""
    wrong: list[str] = []
    world.fake.call_at_points(lambda name, after: wrong.append(name.decode()))
    uses: dict[str, Callable[[], Any]] = {
        "poll": world.queue.poll,
        "wait": lambda: world.queue.wait(1),
        "arm": world.queue.arm,
        "resize": lambda: world.queue.resize(8),
        "receive": lambda: world.queue_pair.receive(world.region),
        "send": lambda: world.queue_pair.send(world.region),
        "send inline": lambda: world.queue_pair.send(b"", flags=ndpy.Flags.INLINE),
        "bind": lambda: world.queue_pair.bind(world.window, world.region),
        "flush": world.queue_pair.flush,
        "register": lambda: world.adapter.register(bytearray(8)),
        "begin_register": lambda: world.adapter.begin_register(bytearray(8)),
        "listen": lambda: world.adapter.listen(("127.0.0.1", 0)),
        "remote": world.window.remote,
        "deregister": world.region.remote,
        "get_request": lambda: world.listener.get_request(1),
        "disconnect": lambda: world.connector.disconnect(1),
        "wait_disconnected": lambda: world.connector.wait_disconnected(1),
        "local_address": lambda: world.connector.local_address,
        "cached": lambda: world.cache.local(bytearray(64)),
        "exposed": lambda: world.cache.remote(bytearray(64), world.queue_pair),
        "invalidate": lambda: world.cache.invalidate(bytearray(64)),
        "poller.wait": lambda: world.poller.wait(1),
        "poller.add": lambda: world.poller.add(world.queue),
        "poller.fileno": world.poller.fileno,
        **{f"result of {name}": pending.result for name, pending in world.pendings.items()},
        **{f"result of {name} in time": lambda p=p: p.result(1) for name, p in world.pendings.items()},
    }
    for name, use in uses.items():
        try:
            wrong.append(f"{name}: returned {use()!r}")
        except ndpy.ClosedError as error:
            if "parent" not in str(error):
                wrong.append(f"{name}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    assert world.done.result() == 7
    for pending in world.pendings.values():
        assert pending.done()
        assert not pending.cancel()
        pending.add_done_callback(lambda _: None)
    world.lease.release()
    world.exposure.release()
    world.poller.wake()
    world.poller.remove(world.queue)
    assert world.cache.stats.entries >= 0
    for thing in world.things().values():
        thing.close()
        repr(thing)
    return wrong


def still_held(locks: dict[str, Any]) -> list[str]:
    held = []
    for name, lock in locks.items():
        if lock.acquire(False):
            lock.release()
        else:
            held.append(name)
    return held


def test_a_child_hangs_nowhere_whatever_lock_another_thread_held(world):
    locks = locks_of(world)
    assert len(locks) > 15, sorted(locks)
    with Holder(list(locks.values())):
        assert in_child(lambda: use_everything(world)) == []
        left = in_child(lambda: (use_everything(world), still_held(locks_of(world)))[1])
    # A Pending that has ended takes no lock.
    assert left == ["Pending, done._condition"]
    # The parent still works.
    assert world.queue.poll() == []


def test_a_child_may_open_an_adapter_of_its_own_although_another_thread_was_loading_the_libraries(fake):
    with native_calls._lock:

        def load() -> bool:
            native_calls.load()
            return True

        assert in_child(load)


def test_an_object_that_is_being_closed_can_be_closed_in_the_child(world):
    """close() in the parent has released the object and still holds the lock."""
    region = world.adapter.register(bytearray(64))
    region.close()
    assert region.closed
    with Holder([region._lifetime]):
        assert in_child(lambda: region.close() or region.closed)


@pytest.mark.parametrize("use", ["wake", "close", "remove", "del", "add"])
def test_a_childs_use_of_a_poller_does_not_reach_the_parents(world, use):
    def touch() -> bool:
        poller = world.poller
        try:
            if use == "del":
                world.poller = None
                del poller
            elif use in ("remove", "add"):
                getattr(poller, use)(world.queue)
            else:
                getattr(poller, use)()
        except ndpy.ClosedError:
            return use == "add"
        return use != "add"

    # After add() the poller looks at the queue once. It does so here, before the fork.
    with pytest.raises(ndpy.TimeoutError):
        world.poller.wait(0)
    assert in_child(touch)
    watched = select.poll()
    watched.register(world.poller._wake_fd, select.POLLIN)
    assert watched.poll(50) == []
    with pytest.raises(ndpy.TimeoutError):
        world.poller.wait(0)
    assert world.fake.complete(world.queue_pair)
    ((queue, (_,)),) = world.poller.wait(DEADLINE_S)
    assert queue is world.queue


def test_what_a_child_drops_does_not_wake_the_parents_thread(world, monkeypatch):
    looked: list[int] = []
    monkeypatch.setattr(world.adapter._orphans, "close", lambda **_: looked.append(1))

    def drop() -> bool:
        world.cache._marks.wake()
        world.adapter._wake()
        world.lease = world.exposure = None
        return True

    assert in_child(drop)
    world.adapter._wake()
    wait_until(lambda: looked, "the thread looks once")
    assert looked == [1]


def test_an_orphan_is_the_parents(world):
    """A dropped object that is not closed yet. Only the adapter's list of orphans refers to it."""
    adapter = world.adapter
    wake, adapter._wake = adapter._wake, lambda: None
    region = adapter.register(bytearray(64))
    with pytest.warns(ResourceWarning):
        del region
    native = []

    def look() -> list[bool]:
        return [orphan.closed for orphan in native]

    native += adapter._orphans.waiting()
    assert in_child(look) == [True]
    assert look() == [False]
    del native[:]
    adapter._wake = wake


def test_a_child_closes_no_file_that_has_the_number_of_what_the_parent_closed(fake):
    adapter, poller = fake.open(), ndpy.Poller()
    adapter.close()
    poller.close()
    assert poller.closed
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(16)]

    def look() -> bool:
        for file in opened:
            os.fstat(file)
        return adapter.closed

    assert in_child(look)
    for file in opened:
        os.close(file)


def epolls() -> int:
    """How many descriptors of this process are epolls."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link) == "anon_inode:[eventpoll]" for link in links if os.path.islink(link))


def test_a_child_lets_go_of_the_parents_epolls(fake):
    """An inherited epoll would keep descriptors in the parent's epoll after the parent has closed them."""
    gc.collect()
    before = epolls()
    poller = ndpy.Poller()
    with fake.open():
        assert epolls() > before + 1
        # Other adapters of the process may be open, and the child lets go of theirs too.
        assert in_child(epolls) <= before
    poller.close()
