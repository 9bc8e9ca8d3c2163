"""A key-value store whose clients read the server's memory themselves, with asyncio.

    python key_value_store.py server
    python key_value_store.py put 192.0.2.1 colour blue
    python key_value_store.py get 192.0.2.1 colour
    python key_value_store.py measure 192.0.2.1 --count 1000

The server has a table of buckets, and exposes it to each client. A bucket has room for four entries. The hash of a key
says in which bucket it is.

    put    The client sends a message with the key and the value. The server writes the entry and answers.
    get    The client reads the bucket with one RDMA read. The server's program does nothing.

A read may see an entry that is half written. Each entry has a checksum, so the client notices this and reads again.
"""

import argparse
import asyncio
import contextlib
import hashlib
import random
import struct
import sys
import time

import ndpy
from ndpy import aio

PORT = 7475
HEADER = struct.Struct("!8sHH")  # the checksum, and the lengths of key and value. An empty entry has only zero bytes.
ENTRY = 256
BUCKET = 4 * ENTRY
PUT = struct.Struct("!cH")  # b"P" and the length of the key. Key and value follow.
USAGE = struct.Struct("!dd")  # answers b"U": seconds of processor time of the server's thread, and of its whole process


class TornError(Exception):
    """This entry is half written."""


def checksum(data):
    return hashlib.blake2b(data, digest_size=8).digest()


