"""ndpy._core by itself: slices, records, and the arguments of posts."""

from __future__ import annotations

import gc
import weakref

import pytest
from kit.helpers import HAS_GIL

import ndpy
from ndpy import ElementRangeError, RemoteMemory, Sge, _core


class Region(_core.MemoryRegion):
    """A region of 100 bytes without an adapter."""

    def __init__(self) -> None:
        self.address, self.length, self.local_token = 0x1000, 100, 7


# ---- elements and remote memory ----


@pytest.mark.parametrize(
    ("key", "offset", "length"),
    [
        (slice(None), 0, 100),
        (slice(10, 30), 10, 20),
        (slice(100, None), 100, 0),
        (slice(None, 7), 0, 7),
        (slice(3, 3, 1), 3, 0),
    ],
)
def test_a_slice_is_its_bytes(key, offset, length):
    element = Region()[key]
    assert (element.address, element.length, element.token) == (0x1000 + offset, length, 7)
    piece = RemoteMemory(0x1000, 100, 8)[key]
    assert (piece.address, piece.length, piece.token) == (0x1000 + offset, length, 8)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (slice(0, 101), r"\[0:101\] is outside the region of 100 bytes( \(|$)"),
        (slice(-1, 10), r"\[-1:10\] is outside .*; the limits of a slice count from the beginning, not from the end"),
        (slice(-16, None), r"\[-16:\] is outside .*; the limits of a slice count from the beginning"),
        (slice(0, -1), r"\[0:-1\] is outside .*; the limits of a slice count from the beginning"),
        (slice(50, 40), r"\[50:40\] is outside"),
        (slice(None, 1 << 70), r"\[:1180591620717411303424\] is outside"),
        (slice(101, None), r"\[101:\] is outside"),
        (slice(0, 10, 2), "a step of 2 is not possible"),
    ],
)
def test_a_slice_beyond_the_region_is_refused_with_its_numbers(key, message):
    with pytest.raises(ElementRangeError, match=message):
        Region()[key]
    with pytest.raises(ElementRangeError, match=message.replace("the region", "the remote memory")):
        RemoteMemory(0x1000, 100, 8)[key]


@pytest.mark.parametrize("key", [3, "a", (1, 2)])
def test_a_region_has_no_single_bytes(key):
    with pytest.raises(TypeError, match=r"sliced by bytes, as in \[0:8\]"):
        Region()[key]


def test_the_longest_region_can_be_sliced_to_its_end():
    region = Region()
    region.address, region.length = 0, (1 << 64) - 1
    assert region[:].length == (1 << 64) - 1
    assert region[1 << 40 :].length == (1 << 64) - 1 - (1 << 40)


def test_many_elements_at_once_are_their_own():
    region = Region()
    for _ in range(3):
        elements = [region[place : place + 1] for place in range(100)]
        assert [element.address for element in elements] == [0x1000 + place for place in range(100)]
        assert all(element.region is region for element in elements)
        del elements


def test_an_element_lets_go_of_its_region():
    region = Region()
    gone = weakref.ref(region)
    element = region[0:8]
    del region
    assert gone() is not None
    del element
    assert gone() is None


def test_a_region_that_holds_its_own_element_is_collected():
    region = Region()
    region.whole = region[:]
    gone = weakref.ref(region)
    del region
    gc.collect()
    assert gone() is None


def test_the_limits_of_the_last_slice_mean_the_same_for_other_memory():
    start, stop, region = 300, 1000, Region()
    region.length = 1000
    for _ in range(2):
        element, piece = region[start:stop], RemoteMemory(0, 1000, 8)[start:stop]
        assert (element.address, element.length, piece.address, piece.length) == (0x1000 + 300, 700, 300, 700)
        with pytest.raises(ElementRangeError, match=r"\[300:1000\] is outside the region of 100 bytes"):
            Region()[start:stop]
        with pytest.raises(ElementRangeError, match="a step of 2 is not possible"):
            region[start:stop:2]
        assert region[start:].length == 700
        assert region[:stop].length == 1000


@pytest.fixture
def frozen():
    """The garbage collector does not look at objects from before the test."""
    elements = [Region()[0:8] for _ in range(100)]
    del elements
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_elements_are_collected_that_use_the_memory_of_frozen_ones(frozen):
    for _ in range(100):
        region = Region()
        # The limits of the last slice, so that a spare element is used as it is.
        region.part = region[0:8]
        gone = weakref.ref(region)
        del region
        gc.collect()
        assert gone() is None


@pytest.mark.skipif(not HAS_GIL, reason="without the GIL no freed element is used again, and the collector tracks code")
def test_an_element_that_is_made_in_the_middle_of_a_collection_stays_whole():
    regions, made = [Region()], []
    kept = [regions[0][0:8] for _ in range(100)]

    # The collector does not track code, so this ends while the collector clears what it has found.
    last = compile("0", "", "eval")
    assert not gc.is_tracked(last)
    watch = weakref.ref(last, lambda _: made.extend(regions[0][0:8] for _ in range(10)))
    # The list is cleared before the elements, which are new. It lets its first item go last.
    garbage = [last]
    garbage.append(garbage)
    garbage.extend(regions[0][0:8] for _ in range(10))
    identities = [id(element) for element in garbage[2:]]
    del last
    del garbage
    gc.collect()
    assert watch() is None
    assert sorted(id(element) for element in made) == sorted(identities)
    assert all(element.region is regions[0] and element.length == 8 for element in made)
    gone = weakref.ref(regions.pop())
    made.clear()
    kept.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((-1, 8, 7), ValueError), ((0, 1 << 64, 7), ValueError), ((0, 8, "7"), TypeError), ((0, 8), TypeError)],
)
def test_an_element_and_remote_memory_refuse_other_than_numbers_of_64_bits(arguments, error):
    with pytest.raises(error):
        Sge(Region(), *arguments)
    with pytest.raises(error):
        RemoteMemory(*arguments)


