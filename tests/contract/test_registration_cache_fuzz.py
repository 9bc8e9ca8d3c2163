"""The registration cache under random use.

One test compares the cache with an exact model. The other uses it in many threads at once and checks what must always
hold. NDPY_STRESS=1 raises the number of steps to 100,000. NDPY_TEST_SEED sets another seed.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import itertools
import mmap
import queue
import random
import sys
import threading
from dataclasses import dataclass, field

import pytest
from kit.helpers import DEADLINE_S, STRESS, wait_until

import ndpy
from ndpy.objects.memory import address_of

try:
    import numpy
except ImportError:
    numpy = None

STEPS = 100_000 if STRESS else 1200
RUN_LIMIT_S = 3000 if STRESS else 120
UNIT = 512
RIGHTS = (0, 1, 9)
THREADS = 3


class Refused(ndpy.ProviderError):
    """The test refuses a registration."""


class Provider:
    """Wraps the adapter's registration: keeps a list of the registered regions, and refuses on demand."""

    def __init__(self, monkeypatch, adapter):
        self.ticks = itertools.count(1)
        #: Each registered region, and the tick at which it was registered.
        self.live = {}
        #: The failures of the next calls, one for each call.
        self.refusals = []
        self.chance = None
        plain = type(adapter).register
        with adapter.register(bytearray(1)) as region:
            region_class = type(region)
        # A region ends with one of these.
        ends = {name: getattr(region_class, name) for name in ("close", "_mark_closed")}

        def register(adapter, buffer, access):
            failure = self.refusals.pop(0) if self.refusals else self.chance and self.chance()
            try:
                if failure:
                    raise failure
            finally:
                # The frames of the exception would keep the buffers in a cycle.
                del failure
            region = plain(adapter, buffer, access)
            self.live[region] = next(self.ticks)
            return region

        def end(region, name):
            ends[name](region)
            self.live.pop(region, None)

        monkeypatch.setattr(type(adapter), "register", register)
        for name in ends:
            monkeypatch.setattr(region_class, name, lambda region, name=name: end(region, name))

    @property
    def pinned(self):
        return sum(region.length for region in list(self.live))


@pytest.fixture
def provider(monkeypatch, adapter):
    return Provider(monkeypatch, adapter)


def make_memory(kind, units):
    length = units * UNIT
    if kind == "alloc":
        return ndpy.alloc(length)
    if kind == "mmap":
        return mmap.mmap(-1, length)
    if kind == "numpy":
        return numpy.zeros(length, dtype="u1")
    if kind == "array":
        return array.array("B", bytes(length))
    return bytearray(length)


KINDS = ("alloc", "mmap", "bytearray", "array", *(("numpy",) if numpy is not None else ()))


def within_deadline(work):
    """Run work(). If it takes too long, print the stacks of all threads, and fail."""
    failures = []

    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="fuzz")
    thread.start()
    thread.join(RUN_LIMIT_S)
    if thread.is_alive():
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        pytest.fail(f"not done within {RUN_LIMIT_S} s; the stacks are on stderr")
    if failures:
        raise failures[0]


# ---- beside a model ----


@dataclass(eq=False)
class Piece:
    """A registration in the model."""

    owner: Memory
    start: int
    end: int
    rights: int
    used: int
    uses: int = 1
    cached: bool = True
    region: object = None

    @property
    def length(self):
        return self.end - self.start


@dataclass(eq=False)
class Memory:
    """An object with memory. exported: only at a miss can the cache see that nobody else refers to it."""

    kind: str
    units: int
    thing: object
    base: int
    dropped: bool = False
    leases: int = 0
    pieces: list = field(default_factory=list)

    @property
    def exported(self):
        return self.kind in ("bytearray", "array")


