"""An echo of messages between two processes, over ndpy.aio or over TCP with asyncio's streams.

python echo_loops.py ndpy|streams|uvloop ROUNDS SIZE [CONNECTIONS] [--answer BYTES]

Prints the microseconds of a round trip: the time of all of them, divided by their number. Over TCP, four bytes before
each message have its length, as a program needs it that exchanges messages.
"""

import argparse
import asyncio
import contextlib
import gc
import subprocess
import sys
import time

import ndpy
from ndpy import aio

LIMIT_S = 120
LENGTH_SIZE = 4
# A stream of asyncio reads no further while twice this waits. Its default of 64 KiB suits no message of 1 MiB.
STREAM_LIMIT = 1 << 21


class Streams:
    """Messages over a TCP connection of asyncio."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def send(self, data):
        self._writer.write(len(data).to_bytes(LENGTH_SIZE, "big"))
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self):
        return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(LENGTH_SIZE), "big"))


@contextlib.asynccontextmanager
async def connected(args):
    async with contextlib.AsyncExitStack() as stack:
        ends = []
        for _ in range(args.connections):
            if args.transport == "ndpy":
                ends.append(await stack.enter_async_context(aio.connect(("127.0.0.1", args.port), adapter="soft0")))
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", args.port, limit=STREAM_LIMIT)
                stack.callback(writer.close)
                ends.append(Streams(reader, writer))
        yield ends


async def answer(end, size):
    """Answer each message with itself, or with its first bytes, until the peer has gone."""
    try:
        while True:
            data = await end.receive()
            await end.send(data[:size] if size else data)
    except (asyncio.IncompleteReadError, ConnectionError, ndpy.NdpyError):
        pass


async def serve(args):
    """Until the standard input ends."""
    async with contextlib.AsyncExitStack() as stack:
        if args.transport == "ndpy":
            server = await stack.enter_async_context(
                aio.serve(("127.0.0.1", 0), lambda connection: answer(connection, args.answer), adapter="soft0")
            )
            port = server.address[1]
        else:

            async def handle(reader, writer):
                with contextlib.closing(writer):
                    await answer(Streams(reader, writer), args.answer)

            server = await stack.enter_async_context(
                await asyncio.start_server(handle, "127.0.0.1", 0, limit=STREAM_LIMIT)
            )
            port = server.sockets[0].getsockname()[1]
        print(port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def ask(end, args, rounds):
    data = bytes(args.size)
    expected = args.answer or args.size
    for _ in range(rounds):
        await end.send(data)
        if len(await end.receive()) != expected:
            raise RuntimeError("an answer has another length")


async def measure(args):
    async with connected(args) as ends:
        await asyncio.gather(*(ask(end, args, max(args.rounds // 10, 2)) for end in ends))
        gc.collect()
        begin = time.perf_counter()
        await asyncio.gather(*(ask(end, args, args.rounds) for end in ends))
        return (time.perf_counter() - begin) * 1e6 / (args.rounds * len(ends))


def run(main, args):
    if args.transport == "uvloop":
        import uvloop

        return uvloop.run(main(args))
    return asyncio.run(main(args))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=("ndpy", "streams", "uvloop"))
    parser.add_argument("rounds", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("connections", type=int, nargs="?", default=1)
    parser.add_argument("--answer", type=int, default=0)
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    if args.serve:
        run(serve, args)
        return
    with subprocess.Popen(
        [sys.executable, *sys.argv, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            args.port = int(server.stdout.readline())
            print(run(measure, args))
            server.communicate("\n", timeout=LIMIT_S)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
