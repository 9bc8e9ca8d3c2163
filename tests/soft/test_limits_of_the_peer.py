"""soft0 against an iWARP peer whose limits are its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from iwarp import READ_REQUEST, Endpoint, Rights, Rtr, Startup
from kit.helpers import DEADLINE_S, Keeper, create_end, host_of, memory, succeed

import ndpy
from ndpy import Access

SINK = Access.LOCAL_WRITE | Access.READ_SINK
BASE = 0x100000


class SlowReader(Endpoint):
    """Answers the reads of a program only after having listened for a while whether more of them come.

    most: how many were there at once.
    """

    def __init__(self, connected: socket.socket, quiet_s: float) -> None:
        super().__init__(connected, limit_s=DEADLINE_S)
        self.quiet_s = quiet_s
        self.held: list[bytes] = []
        self.most = 0

    def _answer_read(self, request: bytes) -> None:
        if READ_REQUEST.unpack(request)[2] == 0:
            super()._answer_read(request)
            return
        self.held.append(request)
        self.most = max(self.most, len(self.held))

    def serve(self, count: int) -> None:
        answered = 0
        while answered < count:
            self.run_until(lambda: bool(self.held))
            until = time.monotonic() + self.quiet_s
            self.socket.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                while True:
                    self._receive(until)
                    self._take_fpdus(lambda: False)
            self.socket.settimeout(None)
            super()._answer_read(self.held.pop(0))
            answered += 1


@pytest.fixture
def keep():
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.mark.parametrize(("limit", "own"), [(1, None), (2, None), (4, 2)])
def test_no_more_reads_are_under_way_than_the_peer_takes(keep, limit, own):
    """The peer says how many. The program posts eight at once, and asks for two itself in one case."""
    adapter = keep(ndpy.open_adapter("soft0"))
    address = host_of(adapter)
    data = bytearray(range(64))
    peers: list[SlowReader] = []
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            connected, _ = server.accept()
            with SlowReader(connected, 0.05) as peer:
                peers.append(peer)
                request = peer.await_start()
                rtr = Rtr.READ
                peer.answer(
                    Startup(
                        reply=True,
                        revision=request.revision,
                        enhanced=True,
                        peer_to_peer=True,
                        rtr=rtr,
                        ird=limit,
                        ord=1,
                    )
                )
                stags.append(peer.expose(data, Rights.READ, BASE))
                peer.serve(8)
                peer.run_to_the_end()

        stags: list[int] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        end = create_end(keep, adapter)
        connector = keep(adapter.create_connector())
        connector.connect(
            end.queue_pair, (address, server.getsockname()[1]), outbound_read_limit=own, timeout_s=DEADLINE_S
        )
        expected = min(limit, own or limit)
        assert connector.read_limits.outbound == expected
        connector.complete_connect(DEADLINE_S)
        sink = memory(keep, adapter, bytes(64), SINK)
        while not stags:
            time.sleep(0.001)
        for place in range(8):
            part = slice(8 * place, 8 * place + 8)
            remote = ndpy.RemoteMemory(BASE, 64, stags[0])
            end.queue_pair.read(sink[part], remote[part], context=place)
        ended = succeed(end.cq, 8)
        assert [completion.context for completion in ended] == list(range(8))
        assert bytes(sink.buffer) == bytes(data)
        connector.close()
        thread.join(DEADLINE_S)
    assert peers[0].most == expected


def test_a_fenced_send_waits_for_the_read_before_it(keep):
    """The peer answers the read late. Until then no message comes, and then it carries what was read."""
    adapter = keep(ndpy.open_adapter("soft0"))
    address = host_of(adapter)
    seen: list[object] = []
    stags: list[int] = []
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            connected, _ = server.accept()
            with SlowReader(connected, 0.1) as peer:
                revision = peer.await_start().revision
                peer.answer(
                    Startup(reply=True, revision=revision, enhanced=True, peer_to_peer=True, rtr=Rtr.READ, ird=4, ord=1)
                )
                stags.append(peer.expose(bytearray(b"was read"), Rights.READ, BASE))
                peer.run_until(lambda: bool(peer.held))
                with contextlib.suppress(TimeoutError):
                    until = time.monotonic() + peer.quiet_s
                    while True:
                        peer._receive(until)
                        peer._take_fpdus(lambda: False)
                seen.append(len(peer.messages))
                Endpoint._answer_read(peer, peer.held.pop())
                seen.append(peer.receive().data)
                peer.run_to_the_end()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        end = create_end(keep, adapter)
        connector = keep(adapter.create_connector())
        connector.connect(end.queue_pair, (address, server.getsockname()[1]), timeout_s=DEADLINE_S)
        connector.complete_connect(DEADLINE_S)
        while not stags:
            time.sleep(0.001)
        region = memory(keep, adapter, b"too soon", SINK)
        end.queue_pair.read(region, ndpy.RemoteMemory(BASE, 8, stags[0]), context=1)
        end.queue_pair.send(region, context=2, flags=ndpy.Flags.READ_FENCE)
        assert [completion.context for completion in succeed(end.cq, 2)] == [1, 2]
        connector.close()
        thread.join(DEADLINE_S)
    assert seen == [0, b"was read"]
