"""The hot loops: everything that runs while the clock does.

They are written for speed: what they use is in local variables, lists are made before, and times go to an array. A
faster way to post or to take completions belongs here:

- taker() is the only place that takes completions.
- _posters() is the only place that posts the requests of a bandwidth test.
"""

from __future__ import annotations

import itertools
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ndpy
from ndpy import Flags, Operation
from ndpy.tools.cli.peers import PeerRefused
from ndpy.tools.cli.perf.end import End
from ndpy.tools.cli.perf.watch import Idle, NothingCame
from ndpy.vocabulary.quirks import Quirk, quirks_of

#: How often a loop looks at memory in vain before it calls idle(), and how long it polls a queue.
_SPINS = range(500)
_SPIN_S = 0.0002
#: How many completions are taken at once.
_AT_ONCE = 64
#: How long a loop sleeps for a completion before it calls idle().
_SLEEP_S = 0.1
#: How often stream() and exchange() call their `tick`.
_TICK_NS = 250_000_000

#: In a latency test of messages one send in this number has a completion.
_SIGNAL_EVERY = 16
#: See Quirk.SIW_SPLITS_SILENT_MESSAGES.
_SPLIT_FROM = 4096
#: The most sends of such a test that have not ended as far as the loop knows. An answer may arrive before the
#: completion.
_MAX_OWED = 48

_SILENT = int(Flags.SILENT_SUCCESS)
_INLINE = int(Flags.INLINE)
_FOREVER = sys.maxsize

#: NetworkDirect has no lists of requests, so a batch is posted there one by one, in Python.
_HAS_LISTS = sys.platform != "win32"

#: take(progress) waits for completions and returns them. All of them are successes.
Take = Callable[[int], list[ndpy.Completion]]


@dataclass
class Tally:
    """What a side has moved: groups, and the time from the first post to the last completion. Valid even after an
    exception.
    """

    groups: int = 0
    ns: int = 0


def taker(end: End, idle: Idle) -> Take:
    """The function that takes completions, by polling or by sleeping until there are some."""
    poll, wait = end.cq.poll, end.cq.wait

    def take_by_polling(progress: int) -> list[ndpy.Completion]:
        while not (completions := poll(_AT_ONCE, spin_s=_SPIN_S)):
            idle(progress)
        for completion in completions:
            if not completion.ok:
                completion.raise_for_status()
        return completions

    def take_by_events(progress: int) -> list[ndpy.Completion]:
        while True:
            try:
                completions = wait(_SLEEP_S)
            except ndpy.TimeoutError:
                idle(progress)
                continue
            for completion in completions:
                if not completion.ok:
                    completion.raise_for_status()
            return completions

    return take_by_events if end.plan.events else take_by_polling


def _flags(end: End, size: int) -> int:
    return _INLINE if size <= end.plan.inline else 0


# ---- latency ----


def _signal_every(end: End, size: int) -> int:
    splits = size >= _SPLIT_FROM and Quirk.SIW_SPLITS_SILENT_MESSAGES in quirks_of(end.adapter.info)
    return 1 if splits else _SIGNAL_EVERY


def ping_by_write(end: End, idle: Idle, size: int, stamps: array[int], count: int) -> None:
    """`count` times: write, and wait until the answer's last byte is in the memory.

    stamps: gets the time of each post, and the time of the end.
    """
    write, view, clock = end.queue_pairs[0].write, end.buffer, time.perf_counter_ns
    take = taker(end, idle)
    start = end.plan.inbox(0)
    outgoing, remote, flags = end.region[0:size], end.remotes[0][start : start + size], _flags(end, size)
    last_out, last_in = size - 1, start + size - 1
    for turn, mark in zip(range(count), end.marks, strict=False):
        view[last_out] = mark
        stamps[turn] = clock()
        write(outgoing, remote, flags=flags)
        while view[last_in] != mark:
            for _ in _SPINS:
                if view[last_in] == mark:
                    break
            else:
                idle(turn)
        take(turn)
    stamps[count] = clock()


