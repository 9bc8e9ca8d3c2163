"""ndpy._core, the C part of the registration cache: what it finds, what it keeps, and what it releases."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref

import pytest

from ndpy import Access, _core

ACCESS, SINK = int(Access.LOCAL_WRITE), int(Access.READ_SINK)


class LeaseFinder(_core.LeaseFinder):
    """A cache that has only this part."""

    def __init__(self):
        self._known_buffers = {}
        self._lease_type = Lease
        self.released = []

    def _local(self, *arguments):
        return arguments

    def _on_released(self, entry):
        self.released.append(entry)


class Entry(_core.Entry):
    __slots__ = ("__weakref__", "cycle")

    def __init__(self):
        self.cached = True


class KnownBuffer(_core.KnownBuffer):
    __slots__ = ("__weakref__",)


class Lease(_core.LeaseBase):
    __slots__ = ("__weakref__",)
    dropped = 0

    def _entry_in_use(self):
        raise ValueError("it was released")

    def _on_dropped(self):
        type(self).dropped += 1


@pytest.fixture
def finder():
    return LeaseFinder()


def learn(finder, buffer, export=memoryview, subject=None, pointer=None, size=-1, key=None):
    entry = Entry()
    known = KnownBuffer(entry, ACCESS, export, subject, pointer, size)
    finder._known_buffers[id(buffer) if key is None else key] = known
    return entry


def find(finder, buffer, access=ACCESS, raw=False):
    """The lease if there is a hit, else None."""
    found = finder.local(buffer, access, raw=raw)
    return found if isinstance(found, Lease) else None


def state(finder, entry):
    return entry.uses, finder._hits


def test_a_hit_is_a_use_until_it_is_released(finder):
    buffer = bytearray(8)
    entry = learn(finder, buffer)
    first = find(finder, buffer)
    second = find(finder, buffer, access=0)
    assert state(finder, entry) == (2, 2)
    assert entry.used == 2
    with pytest.raises(BufferError):
        buffer.append(1)
    first.release()
    first.release()
    with second:
        assert entry.uses == 1
    assert state(finder, entry) == (0, 2)
    assert finder.released == []
    buffer.append(1)
    with pytest.raises(ValueError, match="released"), second:
        pass
    assert finder._next_use() == 3


@pytest.mark.parametrize("why", ["unknown", "right", "not cached", "closed"])
def test_what_is_no_hit_counts_as_none(finder, why):
    buffer = bytearray(8)
    entry = learn(finder, buffer)
    entry.cached = why != "not cached"
    finder._defunct = object() if why == "closed" else None
    assert find(finder, bytearray(8) if why == "unknown" else buffer, access=SINK if why == "right" else ACCESS) is None
    assert state(finder, entry) == (0, 0)
    buffer.append(1)


def test_an_export_has_to_be_equal_and_as_long(finder):
    buffer = bytearray(b"12345678")
    entry = learn(finder, buffer, pointer=b"12345678", size=8)
    find(finder, buffer).release()
    buffer[0] = 0
    assert find(finder, buffer) is None
    entry = learn(finder, buffer, size=7)
    assert find(finder, buffer) is None
    assert state(finder, entry) == (0, 1)
    buffer.append(1)


def test_ranges_are_found_by_their_value_and_by_whether_the_caller_watches_them(finder):
    own, raw = learn(finder, None, export=None, key=(4096, 8)), learn(finder, None, export=None, key=((4096, 8), True))
    with find(finder, (4096, 8)), find(finder, (4096, 8), raw=True):
        assert (own.uses, raw.uses) == (1, 1)
    assert find(finder, (4096, 9)) is None
    # The rest of the cache says what is wrong with it.
    assert find(finder, ([], 8)) is None


def test_a_watch_is_asked_instead_of_the_buffer(finder):
    changed = {"watch": 0}
    learn(finder, None, export=changed.get, subject="watch", pointer=0, key=(4096, 8))
    find(finder, (4096, 8)).release()
    changed["watch"] = 1
    assert find(finder, (4096, 8)) is None


def test_the_error_of_an_export_is_the_callers(finder):
    view = memoryview(bytearray(8))
    entry = learn(finder, view)
    view.release()
    with pytest.raises(ValueError, match="released"):
        find(finder, view)
    assert state(finder, entry) == (0, 0)


@pytest.mark.parametrize("over", [False, True])
def test_the_cache_is_told_when_the_release_concerns_it(finder, over):
    buffer = bytearray(8)
    entry = learn(finder, buffer)
    lease = find(finder, buffer)
    finder._over_bounds = over
    entry.cached = over
    lease.release()
    assert finder.released == [entry]
    assert entry.uses == 0


def test_a_release_that_fails_is_one_all_the_same(finder):
    def fail(entry):
        raise OSError("no")

    buffer = bytearray(8)
    entry = learn(finder, buffer)
    finder._on_released, finder._over_bounds = fail, True
    lease = find(finder, buffer)
    with pytest.raises(OSError, match="no"):
        lease.release()
    lease.release()
    assert entry.uses == 0
    buffer.append(1)


def test_a_dropped_lease_says_so_once_and_a_released_one_nothing(finder, monkeypatch):
    monkeypatch.setattr(Lease, "dropped", 0)
    buffer = bytearray(8)
    learn(finder, buffer)
    find(finder, buffer).release()
    assert Lease.dropped == 0
    find(finder, buffer)
    assert Lease.dropped == 1
    try:
        raise KeyError("kept")
    except KeyError as error:
        find(finder, buffer)
        assert str(error) == "'kept'"
    assert Lease.dropped == 2


def test_what_a_finalizer_raises_is_reported_and_nothing_else_is_lost(finder, monkeypatch):
    def fail(self):
        raise OSError("no")

    reports = []
    monkeypatch.setattr(Lease, "_on_dropped", fail)
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(str(report.exc_value)))
    buffer = bytearray(8)
    learn(finder, buffer)
    find(finder, buffer)
    assert reports == ["no"]


def test_cycles_are_collected(finder):
    buffer = bytearray(8)
    entry = learn(finder, buffer)
    lease = find(finder, buffer)
    entry.cycle = (lease, finder)
    watches = [weakref.ref(thing) for thing in (lease, entry, finder._known_buffers[id(buffer)])]
    lease.release()
    finder._known_buffers.clear()
    del lease, entry
    gc.collect()
    assert [watch() for watch in watches] == [None, None, None]


def test_nothing_is_left_of_many_uses(finder):
    buffer, closed = bytearray(8), memoryview(bytearray(8))
    things = [buffer, learn(finder, buffer), finder, finder._known_buffers[id(buffer)], Lease, None]
    learn(finder, closed)
    closed.release()

    def everything():
        find(finder, buffer).release()
        with find(finder, buffer):
            find(finder, buffer, access=SINK)
        find(finder, ([], 8))
        find(finder, (4096, 8), raw=True)
        with pytest.raises(ValueError):
            find(finder, closed)

    everything()
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(1000):
        everything()
    after = [sys.getrefcount(thing) for thing in things]
    # The last one is None, whose reference count changes for other reasons too.
    assert after[:-1] == before[:-1]
    assert abs(after[-1] - before[-1]) < 500


def test_wrong_calls_are_refused(finder):
    with pytest.raises(TypeError):
        KnownBuffer(object(), ACCESS, None, None, None, -1)
    known = KnownBuffer(Entry(), ACCESS, None, None, None, -1)
    with pytest.raises(TypeError):
        known.__init__(Entry(), ACCESS, None, None, None, -1)
    for wrong in (object(), KnownBuffer.__new__(KnownBuffer)):
        finder._known_buffers[(4096, 8)] = wrong
        assert find(finder, (4096, 8)) is None
    buffer = bytearray(8)
    learn(finder, buffer)
    for wrong in (int, object()):
        finder._lease_type = wrong
        assert find(finder, buffer) is None
    lease = Lease()
    lease._range, lease._view = 5, 5
    with pytest.raises(AttributeError):
        lease.release()
    lease._view = None


def test_arguments_are_those_of_the_signature(finder):
    signature = inspect.signature(LeaseFinder.local)
    assert str(signature) == "(self, /, buffer, access=1, *, queue_pair=None, raw=False)"
    buffer, other = bytearray(8), object()
    assert finder.local(buffer) == (buffer, ACCESS, None, False)
    assert finder.local(raw=1, access=8, buffer=buffer) == (buffer, 8, None, True)
    assert finder.local(buffer, queue_pair=other) == (buffer, 1, other, False)
    learn(finder, buffer)
    finder.local(buffer=buffer, access=0, queue_pair=None, raw=False).release()
    assert finder.local(buffer, queue_pair=other) == (buffer, 1, other, False)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((), {}, "needs a buffer"),
        ((b"", 1, None), {}, "by name"),
        ((b"",), {"buffer": b""}, "'buffer' that it has already"),
        ((b"",), {"length": 1}, "'length' that it does not take"),
    ],
)
def test_other_arguments_are_refused(finder, arguments, named, message):
    with pytest.raises(TypeError, match=message):
        finder.local(*arguments, **named)


@pytest.mark.parametrize("access", [-1, 1 << 80, "1", None])
def test_what_is_no_right_is_left_to_the_rest_of_the_cache(finder, access):
    buffer = bytearray(8)
    learn(finder, buffer)
    assert finder.local(buffer, access) == (buffer, access, None, False)


def test_a_truth_that_cannot_be_told_is_an_error(finder):
    class Unclear:
        def __bool__(self):
            raise ValueError("unclear")

    with pytest.raises(ValueError, match="unclear"):
        finder.local(bytearray(8), raw=Unclear())


def test_an_identity_is_the_number_of_its_object_however_many_there_are():
    things = [bytearray(1) for _ in range(2000)]
    for _ in range(2):
        assert [_core.identity(thing) for thing in things] == [id(thing) for thing in things]
    assert _core.identity(things[0]) is _core.identity(things[0])
