"""Connections between two processes, one of which may vanish, and the packets that a program's own port gets."""

from __future__ import annotations

import os
import time

import pytest
from connection_attempt import bind
from consumer import (
    Kit,
    Node,
    Port,
    Side,
    accept,
    connect,
    get_address,
    no_completion,
    raw,
    still_open,
)
from peer import Peer
from version2 import NULL, Kind, Status, sockaddr


def serve(channel, action, count):
    """Accept one connection, take `count` messages into Receives, then do `action`."""
    kit = Kit()
    node = Node(kit, "127.0.0.1")
    side = Side(node, 2)
    for i in range(count):
        side.receive(side.region.sge(i * 16, 16), context=i)
    listener = node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", side.connector)
    channel.send(get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    if action == "vanish before accept":
        os._exit(0)
    assert accept(kit, side.connector, side.qp).result() == Status.SUCCESS
    if action == "exit after receiving":
        side.take(count)
        os._exit(0)
    if action == "send and leave":
        side.region.put(0, b"last words" * 1000)
        side.send(side.region.sge(0, 10000))
        assert side.one().status == Status.SUCCESS
        kit.close()
        os._exit(0)
    channel.send({"address": side.region.address, "token": side.region.remote})
    if action == "collect":
        done = side.take(count, 30)
        channel.send([[d.context, d.bytes, int(d.status)] for d in done])
        channel.send(side.region.get(0, 16 * count).hex())
    channel.receive()
    kit.close()
    channel.send("closed")


def join(kit, peer):
    side = Side(kit.node(), 1)
    to = tuple(peer.receive())
    assert connect(kit, side.connector, side.qp, to).result() == Status.SUCCESS
    assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
    return side


def test_h_two_processes_send_write_and_read(kit):
    with Peer("test_h_processes", "serve", "collect", 8) as peer:
        side = join(kit, peer)
        remote = peer.receive()
        for i in range(8):
            side.region.put(0, b"message%d" % i)
            side.send(side.region.sge(0, 8))
            assert side.one().status == Status.SUCCESS
        assert peer.receive() == [[i, 8, 0] for i in range(8)]
        expected = b"".join((b"message%d" % i).ljust(16, b"\0") for i in range(8))
        assert bytes.fromhex(peer.receive()) == expected
        data = os.urandom(4096)
        side.region.put(0, data)
        side.write(side.region.sge(0, 4096), to=remote["address"] + 8192, token=remote["token"])
        side.read(side.region.sge(8192, 4096), at=remote["address"] + 8192, token=remote["token"])
        assert [d.status for d in side.take(2)] == [Status.SUCCESS] * 2
        assert side.region.get(8192, 4096) == data
        peer.send("leave")
        assert peer.receive() == "closed"
        assert peer.finish() == 0
    side.receive(context=1)
    assert side.one().status == Status.CANCELED


def test_h_two_processes_an_address_listened_on_elsewhere_is_taken(kit, node):
    with Peer("test_h_processes", "serve", "wait", 0) as peer:
        _, port = peer.receive()
        listener = node.create("Listener", node.file)
        code = bind(listener, "127.0.0.1", port)
        if code == Status.SUCCESS:
            code = listener.Listen(0)
        assert code == Status.SHARING_VIOLATION


def test_f_5_4_two_processes_a_send_succeeds_though_the_receiver_exits(kit):
    with Peer("test_h_processes", "serve", "exit after receiving", 1) as peer:
        side = join(kit, peer)
        side.send(side.region.sge(0, 8), context=1)
        assert side.one()[:3] == (Kind.SEND, Status.SUCCESS, 1)
        side.receive(context=2)
        assert side.one()[:3] == (Kind.RECEIVE, Status.CANCELED, 2)
        assert peer.finish() == 0


def test_h_8_8_two_processes_data_arrive_though_the_sender_exits(kit):
    with Peer("test_h_processes", "serve", "send and leave", 0) as peer:
        side = Side(kit.node(), 1)
        side.receive(side.region.sge(0, 20000), context=1)
        to = tuple(peer.receive())
        assert connect(kit, side.connector, side.qp, to).result() == Status.SUCCESS
        assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
        assert side.one().bytes == 10000
        assert side.region.get(0, 10000) == b"last words" * 1000
        assert peer.finish() == 0


def test_h_5_4_two_processes_the_peer_vanishes_before_accepting(kit):
    with Peer("test_h_processes", "serve", "vanish before accept", 0) as peer:
        side = Side(kit.node(), 1)
        to = tuple(peer.receive())
        code = connect(kit, side.connector, side.qp, to).result()
        assert code in (Status.CONNECTION_REFUSED, Status.CONNECTION_ABORTED)


def kill(attempt):
    """Call attempt() again if the peer that it has killed is dead, and the peer's socket open."""
    for _ in range(3):
        side, request = attempt()
        if request.ends(5) or not still_open(side.connector):
            return side, request
        side.disconnect()
    pytest.fail("the system keeps the sockets of three killed processes open")


def test_f_6_6_two_processes_a_killed_peer(kit):
    def attempt():
        with Peer("test_h_processes", "serve", "wait", 0) as peer:
            side = join(kit, peer)
            peer.receive()
            gone = kit.issue(side.connector, "NotifyDisconnect")
            side.receive(context=1)
            side.send(side.region.sge(0, 8), context=2)  # finds no Receive
            side.send(side.region.sge(0, 8), context=3)
            peer.kill()
        return side, gone

    side, gone = kill(attempt)
    done = side.take(3)
    assert [(d.status, d.context) for d in done if d.kind == Kind.SEND] == [
        (Status.IO_TIMEOUT, 2),
        (Status.CANCELED, 3),
    ]
    assert [(d.status, d.context) for d in done if d.kind == Kind.RECEIVE] == [(Status.CANCELED, 1)]
    assert gone.result() == Status.SUCCESS
    assert side.disconnect() == Status.SUCCESS


def vanish(channel, to, phase):
    kit = Kit()
    side = Side(Node(kit, "127.0.0.1"), 1)
    request = connect(kit, side.connector, side.qp, tuple(to))
    channel.send("connecting")
    if phase == "offered":
        assert request.result() == Status.SUCCESS
        channel.send("offered")
    channel.receive()


@pytest.mark.parametrize("phase", ["connecting", "offered"])
def test_h_5_4_m_16_two_processes_the_active_side_is_killed(kit, phase):
    def attempt():
        side = Side(kit.node(), 2)
        listener = side.node.listener()
        arrived = kit.issue(listener, "GetConnectionRequest", side.connector)
        to = get_address(listener, "GetLocalAddress")
        with Peer("test_h_processes", "vanish", to, phase) as peer:
            assert peer.receive() == "connecting"
            assert arrived.result() == Status.SUCCESS
            if phase == "offered":
                accepting = accept(kit, side.connector, side.qp)
                assert peer.receive() == "offered"
            peer.kill()
            if phase == "connecting":
                time.sleep(0.3)  # time for the passive side to learn of it
                accepting = accept(kit, side.connector, side.qp)
        return side, accepting

    _, accepting = kill(attempt)
    assert accepting.result() == Status.CONNECTION_ABORTED


def test_c_1_5_a_connections_packets_carry_the_key(kit):
    node = kit.node()
    file = node.new_file()
    port = Port(file, key=0x5151)
    cq = node.cq()
    connector, qp = node.connector(file), node.qp(cq)
    passive = Side(kit.node(), 2)
    listener = passive.node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", passive.connector)
    name = sockaddr(*get_address(listener, "GetLocalAddress"))
    overlapped = kit.overlapped()
    assert connector.Connect(raw(qp), name, len(name), 1, 1, NULL, 0, overlapped) == Status.PENDING
    assert arrived.result() == Status.SUCCESS
    accepting = accept(kit, passive.connector, passive.qp)
    assert port.get() == (True, overlapped, 0x5151)
    assert connector.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
    assert connector.CompleteConnect(overlapped) == Status.PENDING
    assert port.get() == (True, overlapped, 0x5151)
    assert accepting.result() == Status.SUCCESS
    assert connector.NotifyDisconnect(overlapped) == Status.PENDING
    assert passive.disconnect() == Status.SUCCESS
    assert port.get() == (True, overlapped, 0x5151)
    other = kit.overlapped()
    assert connector.Disconnect(other) == Status.PENDING
    assert port.get() == (True, other, 0x5151)
    assert no_completion(cq)
    port.close()
