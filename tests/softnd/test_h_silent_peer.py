"""Peers that fall silent before, within and after the start-up. The peers are Python in this process.

The provider is a copy of the DLL. The test unloads it at the end, so that anything a silent peer keeps alive shows.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import time

import iwarp
import pytest
import version2
from consumer import Kit, Side, connect, establish, get_address, make_pair, wait_until
from iwarp import Opcode, Startup
from test_h_hostile_answers import REPLY, Peer, connect_to_peer
from version2 import Kind, Status, kernel32

START_UP_S = 1.0
# What a busy machine may add.
LATE_S = 20.0
# One second, plus what a busy machine may add. Without the bound it took six seconds.
LAST_RELEASE_S = 4.0

REQUEST = Startup(ird=1, ord=1, peer_to_peer=True, rtr=iwarp.Rtr.READ, private_data=b"twenty bytes of data").encode()
ANSWER = Startup(reply=True, ird=1, ord=1, peer_to_peer=True, rtr=iwarp.Rtr.READ, private_data=b"good").encode()
# Where start-up frames are cut: in the key, before the length, in the enhanced data, in the private data.
CUTS = (1, 15, 19, 22, -1)


@pytest.fixture
def held():
    """Connections that stay open and unread until the provider is gone."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def kit(monkeypatch, tmp_path, held):
    """A Kit with its own provider, which must be unloadable at the end."""
    statistics = tmp_path / "statistics"
    monkeypatch.setenv("SOFTND_START_UP_MS", str(int(START_UP_S * 1000)))
    monkeypatch.setenv("SOFTND_STATISTICS", str(statistics))
    shutil.copy(version2.DLL, tmp_path / "own.dll")
    library = version2.Library(tmp_path / "own.dll")
    kit = Kit(library)
    yield kit
    kit.close()
    wait_until(lambda: library.can_unload() == Status.SUCCESS, "everything is released")
    library.free()
    leaks = re.findall(r"(\d+) leaked", statistics.read_text())
    assert leaks
    assert not any(map(int, leaks)), statistics.read_text()


@pytest.fixture
def neighbours(kit):
    """A connection that must continue to work."""
    active, passive = make_pair(kit)
    yield active, passive
    exchange(active, passive)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        listening.settimeout(10)
        yield listening


def exchange(active, passive):
    passive.receive(passive.region.sge(0, 8), context=1)
    active.send(active.region.sge(0, 8), context=2)
    assert passive.one()[:3] == (Kind.RECEIVE, Status.SUCCESS, 1)
    assert active.one()[:3] == (Kind.SEND, Status.SUCCESS, 2)
    active.read(active.region.sge(0, 64), at=passive.region.address, token=passive.region.remote, context=3)
    assert active.one()[:3] == (Kind.READ, Status.SUCCESS, 3)


def closed_by_the_other_end(connection):
    """Wait until the other end closes; ignore what comes before."""
    connection.settimeout(START_UP_S + LATE_S)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


def test_h_3_a_peer_without_a_whole_request_is_closed_in_time(kit, neighbours):
    node = kit.node()
    listener = node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", node.connector())
    to = get_address(listener, "GetLocalAddress")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(to)) for _ in (0, *CUTS)]
        began = time.monotonic()
        for connection, cut in zip(silent[1:], CUTS, strict=True):
            connection.sendall(REQUEST[:cut])
        exchange(*neighbours)
        for connection in silent:
            closed_by_the_other_end(connection)
        assert time.monotonic() - began >= START_UP_S - 0.1
    assert arrived.pending(), "half a request is none"
    arrived.interface.CancelOverlappedRequests()
    assert arrived.result() == Status.CANCELED
    establish(Side(kit.node(), 1), Side(node, 2), listener)


