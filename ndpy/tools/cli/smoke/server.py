"""The peer's own side of a smoke test: it executes a fixed set of commands for the checking side.

The arguments of a request are checked. What a client can allocate, and how long it can make this process wait, is
limited.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import ndpy
from ndpy import Access, Capability, Flags, Operation
from ndpy.tools.cli.channel import REQUEST_LIMIT, Arguments, BadRequest, Channel, encode
from ndpy.tools.cli.serving import HELLO_LIMIT_S, Answer, Session
from ndpy.tools.cli.smoke.link_answer import describe_own, view_of
from ndpy.tools.cli.smoke.resources import DEPTH, Closable, ConnectionEnd, Memory, close_all

#: The version of the protocol. Both sides must have the same.
PROTOCOL = 2
MAX_WAIT_S = 60.0
MAX_MEMORY = 32 << 20
MAX_TOTAL_MEMORY = 128 << 20
MAX_CONTENTS = 128 << 10
MAX_OBJECTS = 64
#: A client that sends nothing for this long is dropped, so that the next one can be served.
IDLE_LIMIT_S = 300.0

T = TypeVar("T")


class ClientSession(Session):
    """The objects that one client has created here. The client refers to them by number."""

    name, protocol = "smoke", PROTOCOL

    def __init__(self, adapter: ndpy.Adapter, control: tuple[str | None, str | None] = (None, None)) -> None:
        super().__init__(adapter, control)
        self._commands |= {
            "reset": self._reset,
            "listen": self._listen,
            "accept": self._accept,
            "reject": self._reject,
            "hold": self._hold,
            "link": self._link,
            "view": self._view,
            "memory": self._memory,
            "contents": self._contents,
            "post": self._post,
            "completions": self._completions,
            "disconnect": self._disconnect,
            "wait_disconnected": self._wait_disconnected,
            "flush": self._flush,
            "close": self._close,
        }
        self._objects: dict[int, Any] = {}
        self._next = 1
        self._greeted = False

    @property
    def limit_s(self) -> float:
        return IDLE_LIMIT_S if self._greeted else HELLO_LIMIT_S

    def answer(self, request: Answer) -> Answer | None:
        if not self._greeted and request.get("command") != "hello":
            raise BadRequest("the first command must be hello")
        self._greeted = True
        return super().answer(request)

    def close(self) -> list[str]:
        """Close everything that the client created. Returns a sentence for each failure."""
        resources: list[Closable] = []
        for item in self._objects.values():
            if isinstance(item, ConnectionEnd):
                resources += item.resources()
            else:
                resources.append(item)
        self._objects.clear()
        return close_all(resources)

    def _add(self, item: Any) -> int:
        number = self._next
        self._next += 1
        self._objects[number] = item
        return number

    def _require_room(self) -> None:
        if len(self._objects) >= MAX_OBJECTS:
            raise BadRequest(f"a client can have at most {MAX_OBJECTS} objects at a time")

    def _get(self, kind: type[T], arguments: Arguments, name: str) -> T:
        item = self._objects.get(arguments.integer(name, 1, 1 << 31))
        if not isinstance(item, kind):
            raise BadRequest(f"{name} names no {kind.__name__} of this session")
        return item

    def _listener(self, arguments: Arguments) -> ndpy.Listener:
        return self._get(ndpy.Listener, arguments, "listener")  # type: ignore[type-abstract]

    def _reset(self, arguments: Arguments) -> Answer:
        arguments.finish()
        return {"failures": self.close()}

    def _listen(self, arguments: Arguments) -> Answer:
        host = arguments.text("host", 64)
        arguments.finish()
        self._require_room()
        if host not in self._adapter.info.addresses:
            raise BadRequest(f"{self._adapter.info.name} does not have the address {host!r}")
        listener = self._adapter.listen((host, 0))
        return {"listener": self._add(listener), "port": listener.address[1]}

    def _accept(self, arguments: Arguments) -> Answer:
        listener = self._listener(arguments)
        receives = arguments.integer("receives", 0, DEPTH)
        size = arguments.integer("size", 0, MAX_MEMORY // DEPTH)
        seed = arguments.integer("seed", 0, 1 << 31)
        private_data = arguments.data("private_data", 512)
        inbound = arguments.optional("inbound", 0, 1 << 16)
        outbound = arguments.optional("outbound", 0, 1 << 16)
        timeout_s = arguments.seconds("timeout_s", MAX_WAIT_S)
        arguments.finish()
        self._require_room()
        end = ConnectionEnd(self._adapter)
        number = self._add(end)
        answer: Answer = {"end": number}
        if receives and size:
            memory = self._new_memory(receives * size, Access.LOCAL_WRITE, seed)
            end.post_receives(memory, receives)
            answer["memory"] = self._add(memory)
        else:
            for slot in range(receives):
                end.queue_pair.receive([], context=slot)
        end.connector = connector = listener.get_request(timeout_s)
        answer["private_data"] = encode(connector.private_data)
        answer["peer_address"] = list(connector.peer_address[:2])
        answer["read_limits"] = list(connector.read_limits)
        connector.accept(
            end.queue_pair,
            private_data=private_data,
            inbound_read_limit=inbound,
            outbound_read_limit=outbound,
            timeout_s=timeout_s,
        )
        return answer

    def _reject(self, arguments: Arguments) -> Answer:
        listener = self._listener(arguments)
        private_data = arguments.data("private_data", 512)
        timeout_s = arguments.seconds("timeout_s", MAX_WAIT_S)
        arguments.finish()
        with listener.get_request(timeout_s) as connector:
            connector.reject(private_data)
        return {}

    def _hold(self, arguments: Arguments) -> Answer:
        listener = self._listener(arguments)
        timeout_s = arguments.seconds("timeout_s", MAX_WAIT_S)
        arguments.finish()
        self._require_room()
        return {"connector": self._add(listener.get_request(timeout_s))}

    def _link(self, arguments: Arguments) -> Answer:
        end = self._get(ConnectionEnd, arguments, "end") if arguments.has("end") else None
        arguments.finish()
        described = describe_own(self._adapter.info, None if end is None else end.queue_pair)
        return {"link": described.to_dict()}

    def _view(self, arguments: Arguments) -> Answer:
        end = self._get(ConnectionEnd, arguments, "end")
        arguments.finish()
        if end.connector is None:
            raise BadRequest("that end has no connection")
        return {**vars(view_of(self._adapter.info, end, self._control)), "addresses": []}

    def _memory(self, arguments: Arguments) -> Answer:
        length = arguments.integer("length", 1, MAX_MEMORY)
        access = Access(
            arguments.integer("access", 0, int(Access.REMOTE_WRITE | Access.REMOTE_READ | Access.READ_SINK))
        )
        seed = arguments.integer("seed", 0, 1 << 31)
        end = self._get(ConnectionEnd, arguments, "end") if arguments.has("end") else None
        arguments.finish()
        self._require_room()
        memory = self._new_memory(length, access, seed)
        answer: Answer = {"memory": self._add(memory)}
        rights = access & (Access.REMOTE_READ | Access.REMOTE_WRITE)
        if rights & ~Access.LOCAL_WRITE:
            remote = self._through_window(end, memory, rights) if end is not None else memory.region.remote()
            answer["remote"] = encode(remote.to_bytes())
        return answer

    def _through_window(self, end: ConnectionEnd, memory: Memory, access: Access) -> ndpy.RemoteMemory:
        """Give this end's peer access to all of the memory: by the region's own rights if regions have any, else by a
        window.
        """
        if Capability.REGION_ACCESS in self._adapter.info.capabilities:
            return memory.region.remote()
        window = self._adapter.create_memory_window()
        self._add(window)
        end.queue_pair.bind(window, memory.region, access=access)
        (bound,) = end.take(1, MAX_WAIT_S)
        bound.raise_for_status()
        return window.remote()

    def _new_memory(self, length: int, access: Access, seed: int) -> Memory:
        held = sum(item.length for item in self._objects.values() if isinstance(item, Memory))
        if held + length > MAX_TOTAL_MEMORY:
            raise BadRequest(f"a client can have at most {MAX_TOTAL_MEMORY} bytes of memory at a time")
        return Memory(self._adapter, length, access, seed)

    def _contents(self, arguments: Arguments) -> Answer:
        memory = self._get(Memory, arguments, "memory")
        offset = arguments.integer("offset", 0, memory.length)
        length = arguments.integer("length", 0, min(MAX_CONTENTS, memory.length - offset))
        arguments.finish()
        return {"bytes": encode(memory.contents(offset, length))}

    def _post(self, arguments: Arguments) -> Answer:
        end = self._get(ConnectionEnd, arguments, "end")
        operation = arguments.text("operation", 16)
        memory = self._get(Memory, arguments, "memory")
        offset = arguments.integer("offset", 0, memory.length)
        length = arguments.integer("length", 0, memory.length - offset)
        context = arguments.integer("context", 0, (1 << 64) - 1)
        flags = Flags(arguments.integer("flags", 0, 0x3F))
        remote_bytes = arguments.data("remote", 20)
        arguments.finish()
        element = memory.region[offset : offset + length]
        queue_pair = end.queue_pair
        if operation == Operation.SEND.name:
            queue_pair.send(element, context=context, flags=flags)
        elif operation == Operation.RECEIVE.name:
            queue_pair.receive(element, context=context)
        elif operation in (Operation.READ.name, Operation.WRITE.name):
            try:
                remote = ndpy.RemoteMemory.from_bytes(remote_bytes)
            except ValueError as error:
                raise BadRequest(str(error)) from None
            post = queue_pair.read if operation == Operation.READ.name else queue_pair.write
            post(element, remote, context=context, flags=flags)
        else:
            raise BadRequest(f"there is no operation {operation!r}")
        return {}

    def _completions(self, arguments: Arguments) -> Answer:
        end = self._get(ConnectionEnd, arguments, "end")
        count = arguments.integer("count", 1, 2 * DEPTH)
        timeout_s = arguments.seconds("timeout_s", MAX_WAIT_S)
        arguments.finish()
        taken = end.take(count, timeout_s)
        return {"completions": [[c.context, c.operation.name, c.status.name, c.nbytes] for c in taken]}

    def _disconnect(self, arguments: Arguments) -> Answer:
        return self._end_connection(arguments, ndpy.Connector.disconnect)

    def _wait_disconnected(self, arguments: Arguments) -> Answer:
        return self._end_connection(arguments, ndpy.Connector.wait_disconnected)

    def _end_connection(self, arguments: Arguments, how: Callable[[ndpy.Connector, float], None]) -> Answer:
        end = self._get(ConnectionEnd, arguments, "end")
        timeout_s = arguments.seconds("timeout_s", MAX_WAIT_S)
        arguments.finish()
        if end.connector is not None:
            how(end.connector, timeout_s)
        return {}

    def _flush(self, arguments: Arguments) -> Answer:
        end = self._get(ConnectionEnd, arguments, "end")
        arguments.finish()
        end.queue_pair.flush()
        return {}

    def _close(self, arguments: Arguments) -> Answer:
        number = arguments.integer("object", 1, 1 << 31)
        arguments.finish()
        item = self._objects.pop(number, None)
        if item is None:
            raise BadRequest(f"there is no object {number}")
        failures = close_all(item.resources() if isinstance(item, ConnectionEnd) else [item])
        return {"failures": failures}


def serve_client(adapter: ndpy.Adapter, connection: socket.socket) -> str:
    """Serve one client until it leaves. Returns how it ended."""
    channel = Channel(connection, line_limit=REQUEST_LIMIT)
    return ClientSession(adapter, channel.addresses()).serve(channel)
