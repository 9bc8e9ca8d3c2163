"""Atomic operations on 8 bytes of a peer's memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_quiet,
    assert_works,
    connect_pair,
    contents,
    contexts,
    create_end,
    establish,
    memory,
    require,
    rounds,
    send_message,
    succeed,
    take,
    wait_until,
)
from kit.threads import in_threads

import ndpy
from ndpy import Access, Batch, Capability, CompletionArray, Flags, Operation, Status

ATOMIC = Access.REMOTE_ATOMIC | Access.REMOTE_READ | Access.REMOTE_WRITE
START = 0x0102030405060708
MASK = (1 << 64) - 1


def number(data: bytes, place: int = 0) -> int:
    return int.from_bytes(data[8 * place : 8 * place + 8], sys.byteorder)


def octets(value: int) -> bytes:
    return (value & MASK).to_bytes(8, sys.byteorder)


@pytest.fixture
def ends(pair):
    require(pair.adapter, Capability.ATOMICS)
    return pair


@pytest.fixture
def counter(ends, keep):
    """Three numbers of the server. The tests use the one in the middle."""
    return memory(keep, ends.server.adapter, octets(1) + octets(START) + octets(2), ATOMIC)


@pytest.fixture
def former(ends, keep):
    """Where the results of the client's operations go."""
    return memory(keep, ends.adapter, b"\xee" * 24)


def middle(region):
    assert (number(contents(region)), number(contents(region), 2)) == (1, 2)
    return number(contents(region), 1)


@pytest.mark.parametrize("add", [0, 1, -1, 1 << 63, MASK, MASK - START, -(1 << 63)])
def test_fetch_and_add(ends, counter, former, add):
    ends.client.queue_pair.fetch_and_add(former[8:16], counter.remote(8, 8), add, context=7)
    (done,) = succeed(ends.client.cq)
    assert (done.operation, done.context, done.nbytes) == (Operation.FETCH_AND_ADD, 7, 8)
    assert contents(former) == b"\xee" * 8 + octets(START) + b"\xee" * 8
    assert middle(counter) == (START + add) & MASK


@pytest.mark.parametrize(("compare", "after"), [(START, 99), (START + 1, START)])
def test_compare_and_swap(ends, counter, former, compare, after):
    ends.client.queue_pair.compare_and_swap(former[8:16], counter.remote(8), compare, 99, context=8)
    (done,) = succeed(ends.client.cq)
    assert (done.operation, done.context, done.nbytes) == (Operation.COMPARE_AND_SWAP, 8, 8)
    assert contents(former) == b"\xee" * 8 + octets(START) + b"\xee" * 8
    assert middle(counter) == after


def test_operands_may_be_signed(ends, counter, former):
    queue_pair = ends.client.queue_pair
    queue_pair.fetch_and_add(former[0:8], counter.remote(8), -START - 2)
    queue_pair.compare_and_swap(former[8:16], counter.remote(8), -2, -(1 << 63))
    succeed(ends.client.cq, 2)
    assert number(contents(former), 1) == MASK - 1
    assert middle(counter) == 1 << 63


def test_the_arguments_may_be_named(ends, counter, former):
    queue_pair = ends.client.queue_pair
    queue_pair.compare_and_swap(
        flags=Flags.READ_FENCE, swap=5, compare=START, context=1, remote=counter.remote(8), sges=[former[0:8]]
    )
    queue_pair.fetch_and_add(add=6, context=2, remote=counter.remote(8), sges=[former[8:16]])
    assert contexts(succeed(ends.client.cq, 2)) == [1, 2]
    assert (number(contents(former)), number(contents(former), 1)) == (START, 5)
    assert middle(counter) == 11


def test_silent_operations_leave_no_completion(ends, counter, former):
    for _ in range(40):
        wait_until(lambda: _add_if_room(ends, former[0:8], counter, flags=Flags.SILENT_SUCCESS), "room in the queue")
    wait_until(lambda: _add_if_room(ends, former[8:16], counter, context=3), "room in the queue")
    (last,) = succeed(ends.client.cq)
    assert last.context == 3
    assert number(contents(former), 1) == START + 40
    assert_quiet(ends.client.cq)


