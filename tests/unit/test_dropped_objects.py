"""Objects that are dropped without close(). A warning names them, and their adapter adopts and closes them."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kit.helpers import DEADLINE_S, wait_until
from kit.threads import beside
from ndpy._verbs import ffi, lib

import ndpy
from ndpy import _core
from ndpy.objects import adapter as adapter_module
from ndpy.objects.resource import Orphans, Resource
from ndpy.vocabulary.unraisable import report

# ---- memory that another library frees ----


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_memory_goes_after_its_region_although_both_are_in_one_cycle_of_garbage(fake):
    registered_when_freed = []
    pages = ffi.new("char[4096]")
    memory = _core.Owned(
        lambda _: registered_when_freed.append(fake.seen.registered), (pages,), ffi.buffer(pages, 4096)
    )
    adapter = fake.open()
    cycle: list[Any] = [memory, adapter.register(memoryview(memory))]
    cycle.append(cycle)
    del memory, cycle
    gc.collect()
    wait_until(lambda: registered_when_freed, "the memory is freed")
    adapter.close()
    assert registered_when_freed == [0]


def used_by_a_window(adapter: Any) -> list[Any]:
    queue_pair = adapter.create_queue_pair(adapter.create_completion_queue(8))
    connector = adapter.connect(queue_pair, ("127.0.0.1", 4791), timeout_s=DEADLINE_S)
    region, window = adapter.register(bytearray(4096), ndpy.Access.LOCAL_WRITE), adapter.create_memory_window()
    queue_pair.bind(window, region)
    return [region, window, queue_pair, connector]


def used_by_a_region(adapter: Any) -> list[Any]:
    memory = adapter.alloc_device_memory(256)
    return [memory, memory.register()]


def used_by_a_receiver(adapter: Any) -> list[Any]:
    domain = adapter.open_xrc_domain()
    return [domain, domain.create_receiver()]


def used_by_a_listener(adapter: Any) -> list[Any]:
    queue_pair = adapter.create_datagram_queue_pair(adapter.create_completion_queue(8))
    return [queue_pair, adapter.listen_for_datagrams(queue_pair, ("127.0.0.1", 4791))]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("make", [used_by_a_window, used_by_a_region, used_by_a_receiver, used_by_a_listener])
def test_what_is_used_goes_after_its_users_of_the_same_garbage(fake, monkeypatch, make):
    """The adapter's thread may close it while the collector has not come to the others yet."""
    fake.have_address()
    fake.xrc.value = 1
    adapter = fake.open(windows=1, device_memory=4096)
    used, *users = cycle = make(adapter)
    kind, number = type(used), used._serial
    others: list[Resource] = []
    add = Orphans.add

    def add_or_hold(orphans: Orphans, orphan: Resource) -> None:
        if orphan._serial == number:
            add(orphans, orphan)
        else:
            others.append(orphan)

    monkeypatch.setattr(Orphans, "add", add_or_hold)
    cycle.append(cycle)
    del used, users, cycle

    def collected() -> bool:
        # It returns at once while another thread collects.
        gc.collect()
        return bool(others)

    wait_until(collected, "the garbage is collected")
    adapter._orphans.close()
    assert [type(orphan) for orphan in adapter._orphans.waiting()] == [kind]
    while others:
        add(adapter._orphans, others.pop())
    adapter._orphans.close()
    assert adapter._orphans.waiting() == []
    adapter.close()
    assert fake.counts.left() == {}


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_region_that_is_kept_waits_for_a_window_that_was_dropped(fake, monkeypatch):
    fake.have_address()
    adapter = fake.open(windows=1)
    region, *cycle = used_by_a_window(adapter)
    others: list[Resource] = []
    monkeypatch.setattr(Orphans, "add", lambda _, orphan: others.append(orphan))
    cycle.append(cycle)
    del cycle
    wait_until(lambda: gc.collect() >= 0 and others, "the garbage is collected")
    with pytest.raises(ndpy.DeviceBusyError, match="a window that was dropped bound to it"):
        region.close()
    assert fake.seen.registered == 1
    monkeypatch.undo()
    while others:
        adapter._adopt(others.pop())
    adapter._orphans.close()
    region.close()
    adapter.close()


def test_what_is_owned_is_freed_once_and_after_its_last_view():
    freed: list[Any] = []
    pages = ffi.new("char[8]", b"1234567")
    owned = _core.Owned(lambda *arguments: freed.append(arguments), (pages, 5), ffi.buffer(pages, 8))
    view = memoryview(owned)[4:]
    assert (view.nbytes, view.readonly, view.format, bytes(view)) == (4, False, "B", b"567\0")
    view[0] = 65
    assert ffi.string(pages) == b"1234A67"
    del owned
    assert not freed
    del view
    assert freed == [(pages, 5)]


