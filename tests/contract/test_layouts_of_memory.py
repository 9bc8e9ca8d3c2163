"""Which buffers can be registered, sent, received into, read, written and exposed: one rule, at every length."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re

import pytest
from kit.aio_ends import LONG, SHORT, both, pattern
from kit.helpers import create_end, require

import ndpy
from ndpy import Access
from ndpy.objects.memory import address_of

LENGTHS = pytest.mark.parametrize("length", [SHORT, LONG])
# Word for word, because programs meet it in every call.
CONTIGUOUS = re.escape(
    "is not C-contiguous: its bytes have gaps, or another order than its elements; give a contiguous copy "
    "(numpy.ascontiguousarray(), tensor.contiguous(), bytes()), or fill contiguous memory and copy from that"
)
OBJECTS = "holds Python objects, so its bytes are addresses"


def numpy():
    return pytest.importorskip("numpy")


def columns(length: int):
    return numpy().zeros((length // 4, 4), dtype="u1", order="F")


def columns_of_a_row(length: int):
    """Of one row, rows and columns are the same."""
    return numpy().zeros((1, length), dtype="u1", order="F")


BAD = {
    "strided": (lambda length: memoryview(bytearray(2 * length))[::2], CONTIGUOUS),
    "backwards": (lambda length: memoryview(bytearray(length))[::-1], CONTIGUOUS),
    "columns": (columns, CONTIGUOUS),
    "transposed": (lambda length: numpy().zeros((4, length // 4), dtype="u1").T, CONTIGUOUS),
    "strided array": (lambda length: numpy().zeros((length, 2), dtype="u1")[:, 0], CONTIGUOUS),
    "objects": (lambda length: numpy().zeros(length // 8, dtype=object), OBJECTS),
    "objects in records": (
        lambda length: numpy().zeros(length // 16, dtype=[("number", "i8"), ("thing", "O")]),
        OBJECTS,
    ),
    "objects of ctypes": (lambda length: (ctypes.py_object * (length // 8))(), OBJECTS),
}
GOOD = {
    "bytearray": bytearray,
    "one row in columns": columns_of_a_row,
    "numbers in the other byte order": lambda length: numpy().zeros(length // 4, dtype=">i4"),
    "records with a capital O": lambda length: numpy().zeros(length // 4, dtype=[("OO", "i4")]),
    "a structure": lambda length: (ctypes.c_ubyte * length)(),
    "complex numbers": lambda length: numpy().zeros(length // 4, dtype="c8")[: length // 8],
}


def made(kinds, length):
    """(kind, what it makes of this length, its error) of all kinds that this machine can make."""
    for kind, maker in kinds.items():
        make, match = maker if isinstance(maker, tuple) else (maker, None)
        with contextlib.suppress(pytest.skip.Exception):
            yield kind, make(length), match


@LENGTHS
async def test_a_buffer_that_is_not_plain_is_refused_by_every_call_of_a_connection(connected, length):
    data = pattern(length)
    async with connected() as (client, server):
        sending = asyncio.ensure_future(server.send(data))
        async with server.expose(bytearray(length)) as remote:
            for kind, buffer, match in made(BAD, length):
                for name, call in {
                    "send": client.send(buffer),
                    "receive": client.receive(into=buffer),
                    "read": client.read(remote, buffer),
                    "write": client.write(remote, buffer),
                    "expose": client.expose(buffer).__aenter__(),
                }.items():
                    with pytest.raises(ndpy.InvalidBufferError, match=match):
                        pytest.fail(f"{name} of {kind}: {await call}")
        assert await client.receive() == data
        await sending


@LENGTHS
async def test_the_bytes_of_a_plain_buffer_come_in_the_order_of_its_elements(connected, length):
    async with connected() as (client, server):
        for (kind, buffer, _), (_, sink, _) in zip(made(GOOD, length), made(GOOD, length), strict=True):
            view = memoryview(buffer).cast("B")
            view[:] = data = pattern(view.nbytes)
            _, count = await both(client.send(buffer), server.receive(into=sink))
            assert count == len(data), kind
            assert bytes(sink) == data, kind


@LENGTHS
@pytest.mark.parametrize("what", ["lease", "region by its address", "region", "slice"])
def test_registered_memory_is_sent_and_filled_at_every_length(run, adapter, keep, what, length):
    buffer, data = bytearray(length), pattern(length)
    if what == "lease":
        memory = keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4)).local(buffer)
    elif what == "region by its address":
        memory = keep(adapter.register((address_of(memoryview(buffer)), length)))
    else:
        memory = keep(adapter.register(buffer))[: length if what == "slice" else None]

    async def scene(client, server):
        await both(server.send(data), client.receive(into=memory))
        assert buffer == data
        _, message = await both(client.send(memory), server.receive())
        assert message == data

    try:
        run(scene)
    finally:
        if what == "lease":
            memory.release()


@LENGTHS
@pytest.mark.parametrize("kind", BAD)
def test_a_buffer_that_is_not_plain_is_not_registered(adapter, keep, kind, length):
    make, match = BAD[kind]
    buffer = make(length)
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4))
    region = keep(adapter.register(bytearray(8)))
    calls = [
        lambda: adapter.register(buffer),
        lambda: adapter.register(buffer, Access.NONE),
        lambda: adapter.register(buffer, timeout_s=5),
        lambda: adapter.begin_register(buffer),
        lambda: cache.local(buffer),
    ]
    if ndpy.Capability.REREGISTRATION in adapter.info.capabilities:
        calls.append(lambda: region.reregister(buffer))
    if ndpy.Capability.CHOSEN_ADDRESS in adapter.info.capabilities:
        calls.append(lambda: adapter.register_at(buffer, 0))
    for call in calls:
        with pytest.raises(ndpy.InvalidBufferError, match=match):
            call()


@pytest.mark.parametrize("kind", GOOD)
def test_a_plain_buffer_is_registered_whole(adapter, keep, kind):
    buffer = GOOD[kind](SHORT)
    region = keep(adapter.register(buffer))
    view = memoryview(buffer).cast("B")
    assert (region.address, region.length) == (address_of(view), view.nbytes)


@pytest.mark.parametrize("kind", ["strided", "columns", "objects"])
def test_inline_data_that_is_not_plain_is_not_sent(adapter, keep, kind):
    make, match = BAD[kind]
    if adapter.info.max_inline_data_size < 64:
        pytest.skip("the adapter sends nothing inline")
    end = create_end(keep, adapter, inline_data_size=64)
    with pytest.raises(ndpy.InvalidBufferError, match=match):
        end.queue_pair.send(memoryview(make(32)), flags=ndpy.Flags.INLINE)


@LENGTHS
async def test_what_cannot_be_written_to_is_not_received_into_and_not_taken_for_the_peer_s_end(
    connected, adapter, keep, length
):
    """A long message would have ended as if the peer had closed the connection."""
    require(adapter, ndpy.Capability.REGION_ACCESS)
    frozen, data = bytes(length), pattern(length)
    region = keep(adapter.register(frozen, Access.NONE))
    async with connected() as (client, server):
        sending = asyncio.ensure_future(server.send(data))
        async with server.expose(bytearray(length)) as remote:
            for sink in (frozen, memoryview(frozen), region, region[:length]):
                for call in (client.receive(into=sink), client.read(remote, sink)):
                    with pytest.raises(ndpy.AccessViolationError):
                        await call
        assert await client.receive() == data
        await sending
        assert not client.closed
