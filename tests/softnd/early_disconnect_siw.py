"""Short conversations between ndpy on softnd and ndpy on siw. One end disconnects as soon as it can.

    early_disconnect_siw.py serve ADAPTER PORT HOST PEER_PORT COUNT     answers until the peer is done, then asks
    early_disconnect_siw.py join ADAPTER PORT HOST PEER_PORT COUNT      asks for COUNT of each, then answers

The last line counts the outcomes of this end's requests: {"burst, take_burst": {"RECEIVE SUCCESS": 20}, ...}.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ndpy

LIMIT_S = 60.0
PAGE = 4096
BURST = 4
CALLER_DATA, CALLEE_DATA = 56, 148  # the most that rdma_cm lets a program on siw send
SIW_TAKES = 252  # bytes of private data that siw accepts
PORTS = 10  # rdma_cm may pick this many ports in a row whose last connection TCP still remembers
# siw_send_terminate() leaves the Terminate out while siw's own Send is in progress, also when the peer has all of it.
SEND_IS_OVER_S = 0.2
DONE = "done"


class End:
    """One end, with one page to send from and one to receive into."""

    def __init__(self, adapter: Any, stack: contextlib.ExitStack) -> None:
        self.adapter = adapter
        self.outbox, self.inbox = bytearray(PAGE), bytearray(PAGE)
        self.outgoing = stack.enter_context(adapter.register(self.outbox, ndpy.Access.REMOTE_READ))
        self.incoming = stack.enter_context(adapter.register(self.inbox, ndpy.Access.LOCAL_WRITE))
        self.outbox[:20] = self.outgoing.remote().to_bytes()
        self.queue = stack.enter_context(adapter.create_completion_queue(64))
        self.base = self.posted = 0

    def renew(self, stack: contextlib.ExitStack) -> None:
        """Create a queue pair for another conversation."""
        self.queue_pair = stack.enter_context(
            self.adapter.create_queue_pair(self.queue, receive_queue_depth=BURST + 1, initiator_queue_depth=BURST)
        )
        self.base += self.posted
        self.posted = 0
        self.done: dict[int, Any] = {}

    def post(self, method: str, *arguments: Any) -> int:
        self.posted += 1
        getattr(self.queue_pair, method)(*arguments, context=self.base + self.posted)
        return self.posted

    def receive(self) -> int:
        return self.post("receive", self.incoming)

    def send(self, size: int = PAGE) -> int:
        return self.post("send", self.outgoing[:size] if size else [])

    def outcome(self, context: int) -> Any:
        end = time.monotonic() + LIMIT_S
        while self.base + context not in self.done:
            for completion in self.queue.wait(end - time.monotonic()):
                self.done[completion.context] = completion
        return self.done[self.base + context]


def exchange(end: End) -> None:
    end.send()
    end.outcome(1)


def give(end: End) -> None:
    end.outcome(end.send(20))
    end.outcome(1)


def access_violation(end: End, method: str, beyond: int) -> None:
    end.outcome(1)
    if method == "write":
        time.sleep(SEND_IS_OVER_S)
    target = ndpy.RemoteMemory.from_bytes(bytes(end.inbox[:20]))
    target = ndpy.RemoteMemory(target.address + beyond, 64, target.token)
    end.outcome(end.post(method, end.incoming[:64], target))


def read_beyond(end: End) -> None:
    access_violation(end, "read", PAGE)


def write_beyond(end: End) -> None:
    access_violation(end, "write", PAGE)


def write_read_only(end: End) -> None:
    access_violation(end, "write", 0)


def send_nothing(end: End) -> None:
    end.outcome(end.send(0))


def take_one(end: End) -> None:
    end.outcome(1)


def burst(end: End) -> None:
    for context in [end.send(64) for _ in range(BURST)]:
        end.outcome(context)


def take_burst(end: End) -> None:
    end.outcome(BURST)


def burst_until_answered(end: End) -> None:
    for _ in range(BURST):
        end.send(64)
    end.outcome(1)


def take_burst_and_answer(end: End) -> None:
    end.outcome(BURST)
    end.send(64)
    end.outcome(BURST + 1)


# What the role that speaks first does, what the other does, and how many Receives each posts.
CONVERSATIONS = {
    "exchange": ((exchange, 1), (exchange, 1)),
    "read beyond": ((give, 1), (read_beyond, 1)),
    "write beyond": ((give, 1), (write_beyond, 1)),
    "write read-only": ((give, 1), (write_read_only, 1)),
    "private data": ((send_nothing, 0), (take_one, 1)),
    "burst": ((burst, 0), (take_burst, BURST)),
    "answered burst": ((burst_until_answered, 1), (take_burst_and_answer, BURST + 1)),
    "without reads": ((burst_until_answered, 1), (take_burst_and_answer, BURST + 1)),
}


def limits(what: str) -> dict[str, int]:
    reads = 0 if what == "without reads" else 1
    return {"inbound_read_limit": reads, "outbound_read_limit": reads}


def from_some_port(connect: Callable[..., None], *arguments: Any) -> None:
    for _ in range(PORTS - 1):
        with contextlib.suppress(ndpy.AddressUnreachableError):
            return connect(*arguments)
    return connect(*arguments)


class Program:
    """Plays both roles and counts the outcomes of each."""

    def __init__(self, adapter: Any, stack: contextlib.ExitStack, port: int) -> None:
        self.adapter = adapter
        self.end = End(adapter, stack)
        self.listener = stack.enter_context(adapter.listen(("", port)))
        self.tallies: dict[str, collections.Counter[str]] = {}

    def count(self, what: str, outcome: str) -> None:
        self.tallies.setdefault(what, collections.Counter())[outcome] += 1

    def run_role(self, what: str, number: int, connect: Any) -> None:
        act, receives = CONVERSATIONS[what][number]
        with contextlib.ExitStack() as stack:
            self.end.renew(stack)
            for _ in range(receives):
                self.end.receive()
            connector = stack.enter_context(connect(self.end.queue_pair))
            act(self.end)
            connector.disconnect(timeout_s=LIMIT_S)
            for context in range(1, self.end.posted + 1):
                completion = self.end.outcome(context)
                self.count(f"{what}, {act.__name__}", f"{completion.operation.name} {completion.status.name}")

    def serve(self) -> None:
        while True:
            connector = self.listener.get_request(timeout_s=LIMIT_S * 10)
            what, _, number = connector.private_data.rstrip(b"\0").decode().partition("/")
            if what == DONE:
                connector.reject()
                connector.close()
                return
            if what == "private data":
                self.count("private data that came", str(len(connector.private_data)))
            data = bytes(CALLEE_DATA) if what == "private data" else b""

            def accept(queue_pair: Any, connector: Any = connector, what: str = what, data: bytes = data) -> Any:
                connector.accept(queue_pair, private_data=data, timeout_s=LIMIT_S, **limits(what))
                return connector

            self.run_role(what, 1 - int(number), accept)

    def say_done(self, to: tuple[str, int]) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(ndpy.ConnectionRefusedError):
            self.end.renew(stack)
            self.adapter.connect(self.end.queue_pair, to, private_data=DONE.encode(), timeout_s=LIMIT_S)

    def offer_too_much(self, to: tuple[str, int]) -> None:
        data = bytes(self.adapter.info.max_caller_data)
        with contextlib.ExitStack() as stack:
            self.end.renew(stack)
            try:
                stack.enter_context(self.adapter.connect(self.end.queue_pair, to, private_data=data, timeout_s=LIMIT_S))
                outcome = "accepted"
            except ndpy.ConnectionRefusedError:
                outcome = "refused"
            self.count("all private data that softnd can send", outcome)

    def join(self, to: tuple[str, int], count: int) -> None:
        on_siw = self.adapter.info.name.startswith("siw")
        for what, parts in CONVERSATIONS.items():
            for number in (0, 1):
                # On the accepting side, softnd does not speak first to siw.
                if number == 1 and (parts[0] == parts[1] or on_siw):
                    continue
                data = f"{what}/{number}".encode()
                if what == "private data":
                    data = data.ljust(CALLER_DATA if on_siw else SIW_TAKES, b"\0")

                def connect(queue_pair: Any, what: str = what, data: bytes = data) -> Any:
                    return self.adapter.connect(queue_pair, to, private_data=data, timeout_s=LIMIT_S, **limits(what))

                for _ in range(count):
                    from_some_port(self.run_role, what, number, connect)
        if not on_siw:
            self.offer_too_much(to)
        from_some_port(self.say_done, to)


def main() -> None:
    role, name, port, host, peer_port, count = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        program = Program(stack.enter_context(ndpy.open_adapter(name)), stack, int(port))
        print("early disconnects: listening", flush=True)
        if role == "serve":
            program.serve()
        program.join((host, int(peer_port)), int(count))
        if role == "join":
            program.serve()
    print(json.dumps(program.tallies), flush=True)


if __name__ == "__main__":
    main()