def pong_by_write(end: End, idle: Idle, idle_between: Idle, size: int) -> None:
    """Answer the writes of ping_by_write(), until idle_between() raises. It is called when all of them are answered."""
    write, view = end.queue_pairs[0].write, end.buffer
    take = taker(end, idle)
    start = end.plan.inbox(0)
    outgoing, remote, flags = end.region[0:size], end.remotes[0][start : start + size], _flags(end, size)
    last_out, last_in = size - 1, start + size - 1
    for turn, mark in enumerate(end.marks):
        while view[last_in] != mark:
            for _ in _SPINS:
                if view[last_in] == mark:
                    break
            else:
                idle_between(turn)
        view[last_out] = mark
        write(outgoing, remote, flags=flags)
        take(turn)


def read_one_by_one(end: End, idle: Idle, size: int, stamps: array[int], count: int) -> None:
    """`count` times: read, and wait for the completion."""
    read, clock, take = end.queue_pairs[0].read, time.perf_counter_ns, taker(end, idle)
    start = end.plan.inbox(0)
    incoming, remote = end.region[start : start + size], end.remotes[0][0:size]
    for turn in range(count):
        stamps[turn] = clock()
        read(incoming, remote)
        take(turn)
    stamps[count] = clock()


def ping_by_send(end: End, idle: Idle, size: int, stamps: array[int], count: int) -> None:
    """`count` times: send a message, and wait for the answer."""
    queue_pair, clock, take = end.queue_pairs[0], time.perf_counter_ns, taker(end, idle)
    send, receive = queue_pair.send, queue_pair.receive
    outgoing, slot, flags = end.region[0:size], end.slots[0], _flags(end, size)
    silent, received, signal_every = flags | _SILENT, len(end.queue_pairs), _signal_every(end, size)
    # The context of a send is larger than that of a receive, by the number of sends up to it.
    ended = 0
    for turn in range(count):
        stamps[turn] = clock()
        if turn % signal_every:
            send(outgoing, flags=silent)
        else:
            send(outgoing, context=received + turn + 1, flags=flags)
        waiting = True
        while waiting or turn + 1 - ended > _MAX_OWED:
            for completion in take(turn):
                if completion.context == received:
                    waiting = False
                else:
                    ended = completion.context - received
        receive(slot, context=received)
    stamps[count] = clock()


def pong_by_send(end: End, idle: Idle, idle_between: Idle, size: int) -> None:
    """Answer the messages of ping_by_send(), until idle_between() raises.
    It is called when all of them are answered.
    """
    queue_pair, take, take_next = end.queue_pairs[0], taker(end, idle), taker(end, idle_between)
    send, receive = queue_pair.send, queue_pair.receive
    outgoing, slot, flags = end.region[0:size], end.slots[0], _flags(end, size)
    silent, received, signal_every = flags | _SILENT, len(end.queue_pairs), _signal_every(end, size)
    ended = 0
    for turn in itertools.count():
        waiting = True
        while waiting or turn - ended > _MAX_OWED:
            for completion in (take_next if waiting else take)(turn):
                if completion.context == received:
                    waiting = False
                else:
                    ended = completion.context - received
        if turn % signal_every:
            send(outgoing, flags=silent)
        else:
            send(outgoing, context=received + turn + 1, flags=flags)
        receive(slot, context=received)


#: The loop of the measuring side of a latency test, and the one that answers it.
PING = {Operation.WRITE: ping_by_write, Operation.READ: read_one_by_one, Operation.SEND: ping_by_send}
PONG = {Operation.WRITE: pong_by_write, Operation.SEND: pong_by_send}


# ---- bandwidth ----


