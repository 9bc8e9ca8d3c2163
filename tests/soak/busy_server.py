"""A busy server uses the registration cache for SOAK_S seconds (600). Memory and pinned bytes must stay flat.

    python tests/soak/busy_server.py [ADAPTER]        (make soak)

Clients expose memory that comes and goes, and ask the server to read it. The server reads it into its own memory and
compares each byte with the one that the client wrote last. Connections are closed and made again all the time.

Exit status 0 means that all bytes were right, and that after the first quarter of the time neither the memory of the
process nor the number of pinned bytes grew.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.helpers import SEED, Keeper, connect_pair, take

import ndpy
from ndpy import Access

SOAK_S = float(os.environ.get("SOAK_S", "600"))
CLIENTS = 3
REQUESTS_PER_CONNECTION = 200
# The program at times uses more than this, so idle registrations must give way.
MAX_BYTES = 1 << 20
MAX_ENTRIES = 16
SIZES = (512, 4096, 20_000, 65_536, 262_144)
SAMPLES = 40
# An allocator and some caches may change the resident memory by this much.
RSS_SLACK = 3 << 20
DESCRIPTOR = 20


def pinned_by_kernel() -> int:
    """The bytes that the kernel has pinned for this process, or 0 if it does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmPin:"))


def new_buffer(rng: random.Random):
    """Writable memory of a random kind and size."""
    size = rng.choice(SIZES)
    return rng.choice((ndpy.alloc, bytearray, lambda length: mmap.mmap(-1, length)))(size)


class Conversation:
    """One client and the server's side of it. A thread runs both, over one connection after another."""

    def __init__(self, adapter, client_cache, server_cache, number):
        self.adapter = adapter
        self.caches = client_cache, server_cache
        self.rng = random.Random(SEED + number)
        self.numbers = itertools.count(number * 1_000_000_000)
        self.requests = 0
        self.sinks = [ndpy.alloc(max(SIZES)) for _ in range(4)]

    def run(self, ends_at: float) -> None:
        buffers = [new_buffer(self.rng) for _ in range(12)]
        while time.monotonic() < ends_at:
            keep = Keeper()
            try:
                pair = connect_pair(keep, self.adapter)
                self.converse(pair, keep, buffers, ends_at)
                pair.client.connector.disconnect(20)
            finally:
                keep.close()

    def converse(self, pair, keep, buffers, ends_at) -> None:
        client, server = pair
        messages = keep(self.adapter.register(bytearray(4 * DESCRIPTOR)))
        asked, answered = messages[:DESCRIPTOR], messages[2 * DESCRIPTOR : 3 * DESCRIPTOR]
        request = messages[DESCRIPTOR : 2 * DESCRIPTOR]
        for _ in range(REQUESTS_PER_CONNECTION):
            if time.monotonic() > ends_at:
                return
            place = self.rng.randrange(len(buffers))
            if self.rng.random() < 0.2:
                buffers[place] = new_buffer(self.rng)
            buffer = buffers[place]
            pattern = next(self.numbers).to_bytes(8, "little")
            length = len(buffer) // 8 * 8
            memoryview(buffer)[:length] = pattern * (length // 8)
            server.queue_pair.receive(asked)
            client.queue_pair.receive(answered)
            with self.caches[0].remote(buffer, client.queue_pair, Access.REMOTE_READ) as exposure:
                messages.buffer[DESCRIPTOR : 2 * DESCRIPTOR] = exposure.remote().to_bytes()
                client.queue_pair.send(request)
                self.serve(server, messages, pattern * (length // 8))
                take_well(client, 2)
            self.requests += 1

    def serve(self, server, messages, expected) -> None:
        """Read the memory that the client has exposed, check it, and answer."""
        take_well(server, 1)
        remote = ndpy.RemoteMemory.from_bytes(bytes(messages.buffer[:DESCRIPTOR]))
        # Some of the server's memory stays, some comes and goes.
        sink = self.rng.choice([*self.sinks, ndpy.alloc(remote.length)])[: remote.length]
        with self.caches[1].local(sink, Access.LOCAL_WRITE | Access.READ_SINK, queue_pair=server.queue_pair) as lease:
            server.queue_pair.read(lease[:], remote)
            take_well(server, 1)
        if sink[: len(expected)] != expected:
            raise AssertionError(f"{remote.length} bytes at {remote.address:#x} are not what was written there last")
        server.queue_pair.send(messages[3 * DESCRIPTOR :])
        take_well(server, 1)


def take_well(end, count: int) -> None:
    for completion in take(end.cq, count):
        completion.raise_for_status()


def main() -> None:
    process = psutil.Process()
    before = pinned_by_kernel()
    samples: list[tuple[int, int, int]] = []
    with ndpy.open_adapter(sys.argv[1] if len(sys.argv) > 1 else None) as adapter:
        print(f"{SOAK_S:g} s on {adapter.info.name}, seed {SEED} (NDPY_TEST_SEED)", flush=True)
        caches = [ndpy.RegistrationCache(adapter, max_bytes=MAX_BYTES, max_entries=MAX_ENTRIES) for _ in range(2)]
        began = time.monotonic()
        conversations = [Conversation(adapter, *caches, number) for number in range(CLIENTS)]
        failures: list[BaseException] = []

        def run(conversation):
            try:
                conversation.run(began + SOAK_S)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(conversation,)) for conversation in conversations]
        for thread in threads:
            thread.start()
        for turn in range(1, SAMPLES + 1):
            while not failures and time.monotonic() < began + turn * SOAK_S / SAMPLES:
                time.sleep(0.1)
            if failures:
                break
            gc.collect()
            pinned = sum(cache.stats.bytes_pinned for cache in caches)
            samples.append((process.memory_info().rss, pinned, pinned_by_kernel() - before))
            done = sum(conversation.requests for conversation in conversations)
            rss, pinned, kernel = samples[-1]
            print(
                f"{time.monotonic() - began:7.0f} s {done:8} requests, {rss / 1024:9.0f} KiB resident, "
                f"{pinned / 1024:7.0f} KiB registered, {kernel / 1024:7.0f} KiB pinned",
                flush=True,
            )
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                sys.exit("a conversation hangs")
        if failures:
            raise failures[0]
        for cache in caches:
            print(cache.stats)
            cache.close()
    judge(samples)
    if pinned_by_kernel() > before:
        sys.exit(f"{pinned_by_kernel() - before} bytes are pinned after the adapter was closed")
    print("memory and pinned bytes are flat")


def judge(samples: list[tuple[int, int, int]]) -> None:
    """Exit with an error if the last quarter of the samples is higher than the second."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    # Each client may hold one exposure and one lease beyond the bounds of the caches.
    bound = 2 * MAX_BYTES + 2 * CLIENTS * max(SIZES)
    for name, column, slack in (("resident", 0, RSS_SLACK), ("registered", 1, 2 << 20), ("pinned", 2, 2 << 20)):
        first, last = (statistics.median(sample[column] for sample in part) for part in (early, late))
        print(f"{name}: {first / 1024:.0f} KiB in the second quarter, {last / 1024:.0f} KiB in the last")
        if last > first + slack:
            sys.exit(f"{name}: {(last - first) / 1024:.0f} KiB more")
    most = max(sample[1] for sample in samples)
    if most > bound:
        sys.exit(f"{most} bytes were registered, more than {bound}")


if __name__ == "__main__":
    main()
