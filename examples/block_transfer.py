"""A cache of blocks in one program's memory, which others fill and read by lists of blocks, with asyncio.

    python block_transfer.py server --blocks 4096 --size 4096
    python block_transfer.py client 192.0.2.1 --blocks 256 --count 10

A server of a language model passes on keys and values like this: contiguous at one end, scattered in a pool at the
other.

    server  sends where its pool is and the size of a block
    client  asks for blocks, and the server answers with their numbers
    client  writes to them with write_many(), and sends the checksum, which the server verifies
    client  reads them with read_many() in another order, each into its place, and verifies them

A client has its blocks until it closes its connection. The clients trust each other: each may use the whole pool.
"""

import argparse
import asyncio
import hashlib
import random
import struct
import sys

import ndpy
from ndpy import aio

PORT = 7478
WELCOME = struct.Struct("!20sI")  # where the pool is, and the size of a block
TAKE = struct.Struct("!I")  # how many blocks; a checksum is longer


class Pool:
    def __init__(self, blocks, size):
        self.memory, self.size, self.left = ndpy.alloc(blocks * size), size, asyncio.Queue()
        self.free = random.sample(range(blocks), blocks)  # the order that a pool has after some time

    def answer(self, message, taken):
        """The answer to a message of a client that has taken these blocks. An empty answer is a refusal."""
        if len(message) != TAKE.size:
            blocks = (self.memory[number * self.size : (number + 1) * self.size] for number in taken)
            return b"intact" if hashlib.sha256(b"".join(blocks)).digest() == message else b""
        (count,) = TAKE.unpack(message)
        numbers = [self.free.pop() for _ in range(count)] if count <= len(self.free) else []
        taken += numbers
        return struct.pack(f"!{len(numbers)}I", *numbers)

    async def serve(self, connection):
        taken = []
        try:
            async with connection, connection.expose(self.memory) as remote:
                await connection.send(WELCOME.pack(remote.to_bytes(), self.size))
                async for message in connection:
                    await connection.send(self.answer(message, taken))
        finally:
            self.free += taken  # the client cannot write to them any more
            self.left.put_nowait(f"{connection.peer_address[0]} has left, {len(self.free)} blocks are free")


async def run_server(args):
    pool, count = Pool(args.blocks, args.size), 0
    async with aio.serve(("", args.port), pool.serve, adapter=args.adapter, timeout_s=args.timeout) as server:
        print("listening on {} port {}".format(*server.address[:2]), flush=True)
        while count != args.until:
            print(await pool.left.get(), flush=True)  # waits for ever; Ctrl-C ends it
            count += 1


async def ask(connection, message, timeout_s, refusal):
    await connection.send(message)
    if answer := await asyncio.wait_for(connection.receive(), timeout_s):
        return answer
    raise RuntimeError(refusal)


async def run_client(args):
    async with aio.connect((args.host, args.port), adapter=args.adapter, timeout_s=args.timeout) as connection:
        pool, size = WELCOME.unpack(await asyncio.wait_for(connection.receive(), args.timeout))
        remote, refusal = ndpy.RemoteMemory.from_bytes(pool), f"the server has no {args.blocks} free blocks"
        answer = await ask(connection, TAKE.pack(args.blocks), args.timeout, refusal)
        there = [remote[number * size : (number + 1) * size] for (number,) in struct.iter_unpack("!I", answer)]
        here = [slice(place * size, (place + 1) * size) for place in range(args.blocks)]
        sent, got, register = bytearray(args.blocks * size), bytearray(args.blocks * size), connection.adapter.register
        # Registered once, as a whole, so that a block is only a slice.
        with register(sent, ndpy.Access.NONE) as source, register(got, ndpy.Access.LOCAL_WRITE) as sink:
            for _ in range(args.count):
                sent[:] = random.randbytes(len(sent))
                pairs = [(block, source[part]) for block, part in zip(there, here, strict=True)]
                await asyncio.wait_for(connection.write_many(pairs), args.timeout)
                await ask(connection, hashlib.sha256(sent).digest(), args.timeout, "the blocks arrived damaged")
                pairs = [(block, sink[part]) for block, part in zip(there, here, strict=True)]
                await asyncio.wait_for(connection.read_many(random.sample(pairs, len(pairs))), args.timeout)
                if got != sent:
                    raise RuntimeError("the blocks came back damaged")
    print(f"verified {args.count} times {args.blocks} blocks of {size} bytes")


def positive(text):
    value = int(text)
    if not 0 < value < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to {2**32 - 1}")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server", parents=[common], help="serve a pool of blocks until Ctrl-C")
    for option in ("--blocks", "--size"):
        server.add_argument(option, type=positive, default=4096, metavar="N", help="default: %(default)s")
    server.add_argument("--until", type=positive, metavar="N", help="stop after N clients have left")
    client = roles.add_parser("client", parents=[common], help="write blocks, read them, and verify both")
    client.add_argument("host")
    client.add_argument("--blocks", type=positive, default=256, help="to transfer at once; default: %(default)s")
    client.add_argument("--count", type=positive, default=10, help="how often; default: %(default)s")
    args = parser.parse_args()
    asyncio.run((run_server if args.role == "server" else run_client)(args))


if __name__ == "__main__":
    try:
        main()
    except asyncio.TimeoutError as error:
        sys.exit(f"block_transfer: {str(error) or 'no answer within --timeout seconds'}")
    except (ndpy.NdpyError, OSError, RuntimeError, ValueError, struct.error) as error:
        sys.exit(f"block_transfer: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
