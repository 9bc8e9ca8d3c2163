"""What test_engine_faults.py runs: conversations over soft0 with faults, each in a child of this process.

stdin has a list of cases in JSON: [{"scenario": a path, "program": a name below}]. A line of JSON
for each, in their order, goes to stdout: what the program saw, or {"failed": the exception}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.deadlines import patient
from kit.helpers import DEADLINE_S, Keeper, Pair, bind, connect_pair, create_end, memory

import ndpy
from ndpy import Access

Result = dict[str, Any]
COUNT = 5
SIZE = 64
# So long a program waits for what may not come.
QUIET_S = patient(0.3)
AT_ONCE = 8


def taken(cq: ndpy.CompletionQueue, count: int, seconds: float = DEADLINE_S) -> list[list[int]]:
    """[context, native status] of completions, until there are so many or the time has passed."""
    found: list[list[int]] = []
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ndpy.TimeoutError):
        while len(found) < count:
            left = max(deadline - time.monotonic(), 0)
            found += [[each.context, each.native_status] for each in cq.wait(left, count - len(found))]
    return found


def post(pair: Pair, operation: str, keep: Keeper, adapter: ndpy.Adapter, size: int) -> bytearray:
    """COUNT requests of an operation. Returns the memory where their data arrive."""
    qp = pair.client.queue_pair
    buffer = bytearray(b"." * size)
    if operation in ("send", "receive"):
        sink = keep(adapter.register(buffer, Access.LOCAL_WRITE))
        for number in range(COUNT + 1):
            pair.server.queue_pair.receive(sink, context=number)
        for number in range(COUNT):
            qp.send(memory(keep, adapter, bytes([65 + number]) * size, Access.NONE), context=number)
    elif operation == "write":
        remote = keep(adapter.register(buffer, Access.LOCAL_WRITE | Access.REMOTE_WRITE)).remote()
        for number in range(COUNT):
            qp.write(memory(keep, adapter, bytes([65 + number]) * size, Access.NONE), remote, context=number)
    elif operation == "read":
        remote = memory(keep, adapter, b"R" * size, Access.LOCAL_WRITE | Access.REMOTE_READ).remote()
        sink = keep(adapter.register(buffer, Access.LOCAL_WRITE))
        for number in range(COUNT):
            qp.read(sink, remote, context=number)
    else:
        window = keep(adapter.create_memory_window())
        region = memory(keep, adapter, SIZE, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        if operation == "invalidate":
            bind(pair.client, window, region, Access.REMOTE_WRITE)
            qp.invalidate(window, context=0)
        else:
            qp.bind(window, region, Access.REMOTE_WRITE, context=0)
    return buffer


def conversation(
    operation: str, size: int = SIZE, seconds: float = DEADLINE_S
) -> Callable[[ndpy.Adapter, Keeper], Result]:
    def run(adapter: ndpy.Adapter, keep: Keeper) -> Result:
        pair = connect_pair(keep, adapter)
        began = time.monotonic()
        buffer = post(pair, operation, keep, adapter, size)
        count = COUNT if operation in ("send", "receive", "write", "read") else 1
        client = taken(pair.client.cq, count, seconds)
        took = time.monotonic() - began
        server = taken(pair.server.cq, COUNT + 1, QUIET_S) if operation in ("send", "receive") else []
        ended = True
        try:
            pair.client.connector.wait_disconnected(QUIET_S if all(status == 0 for _, status in client) else DEADLINE_S)
        except ndpy.TimeoutError:
            ended = False
        return {"client": client, "server": server, "ended": ended, "took": took, "data": buffer.decode("latin-1")}

    return run


def events(adapter: ndpy.Adapter, keep: Keeper) -> Result:
    """The adapter's events, after a message or two."""
    stream = keep(adapter.events())
    pair = connect_pair(keep, adapter)
    with contextlib.suppress(ndpy.ProviderError, ndpy.DeviceRemovedError):
        post(pair, "send", keep, adapter, SIZE)
    client: list[list[Any]] = []
    try:
        client = taken(pair.client.cq, COUNT, QUIET_S)
    except (ndpy.CompletionQueueOverrunError, ndpy.DeviceRemovedError) as error:
        client = [[-1, type(error).__name__]]
    seen = []
    with contextlib.suppress(ndpy.TimeoutError, ndpy.DeviceRemovedError):
        while True:
            seen.append(stream.get(QUIET_S).kind.name)
    return {"client": client, "events": seen}


def _private(connector: ndpy.Connector) -> bytes:
    with contextlib.suppress(ndpy.NdpyError):
        return bytes(connector.private_data)
    return b""


def connect(adapter: ndpy.Adapter, keep: Keeper) -> Result:
    """An attempt to connect, and another one."""
    outcomes = []
    listener = keep(adapter.listen(("127.0.0.1", 0)))
    for _ in range(2):
        end = create_end(keep, adapter)
        connector = keep(adapter.create_connector())
        connecting = connector.begin_connect(end.queue_pair, listener.address)
        try:
            connecting.result(QUIET_S)
            outcomes.append("connected")
        except ndpy.TimeoutError as error:
            outcomes.append("arrived" if not connecting.done() else type(error).__name__)
        except ndpy.NdpyError as error:
            data = _private(connector) if isinstance(error, ndpy.ConnectionRefusedError) else b""
            outcomes.append(f"{type(error).__name__} {data.hex()}")
    return {"outcomes": outcomes}


def calls(adapter: ndpy.Adapter, keep: Keeper) -> Result:
    """How each call ends."""
    ends: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            ends[name] = "OK"
        except ndpy.NdpyError as error:
            ends[name] = error.native_name if isinstance(error, ndpy.ProviderError) else type(error).__name__

    attempt("reg_mr", lambda: memory(keep, adapter, 64))
    attempt("reg_mr again", lambda: memory(keep, adapter, 64))
    attempt("create_cq", lambda: keep(adapter.create_completion_queue(4)))
    attempt("alloc_pd", lambda: keep(adapter.create_protection_domain()))
    attempt("post_recv", lambda: create_end(keep, adapter).queue_pair.receive(memory(keep, adapter, 8)))
    return {"ends": ends}


PROGRAMS: dict[str, Callable[[ndpy.Adapter, Keeper], Result]] = {
    **{name: conversation(name) for name in ("send", "receive", "write", "read", "bind", "invalidate")},
    "held": conversation("send", seconds=QUIET_S),
    "large write": conversation("write", 300_000),
    "large send": conversation("send", 300_000),
    "events": events,
    "connect": connect,
    "calls": calls,
}


def start(case: dict[str, Any]) -> tuple[int, int]:
    """Run a case in a child. Returns its process ID and the descriptor from which its result can be read."""
    inward, outward = os.pipe()
    child = os.fork()
    if child:
        os.close(outward)
        return child, inward
    os.environ["NDPY_FAULTS"] = case["scenario"]
    try:
        keep = Keeper()
        with ndpy.open_adapter("soft0") as adapter:
            try:
                result = PROGRAMS[case["program"]](adapter, keep)
            finally:
                keep.close()
    except Exception as error:
        result = {"failed": repr(error)}
    with os.fdopen(outward, "w") as out:
        json.dump(result, out)
    os._exit(0)


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    # They mostly wait.
    running = [start(case) for case in cases[:AT_ONCE]]
    for number in range(len(cases)):
        child, inward = running[number]
        with os.fdopen(inward) as result:
            print(result.read())
        os.waitpid(child, 0)
        running += [start(case) for case in cases[len(running) : len(running) + 1]]