def _add_if_room(ends, result, counter, **options):
    """Post the operation, and return True.
    Silent ones that have ended make room, and the program sees nothing of them.
    """
    assert ends.client.cq.poll() == []
    try:
        ends.client.queue_pair.fetch_and_add(result, counter.remote(8), 1, **options)
    except ndpy.QueueFullError:
        return False
    return True


def test_a_batch_of_operations(ends, keep, counter):
    results = memory(keep, ends.adapter, 64)
    remote = counter.remote(8)
    batch = Batch(4, signal_all=True)
    batch.fetch_and_add(results[0:8], remote, 2, context=1)
    batch.compare_and_swap(results[8:16], remote, START + 2, 50, context=2)
    batch.read(results[16:24], remote[:8], context=3, flags=Flags.READ_FENCE)
    batch.fetch_and_add(results[24:32], remote, -1, context=4)
    taken = CompletionArray(8)
    ends.client.queue_pair.post(batch)
    found = []

    def look():
        ends.client.cq.poll_into(taken)
        taken.raise_for_status()
        found.extend(zip(taken.contexts, taken.operations, taken.nbytes, strict=True))
        return len(found) == 4

    wait_until(look, "four completions")
    assert found == [
        (1, Operation.FETCH_AND_ADD, 8),
        (2, Operation.COMPARE_AND_SWAP, 8),
        (3, Operation.READ, 8),
        (4, Operation.FETCH_AND_ADD, 8),
    ]
    assert [number(contents(results), place) for place in range(4)] == [START, START + 2, 50, 50]
    assert middle(counter) == 49


def test_nothing_is_lost_between_queue_pairs(keep, adapter, peer):
    """Several connections count at once. Every former value is seen once."""
    require(adapter, Capability.ATOMICS, Capability.LOOPBACK_CONNECTIONS)
    counter = memory(keep, peer, octets(0), ATOMIC)
    remote = counter.remote()
    pairs = [connect_pair(keep, adapter) for _ in range(3)]
    each = rounds(20_000, 300)
    seen: list[list[int]] = [[] for _ in pairs]

    def count(which):
        client = pairs[which].client
        result = memory(keep, adapter, 8)
        for _ in range(each):
            client.queue_pair.fetch_and_add(result, remote, 1)
            succeed(client.cq)
            seen[which].append(number(contents(result)))

    in_threads(len(pairs), count, DEADLINE_S * 20)
    assert sorted(value for values in seen for value in values) == list(range(each * len(pairs)))
    assert all(values == sorted(values) for values in seen)
    assert number(contents(counter)) == each * len(pairs)


def assert_ends(ends, operation, *allowed):
    """The client's oldest request fails with one of these statuses."""
    (failed,) = take(ends.client.cq)
    assert failed.operation is operation
    assert failed.status in allowed, failed
    assert failed.nbytes == 0
    with pytest.raises(ndpy.ProviderError):
        failed.raise_for_status()


@pytest.mark.parametrize("access", [Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_READ | Access.REMOTE_WRITE])
def test_memory_without_the_right_is_left_alone(ends, keep, former, access):
    private = memory(keep, ends.server.adapter, octets(START), access)
    ends.client.queue_pair.fetch_and_add(former[0:8], private.remote(), 1)
    assert_ends(ends, Operation.FETCH_AND_ADD, Status.ACCESS_VIOLATION)
    assert contents(private) == octets(START)
    assert contents(former) == b"\xee" * 24


def test_a_wrong_token_is_refused(ends, counter, former):
    remote = counter.remote(8)
    wrong = ndpy.RemoteMemory(remote.address, remote.length, remote.token ^ 0x100)
    ends.client.queue_pair.compare_and_swap(former[0:8], wrong, START, 1)
    assert_ends(ends, Operation.COMPARE_AND_SWAP, Status.ACCESS_VIOLATION)
    assert middle(counter) == START


def test_memory_beyond_the_region_is_refused(ends, counter, former):
    beyond = ndpy.RemoteMemory(counter.remote().address + 24, 8, counter.remote().token)
    ends.client.queue_pair.fetch_and_add(former[0:8], beyond, 1)
    assert_ends(ends, Operation.FETCH_AND_ADD, Status.ACCESS_VIOLATION)