def test_owning_without_memory_and_with_a_failing_end(unraisable):
    def fail() -> None:
        raise ValueError("it could not be freed")

    owned = _core.Owned(fail, ())
    with pytest.raises(BufferError, match="no memory"):
        memoryview(owned)
    with pytest.raises(TypeError, match=r"'int'.* is not a buffer"):
        _core.Owned(fail, (), 5)
    with pytest.raises(BufferError):
        _core.Owned(fail, (), b"read-only")
    assert not unraisable
    del owned
    assert unraisable == [(ValueError, "it could not be freed")]


# ---- warnings that are errors ----


def test_what_is_dropped_is_released_although_its_warning_is_an_error(fake, unraisable):
    adapter = fake.open()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region = adapter.register(bytearray(64))
        del region
        gc.collect()
        adapter.close()
    assert fake.seen.registered == 0
    ((kind, text),) = unraisable
    assert kind is ResourceWarning
    assert "unclosed <MemoryRegion" in text


def test_a_lease_that_is_dropped_is_given_back_although_its_warning_is_an_error(fake, unraisable):
    adapter = fake.open()
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = cache.local(bytearray(64))
        del lease
        gc.collect()
        cache.close()
        adapter.close()
    assert [kind for kind, _ in unraisable] == [ResourceWarning]


def slow(monkeypatch: pytest.MonkeyPatch, what: type, step: str) -> tuple[threading.Event, threading.Event]:
    """The first call of a method says that it has begun, and goes on only when it is told to."""
    begun, go_on = threading.Event(), threading.Event()
    usual = getattr(what, step)

    def wait_once(*arguments: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(DEADLINE_S)
        usual(*arguments)

    monkeypatch.setattr(what, step, wait_once)
    return begun, go_on


@contextlib.contextmanager
def cache_closing(cache: ndpy.RegistrationCache, adapter: ndpy.Adapter) -> Iterator[None]:
    """In the block, another thread waits to close both, or has not been able to."""
    with beside(lambda: (cache.close(), adapter.close())) as (closing,):
        wait_until(lambda: closing.over or cache._changed._waiters, "close() waits or ended")  # type: ignore[attr-defined]
        yield


@pytest.mark.filterwarnings("ignore:unreleased:ResourceWarning")
def test_a_cache_closes_although_its_adapter_has_begun_to_give_a_dropped_lease_back(fake, monkeypatch):
    adapter = fake.open()
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4)
    begun, go_on = slow(monkeypatch, ndpy.RegistrationCache, "_release_use")
    cache.local(bytearray(64))
    assert begun.wait(DEADLINE_S)
    with cache_closing(cache, adapter):
        go_on.set()
    assert fake.seen.registered == 0


def test_a_closed_cache_has_no_region_left_that_another_thread_was_deregistering(fake, monkeypatch):
    adapter = fake.open()
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4)
    memory = bytearray(64)
    cache.local(memory).release()
    begun, go_on = slow(monkeypatch, ndpy.MemoryRegion, "close")
    with beside(lambda: cache.invalidate(memory)):
        assert begun.wait(DEADLINE_S)
        with cache_closing(cache, adapter):
            go_on.set()
    assert fake.seen.registered == 0


# ---- orphans ----