def test_h_3_a_request_that_comes_byte_by_byte_has_no_more_time(kit):
    listener = kit.node().listener()
    with socket.create_connection(get_address(listener, "GetLocalAddress")) as connection:
        connection.settimeout(START_UP_S / 4)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for at in range(len(REQUEST)):
                connection.sendall(REQUEST[at : at + 1])
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1) == b""
                    break
        assert START_UP_S - 0.1 <= time.monotonic() - began < START_UP_S * len(REQUEST) / 4


def test_h_4_2_half_a_reply_is_a_timeout_and_no_reply_is_waited_for(kit, neighbours, listener):
    with contextlib.ExitStack() as stack:
        attempts = []
        began = time.monotonic()
        for cut in (0, *CUTS):
            side = Side(kit.node(), 1)
            connecting = connect(kit, side.connector, side.qp, listener.getsockname()[:2])
            peer = Peer(stack.enter_context(listener.accept()[0]))
            peer.await_start()
            peer.socket.sendall(ANSWER[:cut])
            attempts.append((side, connecting, peer))
        exchange(*neighbours)
        for side, connecting, peer in attempts[1:]:
            assert connecting.result() == Status.IO_TIMEOUT
            closed_by_the_other_end(peer.socket)
            # H.4.4: again with the same connector and queue pair.
            connect_to_peer(side, listener).close()
        assert time.monotonic() - began >= START_UP_S - 0.1
        side, connecting, peer = attempts[0]
        assert connecting.pending(), "H.1.2: its program may still decide"
        side.connector.CancelOverlappedRequests()
        assert connecting.result() == Status.CANCELED
        closed_by_the_other_end(peer.socket)


def test_h_8_8_the_last_release_waits_a_second_for_a_peer_that_reads_nothing(kit, held, listener):
    side = Side(kit.node(), 0xA)
    held.enter_context(connect_to_peer(side, listener))
    side.send(side.node.region(8 << 20).sge())
    began = time.monotonic()
    kit.close()
    assert time.monotonic() - began < LAST_RELEASE_S


def half_a_send(crc):
    return iwarp.fpdu(iwarp.untagged(Opcode.SEND, 0, 1, b"x" * 64), crc=crc)[:50]


@pytest.mark.parametrize("ending", ["Disconnect", "release"])
@pytest.mark.parametrize("role", ["active", "passive"])
def test_h_8_7_a_peer_that_falls_silent_within_a_segment_holds_up_nothing(
    kit, held, neighbours, listener, role, ending
):
    side = Side(kit.node(), 0xA)
    side.receive(side.region.sge(0, 64), context=7)
    peer = connect_to_peer(side, listener) if role == "active" else connected_to(kit, side)
    held.enter_context(peer)
    peer.socket.sendall(half_a_send(peer.crc))
    side.write(side.region.sge(0, 8), to=0x1000, token=0x1234, context=8)
    # Longer than the start-up may take. That limit no longer applies.
    deadline = time.monotonic() + START_UP_S * 1.5
    while time.monotonic() < deadline:
        exchange(*neighbours)
        kernel32.Sleep(20)
    if ending == "Disconnect":
        assert side.disconnect() == Status.SUCCESS
    else:
        side.connector.release()
    done = {(d.kind, d.status, d.context) for d in side.take(2)}
    assert done == {(Kind.RECEIVE, Status.CANCELED, 7), (Kind.WRITE, Status.CANCELED, 8)}


def connected_to(kit, side):
    """Return a peer in Python that connected to this side."""
    listener = side.node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", side.connector)
    peer = Peer(socket.create_connection(get_address(listener, "GetLocalAddress")))
    peer.local = REPLY
    peer.socket.sendall(REQUEST)
    assert arrived.result() == Status.SUCCESS
    accepting = kit.issue(side.connector, "Accept", side.qp, 1, 1, version2.NULL, 0)
    peer._agree(peer._take_startup(reply=True))
    peer.read_start(0, 0, 0)
    assert accepting.result() == Status.SUCCESS
    peer.flush()
    return peer
