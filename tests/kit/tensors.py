"""What tests/contract/test_arrays.py claims, for the arrays of PyTorch and JAX: `python -m kit.tensors torch soft0`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import ndpy
from kit.helpers import host_of
from ndpy import Access, aio

LONG = 1 << 17
GAPS = "is not C-contiguous"


def pattern(length: int) -> bytes:
    return bytes((7 * place + place // 251) % 256 for place in range(length))


@asynccontextmanager
async def connected(adapter: ndpy.Adapter) -> AsyncIterator[tuple[aio.Connection, aio.Connection]]:
    arrived: asyncio.Future[aio.Connection] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def handler(connection: aio.Connection) -> None:
        arrived.set_result(connection)
        await leave.wait()

    address = (host_of(adapter), 0)
    async with (
        aio.serve(address, handler, adapter=adapter) as server,
        aio.connect(server.address, adapter=adapter) as client,
    ):
        yield client, await arrived
        leave.set()


def refused(adapter: ndpy.Adapter, things: dict[str, tuple[Callable[[], Any], str]]) -> None:
    for kind, (make, match) in things.items():
        thing = make()
        try:
            adapter.register(thing, Access.NONE)
        except ndpy.InvalidBufferError as error:
            assert re.search(match, str(error)), f"{kind}: {error}"
        else:
            raise AssertionError(f"{kind} was registered")


async def torch(adapter: ndpy.Adapter) -> None:
    import torch

    def filled(tensor: Any) -> Any:
        length = tensor.numel() * tensor.element_size()
        tensor.view(torch.uint8).reshape(-1).copy_(torch.frombuffer(bytearray(pattern(length)), dtype=torch.uint8))
        return tensor

    def bytes_of(tensor: Any) -> bytes:
        return bytes(tensor.view(torch.uint8).reshape(-1).numpy().tobytes())

    kinds: dict[str, Callable[[int], Any]] = {
        "float32": lambda length: torch.zeros((2, length // 8), dtype=torch.float32),
        "bfloat16": lambda length: torch.zeros(length // 2, dtype=torch.bfloat16),
        "float8": lambda length: torch.zeros(length, dtype=torch.float8_e5m2),
        "complex": lambda length: torch.zeros(length // 8, dtype=torch.complex64),
        "a view of a view": lambda length: torch.zeros((4, length), dtype=torch.uint8)[1:3][1],
    }
    async with connected(adapter) as (client, server):
        for kind, make in kinds.items():
            for length in (96, LONG):
                source, sink, third = filled(make(length)), make(length), make(length)
                sending = asyncio.ensure_future(client.send(source))
                assert await server.receive(into=sink) == length
                await sending
                assert bytes_of(sink) == pattern(length), kind
                other = make(length)
                async with server.expose(other) as remote:
                    await client.write(remote, source)
                    await client.read(remote, third)
                assert bytes_of(other) == bytes_of(third) == pattern(length), kind
        await client.send(torch.empty(0))
        assert await server.receive() == b""
        await client.send(torch.tensor(5, dtype=torch.int16))
        assert await server.receive() == b"\5\0"
        # Other storage: the cache must not take the former registration.
        tensor = torch.zeros(LONG, dtype=torch.uint8)
        for turn in range(6):
            if turn % 2:
                tensor.resize_(LONG << turn)
            else:
                tensor.set_(torch.zeros(LONG << turn, dtype=torch.uint8))
            filled(tensor)
            sending = asyncio.ensure_future(client.send(tensor))
            assert await server.receive() == pattern(LONG << turn)
            await sending
    freed = torch.zeros(64)
    freed.untyped_storage().resize_(0)
    refused(
        adapter,
        {
            "strided": (lambda: torch.zeros(16)[::2], GAPS),
            "transposed": (lambda: torch.zeros((3, 4)).T, GAPS),
            "expanded": (lambda: torch.zeros((1, 4)).expand(3, 4), GAPS),
            "with a gradient": (lambda: torch.zeros(4, requires_grad=True), r"tensor\.detach\(\)"),
            "conjugate": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "conjugate"),
            "negated": (lambda: torch._neg_view(torch.ones(4)), r"resolve_neg\(\)"),
            "sparse": (lambda: torch.zeros((4, 4)).to_sparse(), "gives no view of its bytes"),
            "without memory": (lambda: torch.zeros(4, device="meta"), "meta"),
            "freed": (lambda: freed, "which is not possible"),
        },
    )
    # The cache does not keep a tensor.
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=8) as cache:
        tensor = torch.zeros(64)
        cache.local(tensor).release()
        cache.local(tensor).release()
        assert (cache.stats.registrations, cache.stats.hits) == (1, 1), cache.stats
        del tensor
        gc.collect()
        cache.local(bytearray(8)).release()
        assert cache.stats.invalidations == 1, cache.stats
    region = adapter.register(filled(torch.zeros(64, dtype=torch.uint8)))
    gc.collect()
    assert ctypes.string_at(region.address, 64) == pattern(64)
    region.close()


async def jax(adapter: ndpy.Adapter) -> None:
    import jax.numpy
    import numpy

    arrays = {
        "int32": jax.numpy.arange(8, dtype="int32"),
        "bfloat16": jax.numpy.arange(8, dtype="bfloat16"),
        "transposed, which copies": jax.numpy.arange(12, dtype="int16").reshape(3, 4).T,
        "long": jax.numpy.arange(LONG, dtype="int32"),
        "without dimensions": jax.numpy.int16(5),
        "of no bytes": jax.numpy.zeros((2, 0)),
    }
    async with connected(adapter) as (client, server):
        for kind, array in arrays.items():
            sending = asyncio.ensure_future(client.send(array))
            assert bytes(await server.receive()) == numpy.asarray(array).tobytes(), kind
            await sending
            await server.send(b"for nobody")
            try:
                await client.receive(into=array)
            except ndpy.AccessViolationError as error:
                assert "is read-only" in str(error)
            else:
                raise AssertionError(f"{kind} was filled")
            assert await client.receive() == b"for nobody"
            if array.size:
                async with server.expose(bytearray(array.nbytes)) as remote:
                    await client.write(remote, array)
                    result = bytearray(array.nbytes)
                    await client.read(remote, result)
                    assert bytes(result) == numpy.asarray(array).tobytes(), kind
    deleted = jax.numpy.zeros(64)
    deleted.delete()
    refused(
        adapter,
        {
            "deleted": (lambda: deleted, "deleted"),
            "4 bits each": (lambda: jax.numpy.ones(4, dtype="int4"), "gives no view of its bytes"),
        },
    )


if __name__ == "__main__":
    with ndpy.open_adapter(sys.argv[2]) as opened:
        asyncio.run({"torch": torch, "jax": jax}[sys.argv[1]](opened))
    print("all right")
