"""ndpy._core, the C part of the registration cache: what it finds, what it keeps, and what it releases."""

from __future__ import annotations

import array
import gc
import inspect
import mmap
import subprocess
import sys
import weakref

import pytest
from collecting import in_next_collection
from kit.helpers import HAS_GIL

from ndpy import Access, ClosedError, Lease, _core
from ndpy.objects.memory import address_of

ACCESS, SINK = int(Access.LOCAL_WRITE), int(Access.READ_SINK)


class LeaseFinder(_core.LeaseFinder):
    """A cache that has only this part."""

    def __init__(self):
        self._known_buffers = {}
        self.released, self.dropped, self.on_dropped = [], 0, None

    def _local(self, *arguments):
        return arguments

    def _on_released(self, entry):
        self.released.append(entry)

    def _on_lease_dropped(self, lease):
        self.dropped += 1
        if self.on_dropped:
            self.on_dropped(lease)


class Entry(_core.Entry):
    __slots__ = ("__weakref__", "cycle", "region")

    def __init__(self):
        self.cached = True


class KnownBuffer(_core.KnownBuffer):
    __slots__ = ("__weakref__",)


@pytest.fixture
def finder():
    return LeaseFinder()


@pytest.fixture
def buffer():
    return bytearray(8)


def learn(finder, buffer, key=None, changed=None, watch=None, *, at=None, length=None):
    entry = Entry()
    if buffer is None:
        known = KnownBuffer(entry, ACCESS, 4096, 8, False, changed, watch)
    else:
        view = memoryview(buffer)
        start, length = at or address_of(view), length or view.nbytes
        known = KnownBuffer(entry, ACCESS, start, length, True, None, None)
    finder._known_buffers[id(buffer) if key is None else key] = known
    return entry


def find(finder, buffer, access=ACCESS, raw=False):
    """The lease if there is a hit, else None."""
    found = finder.local(buffer, access, raw=raw)
    return found if isinstance(found, Lease) else None


def hit(finder, buffer):
    return learn(finder, buffer), find(finder, buffer)


def state(finder, entry):
    return entry.uses, finder._hits


def test_a_hit_is_a_use_until_it_is_released(finder, buffer):
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
    with pytest.raises(ClosedError, match="released"), second:
        pass
    assert finder._next_use() == 3


@pytest.mark.parametrize("why", ["unknown", "right", "not cached", "closed"])
def test_what_is_no_hit_counts_as_none(finder, why, buffer):
    entry = learn(finder, buffer)
    entry.cached = why != "not cached"
    finder._defunct = object() if why == "closed" else None
    assert find(finder, bytearray(8) if why == "unknown" else buffer, access=SINK if why == "right" else ACCESS) is None
    assert state(finder, entry) == (0, 0)
    buffer.append(1)


def test_an_export_has_to_be_of_the_same_memory(finder):
    buffer, other = bytearray(8), bytearray(8)
    entries = [learn(finder, buffer, at=address_of(memoryview(other))), learn(finder, buffer, length=7)]
    assert find(finder, buffer) is None
    assert [state(finder, entry) for entry in entries] == [(0, 0), (0, 0)]
    learn(finder, buffer)
    find(finder, buffer).release()
    buffer.append(1)
    assert find(finder, buffer) is None
    buffer.append(1)


@pytest.mark.filterwarnings("ignore:Setting the strides:DeprecationWarning")
def test_buffers_of_any_kind_are_exported_and_let_go(finder):
    numpy = pytest.importorskip("numpy")
    rows = numpy.zeros((4, 4))
    for buffer in (
        bytes(8),
        bytearray(8),
        memoryview(bytearray(8)),
        array.array("q", [1, 2]),
        mmap.mmap(-1, 4096),
        rows,
    ):
        learn(finder, buffer)
        before = sys.getrefcount(buffer)
        lease = find(finder, buffer)
        assert sys.getrefcount(buffer) == before + 1
        lease.release()
        assert sys.getrefcount(buffer) == before
    view = memoryview(bytearray(8))
    learn(finder, view)
    with find(finder, view), pytest.raises(BufferError):
        view.release()
    view.release()
    learn(finder, rows)
    rows.strides = (8, 32)
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        find(finder, rows)