class Model:
    """The rules of the cache, written a second time."""

    def __init__(self, max_bytes, max_entries):
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.pieces = []
        self.memories = []
        self.tick = 0
        self.counts = dict.fromkeys(("hits", "misses", "registrations", "evictions", "invalidations"), 0)

    @property
    def pinned(self):
        return sum(piece.length for piece in self.pieces)

    def leave(self, piece, reason=""):
        """Take a piece out of the cache. It is deregistered too, unless it is in use."""
        if piece.cached:
            piece.cached = False
            if reason:
                self.counts[reason] += 1
        if not piece.uses and piece in self.pieces:
            self.pieces.remove(piece)

    def make_room(self, length=0, number=0):
        idle = sorted((piece for piece in self.pieces if piece.cached and not piece.uses), key=lambda piece: piece.used)
        for piece in idle:
            if self.pinned + length <= self.max_bytes and len(self.pieces) + number <= self.max_entries:
                break
            self.leave(piece, "evictions")

    def use(self, memory, start, end, rights, refusals):
        """Return the piece that serves the request, or None if the registration fails."""
        self.tick += 1
        own = [piece for piece in self.pieces if piece.owner is memory and piece.cached]
        for piece in own:
            if piece.start <= start and end <= piece.end and not rights & ~piece.rights:
                self.counts["hits"] += 1
                piece.uses += 1
                piece.used = self.tick
                return piece
        self.counts["misses"] += 1
        for piece in list(self.pieces):
            if piece.owner.exported and piece.owner.dropped and not piece.owner.leases:
                self.leave(piece, "invalidations")
        overlapping = [piece for piece in own if piece.start < end and start < piece.end]
        wide = (
            min([start, *(piece.start for piece in overlapping)]),
            max([end, *(piece.end for piece in overlapping)]),
            rights,
        )
        for piece in overlapping:
            wide = (*wide[:2], wide[2] | piece.rights)
        if wide[1] - wide[0] > self.max_bytes:
            wide = (start, end, rights)
        self.make_room(wide[1] - wide[0], 1)
        done = self.register(refusals)
        if not done and wide != (start, end, rights):
            wide = (start, end, rights)
            done = self.register(refusals)
        if not done:
            return None
        self.counts["registrations"] += 1
        new = Piece(memory, *wide, self.tick)
        for piece in own:
            if piece.cached and piece.start < new.end and new.start < piece.end:
                self.leave(piece)
        self.pieces.append(new)
        return new

    def register(self, refusals):
        if not refusals:
            return True
        if refusals.pop(0) is not ndpy.InsufficientResourcesError:
            return False
        idle = [piece for piece in self.pieces if piece.cached and not piece.uses]
        for piece in idle:
            self.leave(piece, "evictions")
        return bool(idle) and (not refusals or not refusals.pop(0))

    def release(self, piece):
        piece.uses -= 1
        if not piece.uses and not piece.cached:
            self.leave(piece)
        self.make_room()

    def invalidate(self, memory, start, end):
        for piece in list(self.pieces):
            if piece.owner is memory and piece.start < end and start < piece.end:
                self.leave(piece, "invalidations")

    def died(self, memory):
        for piece in [piece for piece in self.pieces if piece.owner is memory]:
            self.leave(piece, "invalidations")


class Worker:
    """A thread that does one step at a time."""

    def __init__(self):
        self._steps = queue.SimpleQueue()
        self._results = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (step := self._steps.get()) is not None:
            try:
                result = (step(), None)
            except Exception as error:
                # The frames of the exception would keep the buffers.
                result = (None, error.with_traceback(None))
                error.__context__ = error.__cause__ = None
            del step
            self._results.put(result)
            del result

    def __call__(self, step):
        self._steps.put(step)
        del step
        result, error = self._results.get(timeout=DEADLINE_S)
        if error is not None:
            raise error
        return result

    def end(self):
        self._steps.put(None)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.mark.timeout(RUN_LIMIT_S + 60)
def test_what_is_registered_is_what_the_model_says(adapter, provider, rng):
    """The steps run one after another, each in a thread chosen at random. After each step every count must agree."""
    max_bytes, max_entries = 60 * UNIT, 9
    model = Model(max_bytes, max_entries)
    workers = [Worker() for _ in range(THREADS)]
    with ndpy.RegistrationCache(adapter, max_bytes=max_bytes, max_entries=max_entries) as cache:
        within_deadline(lambda: walk(cache, model, provider, rng, workers))
    for worker in workers:
        worker.end()
    assert not provider.live


