"""Connections of ndpy.aio come, talk and go for SOAK_S seconds (600). Every byte is accounted for, and nothing is left.

    python tests/soak/busy_connections.py [ADAPTER]                          (make soak WHAT=aio)
    python tests/soak/busy_connections.py ADAPTER --serve ADDRESS:PORT       one host
    python tests/soak/busy_connections.py ADAPTER --peer ADDRESS:PORT        the other host

Processes with clients connect to one server. In each connection both ends send messages of random lengths, which both
receive slowly or fast, with and without memory of their own. They expose memory, read and write each other's, and
cancel all of this at random. A connection ends by close(), by abort() of either end or by an exception of the server's
handler. Client processes are killed, except for one, the survivor.

Accounting: a message has a number and contents that follow from it. The receiver compares every byte, and the numbers
rise. At the end of a connection each end tells which sends were cancelled. All others have arrived, once.

Exit status 0 means that all of this was right, that no call took longer than HANG_S, that both processes have closed
everything (open files, objects of the adapter and of the kernel), and that after the first quarter of the time no
memory grew. That is only judged if the time is five minutes or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.helpers import SEED, has_kernel_driver, host_of, kernel_resources, open_files

import ndpy
from ndpy import RemoteMemory, aio
from ndpy.aio import transfers as transfers_module

SOAK_S = float(os.environ.get("SOAK_S", "600"))
# A conversation that takes longer hangs. Emulated machines are slow, and so is a network that loses packets.
HANG_S = float(os.environ.get("HANG_S", "120"))
# Clients of a process that talk at once. One process lives, and another one is killed and started again.
CLIENTS = 3
MESSAGES = 30
# A packet that rxe loses costs seconds, so that long messages take for ever on a network that loses 1 %.
LONGEST = int(os.environ.get("SOAK_LONGEST", "1200000"))
LENGTHS = tuple(length for length in (0, 1, 40, 100, 1000, 4000, 5000, 20_000, 70_000, 300_000) if length <= LONGEST)
# A mortal process lives so many seconds.
LIFE_S = (1.0, 15.0)
SAMPLES = 40
# Memory is only judged after so long: at first pools and caches fill.
STEADY_S = 300.0
# An allocator and some caches may change the resident memory by this much.
RSS_SLACK = 6 << 20
OPTIONS = {"timeout_s": HANG_S / 2, "close_timeout_s": HANG_S / 2}

#: what, number, length of the rest
_HEAD = struct.Struct("!BIQ")
TEXT, EXPOSED, ANSWER, FINISH = range(4)
_EXPOSED = struct.Struct("!IQ20s")


class Wrong(Exception):
    """Something is not as it must be."""


class OnPurpose(Exception):
    """Ends a handler in the middle."""


def pattern(number: int, length: int) -> bytes:
    word = (number * 0x9E3779B97F4A7C15 + length & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
    return (word * (length // 8 + 1))[:length]


class Account:
    """What was done in this process."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.conversations = 0
        self.ended_early = 0
        self.messages = 0
        self.bytes = 0
        self.transfers = 0
        self.cancelled = 0
        self.kills = 0
        self.rss: list[int] = []
        #: Conversations that go on, and when they began.
        self.open: dict[asyncio.Task, float] = {}

    def __str__(self) -> str:
        return (
            f"{self.conversations} connections ({self.ended_early} ended early), {self.messages} messages, "
            f"{self.bytes >> 20} MiB, {self.transfers} transfers, {self.cancelled} cancelled, {self.kills} kills"
        )

    def sample(self) -> None:
        gc.collect()
        self.rss.append(psutil.Process().memory_info().rss)
        for task, began in self.open.items():
            if time.monotonic() - began > HANG_S:
                for other in asyncio.all_tasks():
                    other.print_stack(limit=8)
                raise Wrong(f"a conversation hangs: {task}")

    def judge(self) -> None:
        """Raise if the lowest sample of the last quarter is higher than that of the second. The others say how busy it
        was.
        """
        quarter = len(self.rss) // 4
        if not quarter or SOAK_S < STEADY_S:
            return
        first, last = (min(part) for part in (self.rss[quarter : 2 * quarter], self.rss[-quarter:]))
        print(f"resident: {first / 1024:.0f} KiB in the second quarter, {last / 1024:.0f} KiB in the last", flush=True)
        if last > first + RSS_SLACK:
            raise Wrong(f"{(last - first) / 1024:.0f} KiB more are resident")


