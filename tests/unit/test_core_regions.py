"""ndpy._core by itself: regions over a registrar of the test, and the lives of objects."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from kit.deadlines import DEADLINE_S
from kit.helpers import address_of, interrupted, is_free
from kit.walking import Elsewhere

import ndpy
from ndpy import Access, _core

HANDLE = 0x5000
LONGEST = 1 << 20


# ---- regions ----


class Memory(ctypes.Structure):
    """struct ndpy_memory."""

    _fields_ = (("native", ctypes.c_uint64), ("local_token", ctypes.c_uint64), ("remote_token", ctypes.c_uint64))


_REGISTER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32, ctypes.POINTER(Memory)
)
_DEREGISTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)


class Registrar(ctypes.Structure):
    """struct ndpy_registrar. It notes its calls, and gives regions the handles HANDLE + 1, HANDLE + 2, and so on."""

    _fields_ = (("register_memory", _REGISTER), ("deregister_memory", _DEREGISTER))

    def __init__(self) -> None:
        super().__init__(_REGISTER(self._register), _DEREGISTER(self._deregister))
        self.calls: list[tuple[int, ...]] = []
        self.left: set[int] = set()
        self.refusal = 0
        self.during: Callable[[], object] = lambda: None

    def _register(self, domain: int, address: int, length: int, rights: int, out: Any) -> int:
        self.calls.append((domain, address, length, rights))
        self.during()
        if not self.refusal:
            handle = HANDLE + len(self.calls)
            out[0] = Memory(handle, handle + 0x100, handle + 0x200)
            self.left.add(handle)
        return self.refusal

    def _deregister(self, handle: int) -> int:
        assert handle in self.left
        self.during()
        if not self.refusal:
            self.left.remove(handle)
        return self.refusal


class InPythonError(Exception):
    """Python has to release the region."""


class Region(_core.MemoryRegion):
    """A region without what Python has to do."""

    dropped = 0

    def _closed_maker(self) -> Callable[[], ndpy.ClosedError]:
        return partial(ndpy.ClosedError, f"MemoryRegion of {self.length} bytes at {self.address:#x} is closed")

    def _refuse_if_used(self) -> None:
        pass

    def _release(self) -> None:
        raise InPythonError

    def _on_dropped(self) -> None:
        type(self).dropped += 1


class Adapter(_core.Adapter):
    def __init__(self, registrar: Registrar) -> None:
        self.registrar = registrar
        self.woken = 0
        self._orphans = _core.Orphans()
        self._attach_registrar(ctypes.addressof(registrar), 0x77, tuple(range(100, 116)), LONGEST, Region)

    def _register_in_python(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments

    def _wake(self) -> None:
        self.woken += 1

    def _describe(self) -> str:
        return "Adapter"

    def _closed_maker(self) -> Callable[[], ndpy.ClosedError]:
        return partial(ndpy.ClosedError, "Adapter is closed")

    def _on_dropped(self) -> None:
        pass


@pytest.fixture
def registrar() -> Registrar:
    return Registrar()


@pytest.fixture
def adapter(registrar) -> Iterator[Adapter]:
    yield Adapter(registrar)
    assert not registrar.left


def test_a_writable_buffer_is_registered_and_kept_in_place(adapter, registrar):
    buffer = bytearray(100)
    address = address_of(buffer)
    region = adapter.register(buffer, Access.REMOTE_WRITE)
    assert registrar.calls == [(0x77, address, 100, 105)]
    assert (region.buffer, region.address, region.length, region.access) == (buffer, address, 100, Access.REMOTE_WRITE)
    assert (region._handle, region.local_token, region.remote_token) == (0x5001, 0x5101, 0x5201)
    assert region._adapter is adapter
    assert (region.closed, region._defunct) == (False, None)
    element = region[8:20]
    assert (element.address, element.length, element.token) == (address + 8, 12, 0x5101)
    assert not is_free(buffer)
    assert adapter._own_children() == [region]
    region.close()
    assert (region.closed, region._handle, registrar.left) == (True, 0, set())
    assert is_free(buffer)
    assert adapter._own_children() == []


@pytest.mark.parametrize(
    ("access", "writable"),
    [
        (Access.NONE, False),
        (Access.LOCAL_WRITE, True),
        (Access.REMOTE_READ, False),
        (Access.READ_SINK, True),
        (Access.REMOTE_WRITE | Access.READ_SINK | Access.REMOTE_READ, True),
    ],
)
def test_each_plain_access_has_its_rights(adapter, registrar, access, writable):
    region = adapter.register(bytearray(8), access=access)
    assert registrar.calls[0][3] == 100 + int(access)
    assert region.access is access or region.access == access
    assert region._writable is writable
    region.close()


def test_without_an_access_it_is_local_write(adapter, registrar):
    region = adapter.register(buffer=bytearray(8))
    assert region.access is Access.LOCAL_WRITE
    assert region._writable
    region.close()


PYTHONS = {
    "read-only": (b"constant", Access.NONE, None),
    "no bytes": (bytearray(), Access.LOCAL_WRITE, None),
    "an address": ((4096, 100), Access.LOCAL_WRITE, None),
    "every other byte": (memoryview(bytearray(10))[::2], Access.LOCAL_WRITE, None),
    "no buffer": (7, Access.LOCAL_WRITE, None),
    "too long": (bytearray(LONGEST + 1), Access.LOCAL_WRITE, None),
    "a number": (bytearray(8), 1, None),
    "atomics": (bytearray(8), Access.REMOTE_ATOMIC, None),
    "on demand": (bytearray(8), Access.ON_DEMAND, None),
    "a high bit": (bytearray(8), Access.DO_NOT_SECURE_VM, None),
    "no access": (bytearray(8), "1", None),
    "a deadline": (bytearray(8), Access.LOCAL_WRITE, 1.5),
}


@pytest.mark.parametrize("what", PYTHONS)
def test_what_is_not_plain_is_left_to_python(adapter, registrar, what):
    buffer, access, timeout_s = PYTHONS[what]
    assert adapter.register(buffer, access, timeout_s=timeout_s) == (buffer, access, timeout_s)
    assert registrar.calls == []
    assert not isinstance(buffer, bytearray) or is_free(buffer)


def test_the_longest_buffer_is_registered(adapter):
    adapter.register(bytearray(LONGEST)).close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda adapter: adapter.register(), "needs a buffer"),
        (lambda adapter: adapter.register(bytearray(8), Access.NONE, 3), "at most 2 arguments by position, not 3"),
        (lambda adapter: adapter.register(bytearray(8), timeout=3), "'timeout' that it does not take"),
        (lambda adapter: adapter.register(bytearray(8), buffer=bytearray(8)), "'buffer' that it has already"),
    ],
)
def test_wrong_arguments_are_named(adapter, call, message):
    with pytest.raises(TypeError, match=f"register.*{message}"):
        call(adapter)


@pytest.mark.parametrize("why", ["closing", "unusable", "without a registrar"])
def test_an_adapter_that_cannot_register_leaves_it_to_python(adapter, registrar, why):
    if why == "without a registrar":
        adapter = _core.Adapter.__new__(Adapter)
    adapter._closing = why == "closing"
    adapter._defunct = (lambda: ndpy.ClosedError("it is closed")) if why == "unusable" else None
    buffer = bytearray(8)
    assert adapter.register(buffer) == (buffer, Access.LOCAL_WRITE, None)
    assert registrar.calls == []
    assert is_free(buffer)


def test_after_a_refusal_nothing_is_left_and_python_registers(adapter, registrar):
    registrar.refusal = 12
    buffer = bytearray(8)
    assert adapter.register(buffer) == (buffer, Access.LOCAL_WRITE, None)
    assert len(registrar.calls) == 1
    assert not adapter._is_used
    assert is_free(buffer)


def test_an_adapter_counts_a_region_while_it_is_registered(adapter, registrar):
    seen = []
    registrar.during = lambda: seen.append((adapter._is_used, adapter._own_children()))
    region = adapter.register(bytearray(8))
    assert seen == [(True, [])]
    assert adapter._is_used
    region.close()
    assert not adapter._is_used


def test_other_threads_run_while_it_registers_and_deregisters(adapter, registrar):
    registrar.during = lambda: Elsewhere(lambda: None).start().result()
    adapter.register(bytearray(8)).close()


def test_a_region_that_was_being_made_cannot_be_used_if_its_adapter_is_removed(adapter, registrar):
    def remove() -> None:
        adapter._defunct = lambda: ndpy.DeviceRemovedError("it was removed", operation="register")

    registrar.during = remove
    region = adapter.register(bytearray(8))
    assert region._defunct is adapter._defunct
    region.close()


# ---- closing ----


def test_close_is_harmless_when_repeated(adapter):
    region = adapter.register(bytearray(8))
    for _ in range(3):
        assert region.close() is None


def test_a_closed_region_says_so_and_keeps_no_buffer(adapter):
    class Buffer(bytearray):
        pass

    buffer = Buffer(64)
    gone = weakref.ref(buffer)
    region = adapter.register(buffer)
    region.close()
    error = region._defunct()
    assert isinstance(error, ndpy.ClosedError)
    assert str(error).endswith(f"MemoryRegion of 64 bytes at {region.address:#x} is closed (ndpy explain closed)")
    gc.disable()
    try:
        del buffer, region
        assert gone() is None
    finally:
        gc.enable()


def test_two_threads_close_it_once(adapter, registrar):
    region, inside, go_on = adapter.register(bytearray(8)), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(DEADLINE_S)

    registrar.during = wait
    first = Elsewhere(region.close).start()
    assert inside.wait(DEADLINE_S)
    second = Elsewhere(region.close).start()
    second.thread.join(0.05)
    # It waits for the first one.
    assert second.thread.is_alive()
    assert not region.closed
    go_on.set()
    first.result()
    second.result()
    assert registrar.left == set()


def test_close_waits_for_whoever_has_the_regions_lock(adapter):
    region = adapter.register(bytearray(8))
    with region._lifetime:
        closing = Elsewhere(region.close).start()
        closing.thread.join(0.05)
        assert not region.closed
    closing.result()
    assert region.closed


def test_a_thread_may_close_a_region_whose_lock_it_has(adapter):
    region = adapter.register(bytearray(8))
    with region._lifetime:
        region.close()
    assert Elsewhere(lambda: region._lifetime.acquire(False)).start().result()


def test_a_region_in_use_is_closed_by_python(adapter, registrar):
    region = adapter.register(bytearray(8))
    region._bindings.add("a reference to a binding")
    with pytest.raises(InPythonError):
        region.close()
    assert registrar.left == {region._handle}
    region._bindings.clear()
    assert region.close() is None


def test_a_region_that_cannot_be_deregistered_is_as_before_and_left_to_python(adapter, registrar):
    buffer = bytearray(8)
    region = adapter.register(buffer)
    registrar.refusal = 5
    with pytest.raises(InPythonError):
        region.close()
    assert (region.closed, region._defunct, region._handle) == (False, None, HANDLE + 1)
    assert not is_free(buffer)
    assert adapter._own_children() == [region]
    registrar.refusal = 0
    region.close()
    assert is_free(buffer)


def test_a_region_that_python_registered_is_closed_like_others(adapter, registrar):
    region = Region()
    assert region.close() is None
    with pytest.raises(TypeError, match="no adapter"):
        region._opened()
    region._adapter = adapter
    region._opened()
    # There is nothing to deregister natively.
    with pytest.raises(InPythonError):
        region.close()
    region._handle = HANDLE
    registrar.left.add(HANDLE)
    assert region.close() is None
    assert not adapter._is_used


def test_python_can_mark_a_region_as_closed(adapter, registrar):
    region = adapter.register(bytearray(8))
    registrar.left.clear()
    region._mark_closed()
    assert region.closed
    assert isinstance(region._defunct(), ndpy.ClosedError)
    assert not adapter._is_used


@pytest.mark.parametrize("how", ["close", "_mark_closed"])
@pytest.mark.parametrize("orphans", [False, True])
def test_the_end_of_a_region_wakes_the_adapter_if_an_orphan_may_wait_for_it(adapter, registrar, how, orphans):
    region = adapter.register(bytearray(8))
    adapter._orphans.may_have_some = orphans
    getattr(region, how)()
    registrar.left.clear()
    assert adapter.woken == orphans


def test_what_waking_the_adapter_raises_comes_out_of_close(adapter, monkeypatch):
    monkeypatch.setattr(Adapter, "_wake", interrupted)
    region = adapter.register(bytearray(8))
    adapter._orphans.may_have_some = True
    with pytest.raises(KeyboardInterrupt):
        region.close()
    assert region.closed
    assert Elsewhere(lambda: region._lifetime.acquire(False)).start().result()


# ---- dropped regions ----


def test_a_region_that_is_dropped_says_so_once(adapter, registrar, monkeypatch):
    monkeypatch.setattr(Region, "dropped", 0)
    adopted: list[Region] = []
    monkeypatch.setattr(Region, "_on_dropped", lambda self: adopted.append(self))
    adapter.register(bytearray(8))
    assert adapter._own_children() == adopted
    assert len(adopted) == 1
    adopted.pop().close()
    assert adopted == []


def test_what_is_raised_for_a_dropped_region_is_reported(adapter, registrar, monkeypatch, unraisable):
    def fail(self: Region) -> None:
        raise ValueError("not now")

    monkeypatch.setattr(Region, "_on_dropped", fail)
    adapter.register(bytearray(8))
    registrar.left.clear()
    assert unraisable == [(ValueError, "not now")]


def test_a_region_that_is_being_freed_is_not_among_the_open_ones(adapter, registrar):
    """Its weak references tell of its end while it is still in the adapter's circle."""
    lists: list[list[Region]] = []
    region, other = adapter.register(bytearray(8)), adapter.register(bytearray(8))
    reference = weakref.ref(region, lambda _: lists.append(adapter._own_children()))
    del region
    assert reference() is None
    assert lists == [[other]]
    assert adapter._own_children() == [other]
    registrar.left.remove(HANDLE + 1)
    other.close()