def walk(cache, model, provider, rng, workers):
    memories, held = [], []
    log = []

    def new_memory():
        kind, units = rng.choice(KINDS), rng.randint(1, 24)
        thing = make_memory(kind, units)
        memories.append(Memory(kind, units, thing, address_of(memoryview(thing))))

    def part_of(memory):
        start = rng.randrange(memory.units)
        return (0, memory.units) if rng.random() < 0.4 else (start, rng.randint(start + 1, memory.units))

    def use():
        memory = rng.choice(memories)
        start, end = part_of(memory)
        rights = rng.choice(RIGHTS)
        kinds = [Refused, ndpy.InsufficientResourcesError]
        refusals = [rng.choice(kinds) for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2)))]
        whole = (start, end) == (0, memory.units)
        provider.refusals = [kind("refused", operation="register") for kind in refusals]
        piece = model.use(memory, start * UNIT, end * UNIT, rights, list(refusals))
        log.append(f"use {memory.kind} {id(memory):x} {start}:{end} {rights} {refusals}")

        def step():
            if whole:
                return cache.local(memory.thing, rights)
            view = memoryview(memory.thing)
            part = view[start * UNIT : end * UNIT]
            view.release()
            return cache.local(part, rights)

        try:
            lease = rng.choice(workers)(step)
        except (Refused, ndpy.InsufficientResourcesError):
            assert piece is None
            return
        finally:
            provider.refusals = []
        assert piece is not None
        region = lease.region
        if piece.region is None:
            piece.region = region
            model.pieces[model.pieces.index(piece)].region = region
        assert region is piece.region, "a region that was registered for something else"
        assert not region.closed
        assert (region.address, region.length) == (memory.base + piece.start, piece.length)
        assert int(region.access) == piece.rights
        assert (lease.address, lease.length) == (memory.base + start * UNIT, (end - start) * UNIT)
        memory.leases += 1
        held.append((lease, piece))

    def release():
        lease, piece = held.pop(rng.randrange(len(held)))
        log.append(f"release {piece.start}:{piece.end} of {id(piece.owner):x}")
        rng.choice(workers)(lease.release)
        del lease
        model.release(piece)
        memory = piece.owner
        memory.leases -= 1
        end_of(memory)

    def end_of(memory):
        if memory.dropped and not memory.leases and not memory.exported:
            model.died(memory)

    def drop():
        memory = memories.pop(rng.randrange(len(memories)))
        log.append(f"drop {memory.kind} {id(memory):x}")
        memory.dropped = True
        memory.thing = None
        end_of(memory)
        new_memory()

    def invalidate():
        memory = rng.choice(memories)
        start, end = part_of(memory)
        log.append(f"invalidate {memory.kind} {id(memory):x} {start}:{end}")
        model.invalidate(memory, start * UNIT, end * UNIT)
        rng.choice(workers)(lambda: cache.invalidate(memory.base + start * UNIT, (end - start) * UNIT))

    def agrees():
        stats = cache.stats
        counts = {name: getattr(stats, name) for name in model.counts}
        return (counts, stats.entries, stats.bytes_pinned, provider.pinned, len(provider.live)) == (
            model.counts,
            len(model.pieces),
            model.pinned,
            model.pinned,
            len(model.pieces),
        )

    for _ in range(6):
        new_memory()
    try:
        for _ in range(STEPS):
            if held and (len(held) > 8 or rng.random() < 0.35):
                release()
            else:
                rng.choices((use, drop, invalidate), (12, 2, 1))[0]()
            # Free-threaded Python frees what was made in another thread when that thread goes on.
            for worker in workers:
                worker(lambda: None)
            # The adapter's thread may do its part a moment later.
            wait_until(agrees, "the cache and the model agree")
    except BaseException:
        print("the last steps:", *log[-15:], sep="\n  ")
        print("cache:", cache.stats, provider.pinned, "\nmodel:", model.counts, len(model.pieces), model.pinned)
        raise
    while held:
        release()
    wait_until(agrees, "the cache and the model agree at the end")
    assert model.pinned <= model.max_bytes
    print(cache.stats)


# ---- many threads at once ----


