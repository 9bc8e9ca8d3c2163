"""Lets a test use ndpy on another host.

On the other host:

    python tests/kit/remote.py --listen ADDRESS:PORT

In the test:

    with remote.connect((address, port), timeout_s=30) as host:
        adapter = host.call("ndpy:open_adapter", "rxe0")
        with adapter.listen(("", 0)) as listener:
            ...

Plain values cross by value: numbers, strings, bytes, lists, enumerations, addresses, AdapterInfo, RemoteMemory,
Completion, exceptions. So a bytearray that comes from there is a copy. Everything else stays there, and the test gets a
proxy. A proxy forwards attributes, calls, `with`, len(), indices, iteration, comparisons and repr(). As an argument it
becomes its object again. There is one proxy for an object, so that `is` works between proxies too. An object of this
process cannot go there, and neither can a function: those raise TypeError.

Each thread has a connection of its own, which is served by a thread of its own. So a call that waits there holds up no
call of another thread. One more connection, the first, stands for the client process: the server ends when it ends.

Messages are pickled. Use this between machines that trust each other.

This is one file of almost 800 lines, because the other host runs it as a program, which cannot import other modules of
the tests before main(). Both sides and what crosses between them have to be the same version.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import importlib
import operator
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ndpy

# A call takes no longer than this, whatever it waits for there.
CALL_LIMIT_S = 120.0
# A host that answers nothing for this long has died. Emulated machines may stand still for seconds.
_SILENCE_S = 8
_LONGEST_MESSAGE = 64 << 20
_HEADER = struct.Struct(">4sI")
_MAGIC = b"ndpy"


# These two are neither OSError nor TimeoutError: a test that expects those of ndpy must not take these for them.
class HostDied(Exception):
    """The process on the other host has ended, or the host cannot be reached any more."""


class DeadlinePassed(Exception):
    """A call took longer than it may. It may still be running there."""


class RemoteError(Exception):
    """An exception of a type that does not exist in this process."""


# ---- messages ----


class _Closed(Exception):
    """The other end has closed the connection between two messages."""


def _prepare(connection: socket.socket) -> None:
    """Send at once, and notice within _SILENCE_S that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of these.
    for name, value in (
        ("TCP_KEEPIDLE", _SILENCE_S // 4),
        ("TCP_KEEPINTVL", _SILENCE_S // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _SILENCE_S * 1000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _pack(message: Any) -> bytes:
    data = pickle.dumps(message)
    if len(data) > _LONGEST_MESSAGE:
        raise ValueError(f"a message of {len(data)} bytes is longer than {_LONGEST_MESSAGE}")
    return _HEADER.pack(_MAGIC, len(data)) + data


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None, first: bool = False) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            raise _Closed if first and not data else ConnectionError("the connection ended within a message")
        data += part
    return bytes(data)


def _receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    magic, length = _HEADER.unpack(_receive_exactly(connection, _HEADER.size, deadline, first=True))
    if magic != _MAGIC or length > _LONGEST_MESSAGE:
        raise ConnectionError(f"the other end does not speak this protocol: {magic!r}, {length} bytes")
    return _receive_exactly(connection, length, deadline)


# ---- values ----

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...), type(NotImplemented))


@dataclasses.dataclass(frozen=True)
class _There:
    """An object of the server, as the client names it."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Here:
    """An object of the server, as the server names it. `classes` are the names of its classes, derived ones first."""

    number: int
    classes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _BoundMethod:
    """A method of the object whose attribute was asked for, or that the client passes as an argument."""

    owner: Any
    name: str


@dataclasses.dataclass(frozen=True)
class _Memory:
    address: int
    length: int
    token: int


@dataclasses.dataclass(frozen=True)
class _Error:
    """An exception. `pickled` is None if it cannot be pickled; then `type`, `arguments` and `attributes` must do."""

    type: str
    pickled: bytes | None
    arguments: Any
    attributes: Any
    message: str
    traceback: str


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteCompletion:
    """A Completion of the other host: the same fields and the same raise_for_status()."""

    operation: ndpy.Operation
    status: ndpy.Status
    context: int
    nbytes: int
    immediate: int | None
    native_status: int
    vendor_status: int
    ok: bool
    queue_pair: Any
    description: str
    error: BaseException | None

    def __repr__(self) -> str:
        return self.description

    def raise_for_status(self) -> None:
        if self.error is not None:
            raise self.error


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _named(name: str) -> Any:
    """What a name "module:function" stands for."""
    module, colon, path = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is not of the form module:function")
    return operator.attrgetter(path)(importlib.import_module(module))


def _is_global(kind: type) -> bool:
    try:
        return _named(_name_of(kind)) is kind
    except Exception:
        return False


def _is_value(value: Any) -> bool:
    """Whether pickling alone makes an equal value of it."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return True
    if kind is slice:
        return all(_is_value(part) for part in (value.start, value.stop, value.step))
    if isinstance(value, type):
        return _is_global(value)
    if dataclasses.is_dataclass(kind) and kind.__module__.partition(".")[0] == "ndpy":
        frozen: bool = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return frozen and all(_is_plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for item in value.items() for part in item)
    return _is_value(value)


