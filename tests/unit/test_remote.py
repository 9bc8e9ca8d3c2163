"""Objects of another process: tests/kit/remote.py."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import remote_things
from kit import remote
from kit.helpers import contents, fill, peer_of, peering, wait_until
from kit.starting import create_process
from kit.threads import Elsewhere, in_threads

import ndpy

# What takes no time takes less than this on a busy machine.
SOON_S = 20.0
START_S = 60.0


def start_server():
    """Another process, which listens."""
    command = [sys.executable, remote.__file__, "--listen", "127.0.0.1:0"]
    process = create_process(lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    line = process.stdout.readline().split()
    assert line[:4] == ["listening", "on", "127.0.0.1", "port"], line
    process.address = "127.0.0.1", int(line[4])
    return process


@pytest.fixture
def server():
    """The other process. It is killed at the end."""
    process = start_server()
    yield process
    process.kill()
    process.wait(START_S)
    process.stdout.close()


@pytest.fixture
def host(server):
    with remote.connect(server.address, START_S) as host:
        host.call("sys:path.append", str(Path(__file__).parent))
        yield host


@pytest.fixture
def thing(host):
    return host.call("remote_things:Thing", 1, 2, 3)


def test_calls_run_in_the_other_process(host, server):
    assert host.call("os:getpid") == server.pid != os.getpid()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        2.5,
        "text",
        b"bytes",
        bytearray(b"array"),
        range(3),
        slice(0, 8),
        (1, (2, "three")),
        [1, [b"2"]],
        {"a": {1: [2]}},
        {1, 2},
        frozenset({3}),
        remote_things.Colour.RED,
        ndpy.Access.REMOTE_READ | ndpy.Access.LOCAL_WRITE,
        ndpy.RetryPolicy(rnr_retry_count=3),
        ndpy.RemoteMemory(4096, 64, 7),
        ndpy.QueuePair,
        ValueError,
    ],
    ids=repr,
)
def test_plain_values_cross_by_value(host, value):
    (answer,) = host.call("remote_things:echo", value)
    assert type(answer) is type(value)
    assert answer == value


def test_an_exception_that_is_a_value_is_none_that_is_raised(host):
    (error,) = host.call("remote_things:echo", ndpy.ClosedError("it is closed"))
    assert type(error) is ndpy.ClosedError
    assert str(error) == "it is closed (ndpy explain closed)"


def test_a_proxy_forwards_attributes_and_methods(thing):
    assert thing.parts == [1, 2, 3]
    assert thing.total(factor=10) == 60
    total = thing.total
    assert total() == 6
    thing.parts = [5]
    assert thing.total() == 5
    del thing.friend
    assert not hasattr(thing, "friend")
    with pytest.raises(AttributeError, match="absent"):
        _ = thing.absent


def test_a_proxy_forwards_what_operators_do(host, thing):
    assert len(thing) == 3
    assert thing[1] == 2
    assert repr(thing[0:2]) == "Thing(1, 2)"
    assert str(thing) == repr(thing) == "Thing(1, 2, 3)"
    thing[1] = 7
    assert list(thing) == [1, 7, 3]
    assert 7 in thing
    assert not host.call("remote_things:Thing")
    assert host.call("remote_things:Thing", 0) < thing
    with pytest.raises(IndexError):
        _ = thing[9]
    with pytest.raises(TypeError):
        int(thing)


def test_with_tells_the_object_of_an_exception(thing):
    with thing as entered:
        assert entered is thing
        assert thing.entered is True
    assert thing.entered is None
    with pytest.raises(ValueError, match="inside"), thing:
        raise ValueError("inside")
    assert type(thing.entered) is ValueError
    with thing:
        raise KeyError("the object swallows it")


def test_an_object_has_one_proxy(host, thing):
    assert thing.itself() is thing
    assert thing == thing.itself()
    other = host.call("remote_things:Thing", 1, 2, 3)
    assert other != thing
    other.friend = thing
    assert other.friend is thing
    assert {thing: 1}[other.friend] == 1
    assert thing != object()


def test_a_proxy_becomes_its_object_again(host, thing):
    assert thing.is_it(thing)
    assert thing.among([0, thing])
    assert host.call("remote_things:echo", {"it": (thing,)})[0]["it"][0] is thing
    assert host.call("remote_things:call", thing.total) == 6


def test_isinstance_knows_the_class(host, thing):
    assert isinstance(thing, remote_things.Thing)
    region = host.call("remote_things:Region")
    assert isinstance(region, ndpy.MemoryRegion)
    assert not isinstance(region, ndpy.QueuePair)
    assert remote.host_of(region) is host
    assert remote.host_of(object()) is None


def test_objects_of_this_process_are_refused(host, thing):
    for value in (lambda: None, thing.parts.append, object(), remote_things.Thing(1), memoryview(b"bytes")):
        with pytest.raises(TypeError, match="of this process"):
            host.call("remote_things:echo", [value])
    assert thing.total() == 6


def test_an_object_of_another_host_is_refused(server, thing):
    with start_server() as process:
        try:
            with remote.connect(process.address, START_S) as other, pytest.raises(TypeError, match="on another host"):
                other.call("remote_things:echo", thing)
        finally:
            process.kill()


def test_an_exception_keeps_its_type_its_attributes_and_where_it_was_raised(host):
    with pytest.raises(ndpy.TimeoutError) as raised:
        host.call("remote_things:fail", "ndpy")
    error = raised.value
    assert (error.operation, error.native, error.native_name) == ("wait", 110, "ETIMEDOUT")
    assert str(error) == "wait: it took too long [native status 110 (ETIMEDOUT)] (ndpy explain timeout)"
    assert any("remote_things.py" in note and "127.0.0.1" in note for note in error.__notes__)
    with pytest.raises(remote_things.OwnError) as own:
        host.call("remote_things:fail", "own")
    assert (own.value.code, own.value.where, str(own.value)) == (7, "there", "there: 7")
    with pytest.raises(ndpy.ClosedError, match="closed there"):
        host.call("remote_things:fail", "closed")


def test_an_exception_of_an_unknown_type_names_the_type(host):
    with pytest.raises(remote.RemoteError, match=r"LocalError: only here"):
        host.call("remote_things:fail", "local")
    with pytest.raises(ModuleNotFoundError):
        host.call("no_such_module:function")
    with pytest.raises(AttributeError):
        host.call("remote_things:absent")


def test_a_message_that_is_too_long_is_refused_and_does_no_harm(host):
    with pytest.raises(ValueError, match="is longer than"):
        host.call("remote_things:echo", bytes(80 << 20))
    with pytest.raises(ValueError, match="is longer than"):
        host.call("remote_things:too_much")
    assert host.call("remote_things:echo", 1) == (1,)


def test_a_call_that_waits_holds_up_no_other_thread(host):
    begin = time.monotonic()
    waiting = Elsewhere(lambda: host.call("remote_things:wait_for_event", START_S)).start()
    wait_until(lambda: host.call("remote_things:WAITING.is_set"), "the thread waits there", START_S)
    host.call("remote_things:set_event")
    assert waiting.result(START_S) is True
    assert time.monotonic() - begin < SOON_S


def test_threads_share_the_proxies(host, thing):
    def work(_: int) -> None:
        for number in range(50):
            assert thing.itself() is thing
            assert host.call("remote_things:Thing", number).total() == number

    in_threads(4, work, START_S)
    gc.collect()
    assert host.call("remote_things:alive") == 1


def test_an_object_is_dropped_with_its_proxy(host, thing):
    others = [host.call("remote_things:Thing") for _ in range(5)]
    assert host.call("remote_things:alive") == 6
    again = others[0].itself()
    del others
    assert host.call("remote_things:alive") == 2
    del again
    assert host.call("remote_things:alive") == 1
    thing.friend = host.call("remote_things:Thing")
    # The object there still refers to it.
    assert host.call("remote_things:alive") == 2


def test_an_object_stays_while_a_further_reference_is_on_its_way():
    server, thing = remote._Server(), object()
    first, second = server.encode(thing), server.encode(thing)
    assert first == second
    server.drop([(first.number, 1)])
    assert server.decode(second) is thing
    server.drop([(second.number, 1)])
    with pytest.raises(KeyError):
        server.decode(second)


def test_a_call_has_a_deadline(host):
    host.call_limit_s = 0.5
    begin = time.monotonic()
    with pytest.raises(remote.DeadlinePassed, match="sleep"):
        host.call("remote_things:sleep", 3)
    assert 0.4 < time.monotonic() - begin < 3
    host.call_limit_s = SOON_S
    # The late answer goes to nobody.
    assert host.call("remote_things:echo", "next") == ("next",)


def test_a_process_that_dies_in_a_call_ends_the_calls_of_all_threads(host, server, thing, monkeypatch):
    waiting = [Elsewhere(lambda: host.call("remote_things:sleep", START_S)).start() for _ in range(2)]
    time.sleep(0.3)
    begin = time.monotonic()
    server.kill()
    for thread in waiting:
        with pytest.raises(remote.HostDied):
            thread.result(START_S)
    assert time.monotonic() - begin < SOON_S
    # Later calls do not try again: a host that answers nothing would cost seconds each time.
    monkeypatch.setattr(host, "_connection", None)
    with pytest.raises(remote.HostDied, match=r"127\.0\.0\.1"):
        thing.total()
    assert "gone" in repr(thing)
    assert thing == thing


def test_a_host_that_cannot_be_reached_is_told_within_the_time():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        begin = time.monotonic()
        with pytest.raises(remote.HostDied, match="cannot be reached"):
            remote.connect(unused.getsockname(), 0.5)
    assert time.monotonic() - begin < SOON_S


def test_connections_notice_a_host_that_is_gone_without_a_word(host):
    connection = host._connection().socket
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000


def test_the_server_ends_with_its_client(server):
    host = remote.connect(server.address, START_S)
    host.call("os:getpid")
    host.close()
    assert server.wait(SOON_S) == 0
    with pytest.raises(remote.HostDied, match="closed"):
        host.call("os:getpid")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_sigterm_ends_the_server(server):
    server.terminate()
    assert server.wait(SOON_S) == 0


def test_a_second_client_is_refused(host, server):
    with pytest.raises(remote.HostDied, match="serves another client"):
        remote.connect(server.address, START_S)
    assert host.call("remote_things:echo", 1) == (1,)


def test_what_is_no_client_does_no_harm(server):
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with remote.connect(server.address, START_S) as host:
        assert host.call("os:getpid") == server.pid


def test_a_proxy_is_neither_pickled_nor_copied(thing):
    import copy
    import pickle

    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="proxy"):
            use(thing)


def test_the_helpers_fill_memory_there(host):
    region = host.call("remote_things:Buffer", b"original")
    region.buffer[0] = 0
    assert contents(region) == b"original"
    fill(region, b"new", offset=2)
    assert contents(region) == b"ornewnal"


class AdapterStandIn:
    open = True

    def close(self) -> None:
        self.open = False


class HostStandIn:
    def __init__(self) -> None:
        self.opened: list[AdapterStandIn] = []

    def call(self, function: str, name: str) -> AdapterStandIn:
        assert (function, name) == ("ndpy:open_adapter", "rxe0")
        self.opened.append(AdapterStandIn())
        return self.opened[-1]


def test_the_peers_adapter_is_opened_when_it_is_asked_for_and_closed_at_the_end():
    adapter, other, host = AdapterStandIn(), AdapterStandIn(), HostStandIn()
    with peering(adapter, host, "rxe0"):
        assert not host.opened
        peer = peer_of(adapter)
        assert peer is peer_of(adapter) is host.opened[0]
        assert peer_of(other) is other
        assert peer.open
    assert not peer.open
    assert len(host.opened) == 1
    assert peer_of(adapter) is adapter


def test_without_another_host_the_peer_is_the_adapter_itself():
    adapter = AdapterStandIn()
    with peering(adapter, None, "rxe0"):
        assert peer_of(adapter) is adapter
    assert adapter.open


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("host:1", ("host", 1))]
)
def test_addresses_are_read(text, address):
    assert remote.address_of(text) == address


@pytest.mark.parametrize("text", ["", "80", ":80", "host:", "host:x"])
def test_what_is_no_address_is_no_option(text):
    with pytest.raises(ValueError, match="ADDRESS:PORT"):
        remote.address_of(text)
