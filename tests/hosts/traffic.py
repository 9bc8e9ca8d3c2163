"""Traffic between two hosts in which every byte is checked. The server runs on the other host (see kit/remote.py).

A client writes random bytes to a random place of the server's board, reads a random place back, or sends a message that
the server answers with the same bytes inverted. Both ends know the seed of the connection, so the server checks what it
gets too. All the sums are made from what is in memory, not from what was sent.
"""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
import zlib

from kit.quirks import has_quirk

import ndpy
from ndpy import Access, Operation, RetryPolicy
from ndpy.vocabulary.quirks import Quirk

BOARD = 128 << 10
MESSAGE = 64 << 10
_SLOTS = 4
# A request: what, offset, length, sum.
_REQUEST = struct.Struct("!B3xIII")
ECHO, SUM = 1, 2

# How long a wait lasts at most. Longer than a packet can be lost again and again.
LIMIT_S = 60.0


class Mismatch(AssertionError):
    """Bytes differ from what was sent."""


def _inverted(data: bytes | memoryview) -> bytes:
    return bytes(data).translate(_INVERSE)


_INVERSE = bytes(255 - value for value in range(256))


def _difference(wanted: bytes, found: bytes) -> str:
    if len(wanted) != len(found):
        return f"{len(found)} bytes instead of {len(wanted)}"
    first = next(i for i in range(len(wanted)) if wanted[i] != found[i])
    count = sum(a != b for a, b in zip(wanted, found, strict=True))
    return (
        f"{count} of {len(wanted)} bytes differ, the first one at {first}: {found[first]:#04x}, not "
        f"{wanted[first]:#04x}"
    )


class End:
    """A queue pair with its memory. It is closed in one go."""

    def __init__(self, adapter: ndpy.Adapter) -> None:
        self.closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            keep = undo.enter_context
            self.board = keep(
                adapter.register(bytearray(BOARD), Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE)
            )
            self.inbox = keep(adapter.register(bytearray(_SLOTS * MESSAGE)))
            self.outbox = keep(adapter.register(bytearray(MESSAGE), Access.READ_SINK | Access.LOCAL_WRITE))
            self.cq = keep(adapter.create_completion_queue(64))
            self.queue_pair = keep(adapter.create_queue_pair(self.cq))
            self.closing = undo.pop_all()

    def receive(self, slot: int) -> None:
        self.queue_pair.receive(self.inbox[slot * MESSAGE : (slot + 1) * MESSAGE], context=slot)

    def message(self, completion: ndpy.Completion) -> memoryview:
        start = completion.context * MESSAGE
        return memoryview(self.inbox.buffer)[start : start + completion.nbytes]

    def close(self) -> None:
        self.closing.close()


class Server:
    """Serves clients until it is closed. `errors` are those of its connections, except that a client was lost."""

    def __init__(self, adapter_name: str, address: str, *, backlog: int = 256) -> None:
        self._adapter = ndpy.open_adapter(adapter_name)
        self._listener = self._adapter.listen((address, 0), backlog=backlog)
        self.address = self._listener.address[:2]
        self.errors: list[str] = []
        self.served = 0
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._ended:
            with contextlib.suppress(ndpy.TimeoutError):
                connector = self._listener.get_request(0.5)
                thread = threading.Thread(target=self._serve, args=(connector,), daemon=True)
                thread.start()
                self._threads = [old for old in self._threads if old.is_alive()] + [thread]

    def _serve(self, connector: ndpy.Connector) -> None:
        try:
            with connector, contextlib.closing(End(self._adapter)) as end:
                for slot in range(_SLOTS):
                    end.receive(slot)
                try:
                    connector.accept(end.queue_pair, private_data=end.board.remote().to_bytes(), timeout_s=LIMIT_S)
                except ndpy.NdpyError:
                    return  # the client has gone
                self._answer(end)
        except BaseException as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            self.served += 1

    def _answer(self, end: End) -> None:
        waiting: list[ndpy.Completion] = []
        sending = False
        while not self._ended:
            with contextlib.suppress(ndpy.TimeoutError):
                for completion in end.cq.wait(0.5):
                    if not completion.ok:
                        return
                    if completion.operation is Operation.SEND:
                        sending = False
                    else:
                        waiting.append(completion)
            if waiting and not sending:
                try:
                    self._answer_one(end, waiting.pop(0))
                except ndpy.NotConnectedError:
                    return
                sending = True

    def _answer_one(self, end: End, completion: ndpy.Completion) -> None:
        message = end.message(completion)
        what, offset, length, checksum = _REQUEST.unpack_from(message)
        if what == SUM:
            found = zlib.crc32(memoryview(end.board.buffer)[offset : offset + length])
            if found != checksum:
                self.errors.append(f"{length} bytes of the board have the sum {found:#x}, not {checksum:#x}")
            answer = struct.pack("!I", found)
        else:
            data = bytes(message[_REQUEST.size :])
            if (length, checksum) != (len(data), zlib.crc32(data)):
                self.errors.append(f"a message of {len(data)} bytes, which should have {length}, differs")
            answer = _inverted(data)
        end.receive(completion.context)
        memoryview(end.outbox.buffer)[: len(answer)] = answer
        end.queue_pair.send(end.outbox[: len(answer)])

    def close(self) -> None:
        self._ended = True
        self._acceptor.join(LIMIT_S)
        self._listener.close()
        for thread in self._threads:
            thread.join(LIMIT_S)
        self._adapter.close()