def _describe(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(no message: {second!r})"


class _Side:
    """Translates values to what is pickled and back. The two sides differ in what they do with objects."""

    def encode_object(self, value: Any) -> Any:
        raise NotImplementedError

    def decode_object(self, value: Any) -> Any:
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in (Proxy, Method, _BoundMethod):
            return self.encode_object(value)
        if _is_value(value):
            return value
        if kind in (list, tuple, set, frozenset):
            return kind(self.encode(part) for part in value)
        if kind is dict:
            return {self.encode(key): self.encode(part) for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(kind, "_make") and _is_global(kind):
            return kind._make(self.encode(part) for part in value)
        if kind is ndpy.RemoteMemory:
            return _Memory(value.address, value.length, value.token)
        if kind is ndpy.Completion:
            return self._encode_completion(value)
        if issubclass(kind, BaseException):
            return self.encode_error(value)
        return self.encode_object(value)

    def decode(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return kind(self.decode(part) for part in value)
        if kind is dict:
            return {self.decode(key): self.decode(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return kind._make(self.decode(part) for part in value)  # type: ignore[attr-defined]
        if kind is _Memory:
            return ndpy.RemoteMemory(value.address, value.length, value.token)
        if kind is RemoteCompletion:
            return dataclasses.replace(
                value, queue_pair=self.decode(value.queue_pair), error=value.error and self.decode(value.error)
            )
        if kind is _Error:
            return self.decode_error(value)
        if kind in (_There, _Here, _BoundMethod):
            return self.decode_object(value)
        return value

    def _encode_completion(self, completion: ndpy.Completion) -> RemoteCompletion:
        error: Any = None
        try:
            completion.raise_for_status()
        except ndpy.NdpyError as raised:
            error = self.encode_error(raised)
        values = {
            field.name: getattr(completion, field.name)
            for field in dataclasses.fields(RemoteCompletion)
            if field.name not in ("queue_pair", "description", "error")
        }
        return RemoteCompletion(
            **values, queue_pair=self.encode(completion.queue_pair), description=repr(completion), error=error
        )

    def encode_error(self, error: BaseException) -> _Error:
        pickled = None
        with contextlib.suppress(Exception):
            data = pickle.dumps(error)
            # Some exceptions can be pickled, but not made again.
            if type(pickle.loads(data)) is type(error):
                pickled = data
        attributes = {}
        for name, value in vars(error).items():
            # An attribute that cannot go to the other host stays behind.
            with contextlib.suppress(TypeError):
                attributes[name] = self.encode(value)
        arguments: Any = ()
        with contextlib.suppress(TypeError):
            arguments = self.encode(error.args)
        text = "".join(traceback.format_exception(error))
        return _Error(_name_of(type(error)), pickled, arguments, attributes, _describe(error), text)

    def decode_error(self, record: _Error) -> BaseException:
        error: BaseException
        try:
            if record.pickled is not None:
                error = pickle.loads(record.pickled)
            else:
                kind = _named(record.type)
                arguments = self.decode(record.arguments)
                error = kind.__new__(kind, *arguments)
                error.args = arguments
        except Exception:
            error = RemoteError(f"{record.type}: {record.message}")
        with contextlib.suppress(AttributeError):
            vars(error).update(self.decode(record.attributes))
        return error


# ---- the server ----


def _attribute(thing: Any, name: str) -> Any:
    value = getattr(thing, name)
    if getattr(value, "__self__", None) is thing and callable(value):
        return _BoundMethod(None, name)
    return value


def _call(name: str, *arguments: Any, **options: Any) -> Any:
    return _named(name)(*arguments, **options)


def _call_method(thing: Any, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(thing, name)(*arguments, **options)


def _exit(thing: Any, error: BaseException | None) -> Any:
    return type(thing).__exit__(thing, error and type(error), error, error and error.__traceback__)


# Functions that call the special method of the same name. A proxy has these methods.
_SPECIAL = (dir, str, bytes, bool, int, float, hash, len, operator.index, operator.contains)
_SPECIAL += (operator.getitem, operator.setitem, operator.delitem)
_COMPARISONS = (operator.eq, operator.lt, operator.le, operator.gt, operator.ge)

# What a client can ask for.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "attribute": _attribute,
    "method": _call_method,
    "apply": lambda thing, *arguments, **options: thing(*arguments, **options),
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": _exit,
    **{function.__name__: function for function in (setattr, delattr, repr, iter, next, *_SPECIAL, *_COMPARISONS)},
}


class _Server(_Side):
    """Holds the objects that a client has proxies of, each until as many references came back as went out."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}
        self._held: dict[int, list[Any]] = {}
        self._last = 0

    def encode_object(self, value: Any) -> Any:
        if type(value) is _BoundMethod:
            return value
        with self._lock:
            number = self._numbers.get(id(value))
            if number is None:
                self._last = number = self._last + 1
                self._numbers[id(value)] = number
                self._held[number] = [value, 0]
            self._held[number][1] += 1
        return _Here(number, tuple(map(_name_of, type(value).__mro__)))

    def decode_object(self, value: Any) -> Any:
        if type(value) is _BoundMethod:
            return getattr(self.decode_object(value.owner), value.name)
        with self._lock:
            return self._held[value.number][0]

    def drop(self, drops: list[tuple[int, int]]) -> None:
        dropped = []
        with self._lock:
            for number, count in drops:
                entry = self._held[number]
                entry[1] -= count
                if entry[1] == 0:
                    dropped.append(self._held.pop(number))
                    del self._numbers[id(entry[0])]
                    del entry
        # The last reference goes outside the lock: a destructor may take long.
        dropped.clear()

    def answer(self, message: bytes) -> bytes:
        try:
            drops, name, arguments, options = pickle.loads(message)
            self.drop(drops)
            result = _OPERATIONS[name](*self.decode(arguments), **self.decode(options))
            return _pack(("value", self.encode(result)))
        except BaseException as error:
            with contextlib.suppress(Exception):
                return _pack(("error", self.encode_error(error)))
            # It has something that cannot be pickled.
            name = f"{_name_of(type(error))}: {_describe(error)}"
            return _pack(("error", self.encode_error(RemoteError(name))))

    def serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(_Closed, OSError):
            while True:
                connection.sendall(self.answer(_receive(connection)))


def _wait_for_the_end(connection: socket.socket) -> None:
    """End the process when the client's main connection ends, whatever the calls wait for."""
    with contextlib.suppress(_Closed, OSError):
        while True:
            _receive(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(address: tuple[str, int]) -> None:
    """Serve one client process until it ends."""
    server = _Server()
    token = secrets.token_hex(16)
    taken = False
    with socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as listener:
        host, port = listener.getsockname()[:2]
        print(f"listening on {host} port {port}", flush=True)
        while True:
            connection, _ = listener.accept()
            try:
                _prepare(connection)
                presented = pickle.loads(_receive(connection, time.monotonic() + _SILENCE_S))
                connection.settimeout(None)
                if presented is None and not taken:
                    connection.sendall(_pack(("welcome", token)))
                    taken, work = True, _wait_for_the_end
                elif presented == token:
                    connection.sendall(_pack(("welcome", token)))
                    work = server.serve
                else:
                    connection.sendall(_pack(("refused", "the server serves another client")))
                    connection.close()
                    continue
            except (_Closed, OSError, pickle.UnpicklingError) as error:
                print(f"a connection failed: {error!r}", file=sys.stderr, flush=True)
                connection.close()
                continue
            threading.Thread(target=work, args=(connection,), daemon=True).start()


# ---- the client ----


class _Connection:
    """A socket that closes without a warning when its thread has ended."""

    def __init__(self, address: tuple[str, int], token: str | None, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.socket = socket.create_connection(address, timeout_s)
        try:
            _prepare(self.socket)
            self.socket.sendall(_pack(token))
            kind, self.token = pickle.loads(_receive(self.socket, deadline))
            if kind != "welcome":
                raise HostDied(f"{address[0]} port {address[1]}: {self.token}")
        except BaseException:
            self.socket.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close()


class Host(_Side):
    """Another host, on which functions can be called. connect() makes it."""

    def __init__(self, address: tuple[str, int], main: _Connection, call_limit_s: float) -> None:
        self.address = address
        self.call_limit_s = call_limit_s
        self._main = main
        self._death: str | None = None
        self._of_thread = threading.local()
        #: Those of all threads.
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._proxies: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()
        # A proxy may die in the middle of anything. So its death is only noted, and told with the next call.
        self._drops: collections.deque[tuple[int, int]] = collections.deque()

    def __repr__(self) -> str:
        return f"<Host at {self.address[0]} port {self.address[1]}>"

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process on the other host."""
        self._death = self._death or "it was closed"
        for connection in (self._main, *self._connections):
            connection.socket.close()

    def call(self, function: str, /, *arguments: Any, **options: Any) -> Any:
        """Run a function there and return its result, or raise its exception.

        Parameters:
            function: for example "kit.helpers:fill". Modules of tests/ can be imported there.
        Raises:
            HostDied: the process or the host is gone.
            DeadlinePassed: the call took longer than call_limit_s.
            TypeError: an argument cannot go to the other host.
        """
        return self._request("call", function, *arguments, **options)

    def _connection(self) -> _Connection:
        connection: _Connection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            try:
                connection = _Connection(self.address, self._main.token, _SILENCE_S)
            except (_Closed, OSError) as error:
                raise ConnectionError(f"it takes no connection: {error!r}") from None
            self._of_thread.connection = connection
            self._connections.add(connection)
        return connection

    def _forget_connection(self) -> None:
        connection: _Connection | None = self._of_thread.__dict__.pop("connection", None)
        if connection is not None:
            connection.socket.close()

    def _request(self, operation: str, /, *arguments: Any, **options: Any) -> Any:
        encoded = self.encode(arguments), self.encode(options)
        what = f"{operation} {arguments[0] if operation == 'call' else ''}".strip()
        if self._death is not None:
            raise HostDied(f"{self} is gone: {self._death}")
        drops = []
        with contextlib.suppress(IndexError):
            while True:
                drops.append(self._drops.popleft())
        try:
            message = _pack((drops, operation, *encoded))
            deadline = time.monotonic() + self.call_limit_s
            connection = self._connection().socket
            connection.settimeout(self.call_limit_s)
            connection.sendall(message)
            kind, result = pickle.loads(_receive(connection, deadline))
        except TimeoutError as error:
            self._forget_connection()
            if error.errno is not None:
                # The system's own: the other host stopped answering.
                self._die(what, error)
            raise DeadlinePassed(f"{self}: {what} took longer than {self.call_limit_s:g} s") from None
        except (_Closed, OSError) as error:
            self._forget_connection()
            self._die(what, error)
        except BaseException:
            # The answer may still come, so this connection is of no use.
            self._forget_connection()
            raise
        if kind == "value":
            return self.decode(result)
        raised = self.decode_error(result)
        note = f"On {self.address[0]} port {self.address[1]}:\n{result.traceback}"
        # add_note() is in Python 3.11.
        vars(raised).setdefault("__notes__", []).append(note)
        raise raised

    def _die(self, what: str, error: Exception) -> None:
        reason = "its process has ended" if isinstance(error, _Closed) else str(error)
        self._death = self._death or f"{reason} (during: {what})"
        raise HostDied(f"{self} is gone: {self._death}") from None

    def encode_object(self, value: Any) -> Any:
        kind = type(value)
        if kind is Proxy:
            if _host_of(value) is not self:
                raise TypeError(f"{value!r} is on another host than {self}")
            return _There(_number_of(value))
        if kind is Method:
            return _BoundMethod(self.encode_object(value.owner), value.name)
        if callable(value):
            raise TypeError(f"a function of this process cannot be called from {self}: {value!r}")
        raise TypeError(f"an object of this process cannot be used on {self}: {value!r}")

    def decode_object(self, value: Any) -> Any:
        if type(value) is _BoundMethod:
            return value
        with self._lock:
            proxy = self._proxies.get(value.number)
            if proxy is None:
                proxy = Proxy(self, value.number, value.classes)
                self._proxies[value.number] = proxy
            object.__setattr__(proxy, "_proxy_count", object.__getattribute__(proxy, "_proxy_count") + 1)
        return proxy


def connect(address: tuple[str, int], timeout_s: float, *, call_limit_s: float = CALL_LIMIT_S) -> Host:
    """Connect to a server. It may start within timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            main = _Connection(address, None, max(deadline - time.monotonic(), 0.1))
            return Host(address, main, call_limit_s)
        except (_Closed, OSError) as error:
            if time.monotonic() > deadline:
                raise HostDied(f"{address[0]} port {address[1]} cannot be reached: {error!r}") from None
            time.sleep(0.1)


def host_of(thing: Any) -> Host | None:
    """The host on which the object of a proxy is. None for an object of this process."""
    return _host_of(thing) if type(thing) is Proxy else None


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of an object on the other host."""

    owner: Proxy
    name: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _host_of(self.owner)._request("method", self.owner, self.name, *arguments, **options)


def _host_of(proxy: Proxy) -> Host:
    host: Host = object.__getattribute__(proxy, "_proxy_host")
    return host


def _number_of(proxy: Proxy) -> int:
    number: int = object.__getattribute__(proxy, "_proxy_number")
    return number


def _ask(operation: str) -> Callable[..., Any]:
    def method(self: Proxy, *arguments: Any) -> Any:
        return _host_of(self)._request(operation, self, *arguments)

    return method


def _compare(operation: str) -> Callable[[Proxy, object], Any]:
    def method(self: Proxy, other: object) -> Any:
        if self is other and operation == "eq":
            # Also when the host is gone.
            return True
        try:
            return _host_of(self)._request(operation, self, other)
        except TypeError:
            return NotImplemented

    return method


class Proxy:
    """An object on the other host. isinstance() takes it for one of the class of the object."""

    __slots__ = ("__weakref__", "_proxy_class", "_proxy_count", "_proxy_host", "_proxy_number")

    def __init__(self, host: Host, number: int, classes: tuple[str, ...]) -> None:
        own: type = object
        for name in classes:
            # Classes that only exist there are passed over, such as those of the other host's tests.
            with contextlib.suppress(Exception):
                own = _named(name)
                break
        for name, value in (("host", host), ("number", number), ("count", 0), ("class", own)):
            object.__setattr__(self, f"_proxy_{name}", value)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            count = object.__getattribute__(self, "_proxy_count")
            _host_of(self)._drops.append((_number_of(self), count))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        kind: type = object.__getattribute__(self, "_proxy_class")
        return kind

    def __getattr__(self, name: str) -> Any:
        value = _host_of(self)._request("attribute", self, name)
        return Method(self, name) if type(value) is _BoundMethod else value

    def __setattr__(self, name: str, value: Any) -> None:
        _host_of(self)._request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _host_of(self)._request("delattr", self, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _host_of(self)._request("apply", self, *arguments, **options)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> Any:
        return _host_of(self)._request("exit", self, error)

    def __repr__(self) -> str:
        try:
            text: str = _host_of(self)._request("repr", self)
            return text
        except (HostDied, DeadlinePassed) as error:
            return f"<Proxy {_number_of(self)}: {error}>"

    def __next__(self) -> Any:
        return _host_of(self)._request("next", self)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = _host_of(self)._request("iter", self)
        return iterator

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("a proxy cannot be pickled or copied")

    __enter__ = _ask("enter")


for _function in _SPECIAL:
    setattr(Proxy, f"__{_function.__name__}__", _ask(_function.__name__))
for _function in _COMPARISONS:
    setattr(Proxy, f"__{_function.__name__}__", _compare(_function.__name__))


def address_of(text: str) -> tuple[str, int]:
    """The address of "ADDRESS:PORT". An IPv6 address may be in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{text!r} is not of the form ADDRESS:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let the tests of another host use ndpy on this one.")
    parser.add_argument("--listen", metavar="ADDRESS:PORT", type=address_of, required=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    serve(parser.parse_args().listen)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # Its classes are pickled by name, so they must be those of the module and not of "__main__".
    from kit import remote

    remote.main()