def test_a_collection_in_the_middle_of_letting_go_takes_nothing_away(finder, buffer):
    """What is let go collects garbage in its finalizer."""
    collected = []

    class Buffer(bytearray):
        def __del__(self):
            collected.append(gc.collect())

    for number in range(1, 10):
        export = _core.Export(Buffer(8))
        del export
        lease = Lease()
        lease._range = Buffer(8)
        del lease
        assert len(collected) == 2 * number
    learn(finder, buffer)
    with find(finder, buffer), find(finder, buffer):
        pass
    buffer.append(1)


def test_an_export_keeps_a_buffer_in_place_and_is_collected():
    class Buffer(bytearray):
        pass

    buffer = Buffer(8)
    export = _core.Export(buffer)
    with pytest.raises(BufferError):
        buffer.append(1)
    del export
    buffer.append(1)
    buffer.export = _core.Export(buffer)
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is None
    with pytest.raises(TypeError, match="is not a buffer"):
        _core.Export(5)
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        _core.Export(memoryview(bytes(8))[::2])


def test_a_memoryview_that_is_garbage_with_its_export_is_let_go_of_after_it():
    """In a process of its own: the collector would crash it."""
    code = (
        "import gc; from ndpy import _core; memory = bytearray(8); view = memoryview(memory)\n"
        "garbage = [_core.Export(view)]; garbage.append(garbage); del view, garbage; gc.collect(); memory.append(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranges_are_found_by_their_value_and_by_whether_the_caller_watches_them(finder):
    own, raw = learn(finder, None, key=(4096, 8)), learn(finder, None, key=((4096, 8), True))
    with find(finder, (4096, 8)), find(finder, (4096, 8), raw=True):
        assert (own.uses, raw.uses) == (1, 1)
    assert find(finder, (4096, 9)) is None
    # The rest of the cache says what is wrong with it.
    assert find(finder, ([], 8)) is None


def test_a_watch_is_asked_instead_of_the_buffer(finder):
    changed = {"watch": 0}
    learn(finder, None, (4096, 8), changed.get, "watch")
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
def test_the_cache_is_told_when_the_release_concerns_it(finder, over, buffer):
    entry, lease = hit(finder, buffer)
    finder._over_bounds = over
    entry.cached = over
    lease.release()
    assert finder.released == [entry]
    assert entry.uses == 0


def test_a_release_that_fails_is_one_all_the_same(finder, buffer):
    def fail(entry):
        raise OSError("no")

    entry = learn(finder, buffer)
    finder._on_released, finder._over_bounds = fail, True
    lease = find(finder, buffer)
    with pytest.raises(OSError, match="no"):
        lease.release()
    lease.release()
    assert entry.uses == 0
    buffer.append(1)


def test_a_dropped_lease_says_so_once_and_a_released_one_nothing(finder, buffer):
    learn(finder, buffer)
    find(finder, buffer).release()
    assert finder.dropped == 0
    find(finder, buffer)
    assert finder.dropped == 1
    try:
        raise KeyError("kept")
    except KeyError as error:
        find(finder, buffer)
        assert str(error) == "'kept'"
    assert finder.dropped == 2


def test_what_a_finalizer_raises_is_reported_and_nothing_else_is_lost(finder, unraisable, buffer):
    def fail(lease):
        raise OSError("no")

    finder.on_dropped = fail
    learn(finder, buffer)
    find(finder, buffer)
    assert unraisable == [(OSError, "no")]


def test_a_dropped_lease_that_somebody_takes_is_dropped_once(finder, buffer):
    kept = []
    finder.on_dropped = kept.append
    entry = learn(finder, buffer)
    find(finder, buffer)
    assert (len(kept), finder.dropped, entry.uses) == (1, 1, 1)
    kept.clear()
    assert finder.dropped == 1
    buffer.append(1)


def test_a_lease_that_a_later_finalizer_releases_ends_its_use_once(finder, buffer):
    """A coroutine that is collected with its lease calls release() when the lease has been finalized."""

    def hold(lease, cycle):
        try:
            yield
        finally:
            lease.release()
            finalized.append(finder.dropped)

    finalized = []
    entry = learn(finder, buffer)
    lease, cycle = find(finder, buffer), []
    cycle.append(hold(lease, cycle))
    next(cycle[0])
    del lease, cycle
    gc.collect()
    # The collector of a Python without the GIL has an order of its own.
    assert finalized == [1] or not HAS_GIL, "the lease was not finalized first"
    # What ends a dropped lease's use is _on_lease_dropped() of the cache.
    assert (finder.dropped, entry.uses) == (finalized[0], finalized[0])
    buffer.append(1)


def test_release_after_the_finalizer_does_nothing(finder, buffer):
    entry, lease = hit(finder, buffer)
    lease.__del__()
    lease.release()
    del lease
    assert (finder.dropped, entry.uses) == (1, 1)
    buffer.append(1)


def test_leases_in_cycles_are_dropped_once_however_often_their_memory_was_used(finder, buffer):
    for number in range(1, 20):
        entry = learn(finder, buffer)
        entry.cycle = find(finder, buffer), find(finder, buffer)
        learn(finder, buffer)
        del entry
        gc.collect()
        assert finder.dropped == 2 * number
        find(finder, buffer).release()
    finder._known_buffers.clear()
    buffer.append(1)


def test_cycles_are_collected(finder):
    buffer = bytearray(8)
    entry = learn(finder, buffer)
    lease = find(finder, buffer)
    entry.cycle = (lease, finder)
    watches = [weakref.ref(thing) for thing in (entry, finder._known_buffers[id(buffer)])]
    lease.release()
    finder._known_buffers.clear()
    del lease, entry
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


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
        KnownBuffer(object(), ACCESS, 0, 8, False, None, None)
    known = KnownBuffer(Entry(), ACCESS, 0, 8, False, None, None)
    with pytest.raises(TypeError):
        known.__init__(Entry(), ACCESS, 0, 8, False, None, None)
    for wrong in (object(), KnownBuffer.__new__(KnownBuffer)):
        finder._known_buffers[(4096, 8)] = wrong
        assert find(finder, (4096, 8)) is None
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
def test_what_is_no_right_is_left_to_the_rest_of_the_cache(finder, access, buffer):
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


#: So many leases that no spare one is left, and making the next one allocates.
MANY = 80


@pytest.mark.parametrize("after", range(1, 8))
def test_a_collection_in_the_middle_of_a_hit_leaves_no_lease_of_what_it_has_invalidated(finder, after):
    buffer = bytearray(64)
    entry = learn(finder, buffer)
    leases = [finder.local(buffer) for _ in range(MANY)]
    uses = []

    def invalidate():
        entry.cached = False
        uses.append(entry.uses)

    with in_next_collection(invalidate, after):
        while entry.cached:
            leases.append(finder.local(buffer))
    # Who closes an entry looks at its uses then.
    assert uses == [entry.uses]
    assert finder._hits == entry.uses


@pytest.mark.parametrize("after", range(1, 8))
def test_a_lease_that_is_released_while_it_is_sliced_gives_no_element_without_the_memory(finder, after):
    buffer = bytearray(64)
    learn(finder, buffer).region = _core.MemoryRegion()
    lease = finder.local(buffer)
    kept = [lease[:8] for _ in range(MANY)]
    with pytest.raises(ClosedError, match="released"), in_next_collection(lease.release, after):
        while True:
            kept.append(lease[:8])
    assert all(element._export is not None for element in kept)
