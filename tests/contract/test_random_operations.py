"""Random requests of all kinds, beside a model of what they do.

Each step chooses two ends, a few requests from one to the other, how they are posted and how their completions are
taken. After the step the memory of both ends and all completions have to be those of the model. NDPY_STRESS=1 raises
the number of requests to 100,000, and NDPY_TEST_REQUESTS sets it. NDPY_TEST_SEED sets another seed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.helpers import (
    DEADLINE_S,
    SEED,
    End,
    bind,
    connect_ends,
    contents,
    create_end,
    fill,
    memory,
    peer_of,
    rounds,
    take,
)
from kit.quirks import has_quirk

import ndpy
from ndpy import Access, Batch, Capability, CompletionArray, Flags, Operation, QueuePairType, Status
from ndpy.vocabulary.quirks import Quirk

ARENA = 2048
SLOT = 256
SLOTS = 8
INLINE = 32
ATOMIC_SIZE = 8
MASK = (1 << 64) - 1
# The most requests of a step.
MOST = 6
PAGE = 4096
# Below this siw garbles what crosses a page.
SHORT = 64
# A fault of the program, one of the peer's rights, and a new window: each once in so many steps.
FAULTS, REFUSALS, BINDS = 30, 400, 15

SENDS = (Operation.SEND,)
TO_MEMORY = (Operation.WRITE, Operation.READ, Operation.COMPARE_AND_SWAP, Operation.FETCH_AND_ADD)


class Area:
    """Memory of an end, and what the model says is in it."""

    def __init__(self, keep: Any, adapter: ndpy.Adapter, size: int, access: Access) -> None:
        self.region = memory(keep, adapter, size, access)
        self.model = bytearray(size)

    def check(self, what: str) -> None:
        found = contents(self.region)
        if found != self.model:
            places = [i for i, (one, other) in enumerate(zip(found, self.model, strict=True)) if one != other]
            first, last = places[0], places[-1]
            pytest.fail(
                f"{what}: {len(places)} bytes from {first} to {last} differ: {found[first : last + 1].hex()}, "
                f"not {self.model[first : last + 1].hex()}"
            )


class Side:
    """An end with its memory. The peer uses the arena. Messages come to the inbox, and results to the results."""

    def __init__(self, keep: Any, chance: random.Random, end: End, rights: Access) -> None:
        self.end = end
        self.queue_pair = end.queue_pair
        adapter = end.adapter
        self.arena = Area(keep, adapter, ARENA, rights | Access.LOCAL_WRITE)
        start = chance.randbytes(ARENA)
        fill(self.arena.region, start)
        self.arena.model[:] = start
        self.inbox = Area(keep, adapter, SLOT * MOST, Access.LOCAL_WRITE)
        results = Access.LOCAL_WRITE
        if Capability.READ_SINK_REQUIRED in adapter.info.capabilities:
            results |= Access.READ_SINK
        self.results = Area(keep, adapter, SLOT * MOST, results)
        #: A window on a part of the arena, as (window, descriptor, start, length).
        self.window: tuple[Any, Any, int, int] | None = None

    def check(self, what: str) -> None:
        for name in ("arena", "inbox", "results"):
            getattr(self, name).check(f"{what}, {name}")


@dataclass
class Expected:
    """What a completion has to say."""

    operation: Operation
    context: int
    nbytes: int | None = None
    immediate: int | None = None


@dataclass
class Step:
    """The requests of a step: how to post each one plainly and into a batch, and what the completions say."""

    receives: list[tuple[Any, int]] = field(default_factory=list)
    posts: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    sent: list[Expected] = field(default_factory=list)
    received: list[Expected] = field(default_factory=list)
    #: Parts of the peer's arena that reads of this step use. A later write may come before a read is answered again.
    read: list[tuple[int, int]] = field(default_factory=list)


class Link:
    """Two ends that are connected, and the kinds of requests that they take."""

    def __init__(
        self,
        keep: Any,
        adapter: ndpy.Adapter,
        chance: random.Random,
        make: Callable[[], tuple[End, End]],
        kinds: tuple[Operation, ...],
        rights: Access,
    ) -> None:
        self.kinds = kinds
        self.rights = rights
        self.sides = [Side(keep, chance, end, rights) for end in make()]
        self.array = CompletionArray(4 * MOST)
        self.adapter = adapter
        self.immediate = Capability.IMMEDIATE_DATA in adapter.info.capabilities
        # Of unreliable connections, and on iWARP, where nothing answers a write.
        self.writes_end_early = Operation.READ not in kinds or has_quirk(adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT)
        self.is_datagram = isinstance(self.sides[0].queue_pair, ndpy.DatagramQueuePair)
        self.destinations: dict[int, ndpy.Destination] = {}
        if self.is_datagram:
            for source, sink in (self.sides, self.sides[::-1]):
                peer = sink.queue_pair.local_endpoint()
                self.destinations[id(source)] = keep(source.queue_pair.destination(peer))


class Machine:
    """The links of an adapter, and the steps."""

    def __init__(self, keep: Any, adapter: ndpy.Adapter, seed: int) -> None:
        self.keep = keep
        self.adapter = adapter
        self.chance = random.Random(seed)
        self.capabilities = adapter.info.capabilities
        # A busy machine answers late, and then requests are sent again.
        self.may_fence = not has_quirk(adapter, Quirk.RXE_FENCE_WAITS_FOR_ITSELF)
        self.posted = 0
        self.contexts = 0
        #: How often each thing was done, so that a test can tell that it was done at all.
        self.done: dict[str, int] = {}
        kinds = SENDS + tuple(
            kind for kind in TO_MEMORY if kind in (Operation.WRITE, Operation.READ) or self.has(Capability.ATOMICS)
        )
        rights = Access.REMOTE_READ | Access.REMOTE_WRITE
        if self.has(Capability.ATOMICS):
            rights |= Access.REMOTE_ATOMIC
        self.makers: dict[str, Callable[[], Link]] = {
            "RC": lambda: self.link(self.connected, kinds, rights),
        }
        if self.has(Capability.SHARED_RECEIVE_QUEUES):
            self.makers["shared"] = lambda: self.link(self.shared, kinds, rights)
        if self.has(Capability.UNRELIABLE_CONNECTIONS):
            self.makers["UC"] = lambda: self.link(self.unreliable, (Operation.SEND, Operation.WRITE), rights)
        if self.has(Capability.DATAGRAMS):
            self.makers["UD"] = lambda: self.link(self.datagrams, SENDS, Access.NONE)
        self.links = {name: make() for name, make in self.makers.items()}

    def has(self, capability: Capability) -> bool:
        return capability in self.capabilities

    def note(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    # ---- links ----

    def link(self, make: Callable[[], tuple[End, End]], kinds: tuple[Operation, ...], rights: Access) -> Link:
        return Link(self.keep, self.adapter, self.chance, make, kinds, rights)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "max_initiator_sge": min(2, self.adapter.info.max_initiator_sge),
            "max_receive_sge": min(2, self.adapter.info.max_receive_sge),
            "inline_data_size": INLINE if self.has(Capability.INLINE) else 0,
        }

    def connected(self) -> tuple[End, End]:
        ends = [create_end(self.keep, self.adapter, **self.options) for _ in range(2)]
        pair = connect_ends(self.keep, self.adapter, *ends)
        self.greet(pair.client, pair.server)
        return pair.client, pair.server

    def shared(self) -> tuple[End, End]:
        ends = []
        for _ in range(2):
            queue = self.keep(
                self.adapter.create_shared_receive_queue(16, max_sge=min(2, self.adapter.info.max_receive_sge))
            )
            ends.append(create_end(self.keep, self.adapter, **{**self.options, "srq": queue, "max_receive_sge": 1}))
        pair = connect_ends(self.keep, self.adapter, *ends)
        self.greet(pair.client, pair.server)
        return pair.client, pair.server

    def greet(self, client: End, server: End) -> None:
        """On iWARP the client has to send first."""
        (server.queue_pair.srq or server.queue_pair).receive([], context=0)
        client.queue_pair.send([], context=0)
        take(client.cq)
        take(server.cq)

    def unreliable(self) -> tuple[End, End]:
        one, other = (create_end(self.keep, self.adapter, type=QueuePairType.UC, **self.options) for _ in range(2))
        local, remote = one.queue_pair.local_endpoint(), other.queue_pair.local_endpoint()
        one.queue_pair.connect_endpoint(remote)
        other.queue_pair.connect_endpoint(local)
        return one, other

    def datagrams(self) -> tuple[End, End]:
        def make() -> End:
            cq = self.keep(self.adapter.create_completion_queue(64))
            options = {**self.options, "receive_queue_depth": 16, "initiator_queue_depth": 16}
            queue_pair = self.keep(self.adapter.create_datagram_queue_pair(cq, **options))
            return End(queue_pair, cq, None)  # type: ignore[arg-type]

        return make(), make()

    # ---- a step ----

    def run(self, requests: int) -> None:
        while self.posted < requests:
            name = self.chance.choice(sorted(self.links))
            link = self.links[name]
            source, sink = self.chance.sample(link.sides, 2)
            what = f"seed {SEED}, request {self.posted} on {name}"
            if not self.chance.randrange(BINDS) and Operation.READ in link.kinds:
                self.bind(sink)
            if not self.chance.randrange(FAULTS):
                self.make_fault(link, source, sink)
            if not self.chance.randrange(REFUSALS) and self.refuse(name, link, source, sink):
                continue
            step = self.choose(link, source, sink)
            self.post(link, source, sink, step)
            try:
                self.compare(source.end, step.sent, what)
                self.compare(sink.end, step.received, what)
            except ndpy.TimeoutError as error:
                pytest.fail(f"{what}: {error}; {step}")
            for side in link.sides:
                side.check(f"{what}: {step}")

    def next_context(self) -> int:
        self.contexts += 1
        return self.contexts if self.chance.random() < 0.9 else self.contexts | 1 << 63

    def choose(self, link: Link, source: Side, sink: Side) -> Step:
        step = Step()
        count = self.chance.randint(1, MOST)
        for place in range(count):
            kind = self.chance.choice(link.kinds)
            is_last = place == count - 1
            if is_last and link.writes_end_early:
                # Nothing else tells when a write has arrived.
                kind = Operation.SEND
            options: dict[str, Any] = {"context": self.next_context()}
            flags = Flags.NONE
            if not is_last and self.chance.random() < 0.4:
                flags |= Flags.SILENT_SUCCESS
            if self.chance.random() < 0.2 and not link.is_datagram and Operation.READ in link.kinds and self.may_fence:
                flags |= Flags.READ_FENCE
            chosen = self.add(link, source, sink, step, kind, place, options, flags)
            if chosen is not None and Flags.SILENT_SUCCESS not in flags:
                step.sent.append(chosen)
        if not step.posts or step.posts[-1][2]["flags"] & Flags.SILENT_SUCCESS:
            options = {"context": self.next_context()}
            step.sent.append(self.add_send(link, source, sink, step, MOST - 1, options, Flags.NONE))
        self.posted += len(step.posts)
        return step

    def add(
        self,
        link: Link,
        source: Side,
        sink: Side,
        step: Step,
        kind: Operation,
        place: int,
        options: dict[str, Any],
        flags: Flags,
    ) -> Expected | None:
        """Add a request to the step, and do it in the model. None if there is no place for it."""
        if kind is Operation.SEND:
            return self.add_send(link, source, sink, step, place, options, flags)
        if kind is Operation.WRITE:
            return self.add_write(link, source, sink, step, place, options, flags)
        if kind is Operation.READ:
            return self.add_read(source, sink, step, place, options, flags)
        return self.add_atomic(kind, source, sink, step, place, options, flags)

    def gather(self, side: Side, most: int) -> tuple[Any, bytes]:
        """Some elements of the arena, and the bytes in them."""
        elements, data = [], b""
        for _ in range(self.chance.randint(1, min(2, self.adapter.info.max_initiator_sge))):
            length = self.chance.randint(0, most // 2)
            start = self.within_a_page(side, self.chance.randint(0, ARENA - length), length)
            elements.append(side.arena.region[start : start + length])
            data += side.arena.model[start : start + length]
        return (elements[0] if len(elements) == 1 and self.chance.random() < 0.5 else elements), data

    def within_a_page(self, side: Side, start: int, length: int) -> int:
        """Where to begin instead, if the driver cannot send so few bytes from two pages."""
        place = side.arena.region.address + start
        if length < SHORT and has_quirk(self.adapter, Quirk.SIW_GARBLES_SHORT_DATA_ACROSS_PAGES):
            beyond = (place + length) % PAGE
            if beyond < length and beyond > 0:
                later = start + length - beyond
                return later if later + length <= ARENA else start - beyond
        return start

    def payload(self, side: Side, flags: Flags, most: int = SLOT) -> tuple[Any, bytes, Flags]:
        if self.has(Capability.INLINE) and self.chance.random() < 0.2:
            data = self.chance.randbytes(self.chance.randint(0, INLINE))
            self.note("inline")
            return data, data, flags | Flags.INLINE
        elements, data = self.gather(side, most)
        return elements, data, flags

    def number(self) -> int | None:
        return self.chance.randrange(1 << 32) if self.chance.random() < 0.3 else None

    def expect(self, sink: Side, step: Step, place: int, data: bytes, expected: Expected) -> None:
        """Add a receive for data, and do it in the model. A write with a number uses none of its memory."""
        start, spare = place * SLOT, self.chance.choice((0, 1, 7))
        end = min(start + len(data) + spare, start + SLOT)
        region = sink.inbox.region
        elements: Any = region[start:end]
        if self.chance.random() < 0.3 and self.adapter.info.max_receive_sge > 1:
            middle = self.chance.randint(start, end)
            elements = [region[start:middle], region[middle:end]]
        if expected.operation is Operation.RECEIVE:
            sink.inbox.model[start : start + len(data)] = data
        step.receives.append((elements, expected.context))
        step.received.append(expected)

    def add_send(
        self, link: Link, source: Side, sink: Side, step: Step, place: int, options: dict[str, Any], flags: Flags
    ) -> Expected:
        elements, data, flags = self.payload(source, flags)
        if self.chance.random() < 0.2:
            flags |= Flags.SOLICITED
        number = self.number() if link.immediate else None
        if number is not None:
            options["immediate"] = number
            self.note("send with immediate")
        received = Expected(Operation.RECEIVE, self.next_context(), len(data), number)
        self.expect(sink, step, place, data, received)
        arguments: tuple[Any, ...] = (elements,)
        if link.is_datagram:
            arguments = elements, link.destinations[id(source)]
            flags &= ~Flags.READ_FENCE
        step.posts.append(("send", arguments, {**options, "flags": flags}))
        self.note("datagram" if link.is_datagram else "send")
        return Expected(Operation.SEND, options["context"])

    def target(self, sink: Side, length: int) -> tuple[Any, int]:
        """A part of the sink's arena for the peer, through the region or a window: (descriptor, start)."""
        if sink.window is not None and self.chance.random() < 0.5:
            _, descriptor, first, size = sink.window
            if length <= size:
                start = self.chance.randint(0, size - length)
                self.note("window")
                return descriptor[start : start + length], first + start
        start = self.chance.randint(0, ARENA - length)
        return sink.arena.region.remote()[start : start + length], start

    def add_write(
        self, link: Link, source: Side, sink: Side, step: Step, place: int, options: dict[str, Any], flags: Flags
    ) -> Expected | None:
        elements, data, flags = self.payload(source, flags)
        remote, start = self.target(sink, len(data))
        if any(start < end and first < start + len(data) for first, end in step.read):
            return None
        number = self.number() if link.immediate else None
        if number is not None:
            options["immediate"] = number
            received = Expected(Operation.RECEIVE_RDMA_WITH_IMMEDIATE, self.next_context(), len(data), number)
            self.expect(sink, step, place, b"", received)
            self.note("write with immediate")
        sink.arena.model[start : start + len(data)] = data
        step.posts.append(("write", (elements, remote), {**options, "flags": flags}))
        self.note("write")
        return Expected(Operation.WRITE, options["context"])

    def add_read(
        self, source: Side, sink: Side, step: Step, place: int, options: dict[str, Any], flags: Flags
    ) -> Expected | None:
        least = 1 if has_quirk(self.adapter, Quirk.SIW_ANSWERS_EMPTY_READS_WITH_DATA) else 0
        length = self.chance.randint(least, SLOT)
        remote, start = self.target(sink, length)
        if self.within_a_page(sink, start, length) != start:
            return None
        begin = place * SLOT
        region = source.results.region
        elements: Any = region[begin : begin + length]
        source.results.model[begin : begin + length] = sink.arena.model[start : start + length]
        step.read.append((start, start + length))
        step.posts.append(("read", (elements, remote), {**options, "flags": flags}))
        self.note("read")
        return Expected(Operation.READ, options["context"])

    def add_atomic(
        self,
        kind: Operation,
        source: Side,
        sink: Side,
        step: Step,
        place: int,
        options: dict[str, Any],
        flags: Flags,
    ) -> Expected | None:
        start = ATOMIC_SIZE * self.chance.randrange(ARENA // ATOMIC_SIZE)
        if any(start < end and first < start + ATOMIC_SIZE for first, end in step.read):
            return None
        model = sink.arena.model
        former = int.from_bytes(model[start : start + ATOMIC_SIZE], sys.byteorder)
        remote = sink.arena.region.remote()[start : start + ATOMIC_SIZE]
        begin = place * SLOT
        result = source.results.region[begin : begin + ATOMIC_SIZE]
        source.results.model[begin : begin + ATOMIC_SIZE] = model[start : start + ATOMIC_SIZE]
        operands: tuple[int, ...]
        if kind is Operation.FETCH_AND_ADD:
            operands = (self.chance.randrange(1 << 64),)
            after, name = (former + operands[0]) & MASK, "fetch_and_add"
        else:
            operands = (self.chance.choice((former, former ^ 1)), self.chance.randrange(1 << 64))
            after, name = operands[1] if operands[0] == former else former, "compare_and_swap"
        model[start : start + ATOMIC_SIZE] = after.to_bytes(ATOMIC_SIZE, sys.byteorder)
        step.posts.append((name, (result, remote, *operands), {**options, "flags": flags}))
        self.note(name)
        return Expected(kind, options["context"])

    # ---- posting and taking ----

    def post(self, link: Link, source: Side, sink: Side, step: Step) -> None:
        receiver = sink.queue_pair.srq or sink.queue_pair
        how = self.chance.choice(("plain", "many", "batch")) if receiver is sink.queue_pair else "plain"
        if how == "plain":
            for elements, context in step.receives:
                receiver.receive(elements, context=context)
        elif how == "many":
            sink.queue_pair.receive_many(
                [elements for elements, _ in step.receives], contexts=[context for _, context in step.receives]
            )
        elif step.receives:
            batch = Batch(len(step.receives), max_sge=2)
            for elements, context in step.receives:
                batch.receive(elements, context=context)
            sink.queue_pair.post(batch)
        # A batch takes no inline bytes.
        has_bytes = any(options["flags"] & Flags.INLINE for _, _, options in step.posts)
        if self.chance.random() < 0.5 or has_bytes:
            for name, arguments, options in step.posts:
                getattr(source.queue_pair, name)(*arguments, **options)
            self.note("plain calls")
            return
        batch = Batch(MOST + 1, max_sge=2, signal_all=True)
        for name, arguments, options in step.posts:
            getattr(batch, "send_to" if link.is_datagram else name)(*arguments, **options)
        source.queue_pair.post(batch)
        self.note("batches")

    def compare(self, end: End, expected: list[Expected], what: str) -> None:
        how = self.chance.choice(("wait", "poll", "array"))
        found: list[ndpy.Completion] = []
        if how == "array":
            array = CompletionArray(MOST + 1)
            while len(found) < len(expected):
                if end.cq.poll_into(array):
                    assert array.all_ok, (what, list(array))
                    found += array
                else:
                    found += end.cq.wait(DEADLINE_S, len(expected) - len(found))
        elif how == "poll":
            armed = None
            while len(found) < len(expected):
                taken = end.cq.poll()
                if not taken:
                    armed = end.cq.arm()
                    taken = end.cq.poll()
                    if not taken:
                        armed.result(DEADLINE_S)
                found += taken
            if armed is not None:
                armed.cancel()
        else:
            found = take(end.cq, len(expected))
        seen = [
            Expected(
                one.operation,
                one.context,
                one.nbytes if wanted.nbytes is not None else None,
                one.immediate if wanted.operation in RECEIVES else None,
            )
            for one, wanted in zip(found, expected, strict=True)
        ]
        assert seen == expected, what
        assert {one.status for one in found} <= {Status.SUCCESS}, (what, found)
        assert all(one.queue_pair is end.queue_pair for one in found), what

    # ---- what is refused ----

    def bind(self, side: Side) -> None:
        if not self.has(Capability.MEMORY_WINDOWS) or has_quirk(self.adapter, Quirk.RXE_INVALIDATES_ANY_WINDOW):
            return
        former, side.window = side.window, None
        if former is not None:
            former[0].close()
        window = self.keep(side.end.adapter.create_memory_window())
        length = self.chance.randint(1, ARENA)
        start = self.chance.randint(0, ARENA - length)
        part = side.arena.region[start : start + length]
        descriptor = bind(side.end, window, part, Access.REMOTE_READ | Access.REMOTE_WRITE)
        side.window = window, descriptor, start, length
        self.note("bind")

    def make_fault(self, link: Link, source: Side, sink: Side) -> None:
        """A request that is refused before it is posted. It changes nothing."""
        queue_pair, region = source.queue_pair, source.arena.region
        where = (link.destinations[id(source)],) if link.is_datagram else ()
        faults: list[tuple[type[Exception], Callable[[], object]]] = [
            (ndpy.LimitExceededError, lambda: queue_pair.send([region[0:1]] * 20, *where)),
            (ValueError, lambda: queue_pair.send(region[0:8], *where, context=1 << 64)),
        ]
        if Capability.ATOMICS in self.capabilities and Operation.FETCH_AND_ADD in link.kinds:
            odd = sink.arena.region.remote()[4:12]
            faults.append(
                (ndpy.ElementRangeError, lambda: queue_pair.fetch_and_add(source.results.region[0:8], odd, 1))
            )
        if link.is_datagram:
            faults.append((ndpy.UnsupportedError, lambda: queue_pair.read(region, None)))
        kind, call = self.chance.choice(faults)
        with pytest.raises(kind):
            call()
        self.note("fault")

    def refuse(self, name: str, link: Link, source: Side, sink: Side) -> bool:
        """Write without the right, which ends the connection, and make another one. False if that cannot be."""
        if name not in ("RC", "shared") or has_quirk(self.adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT):
            return False
        private = memory(self.keep, sink.end.adapter, b"original", Access.REMOTE_READ)
        source.queue_pair.write(source.arena.region[0:8], private.remote(), context=9)
        (failed,) = take(source.end.cq)
        assert (failed.operation, failed.context, failed.status) == (Operation.WRITE, 9, Status.ACCESS_VIOLATION)
        assert contents(private) == b"original"
        private.close()
        for side in link.sides:
            if side.window is not None:
                side.window[0].close()
            side.end.connector.close()
            side.queue_pair.close()
            if side.queue_pair.srq is not None:
                side.queue_pair.srq.close()
            side.end.cq.close()
            for area in (side.arena, side.inbox, side.results):
                area.region.close()
        self.links[name] = self.makers[name]()
        self.note("refusal")
        return True


RECEIVES = (Operation.RECEIVE, Operation.RECEIVE_RDMA_WITH_IMMEDIATE)


@pytest.mark.timeout(600)
def test_random_requests_do_what_the_model_says(adapter, keep):
    if peer_of(adapter) is not adapter:
        pytest.skip("the other end is on another host")
    if Capability.REGION_ACCESS not in adapter.info.capabilities:
        pytest.skip(f"peers reach memory of {adapter.info.name} through windows only")
    count = int(os.environ.get("NDPY_TEST_REQUESTS") or rounds(100_000, 3_000))
    machine = Machine(keep, adapter, SEED)
    machine.run(count)
    assert {"send", "write", "read", "plain calls", "batches", "fault"} <= machine.done.keys()
    for capability, names in {
        Capability.ATOMICS: {"compare_and_swap", "fetch_and_add"},
        Capability.DATAGRAMS: {"datagram"},
        Capability.IMMEDIATE_DATA: {"send with immediate", "write with immediate"},
        Capability.INLINE: {"inline"},
    }.items():
        if capability in adapter.info.capabilities:
            assert names <= machine.done.keys()