class Storm:
    """Threads use, share, invalidate and drop memory while registrations are refused at random."""

    def __init__(self, cache, provider, seed, steps):
        self.cache = cache
        self.provider = provider
        self.steps = steps
        self.seed = seed
        self.shared = [self.new_memory(random.Random(seed)) for _ in range(3)]
        self.barrier = threading.Barrier(THREADS, action=self.check)
        self.failures = []
        self.removed = False

    def new_memory(self, rng):
        units = rng.randint(1, 16)
        born = next(self.provider.ticks)
        return born, make_memory(rng.choice(KINDS), units), units

    def check(self):
        """Compare the cache with what is registered. All threads but the adapter's stand still."""
        live = self.provider.live

        def agrees():
            stats = self.cache.stats
            return (stats.bytes_pinned, stats.entries) == (self.provider.pinned, len(live))

        wait_until(agrees, f"{self.cache.stats} is what is registered, {self.provider.pinned} bytes in {len(live)}")

    def work(self, number):
        rng = random.Random(self.seed * 1000 + number)
        own = [self.new_memory(rng) for _ in range(3)]
        held = []
        try:
            for step in range(self.steps):
                if step % 40 == 39:
                    self.barrier.wait(2 * DEADLINE_S)
                if held and (len(held) > 4 or rng.random() < 0.4):
                    held.pop(rng.randrange(len(held)))[0].release()
                    continue
                memories = own if rng.random() < 0.6 else self.shared
                place = rng.randrange(len(memories))
                if rng.random() < 0.1:
                    memories[place] = self.new_memory(rng)
                    continue
                born, thing, units = memories[place]
                if rng.random() < 0.08:
                    with contextlib.suppress(ndpy.DeviceRemovedError):
                        self.cache.invalidate(thing)
                    continue
                self.use(rng, born, thing, units, held)
        finally:
            while held:
                held.pop()[0].release()

    def use(self, rng, born, thing, units, held):
        start = rng.randrange(units)
        end = rng.randint(start + 1, units)
        rights = rng.choice(RIGHTS)
        whole = rng.random() < 0.5
        part = thing if whole else memoryview(thing).cast("B")[start * UNIT : end * UNIT]
        try:
            lease = self.cache.local(part, rights)
        except (Refused, ndpy.InsufficientResourcesError):
            return
        except ndpy.DeviceRemovedError:
            assert self.removed
            return
        region = lease.region
        address = address_of(memoryview(part))
        length = (units if whole else end - start) * UNIT
        assert (lease.address, lease.length) == (address, length)
        assert region.address <= address
        assert address + length <= region.address + region.length
        assert not rights & ~region.access
        assert not region.closed, "a hit on a region that is gone"
        assert self.provider.live[region] > born, "a hit on a region that is older than the memory"
        held.append((lease, region))

    def run(self):
        def guarded(number):
            try:
                self.work(number)
            except BaseException as error:
                self.failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        return threads


@pytest.mark.timeout(RUN_LIMIT_S + 60)
@pytest.mark.parametrize("removed", [False, True], ids=["", "device removed"])
def test_threads_get_no_stale_region_and_leave_none(adapter, provider, rng, removed):
    seed = rng.randrange(1 << 30)
    chance = random.Random(seed)
    kinds = (Refused, ndpy.InsufficientResourcesError)

    def refuse():
        return chance.choice(kinds)("refused", operation="register") if chance.random() < 0.05 else None

    def work():
        for number in range(2 * max(STEPS // 1200, 1)):
            provider.chance = refuse
            with (
                ndpy.open_adapter(adapter.info.name) as fresh,
                ndpy.RegistrationCache(fresh, max_bytes=40 * UNIT, max_entries=7) as cache,
            ):
                one_storm(fresh, cache, Storm(cache, provider, seed + number, 200))
            assert not provider.live

    def one_storm(fresh, cache, storm):
        threads = storm.run()
        if removed:
            wait_until(lambda: cache.stats.misses > 20 or storm.failures, "the storm is under way")
            storm.removed = True
            fresh._mark_removed()
        for thread in threads:
            thread.join(RUN_LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
        if storm.failures:
            raise storm.failures[0]
        storm.check()
        assert cache.stats.bytes_pinned <= cache.max_bytes
        assert cache.stats.entries <= cache.max_entries
        provider.chance = None
        storm.shared.clear()
        if not removed:
            # At a miss the cache finds the memory that nobody else refers to.
            last = bytearray(1)
            cache.local(last).release()
            wait_until(lambda: cache.stats.entries == 1, "only the last one is registered")
            cache.invalidate(last)
            assert cache.stats.entries == 0
        storm.check()
        # The device is really there. Closing an adapter whose device is gone would cut librdmacm off from the device.
        fresh._defunct = None

    within_deadline(work)
