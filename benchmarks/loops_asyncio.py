"""What `make bench` says of asyncio: two processes that exchange messages with a Poller, with awaited queues, and with
ndpy.aio.

python loops_asyncio.py ADAPTER: prints a line of JSON for each loop.
"""

import asyncio
import json
import selectors
import subprocess
import sys
from collections import deque

from timing import LENGTH, PAGE, SAMPLES, now, summary

import ndpy
from ndpy import Access, aio

# With a clock that jumps when the machine is idle, a deadline that is near may pass at any time.
LONG_S = 100_000.0
ROUNDS = 50
LARGE = 1 << 20
LARGE_ROUNDS = 8
IN_FLIGHT = 2
PIECES = 1000
PIECES_ROUNDS = 2
AT_ONCE = 64
CROWD = 16
OPTIONS = {"timeout_s": LONG_S, "close_timeout_s": LONG_S}


class CountingSelector(selectors.DefaultSelector):
    """Counts how often the loop wakes up with something to do."""

    count = 0

    def select(self, timeout=None):
        events = super().select(timeout)
        self.count += bool(events)
        return events


def samples_of(turn, rounds, scale=1):
    """Microseconds a round, after a warm-up. turn() makes one round."""
    taken = []
    for sample in range(SAMPLES + 1):
        begin = now()
        for _ in range(rounds):
            turn()
        if sample:
            taken.append((now() - begin) / rounds / scale / 1000)
    return taken


async def samples_of_awaited(turn, rounds):
    taken = []
    for sample in range(SAMPLES + 1):
        begin = now()
        for _ in range(rounds):
            await turn()
        if sample:
            taken.append((now() - begin) / rounds / 1000)
    return taken


class Ping:
    """One end of a plain connection, whose receive is always posted."""

    def __init__(self, name, address=None):
        self.adapter = ndpy.open_adapter(name)
        self.region = self.adapter.register(ndpy.alloc(PAGE))
        self.queue = self.adapter.create_completion_queue(64)
        self.queue_pair = self.adapter.create_queue_pair(self.queue)
        self.landing, self.message = self.region[0:LENGTH], self.region[LENGTH : 2 * LENGTH]
        self.queue_pair.receive(self.landing)
        if address is None:
            with self.adapter.listen((self.adapter.info.addresses[0], 0)) as listener:
                tell(listener.address)
                self.connector = listener.get_request()
                self.connector.accept(self.queue_pair)
        else:
            self.connector = self.adapter.connect(self.queue_pair, address)

    def has_received(self, completions):
        received = False
        for completion in completions:
            completion.raise_for_status()
            received = received or completion.operation is ndpy.Operation.RECEIVE
        return received


def tell(address):
    print(json.dumps(list(address)), flush=True)


def with_poller(ping, rounds_of):
    with ndpy.Poller() as poller:
        poller.add(ping.queue)

        def receive():
            while True:
                for _, completions in poller.wait():
                    if ping.has_received(completions):
                        ping.queue_pair.receive(ping.landing)
                        return

        return rounds_of(receive)


async def awaited(ping):
    while not ping.has_received(await ping.queue.wait_async()):
        pass
    ping.queue_pair.receive(ping.landing)


# ---- the client's part of each loop: microseconds a round ----


def round_trip_poller(name, address):
    ping = Ping(name, address)

    def rounds_of(receive):
        def turn():
            ping.queue_pair.send(ping.message)
            receive()

        return samples_of(turn, ROUNDS)

    return with_poller(ping, rounds_of)


def round_trip_awaited(name, address):
    ping = Ping(name, address)

    async def turn():
        ping.queue_pair.send(ping.message)
        await awaited(ping)

    return asyncio.run(samples_of_awaited(turn, ROUNDS))


def round_trip_message(name, address):
    async def main():
        async with aio.connect(address, adapter=name, **OPTIONS) as connection:

            async def turn():
                await connection.send(b"12345678")
                await connection.receive()

            return await samples_of_awaited(turn, ROUNDS)

    return asyncio.run(main())


def beside_a_connection(measure):
    """A loop over a plain queue pair, whose peer's memory a connection of ndpy.aio has told. measure(queue pair, queue,
    remote, adapter) makes the samples."""

    async def main(name, address):
        adapter = ndpy.open_adapter(name)
        async with aio.connect(address, adapter=adapter, **OPTIONS) as connection:
            remote = ndpy.RemoteMemory.from_bytes(await connection.receive())
            queue = adapter.create_completion_queue(64)
            queue_pair = adapter.create_queue_pair(queue)
            address_of_ping = tuple(json.loads(bytes(await connection.receive())))
            connector = adapter.create_connector()
            await connector.begin_connect(queue_pair, address_of_ping)
            await connector.begin_complete_connect()
            taken = measure(queue_pair, queue, remote, adapter)
            await connector.begin_disconnect()
            return taken

    return lambda name, address: asyncio.run(main(name, address))


def take_one(queue):
    for completion in queue.wait(max_entries=1):
        completion.raise_for_status()


@beside_a_connection
def write_1m(queue_pair, queue, remote, adapter):
    """Plain writes, with as many outstanding as there are messages under way in message_1m."""
    source, target = adapter.register(ndpy.alloc(LARGE), Access.NONE), remote[0:LARGE]
    for _ in range(IN_FLIGHT - 1):
        queue_pair.write(source, target)

    def turn():
        queue_pair.write(source, target)
        take_one(queue)

    return samples_of(turn, LARGE_ROUNDS)


def piece(number):
    """Where a piece is: neither end's pieces follow each other."""
    place = number * 7 % PIECES
    return slice(place * PAGE, (place + 1) * PAGE)


