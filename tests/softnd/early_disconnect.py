"""Short conversations whose ends disconnect at once. Every Send that was taken must still succeed (F.5.4).

A conversation has two roles, in two threads or processes. Either role may connect, and either may use version 1 or
2. Each role checks its own completions and raises if one is unexpected.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import consumer
import consumer_version1
import version2
from consumer import DEADLINE_S, Kit
from version2 import Op, Status, kernel32

PAGE = 4096


@contextlib.contextmanager
def released_at_end(kit: Kit) -> Iterator[None]:
    """Release at the end of the block what was created in it."""
    closing, kept = len(kit._closing), len(kit.kept)
    try:
        yield
    finally:
        while len(kit._closing) > closing:
            kit._closing.pop()()
        del kit.kept[kept:]


class End:
    """One end of a connection, in version 2. Posting a request returns a number that identifies it."""

    version = 2

    def __init__(self, node: Any, limits: tuple[int, int], **options: Any) -> None:
        self.node, self.kit, self.limits = node, node.kit, limits
        self.side = self.make_side(**options)
        self.connector = self.side.connector
        self.region = self.side.region
        self._done: dict[int, Any] = {}
        self._next = 1

    def make_side(self, **options: Any) -> Any:
        return consumer.Side(self.node, 1, **options)

    def issue(self, interface: Any, method: str, *arguments: Any) -> Any:
        return self.kit.issue(interface, method, *arguments)

    def connect(self, to: tuple[str, int], data: bytes) -> None:
        request = consumer.connect(self.kit, self.connector, self.side.qp, to, self.limits, data)
        assert request.result() == Status.SUCCESS
        assert self.issue(self.connector, "CompleteConnect").result() == Status.SUCCESS

    def accept(self, data: bytes) -> None:
        request = consumer.accept(self.kit, self.connector, self.side.qp, self.limits, data)
        assert request.result() == Status.SUCCESS

    def private_data(self) -> bytes:
        return consumer.private_data(self.connector)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def receive(self, size: int = PAGE, offset: int = PAGE) -> int:
        number = self._number()
        self.side.receive(*self._elements(offset, size), context=number)
        return number

    def send(self, size: int = PAGE) -> int:
        number = self._number()
        self.side.send(*self._elements(0, size), context=number)
        return number

    def _elements(self, offset: int, size: int) -> list[tuple[int, int, int]]:
        return [self.region.sge(offset, size)] if size else []

    def window(self, size: int, flags: int) -> bytes:
        """Return the description of a window over the beginning of the memory, for access_violation()."""
        window = self.side.bound_window(2 * PAGE, size, flags)
        return b"%d %d " % (self.region.address + 2 * PAGE, window.GetRemoteToken())

    def access_violation(self, window: bytes, how: str, beyond: int) -> int:
        """Read or Write through the window, beginning `beyond` bytes into it."""
        number = self._number()
        address, token = (int(word) for word in window.split()[:2])
        post = self.side.read if how == "read" else self.side.write
        where = {"at" if how == "read" else "to": address + beyond}
        post(self.region.sge(0, 64), token=token, context=number, **where)
        return number

    def _collect(self) -> list[tuple[int, Any]]:
        return [(done.context, done.status) for done in consumer.get_results(self.side.cq, 16)]

    def ends(self, number: int, limit_s: float) -> bool:
        """Whether a request has an outcome, at the latest `limit_s` after the last one that had."""
        end = time.monotonic() + limit_s
        while number not in self._done:
            new = self._collect()
            self._done.update(new)
            if not new:
                if time.monotonic() >= end:
                    return False
                kernel32.Sleep(0)
        return True

    def outcome(self, number: int) -> Any:
        assert self.ends(number, DEADLINE_S), f"request {number} has no outcome; others have {self._done}"
        return self._done[number]

    def release_queue_pair(self) -> None:
        self.side.qp.release()

    def disconnect(self) -> None:
        assert self.issue(self.connector, "Disconnect").result() == Status.SUCCESS


class EndVersion1(End):
    """One end of a connection, in version 1."""

    version = 1

    def make_side(self, **options: Any) -> Any:
        return consumer_version1.Side(self.node, limits=self.limits, **options)

    def issue(self, interface: Any, method: str, *arguments: Any) -> Any:
        return consumer_version1.issue(self.kit, interface, method, *arguments)

    def connect(self, to: tuple[str, int], data: bytes) -> None:
        assert consumer_version1.connect(self.side, to, data).result() == Status.SUCCESS
        assert self.issue(self.connector, "CompleteConnect").result() == Status.SUCCESS

    def accept(self, data: bytes) -> None:
        assert consumer_version1.accept(self.side, data).result() == Status.SUCCESS

    def private_data(self) -> bytes:
        return consumer_version1.connection_data(self.connector)[2]

    def release_queue_pair(self) -> None:
        self.side.endpoint.release()

    def receive(self, size: int = PAGE, offset: int = PAGE) -> int:
        return consumer_version1.address_of(self.side.receive(*self._elements(offset, size)))

    def send(self, size: int = PAGE) -> int:
        return consumer_version1.address_of(self.side.send(*self._elements(0, size)))

    def window(self, size: int, flags: int) -> bytes:
        *_, made = self.side.bound_window(2 * PAGE, size, flags)
        base, _, token = consumer_version1.fields(made)
        return b"%d %d " % (base, int.from_bytes(token, "little"))

    def access_violation(self, window: bytes, how: str, beyond: int) -> int:
        # This side would refuse an address outside of the window, so the descriptor claims a larger one.
        base, token = (int(word) for word in window.split()[:2])
        claimed = consumer_version1.descriptor(base, 3 * PAGE, token.to_bytes(4, "little"))
        post = self.side.read if how == "read" else self.side.write
        return consumer_version1.address_of(post(self.region.sge(0, 64), remote=claimed, offset=beyond))

    def _collect(self) -> list[tuple[int, Any]]:
        return [(done.address, done.status) for done in consumer_version1.get_results(self.side.cq, 16)]


class Participant:
    """A program that takes part in many conversations, one after another."""

    def __init__(self, version: int, library: version2.Library | None = None) -> None:
        self.kit = Kit(library)
        self.version = version
        node = consumer.Node if version == 2 else consumer_version1.Node
        self.node: Any = node(self.kit, consumer.LOOPBACK)
        self.listener: Any = None

    def listen(self) -> tuple[str, int]:
        if self.version == 2:
            self.listener = self.node.listener()
            return consumer.get_address(self.listener, "GetLocalAddress")
        self.listener, to = self.node.listen()
        return to

    @contextlib.contextmanager
    def connected(
        self, to: tuple[str, int] | None, data: bytes, limits: tuple[int, int], prepare: Callable[[End], None]
    ) -> Iterator[End]:
        """Yield a connected end. It connects to `to`, or accepts whoever connects if `to` is None."""
        with released_at_end(self.kit):
            end = (End if self.version == 2 else EndVersion1)(self.node, limits)
            prepare(end)
            if to is None:
                asked = end.issue(self.listener, "GetConnectionRequest", end.connector)
                assert asked.result() == Status.SUCCESS
                end.got = end.private_data()
                end.accept(data)
            else:
                end.connect(to, data)
            yield end


# Name of each conversation, and for each of its two roles what to prepare and what to do.


def post_a_receive(end: End) -> None:
    end.first = end.receive()


def nothing(_: End) -> None:
    pass


def exchange_and_leave(end: End) -> None:
    """One message each way, then both ends disconnect."""
    sent = end.send()
    assert end.outcome(end.first) == Status.SUCCESS
    end.disconnect()
    assert end.outcome(sent) == Status.SUCCESS, f"the Send: {end.outcome(sent)}"


def give_a_token(flags: int) -> Callable[[End], None]:
    def role(end: End) -> None:
        window = end.window(PAGE, flags)
        end.region.put(0, window)
        waiting = end.receive()
        sent = end.send(len(window))
        assert end.outcome(sent) == Status.SUCCESS, f"the Send of the token: {end.outcome(sent)}"
        assert end.outcome(waiting) == Status.CANCELED
        end.disconnect()

    return role


def misuse_the_token(how: str, beyond: int) -> Callable[[End], None]:
    def role(end: End) -> None:
        assert end.outcome(end.first) == Status.SUCCESS
        refused = end.access_violation(end.region.get(PAGE, 64), how, beyond)
        assert end.outcome(refused) == Status.ACCESS_VIOLATION, f"the {how}: {end.outcome(refused)}"
        end.disconnect()

    return role


def send_nothing(end: End) -> None:
    waiting = end.receive()
    sent = end.send(0)
    assert end.outcome(sent) == Status.SUCCESS, f"the Send of no bytes: {end.outcome(sent)}"
    assert end.outcome(waiting) == Status.CANCELED
    end.disconnect()


def take_one_and_leave(end: End) -> None:
    assert end.outcome(end.first) == Status.SUCCESS
    end.disconnect()


def take_one_and_release(end: End) -> None:
    assert end.outcome(end.first) == Status.SUCCESS
    end.release_queue_pair()


BURST = 4
IDLE_MS = 20


def post_receives(end: End) -> None:
    end.all = [end.receive(64) for _ in range(BURST)]


def send_a_burst(end: End) -> None:
    kernel32.Sleep(IDLE_MS)
    sent = [end.send(64) for _ in range(BURST)]
    outcomes = [end.outcome(number) for number in sent]
    assert outcomes == [Status.SUCCESS] * BURST, f"the Sends: {outcomes}"
    end.disconnect()


def take_the_burst_and_leave(end: End) -> None:
    assert [end.outcome(number) for number in end.all] == [Status.SUCCESS] * BURST
    end.disconnect()


def send_a_burst_and_leave_when_answered(end: End) -> None:
    kernel32.Sleep(IDLE_MS)
    sent = [end.send(64) for _ in range(BURST)]
    assert end.outcome(end.first) == Status.SUCCESS
    end.disconnect()
    outcomes = [end.outcome(number) for number in sent]
    assert outcomes == [Status.SUCCESS] * BURST, f"the Sends: {outcomes}"


def take_the_burst_and_answer(end: End) -> None:
    assert [end.outcome(number) for number in end.all] == [Status.SUCCESS] * BURST
    sent = end.send(64)
    assert end.outcome(sent) == Status.SUCCESS, f"the answer: {end.outcome(sent)}"
    end.disconnect()


Role = tuple[Callable[[End], None], Callable[[End], None]]

READ_ONLY, BOTH = Op.ALLOW_READ, Op.ALLOW_READ | Op.ALLOW_WRITE
END_TOGETHER = "a message each way, both leave"
CONVERSATIONS: dict[str, tuple[Role, Role, tuple[int, int], bytes]] = {
    END_TOGETHER: (
        (post_a_receive, exchange_and_leave), (post_a_receive, exchange_and_leave), (0, 0), b""
    ),
    "read beyond the window": (
        (nothing, give_a_token(BOTH)), (post_a_receive, misuse_the_token("read", PAGE)), (1, 1), b""
    ),
    "write beyond the window": (
        (nothing, give_a_token(BOTH)), (post_a_receive, misuse_the_token("write", PAGE)), (1, 1), b""
    ),
    "write into a window to read": (
        (nothing, give_a_token(READ_ONLY)), (post_a_receive, misuse_the_token("write", 0)), (1, 1), b""
    ),
    "largest private data, a Send of nothing": (
        (nothing, send_nothing), (post_a_receive, take_one_and_leave), (0, 0), bytes(range(254)) * 2
    ),
    "a Send of nothing, the receiver releases its queue pair": (
        (nothing, send_nothing), (post_a_receive, take_one_and_release), (0, 0), b""
    ),
    "a burst, the receiver leaves": (
        (nothing, send_a_burst), (post_receives, take_the_burst_and_leave), (0, 0), b""
    ),
    "a burst and an answer, the sender leaves": (
        (post_a_receive, send_a_burst_and_leave_when_answered), (post_receives, take_the_burst_and_answer), (0, 0), b""
    ),
}  # fmt: skip


def run_role(participant: Participant, name: str, role: int, to: tuple[str, int] | None, count: int) -> list[str]:
    """Play role 0 or 1 in `count` conversations. Return the failures, at most one for each conversation."""
    failures = []
    prepare, act = CONVERSATIONS[name][role]
    _, _, limits, data = CONVERSATIONS[name]
    for number in range(count):
        try:
            with participant.connected(to, data, limits, prepare) as end:
                act(end)
        except AssertionError as error:
            failures.append(f"{name}, {number}, role {role}: {error}")
    return failures


def run_all(channel: Any, role: int, to: list[Any] | None, count: int) -> None:
    """Play one role in all conversations, in its own process (peer.py)."""
    participant = Participant(2)
    if to is None:
        channel.send(participant.listen())
    failures = []
    for name in CONVERSATIONS:
        failures += run_role(participant, name, role, tuple(to) if to else None, count)
    participant.kit.close()
    channel.send(failures)


def exit_after(channel: Any, count: int) -> None:
    """Take some messages of a burst, then end the process without closing anything."""
    participant = Participant(2)
    channel.send(participant.listen())
    with participant.connected(None, b"", (0, 0), post_receives) as end:
        assert [end.outcome(number) for number in end.all[:count]] == [Status.SUCCESS] * count
        os._exit(0)


def run_conversation(name: str, active: int, versions: tuple[int, int], count: int, threads: int = 1) -> list[str]:
    """Play both roles in threads of this process; the role `active` connects. Return the failures."""
    failures: list[str] = []
    gate = threading.Barrier(2 * threads, timeout=DEADLINE_S)

    def run(role: int, channel: list[Any], known: threading.Event) -> None:
        participant = None
        try:
            participant = Participant(versions[role])
            if role == active:
                assert known.wait(DEADLINE_S)
                to = channel[0]
            else:
                channel.append(participant.listen())
                known.set()
                to = None
            gate.wait()
            failures.extend(run_role(participant, name, role, to, count))
        except Exception as error:
            failures.append(f"role {role} ended: {error!r}")
            gate.abort()
        finally:
            if participant is not None:
                participant.kit.close()

    workers = []
    for _ in range(threads):
        channel: list[Any] = []
        known = threading.Event()
        workers += [threading.Thread(target=run, args=(role, channel, known), daemon=True) for role in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE_S + count)
        assert not worker.is_alive(), f"a role does not end, after {failures[:5]}"
    return failures