@pytest.mark.parametrize("operation", ["compare_and_swap", "fetch_and_add"])
def test_what_is_wrong_is_said_before_posting(ends, keep, counter, former, operation):
    read_only = memory(keep, ends.adapter, bytes(8), Access.NONE)
    remote = counter.remote(8, 8)
    operands = (1, 2) if operation == "compare_and_swap" else (1,)

    def post(sges, remote, *operands):
        getattr(ends.client.queue_pair, operation)(sges, remote, *operands)

    def post_batch(sges, remote, *operands):
        batch = Batch(1, max_sge=2)
        getattr(batch, operation)(sges, remote, *operands)
        ends.client.queue_pair.post(batch)

    for call in (post, post_batch):
        with pytest.raises(ndpy.ElementRangeError, match="one element of 8 bytes"):
            call(former[0:4], remote, *operands)
        with pytest.raises(ndpy.ElementRangeError, match="one element of 8 bytes"):
            call([], remote, *operands)
        with pytest.raises(ndpy.ElementRangeError, match="8 bytes do not fit the 4 bytes of remote memory"):
            call(former[0:8], counter.remote(8, 4), *operands)
        with pytest.raises(ndpy.ElementRangeError, match="not a multiple of 8"):
            call(former[0:8], counter.remote(4, 8), *operands)
        with pytest.raises(ndpy.AccessViolationError, match=r"without Access\.LOCAL_WRITE"):
            call(read_only, remote, *operands)
        for wrong, error in ((1 << 64, ValueError), (-(1 << 63) - 1, ValueError), ("1", TypeError), (None, TypeError)):
            with pytest.raises(error, match=r"compare|add"):
                call(former[0:8], remote, wrong, *operands[1:])
        with pytest.raises(TypeError):
            call(former[0:8], remote)
    with pytest.raises(ndpy.InvalidFlagsError):
        getattr(ends.client.queue_pair, operation)(former[0:8], remote, *operands, flags=Flags.SOLICITED)
    assert middle(counter) == START
    assert contents(former) == b"\xee" * 24
    assert_works(keep, ends)


def test_no_read_limit_means_no_atomic_operations(keep, adapter, peer):
    require(adapter, Capability.ATOMICS, Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, peer)
    offer = ask(keep, adapter, client.queue_pair, to=peer, outbound_read_limit=0)
    establish(offer, server.queue_pair)
    counter = memory(keep, peer, octets(START), ATOMIC)
    with pytest.raises(
        ndpy.LimitExceededError, match="fetch_and_add: the connection was made with an outbound read limit"
    ):
        client.queue_pair.fetch_and_add(memory(keep, adapter, 8), counter.remote(), 1)
    assert contents(counter) == octets(START)


def test_an_adapter_without_atomic_operations_says_so(pair, keep):
    if Capability.ATOMICS in pair.adapter.info.capabilities:
        pytest.skip(f"{pair.adapter.info.name} has atomic operations")
    send_message(keep, pair.client, pair.server, b"hello")
    result = memory(keep, pair.adapter, 8)
    remote = ndpy.RemoteMemory(4096, 8, 1)
    batch = Batch(2)
    batch.fetch_and_add(result, remote, 1)
    for call in (
        lambda: pair.client.queue_pair.fetch_and_add(result, remote, 1),
        lambda: pair.client.queue_pair.compare_and_swap([result], remote, 1, 2),
        lambda: pair.client.queue_pair.post(batch),
    ):
        with pytest.raises(ndpy.UnsupportedError, match=f"{pair.adapter.info.name} has no atomic operations"):
            call()
    assert_works(keep, pair)


def test_the_documents_example_of_a_counter_runs(ends, keep):
    program = _program("fetch_and_add")
    counter = memory(keep, ends.server.adapter, octets(41), ATOMIC)
    result = memory(keep, ends.adapter, 8)
    names = {"near": ends.client.queue_pair, "queue": ends.client.cq, "counter": counter.remote(), "result": result}
    exec(compile(f"import sys\n{program}", "docs/verbs.md", "exec"), names)
    assert names["ticket"] == 41
    assert (number(contents(result)), number(contents(counter))) == (42, 0)


def _program(word: str) -> str:
    """The example of docs/verbs.md with this word."""
    blocks = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8").split("```python\n")[1:]
    (program,) = (block.partition("```")[0] for block in blocks if word in block.partition("```")[0])
    return program