def test_an_element_needs_a_region():
    with pytest.raises(TypeError, match="a piece of a MemoryRegion"):
        Sge(object(), 0, 8, 7)
    with pytest.raises(AttributeError):
        Region()[:].region = Region()


# ---- records ----


@pytest.mark.parametrize("queue", ["initiator", "receive"])
def test_records_come_back_in_their_order_however_many_there_are(queue):
    records = getattr(_core.PostedRequests(Region()), queue)
    added = taken = 0
    for count in (1, 7, 8, 9, 100, 3):
        for _ in range(count):
            records.append(added)
            added += 1
        for _ in range(count // 2):
            assert records.popleft() == taken
            taken += 1
    assert len(records) == added - taken
    assert records.pop() == added - 1
    assert [records.popleft() for _ in range(len(records))] == list(range(taken, added - 1))
    for take in (records.pop, records.popleft):
        with pytest.raises(IndexError):
            take()


@pytest.mark.parametrize("queue", ["initiator", "receive"])
def test_records_keep_what_they_hold_and_no_longer(queue):
    posted, region = _core.PostedRequests(Region()), Region()
    gone = weakref.ref(region)
    records = getattr(posted, queue)
    records.append(region)
    del posted, region
    gc.collect()
    assert gone() is not None
    del records
    assert gone() is None


@pytest.mark.parametrize("queue", ["initiator", "receive"])
def test_a_circle_of_records_is_collected(queue):
    posted, region = _core.PostedRequests(Region()), Region()
    region.posted = posted
    getattr(posted, queue).append(region)
    gone = weakref.ref(region)
    del posted, region
    gc.collect()
    assert gone() is None


# ---- the arguments of posts ----


class Queues(_core.WorkQueues):
    """A queue pair that does not exist yet."""

    def __init__(self) -> None:
        self._lock = _core.Lock()

    def _require_offered(self, operation: int) -> None:
        """It takes all of them."""

    @staticmethod
    def _bad_argument(error: Exception, context: object, flags: object) -> Exception:
        return ndpy.NdpyError(f"{type(error).__name__} {context!r} {flags!r}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda queues, sge: queues.send(), "send.* needs the argument 'sges'"),
        (lambda queues, sge: queues.write(sge), "write.* needs the argument 'remote'"),
        (lambda queues, sge: queues.read(remote=1), "read.* needs the argument 'sges'"),
        (lambda queues, sge: queues.send(sge, 7), "send.* takes at most 1 arguments by position, not 2"),
        (lambda queues, sge: queues.send(sge, contxt=7), "send.*'contxt' that it does not take"),
        (lambda queues, sge: queues.receive(sge, flags=7), "receive.*'flags' that it does not take"),
        (lambda queues, sge: queues.send(sge, sges=sge), "send.*'sges' that it has already"),
        (lambda queues, sge: queues.write(sge, (0, 8, 7)), "the peer's memory is a RemoteMemory"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(Queues(), Region()[:])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"context": -1}, "OverflowError -1 0"),
        ({"context": 1 << 64}, "OverflowError 18446744073709551616 0"),
        ({"context": "a", "flags": 2}, "TypeError 'a' 2"),
        ({"flags": 1 << 32}, "OverflowError 0 4294967296"),
        ({"flags": None}, "TypeError 0 None"),
    ],
)
def test_wrong_numbers_are_left_to_python_to_explain(numbers, message):
    with pytest.raises(ndpy.NdpyError, match=message):
        Queues().send(Region()[:], **numbers)


def test_names_that_are_not_interned_are_understood():
    name = "".join(["con", "text"])
    with pytest.raises(ndpy.NdpyError, match="OverflowError -5 0"):
        Queues().send(Region()[:], **{name: -5})


def test_a_post_before_the_queue_pair_exists_is_refused_and_leaves_the_lock():
    queues = Queues()
    with pytest.raises(RuntimeError, match="does not exist yet"):
        queues.send(Region()[:])
    assert not queues._lock.locked()


def test_a_queue_pair_that_cannot_be_used_raises_its_own_error():
    queues = Queues()
    queues._defunct = lambda: ndpy.ClosedError("it is closed")
    for _ in range(2):
        with pytest.raises(ndpy.ClosedError, match="it is closed"):
            queues.write(Region()[:], RemoteMemory(0, 100, 1))
    assert not queues._lock.locked()


def test_a_remote_token_has_32_bits():
    with pytest.raises(ValueError, match="a remote token is 0 to 2"):
        Queues().write(Region()[:], RemoteMemory(0, 100, 1 << 32))


def test_a_poll_before_the_queue_exists_is_refused_and_leaves_the_lock():
    class Queue(_core.CompletionQueue):
        pass

    queue = Queue()
    queue._lock = _core.Lock()
    with pytest.raises(RuntimeError, match="does not exist yet"):
        queue.poll()
    assert not queue._lock.locked()
    with pytest.raises(TypeError):
        queue.poll("a")
    with pytest.raises(TypeError, match="'most' that it does not take"):
        queue.poll(most=3)


def test_a_class_gets_methods_of_its_own_unless_another_one_replaces_them():
    class Between(_core.CompletionQueue):
        def poll(self):
            return "another"

    @_core.with_own_methods
    class Last(Between):
        pass

    assert vars(Last)["poll_into"].__objclass__ is Last
    assert Last.poll_into.__doc__ == _core.CompletionQueue.poll_into.__doc__
    assert Last.poll is Between.poll