class Conversation:
    """One end of a connection. Both ends do the same."""

    def __init__(self, connection: aio.Connection, account: Account, messages: int) -> None:
        self.connection = connection
        self.account = account
        self.rng = random.Random(account.rng.random())
        self.count = messages
        self.number = 0
        self.cancelled: set[int] = set()
        self.received: set[int] = set()
        self.last = -1
        #: How many messages the peer has sent before it finished, and which of them it has cancelled.
        self.promised: asyncio.Future[tuple[int, set[int]]] = asyncio.get_running_loop().create_future()
        self.answers: dict[int, asyncio.Future[tuple[int, int, int]]] = {}
        self.helpers: set[asyncio.Task] = set()
        self.exposures = 0
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Raises what ends the connection early, and Wrong."""
        # Answers to what this end exposes may come after the last message of the peer.
        finishing = asyncio.gather(self.send_all(), self.promised)
        receiving = asyncio.ensure_future(self.receive_all())
        try:
            await first_error(finishing, receiving, self.fault, count=1)
            # The peer may have closed the connection before this end sees that it is through itself.
            await first_error(finishing, self.fault, count=1)
        finally:
            for task in (finishing, receiving, self.fault, *self.helpers):
                task.cancel()
            await asyncio.gather(finishing, receiving, self.fault, *self.helpers, return_exceptions=True)
        count, cancelled = self.promised.result()
        missing = set(range(count)) - self.received
        if missing - cancelled:
            raise Wrong(f"of {count} messages {sorted(missing - cancelled)} did not arrive")

    # ---- sending ----

    def begin_send(self, what: int, body: bytes) -> tuple[int, bytearray, asyncio.Task]:
        """A task, because tasks begin in the order in which they were made. So the numbers rise."""
        number, self.number = self.number, self.number + 1
        data = bytearray(_HEAD.pack(what, number, len(body)) + body)
        return number, data, asyncio.ensure_future(self.connection.send(data))

    async def send(self, what: int, body: bytes) -> None:
        _, _, task = self.begin_send(what, body)
        try:
            await asyncio.shield(task)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def send_texts(self, count: int, patience_s: float | None) -> None:
        """Some messages at once. Those that take too long are cancelled. Then their memory is filled with something
        else.
        """
        begun = []
        for _ in range(count):
            length = LONGEST if self.rng.random() < 0.005 else self.rng.choice(LENGTHS)
            begun.append(self.begin_send(TEXT, pattern(self.number, length)))
        tasks = [task for *_, task in begun]
        try:
            if patience_s is not None:
                await asyncio.wait(tasks, timeout=patience_s)
        finally:
            if patience_s is not None:
                for task in tasks:
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for (number, data, _), result in zip(begun, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                self.cancelled.add(number)
                self.account.cancelled += 1
            data[:] = b"\xee" * len(data)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def send_all(self) -> None:
        left = self.count
        while left > 0:
            choice = self.rng.random()
            if choice < 0.15:
                await self.lend()
                left -= 2
            elif choice < 0.35:
                await self.send_texts(self.rng.randrange(1, 4), self.rng.choice((0.0, 0.001, 0.01)))
                left -= 2
            else:
                count = self.rng.choice((1, 1, 2, 8))
                await self.send_texts(count, None)
                left -= count
        # Answers of this end may still be on their way.
        await self.send(FINISH, json.dumps({"cancelled": sorted(self.cancelled)}).encode())

    async def lend(self) -> None:
        """Expose memory, let the peer read or write a part of it, and see that nothing else has changed."""
        number, self.exposures = self.exposures, self.exposures + 1
        length = self.rng.choice((1, 64, 3000, 50_000))
        before = pattern(number, length)
        memory = bytearray(before)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        async with self.connection.expose(memory) as remote:
            await self.send(EXPOSED, _EXPOSED.pack(number, length, remote.to_bytes()))
            start, end, written = await answer
        expected = before[:start] + pattern(written, end - start) + before[end:] if written >= 0 else before
        if memory != expected:
            raise Wrong(f"exposed memory of {length} bytes is not what the peer wrote to {start} to {end}")

    # ---- receiving ----

    async def receive_all(self) -> None:
        own = bytearray(2 * LONGEST)
        while True:
            if self.rng.random() < 0.05:
                await asyncio.sleep(self.rng.random() / 50)
            try:
                message = await self.receive(own)
            except aio.ConnectionEndedError:
                if not self.promised.done():
                    raise Wrong("the peer has closed the connection in the middle") from None
                return
            what, number, length = _HEAD.unpack_from(message)
            body = message[_HEAD.size :]
            if number <= self.last:
                raise Wrong(f"message {number} came after {self.last}")
            if len(body) != length:
                raise Wrong(f"message {number} has {len(body)} bytes instead of {length}")
            self.last = number
            self.received.add(number)
            self.account.messages += 1
            self.account.bytes += len(message)
            if what == TEXT:
                if body != pattern(number, length):
                    raise Wrong(f"message {number} of {length} bytes is not what was sent")
            elif what == EXPOSED:
                # The sender waits for the answer, so it takes it also if this end does not receive.
                self.help(self.use(*_EXPOSED.unpack(body)))
            elif what == ANSWER:
                place, *result = json.loads(body)
                self.answers.pop(place).set_result(tuple(result))
            else:
                self.promised.set_result((number + 1, set(json.loads(body)["cancelled"])))

    def help(self, coroutine) -> None:
        task = asyncio.ensure_future(coroutine)
        self.helpers.add(task)
        task.add_done_callback(self.on_helped)

    def on_helped(self, task: asyncio.Task) -> None:
        self.helpers.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.fault.done():
            self.fault.set_exception(task.exception())

    async def receive(self, own: bytearray) -> bytes:
        """The next message. At times it is received into memory of the program, and at times that is cancelled
        first.
        """
        into = own if self.rng.random() < 0.3 else None
        while True:
            patience_s = self.rng.choice((0.0, 0.001, 0.005)) if self.rng.random() < 0.2 else None
            done, result = await self.attempt(self.connection.receive(into), patience_s)
            if done:
                return bytes(own[:result]) if into is not None else bytes(result)
            if into is not None:
                own[:64] = b"\xdd" * 64
                await asyncio.sleep(0.001)
                if own[:64] != b"\xdd" * 64:
                    raise Wrong("memory was written to after receive() was cancelled")

    async def attempt(self, coroutine, patience_s: float | None) -> tuple[bool, object]:
        """Cancel it after patience_s. Returns whether it was done, and its result."""
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait((task,), timeout=patience_s)
        finally:
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            self.account.cancelled += 1
            return False, None
        if isinstance(result, BaseException):
            raise result
        return True, result

    async def use(self, number: int, length: int, descriptor: bytes) -> None:
        """Read or write a part of what the peer has exposed, and tell it."""
        remote = RemoteMemory.from_bytes(descriptor)
        if remote.length != length:
            raise Wrong(f"{remote.length} bytes were exposed, not {length}")
        start = self.rng.randrange(length)
        end = self.rng.randrange(start, length) + 1
        written = self.rng.randrange(1000) if self.rng.random() < 0.5 else -1
        if written < 0:
            for patience_s in (self.rng.choice((0.0, 0.001, 0.01)), None):
                into = bytearray(end - start)
                done, _ = await self.attempt(self.connection.read(remote[start:end], into), patience_s)
                if not done:
                    continue
                if into != pattern(number, length)[start:end]:
                    raise Wrong(f"{end - start} bytes at {start} of exposed memory are not what they were")
                break
        else:
            await self.connection.write(remote[start:end], pattern(written, end - start))
        self.account.transfers += 1
        await self.send(ANSWER, json.dumps([number, start, end, written]).encode())


async def first_error(*tasks: asyncio.Future, count: int | None = None) -> None:
    """Wait for all tasks, or for one. Raise the first error at once."""
    done, _ = await asyncio.wait(
        tasks, return_when=asyncio.FIRST_EXCEPTION if count is None else asyncio.FIRST_COMPLETED
    )
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()


# ---- the two sides ----


async def talk(connection: aio.Connection, account: Account, words: dict, mine: bool) -> None:
    """One end of a connection whose client has said how it ends."""
    ending = words["ending"]
    conversation = Conversation(connection, account, words["messages"])
    running = asyncio.ensure_future(conversation.run())
    account.open[running] = time.monotonic()
    try:
        if ending in ("abort", "raise") and mine:
            await asyncio.wait((running,), timeout=account.rng.random())
            if ending == "raise":
                raise OnPurpose
            connection.abort()
        await running
        if ending == "close":
            await connection.close()
    except (ConnectionError, ndpy.AccessViolationError) as error:
        account.ended_early += 1
        # An end that gives up takes its memory back before it ends the connection.
        if ending == "close" and not (words["mortal"] and isinstance(error, ConnectionError)):
            raise
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        del account.open[running]
        account.conversations += 1


class Server:
    def __init__(self, account: Account) -> None:
        self.account = account
        self.failures: list[BaseException] = []
        self.stopped = asyncio.Event()

    async def handle(self, connection: aio.Connection) -> None:
        mortal = True
        try:
            words = json.loads(await connection.receive())
            if not words:
                return
            if "stop" in words:
                self.stopped.set()
                return
            mortal = words["mortal"]
            await talk(connection, self.account, words, mine=words["server"])
        except (OnPurpose, asyncio.CancelledError):
            raise
        except BaseException as error:
            if mortal and isinstance(error, ConnectionError):
                return
            self.failures.append(error)
            self.stopped.set()

    def report(self, loop, context) -> None:
        if not isinstance(context.get("exception"), OnPurpose):
            self.failures.append(context.get("exception") or Wrong(str(context)))
            self.stopped.set()


async def serve(adapter: ndpy.Adapter, address: tuple[str, int], account: Account, *, local: bool) -> None:
    server = Server(account)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(server.report)
    began = time.monotonic()
    manager = None
    async with aio.serve(address, server.handle, adapter=adapter, **OPTIONS) as listening:
        print(f"{SOAK_S:g} s on {adapter.info.name} at {listening.address}, seed {SEED} (NDPY_TEST_SEED)", flush=True)
        if local:
            manager = asyncio.ensure_future(manage(adapter.info.name, listening.address, account, began + SOAK_S))
            manager.add_done_callback(lambda _: server.stopped.set())
        turn = 0
        while not server.stopped.is_set():
            turn += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    server.stopped.wait(), max(0, began + turn * SOAK_S / SAMPLES - time.monotonic())
                )
            account.sample()
            print(f"{time.monotonic() - began:7.0f} s {account}, {account.rss[-1] >> 10} KiB resident", flush=True)
        if server.failures:
            if manager is not None:
                manager.cancel()
                await asyncio.gather(manager, return_exceptions=True)
            raise server.failures[0]
        if manager is not None:
            await manager
        deadline = time.monotonic() + HANG_S
        while listening.connections:
            if time.monotonic() > deadline:
                raise Wrong(f"connections are left: {listening.connections}")
            await asyncio.sleep(0.1)


async def be_client(adapter: ndpy.Adapter, address: tuple[str, int], account: Account, ends_at: float, mortal: bool):
    """Talk in one connection after the other. Some are given up while they are made."""
    rng = random.Random(account.rng.random())
    while time.monotonic() < ends_at:
        connecting = asyncio.ensure_future(aio.connect(address, adapter=adapter, **OPTIONS).__aenter__())
        if rng.random() < 0.1:
            await asyncio.wait((connecting,), timeout=rng.random() / 50)
            connecting.cancel()
        try:
            connection = await connecting
        except asyncio.CancelledError:
            account.cancelled += 1
            continue
        words = {
            "messages": rng.randrange(MESSAGES),
            "ending": rng.choice(("close", "close", "close", "abort", "raise")),
            "server": rng.random() < 0.5,
            "mortal": mortal,
        }
        try:
            async with connection:
                await connection.send(json.dumps(words).encode())
                await talk(connection, account, words, mine=not words["server"])
        except OnPurpose:
            pass


async def be_clients(adapter: ndpy.Adapter, address: tuple[str, int], account: Account, seconds: float, mortal: bool):
    began = time.monotonic()
    clients = [
        asyncio.ensure_future(be_client(adapter, address, account, began + seconds, mortal)) for _ in range(CLIENTS)
    ]
    talking = asyncio.ensure_future(first_error(*clients))
    while not talking.done():
        await asyncio.wait((talking,), timeout=max(seconds / SAMPLES, 0.1))
        account.sample()
    await talking


async def manage(name: str, address: tuple[str, int], account: Account, ends_at: float) -> None:
    """Start processes with clients: one that survives, and one that is killed again and again."""

    async def start(mortal: bool) -> asyncio.subprocess.Process:
        seconds = max(ends_at - time.monotonic(), 0)
        words = [name, "--clients", "{}:{}".format(*address[:2]), "--seconds", str(seconds)]
        words += ["--mortal"] * mortal + ["--seed", str(account.rng.random())]
        return await asyncio.create_subprocess_exec(sys.executable, __file__, *words)

    survivor = await start(False)
    try:
        while time.monotonic() < ends_at and survivor.returncode is None:
            mortal = await start(True)
            life_s = min(account.rng.uniform(*LIFE_S), max(ends_at - time.monotonic(), 1))
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(mortal.wait(), life_s)
                if mortal.returncode:
                    raise Wrong(f"a process with clients ended with status {mortal.returncode}")
            finally:
                if mortal.returncode is None:
                    mortal.send_signal(signal.SIGKILL)
                    account.kills += 1
                await mortal.wait()
        status = await asyncio.wait_for(survivor.wait(), HANG_S)
        if status:
            raise Wrong(f"the survivor ended with status {status}")
    finally:
        if survivor.returncode is None:
            survivor.kill()
            await survivor.wait()


async def manage_there(name: str, address: tuple[str, int], account: Account) -> None:
    """The host with the clients. They start when the server answers, and it is told when they have ended."""
    deadline = time.monotonic() + 60
    while True:
        try:
            async with aio.connect(address, adapter=name, **OPTIONS) as connection:
                await connection.send(b"{}")
            break
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
    await manage(name, address, account, time.monotonic() + SOAK_S)
    async with aio.connect(address, adapter=name, **OPTIONS) as connection:
        await connection.send(b'{"stop": true}')


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def run(name: str | None, scene, account: Account) -> None:
    """Run scene(adapter), and see that nothing is left afterwards."""
    with ndpy.open_adapter(name):
        # What the first adapter of a process leaves for ever is there now.
        pass
    files, resources = open_files(), kernel_resources()
    with ndpy.open_adapter(name) as adapter:
        asyncio.run(scene(adapter))
        gc.collect()
        left = adapter._device._open_children()
        if left:
            raise Wrong(f"open: {left}")
        by_kernel = has_kernel_driver(adapter)
    gc.collect()
    if open_files() > files:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        raise Wrong(f"{open_files()} files are open, {files} before: {links}")
    if by_kernel and kernel_resources() != resources:
        raise Wrong(f"the kernel has {kernel_resources()} of this process, before {resources}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", nargs="?")
    parser.add_argument("--serve", metavar="ADDRESS:PORT", type=address_of)
    parser.add_argument("--peer", metavar="ADDRESS:PORT", type=address_of)
    parser.add_argument("--clients", metavar="ADDRESS:PORT", type=address_of, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SOAK_S, help=argparse.SUPPRESS)
    parser.add_argument("--mortal", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", default=str(SEED), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("ndpy.aio").setLevel(logging.ERROR)
    # A cancelled transfer that the network holds up for longer ends its connection. Here that would hide what is lost
    # otherwise.
    transfers_module._LET_GO_S = HANG_S
    account = Account(random.Random(options.seed))
    try:
        if options.clients:
            run(
                options.adapter,
                lambda adapter: be_clients(adapter, options.clients, account, options.seconds, options.mortal),
                account,
            )
            if not options.mortal:
                print(f"survivor: {account}", flush=True)
        elif options.peer:
            asyncio.run(manage_there(options.adapter, options.peer, account))
            return
        else:
            run(
                options.adapter,
                lambda adapter: serve(
                    adapter, options.serve or (host_of(adapter), 0), account, local=options.serve is None
                ),
                account,
            )
        if not options.mortal:
            account.judge()
    except (Wrong, ndpy.NdpyError, ConnectionError, asyncio.TimeoutError) as error:
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {error}")
    if not options.clients:
        print("every byte was accounted for, and nothing is left")


if __name__ == "__main__":
    main()