def bucket_of(key, table_length):
    """Where in the table the bucket of a key begins."""
    return int.from_bytes(checksum(key), "big") % (table_length // BUCKET) * BUCKET


def encode(key, value):
    lengths = HEADER.pack(b"", len(key), len(value))[8:]
    entry = checksum(lengths + key + value) + lengths + key + value
    if len(entry) > ENTRY:
        raise ValueError(f"key and value have {len(key) + len(value)} bytes, more than {ENTRY - HEADER.size}")
    return entry


def decode(entry):
    """Returns (key, value), or None for an empty entry."""
    stored, key_length, value_length = HEADER.unpack_from(entry)
    end = HEADER.size + key_length + value_length
    if not any(entry[: HEADER.size]):
        return None
    if end > ENTRY or checksum(entry[8:end]) != stored:
        raise TornError
    return entry[HEADER.size : HEADER.size + key_length], entry[HEADER.size + key_length : end]


class Table:
    """The server's side."""

    def __init__(self, buckets):
        self.memory = ndpy.alloc(buckets * BUCKET)

    def put(self, key, value):
        entry = encode(key, value)
        start = bucket_of(key, len(self.memory))
        for place in range(start, start + BUCKET, ENTRY):
            found = decode(bytes(self.memory[place : place + ENTRY]))
            if found is None or found[0] == key:
                self.memory[place : place + len(entry)] = entry
                return
        raise ValueError("the bucket of this key is full")

    def answer(self, message):
        if message == b"U":
            return USAGE.pack(time.thread_time(), time.process_time())
        try:
            tag, key_length = PUT.unpack_from(message)
            if tag != b"P" or PUT.size + key_length > len(message):
                return b"this message is not understood"
            self.put(bytes(message[PUT.size : PUT.size + key_length]), bytes(message[PUT.size + key_length :]))
        except (ValueError, struct.error) as error:
            return str(error).encode()
        return b""

    async def serve(self, connection):
        """Serve one client until it closes its connection."""
        async with connection, connection.expose(self.memory, ndpy.Access.REMOTE_READ) as remote:
            await connection.send(remote.to_bytes())
            async for message in connection:
                await connection.send(self.answer(message))


class Client:
    """The client's side. Make one call at a time.

    Attributes:
        repeated: how many reads saw a half-written entry.
    """

    def __init__(self, connection, timeout_s):
        self.connection, self.timeout_s, self.repeated = connection, timeout_s, 0
        self.remote = None
        self.bucket = ndpy.alloc(BUCKET)

    async def begin(self):
        """Learn where the server's table is."""
        self.remote = ndpy.RemoteMemory.from_bytes(await asyncio.wait_for(self.connection.receive(), self.timeout_s))

    async def ask(self, message):
        await self.connection.send(message)
        return await asyncio.wait_for(self.connection.receive(), self.timeout_s)

    async def put(self, key, value):
        refusal = await self.ask(PUT.pack(b"P", len(key)) + key + value)
        if refusal:
            raise ValueError(refusal.decode())

    async def get(self, key):
        """Returns the value, or None."""
        start = bucket_of(key, self.remote.length)
        deadline = time.monotonic() + self.timeout_s
        while True:
            await self.connection.read(self.remote[start : start + BUCKET], into=self.bucket)
            torn = False
            for place in range(0, BUCKET, ENTRY):
                try:
                    found = decode(bytes(self.bucket[place : place + ENTRY]))
                except TornError:
                    torn = True
                else:
                    if found is not None and found[0] == key:
                        return found[1]
            if not torn:
                return None
            self.repeated += 1
            if time.monotonic() > deadline:
                raise RuntimeError("the server has left an entry half written")

    async def usage(self):
        """The processor time of the server's thread, and of its whole process, in ms."""
        return [seconds * 1000 for seconds in USAGE.unpack(await self.ask(b"U"))]


async def run_server(args):
    table, left = Table(args.buckets), asyncio.Queue()

    async def handle(connection):
        try:
            await table.serve(connection)
        finally:
            left.put_nowait(connection.peer_address[0])

    async with aio.serve(("", args.port), handle, adapter=args.adapter, timeout_s=args.timeout) as server:
        print("listening on {} port {}".format(*server.address[:2]), flush=True)
        count = 0
        while count != args.until:
            print(f"{await left.get()} has left", flush=True)  # waits for ever; Ctrl-C ends it
            count += 1


@contextlib.asynccontextmanager
async def connect(args):
    async with aio.connect((args.host, args.port), adapter=args.adapter, timeout_s=args.timeout) as connection:
        client = Client(connection, args.timeout)
        await client.begin()
        yield client


async def run_put(args):
    async with connect(args) as client:
        await client.put(args.key.encode(), args.value.encode())
    print(f"put {args.key}")


async def run_get(args):
    async with connect(args) as client:
        value = await client.get(args.key.encode())
    if value is None:
        raise RuntimeError(f"there is no {args.key}")
    print(value.decode())


def key_of(number):
    return b"key %d" % number


def value_of(number, turn):
    """A value that is whole if all its parts are the same."""
    return b"%4d:%4d;" % (number, turn % 10000) * 20


async def timed(client, count, call):
    """Call it `count` times. Returns us for each call, and ms of processor time of the server's thread and process."""
    before, start = await client.usage(), time.perf_counter()
    for _ in range(count):
        await call()
    each_us = (time.perf_counter() - start) / count * 1e6
    after = await client.usage()
    return [each_us, *(now - then for now, then in zip(after, before, strict=True))]


def report(name, count, us, thread_ms, process_ms):
    print(
        f"{count} {name}: {us:.1f} us each; the server's program ran for {thread_ms:.3f} ms, "
        f"its whole process for {process_ms:.3f} ms",
        flush=True,
    )


async def run_measure(args):
    chance, turns = random.Random(0), dict.fromkeys(range(args.keys), 0)
    async with connect(args) as reader, connect(args) as writer:
        for number in turns:
            await writer.put(key_of(number), value_of(number, 0))

        async def put():
            number = chance.randrange(args.keys)
            turns[number] += 1
            await writer.put(key_of(number), value_of(number, turns[number]))

        async def get(under_way=0):
            """Get and verify a value. under_way: how many puts may not have reached the table yet."""
            number = chance.randrange(args.keys)
            oldest = turns[number] - under_way
            value = await reader.get(key_of(number))
            if value not in {value_of(number, turn) for turn in range(oldest, turns[number] + 1)}:
                raise RuntimeError(f"{key_of(number).decode()} has a wrong value: {value}")

        async def put_until(finished):
            while not finished.is_set():
                await put()

        report("puts", args.count, *await timed(writer, args.count, put))
        report("gets", args.count, *await timed(reader, args.count, get))
        finished = asyncio.Event()
        putting = asyncio.ensure_future(put_until(finished))
        try:
            for _ in range(args.count):
                await get(under_way=1)
        finally:
            finished.set()
            await putting
    print(f"verified {2 * args.count} gets, half of them during puts; {reader.repeated} reads were repeated")


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server", parents=[common], help="serve until Ctrl-C")
    server.add_argument("--buckets", type=positive, default=1024, help="of 4 entries each; default: %(default)s")
    server.add_argument("--until", type=positive, metavar="N", help="stop after N clients have left")
    put = roles.add_parser("put", parents=[common], help="store a value")
    get = roles.add_parser("get", parents=[common], help="read a value from the server's memory")
    measure = roles.add_parser("measure", parents=[common], help="time and verify many puts and gets")
    for role in (put, get, measure):
        role.add_argument("host")
    for role in (put, get):
        role.add_argument("key")
    put.add_argument("value")
    measure.add_argument("--keys", type=positive, default=100, help="default: %(default)s")
    measure.add_argument("--count", type=positive, default=1000, help="puts and gets; default: %(default)s")
    args = parser.parse_args()
    run = {"server": run_server, "put": run_put, "get": run_get, "measure": run_measure}[args.role]
    asyncio.run(run(args))


if __name__ == "__main__":
    try:
        main()
    except asyncio.TimeoutError as error:
        sys.exit(f"key_value_store: {str(error) or 'no answer within --timeout seconds'}")
    except (ndpy.NdpyError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"key_value_store: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