class Client:
    """A connection to a Server.

    probe_s: after so many seconds without a completion it writes no bytes, again and again. Who waits for an answer to
    a message that was acknowledged has no request outstanding, and would not notice that the peer is gone.
    """

    def __init__(
        self,
        adapter: ndpy.Adapter,
        address: tuple[str, int],
        rng: random.Random,
        *,
        limit_s: float = LIMIT_S,
        retry: RetryPolicy | None = None,
        probe_s: float | None = None,
    ) -> None:
        self.rng = rng
        self.limit_s = limit_s
        self.probe_s = probe_s
        self.end = End(adapter)
        try:
            for slot in range(_SLOTS):
                self.end.receive(slot)
            options = {} if retry is None else {"retry": retry}
            self.connector = adapter.connect(self.end.queue_pair, address, timeout_s=limit_s, **options)
        except BaseException:
            self.end.close()
            raise
        for _ in range(2 if has_quirk(adapter, Quirk.SIW_LEAVES_FIRST_MESSAGE) else 0):
            self._probe()
            time.sleep(0.1)
        self.remote = ndpy.RemoteMemory.from_bytes(self.connector.private_data[:20])
        # What the server's board holds.
        self.shadow = bytearray(BOARD)
        self.bytes = 0
        # Completions that did not succeed.
        self.failed: list[ndpy.Completion] = []

    def _probe(self) -> None:
        self.end.queue_pair.write([], ndpy.RemoteMemory(0, 0, 0), flags=ndpy.Flags.SILENT_SUCCESS)

    def _wait(self, deadline: float) -> list[ndpy.Completion]:
        while self.probe_s is not None and time.monotonic() + self.probe_s < deadline:
            with contextlib.suppress(ndpy.TimeoutError):
                return self.end.cq.wait(self.probe_s)
            self._probe()
        return self.end.cq.wait(max(deadline - time.monotonic(), 0))

    def _take(self, count: int) -> dict[Operation, ndpy.Completion]:
        taken: dict[Operation, ndpy.Completion] = {}
        deadline = time.monotonic() + self.limit_s
        while len(taken) < count:
            completions = self._wait(deadline)
            self.failed += [completion for completion in completions if not completion.ok]
            for completion in completions:
                completion.raise_for_status()
                taken[completion.operation] = completion
        return taken

    def _place(self, longest: int) -> tuple[int, int]:
        length = self.rng.choice([1, 7, 64, 1000, 4096, 4097, 20_000, MESSAGE])
        length = min(length, longest)
        return self.rng.randrange(BOARD - length), length

    def write(self, longest: int = MESSAGE) -> None:
        offset, length = self._place(longest)
        data = self.rng.randbytes(length)
        memoryview(self.end.outbox.buffer)[:length] = data
        self.end.queue_pair.write(self.end.outbox[:length], self.remote[offset : offset + length], context=1)
        self._take(1)
        self.shadow[offset : offset + length] = data
        self.bytes += length

    def read(self, longest: int = MESSAGE) -> None:
        offset, length = self._place(longest)
        memoryview(self.end.outbox.buffer)[:length] = bytes(length)
        self.end.queue_pair.read(self.end.outbox[:length], self.remote[offset : offset + length], context=2)
        self._take(1)
        found = bytes(memoryview(self.end.outbox.buffer)[:length])
        wanted = bytes(self.shadow[offset : offset + length])
        if found != wanted:
            raise Mismatch(f"a read of {length} bytes at {offset}: {_difference(wanted, found)}")
        self.bytes += length

    def _ask(self, what: int, offset: int, length: int, checksum: int, data: bytes) -> bytes:
        message = _REQUEST.pack(what, offset, length, checksum) + data
        memoryview(self.end.outbox.buffer)[: len(message)] = message
        self.end.queue_pair.send(self.end.outbox[: len(message)], context=3)
        received = self._take(2)[Operation.RECEIVE]
        answer = bytes(self.end.message(received))
        self.end.receive(received.context)
        return answer

    def echo(self, longest: int = MESSAGE) -> None:
        _, length = self._place(min(longest, MESSAGE - _REQUEST.size))
        data = self.rng.randbytes(length)
        answer = self._ask(ECHO, 0, length, zlib.crc32(data), data)
        if answer != _inverted(data):
            raise Mismatch(f"the answer to {length} bytes: {_difference(_inverted(data), answer)}")
        self.bytes += 2 * length

    def compare(self) -> None:
        """Compare the whole board."""
        checksum = zlib.crc32(self.shadow)
        (found,) = struct.unpack("!I", self._ask(SUM, 0, BOARD, checksum, b""))
        if found != checksum:
            raise Mismatch(f"the server's board has the sum {found:#x}, not {checksum:#x}")

    def step(self, longest: int = MESSAGE) -> None:
        """One random operation, with at most that many bytes."""
        self.rng.choice([self.write, self.read, self.echo])(longest)

    def close(self, disconnect: bool = True) -> None:
        try:
            if disconnect:
                self.connector.disconnect(self.limit_s)
        finally:
            self.connector.close()
            self.end.close()


def run(
    adapter: ndpy.Adapter,
    address: tuple[str, int],
    seed: object,
    steps: int,
    *,
    longest: int = MESSAGE,
    limit_s: float = LIMIT_S,
) -> int:
    """Connect, make that many random operations, compare everything, disconnect. Returns the number of bytes."""
    client = Client(adapter, address, random.Random(str(seed)), limit_s=limit_s)
    try:
        for _ in range(steps):
            client.step(longest)
        client.compare()
    except BaseException:
        client.close(disconnect=False)
        raise
    client.close()
    return client.bytes