class Orphan(Resource):
    """A dropped object. Its close() raises what the test lists in `failures`."""

    def __init__(self, adapter: Any, name: str, order: int = 50) -> None:
        super().__init__(adapter)
        self._name = name
        self._release_order = order
        self.failures: list[BaseException] = []
        self._opened()

    def _release(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def _describe(self) -> str:
        return self._name


@pytest.fixture
def adapter(fake):
    adapter = fake.open()
    yield adapter
    adapter.close()


@pytest.fixture
def orphans(adapter) -> list[Orphan]:
    """Three dropped objects, in the order in which they are closed."""
    return [Orphan(adapter, f"Orphan {number}", number) for number in range(3)]


def given(adapter: Any, orphans: list[Orphan]) -> Orphans:
    """Put them into the adapter's list of orphans, and keep the adapter's thread from closing them."""
    adapter._wake = lambda: None
    for orphan in orphans:
        adapter._orphans.add(orphan)
    return adapter._orphans


@pytest.mark.parametrize("which", [0, 1, 2])
def test_ctrl_c_while_orphans_are_closed_loses_none(adapter, orphans, which):
    orphans[which].failures = [KeyboardInterrupt()]
    listed = given(adapter, orphans)
    with pytest.raises(KeyboardInterrupt):
        listed.close()
    assert listed.may_have_some
    listed.close()
    assert [orphan.closed for orphan in orphans] == [True] * 3
    assert not listed.may_have_some


def test_an_orphan_that_cannot_be_closed_keeps_no_other_from_it_and_is_tried_again(adapter, orphans):
    orphans[0].failures = [ValueError("not now"), ValueError("nor now")]
    listed = given(adapter, orphans)
    with pytest.warns(ResourceWarning, match="Orphan 0.*not now"):
        listed.close()
    assert [orphan.closed for orphan in orphans] == [False, True, True]
    assert listed.waiting() == orphans[:1]
    # They are not tried again whenever something else closes.
    assert not listed.may_have_some
    listed.close()
    assert len(orphans[0].failures) == 1
    with warnings.catch_warnings():
        # The warning comes once only.
        warnings.simplefilter("error")
        listed.close(again=True)
        assert not orphans[0].closed
        listed.close(again=True)
    assert orphans[0].closed
    assert listed.waiting() == []


def test_a_warning_that_is_an_error_loses_no_orphan(adapter, orphans):
    orphans[0].failures = [ValueError("not now")]
    orphans[1].failures = [ValueError("not now")]
    listed = given(adapter, orphans)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning, match="Orphan 0"):
            listed.close()
        assert orphans[2].closed
        listed.close(again=True)
    assert [orphan.closed for orphan in orphans] == [True] * 3


def test_an_adapter_names_what_could_not_be_closed(adapter, orphans):
    # Closing tries twice.
    orphans[0].failures = [ValueError("not now")] * 2
    given(adapter, orphans)
    with pytest.warns(ResourceWarning), pytest.raises(ndpy.DeviceBusyError, match="Orphan 0"):
        adapter.close()
    adapter.close()
    assert orphans[0].closed


