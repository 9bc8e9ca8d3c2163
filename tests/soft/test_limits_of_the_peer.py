"""soft0 against an iWARP peer whose limits are its own."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time

import pytest
from iwarp import READ_REQUEST, Endpoint, Rights, Rtr, Startup
from kit.helpers import DEADLINE_S, create_end, host_of, memory, succeed, wait_until
from kit.threads import Elsewhere

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


@contextlib.contextmanager
def connected(keep, adapter, data, act, *, quiet_s, limit, **options):
    """Connect to a peer that takes so many reads at once.
    Yields our end, the peer's memory, and act(peer) in a thread.
    """
    stags: list[int] = []
    with socket.create_server((host_of(adapter), 0)) as server:

        def serve():
            accepted, _ = server.accept()
            with SlowReader(accepted, quiet_s) as peer:
                start = Startup(reply=True, peer_to_peer=True, rtr=Rtr.READ, ird=limit, ord=1)
                peer.answer(dataclasses.replace(start, revision=peer.await_start().revision))
                stags.append(peer.expose(data, Rights.READ, BASE))
                return act(peer)

        acting = Elsewhere(serve).start()
        end = create_end(keep, adapter)
        end.connector = keep(adapter.create_connector())
        end.connector.connect(end.queue_pair, server.getsockname()[:2], timeout_s=DEADLINE_S, **options)
        end.connector.complete_connect(DEADLINE_S)
        wait_until(lambda: stags, "the peer exposes its memory")
        yield end, ndpy.RemoteMemory(BASE, len(data), stags[0]), acting


@pytest.mark.parametrize(("limit", "own"), [(1, None), (2, None), (4, 2)])
def test_no_more_reads_are_under_way_than_the_peer_takes(keep, limit, own):
    """The peer says how many. The program posts eight at once, and asks for two itself in one case."""
    adapter = keep(ndpy.open_adapter("soft0"))
    data = bytearray(range(64))

    def act(peer: SlowReader) -> int:
        peer.serve(8)
        peer.run_to_the_end()
        return peer.most

    with connected(keep, adapter, data, act, quiet_s=0.05, limit=limit, outbound_read_limit=own) as (
        end,
        there,
        acting,
    ):
        expected = min(limit, own or limit)
        assert end.connector.read_limits.outbound == expected
        sink = memory(keep, adapter, bytes(64), SINK)
        for place in range(8):
            part = slice(8 * place, 8 * place + 8)
            end.queue_pair.read(sink[part], there[part], context=place)
        ended = succeed(end.cq, 8)
        assert [completion.context for completion in ended] == list(range(8))
        assert bytes(sink.buffer) == bytes(data)
        end.connector.close()
        assert acting.result() == expected


def test_a_fenced_send_waits_for_the_read_before_it(keep):
    """The peer answers the read late. Until then no message comes, and then it carries what was read."""
    adapter = keep(ndpy.open_adapter("soft0"))

    def act(peer: SlowReader) -> tuple[int, bytes]:
        peer.run_until(lambda: bool(peer.held))
        with contextlib.suppress(TimeoutError):
            until = time.monotonic() + peer.quiet_s
            while True:
                peer._receive(until)
                peer._take_fpdus(lambda: False)
        before = len(peer.messages)
        Endpoint._answer_read(peer, peer.held.pop())
        data = peer.receive().data
        peer.run_to_the_end()
        return before, data

    with connected(keep, adapter, bytearray(b"was read"), act, quiet_s=0.1, limit=4) as (end, there, acting):
        region = memory(keep, adapter, b"too soon", SINK)
        end.queue_pair.read(region, there, context=1)
        end.queue_pair.send(region, context=2, flags=ndpy.Flags.READ_FENCE)
        assert [completion.context for completion in succeed(end.cq, 2)] == [1, 2]
        end.connector.close()
        assert acting.result() == (0, b"was read")
