"""The control channel between the two sides of a command. It has size limits and deadlines, and carries only data."""

import socket
import threading
import time

import pytest
from kit.deadlines import DEADLINE_S

from ndpy.tools.cli.channel import (
    Arguments,
    BadRequest,
    Channel,
    ChannelClosed,
    ChannelError,
    SecretListener,
    encode,
)
from ndpy.tools.cli.peers import as_seen_here, common_address, nearest_first, parse_address

DEFAULT_PORT = 18520


@pytest.fixture
def ends():
    """A channel, and the plain socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, line_limit=1000)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_a_message_arrives_as_it_was_sent(ends):
    channel, theirs = ends
    other = Channel(theirs, line_limit=1000)
    other.send({"command": "hello", "data": encode(b"\0\xff")}, 1.0)
    other.send({"second": 2}, 1.0)
    assert channel.receive(1.0) == {"command": "hello", "data": "AP8="}
    assert channel.receive(1.0) == {"second": 2}


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\xfe\n", b"[" * 900 + b"\n", b"\n", b"1\n"])
def test_nonsense_is_an_error_of_the_channel(ends, line):
    channel, theirs = ends
    theirs.sendall(line)
    with pytest.raises(ChannelError):
        channel.receive(1.0)


def test_a_line_without_an_end_is_given_up(ends):
    channel, theirs = ends
    theirs.sendall(b"x" * 2000)
    with pytest.raises(ChannelError, match="more than 1000 bytes"):
        channel.receive(1.0)


def test_silence_ends_at_the_deadline(ends):
    channel, _ = ends
    started = time.monotonic()
    with pytest.raises(ChannelError, match="nothing came"):
        channel.receive(0.1)
    assert time.monotonic() - started < 10


def test_a_long_wait_is_made_of_short_ones(ends, monkeypatch):
    """Between them, Windows tells of Ctrl-C."""
    channel, theirs = ends
    monkeypatch.setattr("ndpy.tools.cli.channel.WAKE_S", 0.01)
    waits = []
    read = channel._read
    monkeypatch.setattr(channel, "_read", lambda timeout_s: (waits.append(timeout_s), read(timeout_s)))
    timer = threading.Timer(0.1, theirs.sendall, [b'{"n": 1}\n'])
    timer.start()
    assert channel.receive(30.0) == {"n": 1}
    timer.join()
    assert len(waits) > 3
    assert max(waits) <= 0.01


def test_bytes_that_trickle_do_not_extend_the_deadline(ends):
    channel, theirs = ends
    theirs.sendall(b"{")
    with pytest.raises(ChannelError, match="nothing came"):
        channel.receive(0.1)


def test_a_look_does_not_wait(ends):
    channel, theirs = ends
    started = time.monotonic()
    assert channel.look() is None
    theirs.sendall(b'{"n": 1}\n{"n": 2}\n{"n"')
    assert channel.receive(1.0) == {"n": 1}
    assert channel.look() == {"n": 2}
    assert channel.look() is None
    theirs.sendall(b": 3}\n")
    assert channel.receive(1.0) == {"n": 3}
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.look()
    assert time.monotonic() - started < 1.0


def test_the_end_of_the_other_side_is_told(ends):
    channel, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.receive(1.0)


def test_arguments_are_taken_with_type_and_bounds():
    arguments = Arguments({"n": 5, "t": "x", "d": "AP8=", "s": 0.5, "none": None})
    assert arguments.integer("n", 0, 5) == 5
    assert arguments.text("t", 1) == "x"
    assert arguments.data("d", 2) == b"\0\xff"
    assert arguments.seconds("s", 1) == 0.5
    assert arguments.optional("none", 0, 1) is None
    arguments.finish()


@pytest.mark.parametrize(
    "take",
    [
        lambda a: a.integer("missing", 0, 1),
        lambda a: a.integer("n", 0, 4),
        lambda a: a.integer("flag", 0, 4),
        lambda a: a.integer("t", 0, 4),
        lambda a: a.text("t", 3),
        lambda a: a.text("n", 3),
        lambda a: a.data("t", 100),
        lambda a: a.data("d", 1),
        lambda a: a.seconds("n", 4),
        lambda a: a.seconds("flag", 4),
        lambda a: a.finish(),
    ],
)
def test_arguments_that_do_not_fit_are_refused(take):
    with pytest.raises(BadRequest):
        take(Arguments({"n": 5, "t": "!!!!", "d": "AP8=", "flag": True}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", DEFAULT_PORT)),
        ("host:5", ("host", 5)),
        (":5", ("", 5)),
        ("", ("", DEFAULT_PORT)),
        ("192.0.2.1:5", ("192.0.2.1", 5)),
        ("2001:db8::1", ("2001:db8::1", DEFAULT_PORT)),
        ("[2001:db8::1]:5", ("2001:db8::1", 5)),
        ("[2001:db8::1]", ("2001:db8::1", DEFAULT_PORT)),
    ],
)
def test_addresses_of_a_peer(text, expected):
    assert parse_address(text, DEFAULT_PORT) == expected


@pytest.mark.parametrize("text", ["host:port", "host:70000", "[2001:db8::1", "[2001:db8::1]5"])
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError):
        parse_address(text, DEFAULT_PORT)


@pytest.mark.parametrize("strangers", [0, 3, 70])
def test_a_process_that_is_slow_to_send_the_secret_is_accepted(strangers):
    listener = SecretListener()
    found = []
    accepting = threading.Thread(target=lambda: found.append(listener.accept(lambda: True, DEADLINE_S)))
    others = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(strangers)]
    accepting.start()
    try:
        with socket.create_connection(("127.0.0.1", listener.port)) as process:
            process.sendall(listener.secret[:10])
            time.sleep(1.2)
            assert accepting.is_alive()
            process.sendall(listener.secret[10:])
            accepting.join(DEADLINE_S)
            with found[0] as accepted:
                assert accepted.getpeername() == process.getsockname()
    finally:
        for other in others:
            other.close()


def test_a_wrong_secret_is_refused_and_the_right_one_accepted():
    listener = SecretListener()
    with (
        socket.create_connection(("127.0.0.1", listener.port)) as wrong,
        socket.create_connection(("127.0.0.1", listener.port)) as right,
    ):
        wrong.sendall(bytes(32))
        right.sendall(listener.secret)
        with listener.accept(lambda: True, DEADLINE_S) as accepted:
            assert accepted.getpeername() == right.getsockname()
        wrong.settimeout(DEADLINE_S)
        assert wrong.recv(1) == b""


def test_the_process_may_end_or_never_come():
    assert SecretListener().accept(lambda: False, DEADLINE_S) is None
    assert SecretListener().accept(lambda: True, 0.1) is None


@pytest.mark.parametrize(
    ("own", "theirs", "options", "expected"),
    [
        (["192.0.2.1"], ["2001:db8::2", "192.0.2.2"], {}, "192.0.2.2"),
        (["192.0.2.1", "2001:db8::1"], ["192.0.2.2", "2001:db8::2"], {"version": 6}, "2001:db8::2"),
        (["fe80::1%eth0"], ["2001:db8::2"], {}, None),
        (["fe80::1%eth0"], ["fe80::2%eth1"], {}, None),
        (["fe80::1%eth0"], ["fe80::2%eth1"], {"same_machine": True}, "fe80::2%eth1"),
        ([], ["192.0.2.2"], {}, None),
        # Loopback leads to no other machine.
        (["127.0.0.1", "2001:db8::1"], ["127.0.0.1", "2001:db8::2"], {}, "2001:db8::2"),
        (["127.0.0.1"], ["127.0.0.1"], {"version": 4}, None),
        (["127.0.0.1"], ["127.0.0.1"], {"same_machine": True}, "127.0.0.1"),
        # The control connection came to one of them.
        (["192.0.2.1"], ["192.0.2.2", "203.0.113.2"], {"reached": "203.0.113.2"}, "203.0.113.2"),
        (["192.0.2.1"], ["192.0.2.2", "203.0.113.2"], {"reached": "198.51.100.1"}, "192.0.2.2"),
        (["fe80::1%eth0"], ["2001:db8::2", "fe80::2%eth1"], {"reached": "fe80::2%eth0"}, "fe80::2%eth1"),
        (["fe80::1%a"], ["fe80::2%c", "fe80::2%d"], {"reached": "fe80::2%d"}, "fe80::2%d"),
    ],
)
def test_the_address_that_both_sides_can_use(own, theirs, options, expected):
    assert common_address(own, theirs, **{"same_machine": False, **options}) == expected


def test_a_scope_is_written_as_on_the_machine_that_uses_it():
    assert as_seen_here("fe80::2%eth1", "fe80::2%eth0") == "fe80::2%eth0"
    assert as_seen_here("192.0.2.2", "fe80::2%eth0") == as_seen_here("192.0.2.2", None) == "192.0.2.2"
    own = ["192.0.2.2", "fe80::2%eth0", "fe80::2%eth1"]
    assert nearest_first(own, "fe80::2%eth1") == ["fe80::2%eth1", "192.0.2.2", "fe80::2%eth0"]
    assert nearest_first(own, None) == own
