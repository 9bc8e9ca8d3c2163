"""python ending.py ADAPTER HOST END: a program that ends while much is open. It says which memory the interpreter
frees.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
import time

import cffi

of_caller = []
# What is registered first is called last, so after ndpy's own. Without the GIL, Python 3.13 keeps functions and their
# globals for ever.
atexit.register(of_caller.clear)

import ndpy  # noqa: E402
import ndpy.aio  # noqa: E402
from ndpy import Access, Capability  # noqa: E402

ffi = cffi.FFI()
LENGTH = 4096
WRITTEN = 60_000
kept = []


def memory(name: str, length: int = LENGTH):
    """A buffer that tells when it is freed. The finalizer of a Python class would tell too early."""

    def tell(_: object, write=os.write, text: bytes = f"freed: {name}\n".encode()) -> None:
        write(1, text)

    return ffi.buffer(ffi.gc(ffi.new("char[]", length), tell), length)


class OfCaller(bytearray):
    """Memory that is registered as (address, length)."""

    def __del__(self, write=os.write) -> None:
        write(1, b"closed first\n" if self.region.closed else b"still open\n")


def connected(adapter: ndpy.Adapter, host: str):
    """Two queue pairs that are connected."""
    ends = [adapter.create_queue_pair(adapter.create_completion_queue(64)) for _ in range(2)]
    listener = adapter.listen((host, 0))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(adapter.connect, ends[0], listener.address, timeout_s=30)
        request = listener.get_request(30)
        request.accept(ends[1], timeout_s=30)
    kept.append([ends, listener, request, asked.result()])
    return ends


def open_everything(adapter: ndpy.Adapter, host: str) -> ndpy.QueuePair:
    rights = Access.LOCAL_WRITE | Access.REMOTE_WRITE
    _, server = connected(adapter, host)
    kept.append(adapter.register(memory("a region's"), rights))
    server.receive(adapter.register(memory("of a receive"))[0:16])
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=16)
    kept.append(cache.local(memory("a lease's")))
    lease = cache.local(memory("of a lease that a receive uses"))
    server.receive(lease[0:16])
    kept.append(lease)
    kept.append(cache.remote(memory("an exposure's"), server))
    return server


def open_memory_of_the_caller(adapter: ndpy.Adapter, host: str) -> None:
    """Register memory that nothing keeps, and bind windows to it."""
    client, _ = connected(adapter, host)
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=16)

    def lease(given: tuple[int, int]) -> ndpy.MemoryRegion:
        kept.extend([cache, cache.local(given, raw=True)])
        return kept[-1].region

    for register in (adapter.register, lease):
        given = OfCaller(LENGTH)
        of_caller.append(given)
        with memoryview(given) as view:
            given.region = register((ndpy.objects.memory.address_of(view), LENGTH))
        if Capability.MEMORY_WINDOWS in adapter.info.capabilities:
            window = adapter.create_memory_window()
            client.bind(window, given.region[0:LENGTH], Access.REMOTE_READ)
            kept.append(window)


def be_written(adapter: ndpy.Adapter, host: str) -> None:
    """Accept a connection whose peer writes to a region, and leave while it does."""
    queue_pair = adapter.create_queue_pair(adapter.create_completion_queue(64))
    region = adapter.register(memory("what the peer writes to", WRITTEN), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    listener = adapter.listen((host, 0))
    print("listening", listener.address[1], region.remote().to_bytes().hex(), flush=True)
    request = listener.get_request(30)
    request.accept(queue_pair, timeout_s=30)
    while region.buffer[0] == b"\0":
        pass
    kept.extend([queue_pair, region, listener, request, Slow()])


class Slow:
    """Takes a while to be taken apart."""

    def __del__(self, sleep=time.sleep) -> None:
        sleep(0.1)


def wait_for_ever(queue: ndpy.CompletionQueue) -> None:
    queue.wait()


def spin_for_ever(queue: ndpy.CompletionQueue) -> None:
    while True:
        queue.poll(spin_s=0.01)


async def leave_tasks(adapter: ndpy.Adapter, host: str) -> None:
    """Leave a connection that receives, and tasks in the middle."""

    async def serve(connection: ndpy.aio.Connection) -> None:
        await connection.receive(into=memory("of a message"))

    server = await ndpy.aio.serve((host, 0), serve, adapter=adapter, close_timeout_s=0.1)
    connection = await ndpy.aio.connect((host, server.address[1]), adapter=adapter, close_timeout_s=0.1)
    kept.extend([server, connection, asyncio.ensure_future(connection.receive())])
    await asyncio.sleep(0)


def main(name: str, host: str, end: str) -> None:
    adapter = ndpy.open_adapter(name)
    if end == "caller":
        open_memory_of_the_caller(adapter, host)
    elif end == "written":
        be_written(adapter, host)
    else:
        kept.append(open_everything(adapter, host))
    if end == "threads":
        for work in (wait_for_ever, spin_for_ever):
            queue = connected(adapter, host)[0].receive_cq
            threading.Thread(target=work, args=[queue], daemon=True).start()
    elif end == "exit":
        pool = concurrent.futures.ThreadPoolExecutor(2)
        kept.extend([pool, *pool.map(lambda _: adapter.register(memory("a pool's")), range(4))])
    elif end == "asyncio":
        asyncio.run(leave_tasks(adapter, host))
    print("open", flush=True)
    if end == "exit":
        sys.exit(3)
    if end == "exception":
        raise ndpy.NdpyError("nobody catches this")


main(*sys.argv[1:])