@beside_a_connection
def read_batches(queue_pair, queue, remote, adapter):
    """Pieces by plain reads, in lists with one completion. They are kept from round to round."""
    region, batches = adapter.register(ndpy.alloc(PIECES * PAGE)), []
    for first in range(0, PIECES, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, PIECES))
        batch = ndpy.Batch(len(numbers))
        for number in numbers:
            last = number == numbers[-1]
            batch.read(
                region[piece(number)], remote[piece(number)], flags=ndpy.Flags(0) if last else ndpy.Flags.SILENT_SUCCESS
            )
        batches.append(batch)

    def turn():
        for batch in batches:
            queue_pair.post(batch)
            take_one(queue)

    return samples_of(turn, PIECES_ROUNDS)


def read_many(name, address):
    """The same pieces by one call of ndpy.aio."""

    async def main():
        adapter = ndpy.open_adapter(name)
        async with aio.connect(address, adapter=adapter, **OPTIONS) as connection:
            remote = ndpy.RemoteMemory.from_bytes(await connection.receive())
            region = adapter.register(ndpy.alloc(PIECES * PAGE))
            pairs = [(remote[piece(number)], region[piece(number)]) for number in range(PIECES)]
            return await samples_of_awaited(lambda: connection.read_many(pairs), PIECES_ROUNDS)

    return asyncio.run(main())


def message_1m(name, address):
    async def main():
        async with aio.connect(address, adapter=name, **OPTIONS) as connection:
            data = ndpy.alloc(LARGE)
            under_way = deque(asyncio.ensure_future(connection.send(data)) for _ in range(IN_FLIGHT - 1))

            async def turn():
                under_way.append(asyncio.ensure_future(connection.send(data)))
                await under_way.popleft()

            taken = await samples_of_awaited(turn, LARGE_ROUNDS)
            await asyncio.gather(*under_way)
            return taken

    return asyncio.run(main())


def wakeups_of_an_await(name, address):
    """How often the loop wakes up for each message that is awaited, with CROWD connections in a task each."""
    selector = CountingSelector()

    async def main():
        ratios = []
        connections = [await aio.connect(address, adapter=name, **OPTIONS) for _ in range(CROWD)]

        async def talk(connection):
            for _ in range(ROUNDS):
                await connection.send(b"12345678")
                await connection.receive()

        for sample in range(SAMPLES + 1):
            before = selector.count
            await asyncio.gather(*map(talk, connections))
            if sample:
                ratios.append((selector.count - before) / (ROUNDS * CROWD))
        await asyncio.gather(*(connection.close() for connection in connections))
        return ratios

    loop = asyncio.SelectorEventLoop(selector)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


LOOPS = {
    "round_trip_poller": round_trip_poller,
    "round_trip_awaited": round_trip_awaited,
    "round_trip_message": round_trip_message,
    "write_1m": write_1m,
    "message_1m": message_1m,
    "read_batches": read_batches,
    "read_many": read_many,
    "wakeups_of_an_await": wakeups_of_an_await,
}

# ---- the server's part ----


def answer_with_poller(name):
    ping = Ping(name)

    def rounds_of(receive):
        while True:
            receive()
            ping.queue_pair.send(ping.message)

    with_poller(ping, rounds_of)


def answer_awaited(name):
    ping = Ping(name)

    async def main():
        while True:
            await awaited(ping)
            ping.queue_pair.send(ping.message)

    asyncio.run(main())


async def echo(connection):
    async for message in connection:
        await connection.send(message)


async def take(connection):
    target = ndpy.alloc(LARGE)
    while await connection.receive(target):
        pass


async def lend(connection):
    """Let the client read, until it leaves."""
    with connection.adapter.register(ndpy.alloc(PIECES * PAGE), Access.REMOTE_WRITE | Access.REMOTE_READ) as region:
        await connection.send(region.remote().to_bytes())
        async for _ in connection:
            pass


async def be_reached(connection):
    """Let the client write and read, also from a plain queue pair of its own."""
    adapter, access = connection.adapter, Access.REMOTE_WRITE | Access.REMOTE_READ
    with (
        adapter.register(ndpy.alloc(max(LARGE, PIECES * PAGE)), access) as region,
        adapter.create_completion_queue(8) as queue,
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.listen((adapter.info.addresses[0], 0)) as listener,
    ):
        await connection.send(region.remote().to_bytes())
        await connection.send(json.dumps(list(listener.address)).encode())
        connector = await listener.get_request_async()
        await connector.begin_accept(queue_pair)
        await connector.begin_wait_disconnected()


def serve(handler, name):
    async def main():
        with ndpy.open_adapter(name) as adapter:
            async with aio.serve((adapter.info.addresses[0], 0), handler, adapter=adapter, **OPTIONS) as server:
                tell(server.address)
                await server.serve_forever()

    asyncio.run(main())


SERVERS = {
    "round_trip_poller": answer_with_poller,
    "round_trip_awaited": answer_awaited,
    "round_trip_message": lambda name: serve(echo, name),
    "write_1m": lambda name: serve(be_reached, name),
    "message_1m": lambda name: serve(take, name),
    "read_batches": lambda name: serve(be_reached, name),
    "read_many": lambda name: serve(lend, name),
    "wakeups_of_an_await": lambda name: serve(echo, name),
}


def main():
    name = sys.argv[1]
    if len(sys.argv) > 2:
        SERVERS[sys.argv[2]](name)
        return
    for loop, measure in LOOPS.items():
        with subprocess.Popen([sys.executable, __file__, name, loop], stdout=subprocess.PIPE, text=True) as server:
            try:
                address = tuple(json.loads(server.stdout.readline()))
                line = {"who": "ndpy", "loop": loop, **summary(measure(name, address)), "rounds": ROUNDS}
            finally:
                server.kill()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