def test_regions_go_in_any_order(adapter):
    regions = [adapter.register(bytearray(8)) for _ in range(5)]
    for which in (2, 0, 2):
        regions.pop(which).close()
        assert set(adapter._own_children()) == set(regions)
    for region in regions:
        region.close()
    assert not adapter._is_used


def test_a_circle_of_an_adapter_and_its_regions_is_collected(registrar):
    adapter = Adapter(registrar)
    adapter.regions = [adapter.register(bytearray(8)) for _ in range(3)]
    adapter.regions[1].itself = adapter.regions[1]
    gone = [weakref.ref(thing) for thing in (adapter, *adapter.regions)]
    del adapter
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_a_region_outlives_its_adapters_place(registrar):
    """The adapter's object goes first, because nothing else refers to it."""
    adapter = Adapter(registrar)
    region = adapter.register(bytearray(8))
    gone = weakref.ref(adapter)
    region._adapter = None
    del adapter
    assert gone() is None
    with pytest.raises(InPythonError):
        region.close()
    region._mark_closed()


def test_nothing_is_left_of_many_uses(adapter, registrar):
    buffer, closed = bytearray(64), adapter.register(bytearray(8))
    closed.close()
    things = [
        buffer,
        adapter,
        registrar,
        Region,
        Adapter,
        _core.Orphans,
        _core.RLock,
        ndpy.ClosedError,
        Access.LOCAL_WRITE,
    ]

    def use_all() -> None:
        for dropped in range(2):
            region = adapter.register(buffer)
            region._serial, region._bindings, adapter._own_children()
            region._defunct = region._lifetime
            adapter._orphans.may_have_some = bool(dropped)
            registrar.refusal = 5
            with pytest.raises(InPythonError):
                region.close()
            adapter.register(buffer)
            registrar.refusal = 0
            region.close()
            region.close()
        adapter.register(bytes(64))
        adapter.register((1, 2))
        other = Adapter(registrar)
        other.register(bytearray(8)).close()
        unmade = Region()
        unmade._adapter = adapter
        unmade._opened()
        unmade._mark_closed()
        thing = Thing(adapter)
        adapter._make(lambda _: thing._opened())
        adapter._own_child(thing._serial)
        thing._mark_still_open()
        thing._inherit()
        thing._mark_closed()

    use_all()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(50):
        use_all()
    gc.collect()
    assert [sys.getrefcount(thing) for thing in things] == before