def _tokens(end: End, group: int, groups: int) -> list[int]:
    """The groups that may be posted at once, as indexes of queue pairs that take turns. At most `groups`."""
    of_one = max(end.plan.depth // group, 1)
    return (list(range(len(end.queue_pairs))) * of_one)[:groups]


def _posters(end: End, size: int, group: int) -> list[Callable[[], object]]:
    """For each queue pair, a function that posts a group. Only the last request of a group has a completion."""
    operation = end.plan.kind.operation
    flags = 0 if operation is Operation.READ else _flags(end, size)
    posters: list[Callable[[], object]] = []
    for q, queue_pair in enumerate(end.queue_pairs):
        start = end.plan.inbox(q)
        if operation is Operation.READ:
            what: tuple[Any, ...] = (end.region[start : start + size], end.remotes[q][0:size])
        elif operation is Operation.WRITE:
            what = (end.region[0:size], end.remotes[q][start : start + size])
        else:
            what = (end.region[0:size],)
        if end.plan.batch and group > 1:
            batch = ndpy.Batch(group)
            for _ in range(group):
                getattr(batch, operation.name.lower())(*what, context=q, flags=flags)
            posters.append(partial(queue_pair.post, batch))
        elif operation is Operation.SEND:
            posters.append(_sender(queue_pair.send, what[0], q, flags, range(group - 1)))
        else:
            post = queue_pair.read if operation is Operation.READ else queue_pair.write
            posters.append(_mover(post, what[0], what[1], q, flags, range(group - 1)))
    return posters


# A call that names its arguments costs a third of one that unpacks a tuple and a dictionary.


def _sender(
    send: Callable[..., None], outgoing: ndpy.Sge, context: int, flags: int, silent_ones: range
) -> Callable[[], None]:
    silent = flags | _SILENT

    def post_group() -> None:
        for _ in silent_ones:
            send(outgoing, flags=silent)
        send(outgoing, context=context, flags=flags)

    return post_group


def _mover(
    post: Callable[..., None], local: ndpy.Sge, remote: ndpy.RemoteMemory, context: int, flags: int, silent_ones: range
) -> Callable[[], None]:
    silent = flags | _SILENT

    def post_group() -> None:
        for _ in silent_ones:
            post(local, remote, flags=silent)
        post(local, remote, context=context, flags=flags)

    return post_group


def _receiver(queue_pair: ndpy.QueuePair, slot: ndpy.Sge, context: int, count: int) -> Callable[[], object]:
    """A function that posts this receive `count` times."""
    if _HAS_LISTS:
        batch = ndpy.Batch(count)
        for _ in range(count):
            batch.receive(slot, context=context)
        return partial(queue_pair.post, batch)
    receive, each = queue_pair.receive, range(count)

    def post_each() -> None:
        for _ in each:
            receive(slot, context=context)

    return post_each


def _granter(queue_pair: ndpy.QueuePair, context: int) -> Callable[[], object]:
    """A function that sends an empty message."""
    batch = ndpy.Batch(1)
    batch.send([], context=context)
    return partial(queue_pair.post, batch)


def _waits_for(
    end: End, posted: int, done: int, wanted: int, outstanding: Iterable[int], held: Sequence[int] = ()
) -> str:
    """What a loop of a bandwidth test waits for.

    outstanding, held: the index of the queue pair for each group without a completion, and for each that waits for
        credit.
    """
    of_each, held_of_each = Counter(outstanding), Counter(held)
    told = []
    if wanted:
        of = f" of {wanted}" if wanted < _FOREVER else ""
        told.append(f"{posted}{of} groups have gone, {done} are complete")
    sends = end.plan.kind.operation is Operation.SEND
    if sends:
        told.append(f"{end.received} messages have come")
    for q in range(len(end.queue_pairs)):
        text = f"queue pair {q}: {of_each[q]} groups outstanding"
        if sends:
            text += f", {held_of_each[q]} held back, credit {end.credit[q]}, {end.ungranted[q]} messages ungranted"
        told.append(text)
    return "; ".join(told)


def stream(
    end: End,
    idle: Idle,
    size: int,
    group: int,
    groups: int,
    duration_ns: int,
    tally: Tally,
    tick: Callable[[int], None],
) -> None:
    """Write or read `groups` groups of requests, with as many outstanding as the plan's depth allows.

    groups, duration_ns: one of them is 0, and the other one decides when posting ends.
    tick: called now and then with the number of groups that have ended.
    """
    posters = _posters(end, size, group)
    take, clock = taker(end, idle), time.perf_counter_ns
    wanted = groups or _FOREVER
    tokens = _tokens(end, group, wanted)
    outstanding = Counter(tokens)
    posted = done = 0
    started = now = clock()
    until = started + duration_ns if duration_ns else _FOREVER
    next_tick = started + _TICK_NS
    try:
        while True:
            for q in tokens:
                posters[q]()
            posted += len(tokens)
            if done == posted:
                return
            tokens = [completion.context for completion in take(done)]
            done += len(tokens)
            now = clock()
            if now >= next_tick:
                tick(done)
                next_tick = now + _TICK_NS
            if now >= until:
                wanted = posted
            if posted + len(tokens) > wanted:
                outstanding.subtract(tokens[wanted - posted :])
                del tokens[wanted - posted :]
    except (NothingCame, PeerRefused):
        end.waits_for = _waits_for(end, posted, done, wanted, outstanding.elements())
        raise
    finally:
        tally.groups, tally.ns = done, now - started


def exchange(
    end: End,
    idle: Idle,
    size: int,
    group: int,
    groups: int,
    duration_ns: int,
    tally: Tally,
    tick: Callable[[int], None],
    *,
    expected: int = 0,
) -> None:
    """Send `groups` groups of messages, and take the messages that come meanwhile. See stream().

    A receiver is never without a receive: a side sends no more than the other side has granted. An empty message is a
    grant. The receives for it are posted all at once before.

    expected: go on until this side has received this many messages since the connection began.
    """
    receives = [queue_pair.receive for queue_pair in end.queue_pairs]
    slots, count, other = end.slots, len(end.queue_pairs), end.other
    credit, ungranted, grant = end.credit, end.ungranted, end.plan.grant
    post_receives = [_receiver(each, slots[q], count + q, grant) for q, each in enumerate(end.queue_pairs)]
    send_grant = [_granter(queue_pair, other) for queue_pair in end.queue_pairs]
    take, clock = taker(end, idle), time.perf_counter_ns
    posters = _posters(end, size, group)
    wanted = groups or (_FOREVER if duration_ns else 0)
    tokens = _tokens(end, group, wanted)
    outstanding = Counter(tokens)
    posted = done = progress = 0
    started = now = clock()
    until = started + duration_ns if duration_ns else _FOREVER
    next_tick = started + _TICK_NS
    received = end.received
    try:
        while True:
            blocked = []
            for q in tokens:
                if credit[q] < group:
                    blocked.append(q)
                    continue
                credit[q] -= group
                posted += 1
                posters[q]()
            tokens = blocked
            if done >= wanted and received >= expected:
                return
            for completion in take(progress):
                progress += 1
                context = completion.context
                if context < count:
                    tokens.append(context)
                    done += 1
                elif context < other:
                    q = context - count
                    if completion.nbytes:
                        received += 1
                        ungranted[q] += 1
                        if ungranted[q] == grant:
                            ungranted[q] = 0
                            post_receives[q]()
                            send_grant[q]()
                    else:
                        receives[q](slots[q], context=context)
                        credit[q] += grant
            now = clock()
            if now >= next_tick:
                tick(done)
                next_tick = now + _TICK_NS
            if now >= until:
                wanted = posted
            if posted + len(tokens) > wanted:
                # The groups that wait for credit are in front. So the last message goes over every queue pair.
                outstanding.subtract(tokens[wanted - posted :])
                del tokens[wanted - posted :]
    except (NothingCame, PeerRefused):
        end.received = received
        outstanding.subtract(tokens)
        end.waits_for = _waits_for(end, posted, done, wanted, outstanding.elements(), tokens)
        raise
    finally:
        tally.groups, tally.ns = done, now - started
        end.sent += posted * group
        end.received = received