def test_what_the_adapters_thread_cannot_handle_is_reported_and_ends_it_not(adapter, orphans, unraisable):
    """If warnings are errors, the warning is raised in the thread that warns."""
    orphans[0].failures = [ValueError("not now")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter._adopt(orphans[0])
        wait_until(lambda: unraisable, "the warning of the adapter's thread")
        ((kind, text),) = unraisable
        assert kind is ResourceWarning
        assert "Orphan 0" in text
        adapter._adopt(orphans[1])
        wait_until(lambda: orphans[1].closed, "the adapter's thread lives")
    orphans[2].close()


def test_a_report_says_where_and_shows_the_exception(capfd, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    try:
        raise ValueError("not now")
    except ValueError as error:
        report(error, "the thread of an adapter")
    shown = capfd.readouterr().err
    assert "the thread of an adapter" in shown
    assert "ValueError: not now" in shown


def test_a_report_keeps_nothing(unraisable):
    class Memory:
        pass

    def fail() -> weakref.ref[Memory]:
        memory = Memory()
        try:
            raise ValueError("not now")
        except ValueError as error:
            report(error, "here")
        return weakref.ref(memory)

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
    assert unraisable


# ---- the garbage collector at close ----


class BusyCollector:
    """A thread that stays inside a garbage collection, in a finalizer, until release()."""

    def __init__(self) -> None:
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._inside.wait(DEADLINE_S), "the thread collects"

    def _run(self) -> None:
        class Garbage:
            def __del__(_) -> None:
                self._inside.set()
                self._leave.wait(DEADLINE_S)

        garbage = Garbage()
        garbage.itself = garbage
        del garbage
        # While another thread collects, gc.collect() does nothing.
        deadline = time.monotonic() + DEADLINE_S
        while not self._inside.is_set() and time.monotonic() < deadline:
            gc.collect()

    def release(self) -> None:
        self._leave.set()
        self._thread.join(DEADLINE_S)


def close_at_last(adapter: Any) -> None:
    """Close the adapter when the dropped objects have gone. It also works after a test that failed."""

    def closed() -> bool:
        gc.collect()
        with contextlib.suppress(ndpy.DeviceBusyError):
            adapter.close()
        return adapter.closed

    wait_until(closed, "the adapter closes")


@pytest.fixture
def busy_collector() -> Iterator[BusyCollector]:
    collector = BusyCollector()
    yield collector
    collector.release()


@pytest.fixture
def dropped(fake, busy_collector) -> Iterator[Any]:
    """An open adapter whose connected queue pair has no references. Only the garbage collector finds that."""
    adapter = Connected(fake).adapter
    yield adapter
    busy_collector.release()
    close_at_last(adapter)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_adapter_closes_while_another_thread_collects_dropped_objects(dropped, busy_collector, monkeypatch):
    """The first call of gc.collect() does nothing, since the other thread is inside a collection."""
    calls = []

    def collect() -> int:
        calls.append(gc.collect())
        busy_collector.release()
        return calls[-1]

    monkeypatch.setattr(adapter_module, "gc", SimpleNamespace(collect=collect, callbacks=gc.callbacks))
    dropped.close()
    assert dropped.closed
    assert calls[0] == 0
    assert len(calls) > 1


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_closing_does_not_wait_for_ever_for_a_thread_that_stays_in_a_collection(dropped, busy_collector, monkeypatch):
    monkeypatch.setattr(adapter_module, "_COLLECTING_S", 0.05)
    callbacks = list(gc.callbacks)
    with pytest.raises(ndpy.DeviceBusyError):
        dropped.close()
    assert gc.callbacks == callbacks
    busy_collector.release()
    dropped.close()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_adapter_closes_while_its_thread_handles_the_end_of_a_dropped_connection(fake):
    """While the thread handles the event, it refers to the connector."""
    fake.have_address()
    adapter = fake.open()
    queue = adapter.create_completion_queue(8)
    connector = adapter.connect(adapter.create_queue_pair(queue), ("127.0.0.1", 4000), timeout_s=DEADLINE_S)
    inside, go_on = threading.Event(), threading.Event()

    def pause(name: bytes, after: int) -> None:
        if name == b"rdma_disconnect" and adapter._events.is_current() and not inside.is_set():
            inside.set()
            go_on.wait(DEADLINE_S)

    fake.call_at_points(pause)
    fake.connection_event(connector, lib.RDMA_CM_EVENT_DISCONNECTED)
    assert inside.wait(DEADLINE_S)
    del connector, queue
    later = threading.Timer(0.05, go_on.set)
    later.start()
    try:
        adapter.close()
    finally:
        go_on.set()
        later.join()
        close_at_last(adapter)
        fake.call_at_points(None)


# ---- a link that is down ----


class Connected:
    """A connector of the fake device with its queue pair, connected to nobody."""

    def __init__(self, fake: Any) -> None:
        fake.have_address()
        self.adapter: Any = fake.open()
        self.queue = self.adapter.create_completion_queue(8)
        self.queue_pair = self.adapter.create_queue_pair(self.queue)
        self.connector: Any = self.adapter.connect(self.queue_pair, ("127.0.0.1", 4711), timeout_s=10)
        self._fake = fake

    def link(self, state: str) -> None:
        kind = lib.IBV_EVENT_PORT_ACTIVE if state == "active" else lib.IBV_EVENT_PORT_ERR
        self._fake.device_event(self.adapter, kind)
        wait_until(lambda: self.adapter.port_state == state, f"the link is {state}")

    def close(self) -> None:
        self.queue_pair.close()
        self.queue.close()
        self.adapter.close()


@pytest.mark.filterwarnings("ignore:unclosed <Connector:ResourceWarning")
def test_a_connector_that_was_dropped_while_the_link_is_down_is_released(fake):
    end = Connected(fake)
    end.link("down")
    end.connector.begin_disconnect().result(10)
    end.queue_pair.close()
    end.connector = None
    end.close()


def test_a_peer_is_told_of_the_end_when_the_link_is_back(fake):
    end = Connected(fake)
    told = fake.calls_of("rdma_disconnect")
    end.link("down")
    end.connector.begin_disconnect().result(10)
    assert not told
    end.link("active")
    wait_until(lambda: told, "the peer is told")
    end.connector.close()
    end.close()


def test_a_peer_is_told_although_the_link_comes_back_while_the_connector_looks(fake):
    """The connector sees that the link is down. The link is back before the adapter notes the connector."""
    end = Connected(fake)
    told = fake.calls_of("rdma_disconnect")
    end.link("down")
    note = end.adapter._tell_when_port_is_active

    def late(connector: Any) -> None:
        end.link("active")
        note(connector)

    end.adapter._tell_when_port_is_active = late
    end.connector.begin_disconnect().result(10)
    assert told
    end.adapter._tell_when_port_is_active = None
    end.connector.close()
    end.close()