# ---- its other attributes ----


def test_a_serial_number_is_given_once(adapter):
    first, second = adapter.register(bytearray(8)), adapter.register(bytearray(8))
    numbers = [first._serial, second._serial, _core.next_serial()]
    assert numbers[0] < numbers[1] < numbers[2]
    assert [first._serial, second._serial] == numbers[:2]
    first.close()
    second.close()


def test_the_lock_of_a_region_is_one_that_c_can_take(adapter):
    region = adapter.register(bytearray(8))
    assert region._lifetime is region._lifetime
    assert isinstance(region._lifetime, _core.RLock)
    region.close()


def test_a_registrar_has_rights_for_each_plain_access_and_a_class_of_regions(adapter, registrar):
    address = ctypes.addressof(registrar)
    for rights, kind in (((1, 2), Region), (tuple(range(16)), int)):
        with pytest.raises(TypeError, match="16 rights and a class of regions"):
            adapter._attach_registrar(address, 0, rights, LONGEST, kind)


# ---- the lives of objects ----


class Thing(_core.Resource):
    """An object whose release is a step of the test."""

    def __init__(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._adapter = adapter
        self.steps: list[str] = []
        self.fails = ""

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.fails == name:
            raise KeyboardInterrupt(name)

    def _refuse_if_used(self) -> None:
        self._step("asked")

    def _release(self) -> None:
        self._step("released")

    def _closed_maker(self) -> Callable[[], ndpy.ClosedError]:
        self._step("worded")
        return partial(ndpy.ClosedError, "the thing is closed")

    def _closed_error(self) -> ndpy.ClosedError:
        return ndpy.ClosedError("the thing is closed")

    def _on_dropped(self) -> None:
        self._step("dropped")


def test_an_object_is_released_once_and_only_while_it_is_open(adapter):
    thing = Thing(adapter)
    assert thing.closed
    thing.close()
    assert thing.steps == []
    assert not adapter._is_used
    thing._opened()
    assert not thing.closed
    assert (adapter._own_children(), adapter._own_child(thing._serial)) == ([thing], thing)
    thing.close()
    thing.close()
    assert thing.steps == ["asked", "released", "worded"]
    assert (adapter._own_children(), adapter._own_child(thing._serial)) == ([], None)
    assert str(thing._defunct()) == "the thing is closed (ndpy explain closed)"


@pytest.mark.parametrize("step", ["asked", "released"])
def test_an_object_whose_release_fails_stays_open(adapter, step):
    thing = Thing(adapter)
    thing._owner = owner = bytearray(8)
    thing._opened()
    thing.fails = step
    with pytest.raises(KeyboardInterrupt, match=step):
        thing.close()
    assert (thing.closed, thing._defunct, thing._owner, adapter._own_children()) == (False, None, owner, [thing])
    thing.fails = ""
    thing.close()
    assert thing._owner is None


def test_ctrl_c_after_the_release_leaves_nothing_open(adapter):
    thing = Thing(adapter)
    thing._opened()
    thing.fails = "worded"
    with pytest.raises(KeyboardInterrupt, match="worded"):
        thing.close()
    assert (thing.closed, adapter._is_used) == (True, False)
    assert str(thing._defunct()) == "the thing is closed (ndpy explain closed)"


def test_an_object_that_a_child_inherits_is_not_closed_there(adapter):
    thing = Thing(adapter)
    thing._opened()
    former = thing._lifetime
    thing._inherit()
    assert thing.closed
    assert thing._lifetime is not former
    thing.close()
    assert thing.steps == []
    # It is the parent's, so its memory stays.
    assert adapter._own_children() == [thing]


def test_an_object_needs_an_adapter_to_be_open():
    with pytest.raises(TypeError, match="no adapter"):
        Thing(None)._opened()


def test_a_domain_is_among_the_objects_of_its_device(adapter, registrar):
    domain = Adapter(registrar)
    domain._adapter, domain._device = domain, adapter
    assert (domain._device, adapter._device) == (adapter, adapter)
    with pytest.raises(TypeError, match="adapter"):
        domain._device = None
    domain._opened()
    assert adapter._own_children() == [domain]
    thing = Thing(domain)
    thing._opened()
    assert (adapter._own_children(), domain._own_children()) == ([domain], [thing])
    thing.close()
    adapter._orphans.may_have_some = True
    domain._mark_closed()
    assert (adapter._is_used, adapter.woken) == (False, 1)


def test_what_an_adapter_makes_keeps_it_open_meanwhile(adapter):
    seen = []

    def make(*arguments: Any) -> str:
        seen.append((arguments, adapter._is_used))
        return "made"

    assert adapter._make(make, 1, 2) == "made"
    assert seen == [((adapter, 1, 2), True)]
    assert not adapter._is_used
    with pytest.raises(ZeroDivisionError):
        adapter._make(lambda _: 1 // 0)
    assert not adapter._is_used
    adapter._closing = True
    with pytest.raises(ndpy.ClosedError, match="Adapter is being closed"):
        adapter._make(make)
    adapter._closing = False
    adapter._defunct = lambda: ndpy.DeviceRemovedError("it was removed", operation="make")
    with pytest.raises(ndpy.DeviceRemovedError):
        adapter._make(make)
    with pytest.raises(TypeError, match="what to call"):
        adapter._make()
    assert len(seen) == 1
