"""softnd's client under Wine with iwarp.py as server on the loopback: set-ups that siw never chooses."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

import hostile
import iwarp
import pytest
import rping_wire
from hostile import WindowsProcess
from iwarp import Endpoint, Opcode, Rtr, Startup

SIZE, ROUNDS = 10007, 20

pytestmark = pytest.mark.timeout(120)


class StaleEndpoint(Endpoint):
    """Answers Reads of no bytes with unrequested bytes, as siw does when it is busy."""

    def _answer_read(self, request: bytes) -> None:
        sink_stag, sink_offset, size, _, _ = iwarp.READ_REQUEST.unpack(request)
        if size:
            super()._answer_read(request)
            return
        stale = b"stale bytes" * 2000
        self.send_raw(iwarp.tagged(Opcode.READ_RESPONSE, sink_stag, sink_offset, stale, last=False))
        self.send_raw(iwarp.tagged(Opcode.READ_RESPONSE, sink_stag, sink_offset + len(stale), b"end"))


class Server:
    """Accepts connections one after another, each with the next of the answers. None closes without an answer."""

    def __init__(self, answers: list[Startup | None], kind: type[Endpoint] = Endpoint) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests: list[Startup] = []
        self.seen: list[bytes] = []
        self.endpoint: Endpoint | None = None
        self._thread = threading.Thread(target=self._run, args=(answers, kind), daemon=True)
        self._thread.start()

    def _run(self, answers: list[Startup | None], kind: type[Endpoint]) -> None:
        for answer in answers:
            accepted, _ = self._listener.accept()
            with kind(accepted) as endpoint:
                self.endpoint = endpoint
                self.requests.append(endpoint.await_start())
                if answer is not None:
                    endpoint.answer(answer)
                    self.seen = rping_wire.server(endpoint)

    def finish(self) -> None:
        with contextlib.closing(self._listener):
            self._thread.join(30)
        assert not self._thread.is_alive()


REPLY = Startup(reply=True, ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ)


def run_client(server: Server) -> None:
    program = hostile.windows_program("rping")
    arguments = (hostile.dll(), "client", "127.0.0.1", server.port, SIZE, ROUNDS)
    with WindowsProcess(program, *arguments, limit_s=60) as process:
        status = process.finish(60)
    assert (status, process.lines) == (0, [f"client: {ROUNDS} rounds of {SIZE} bytes verified"])
    server.finish()
    assert server.seen == [rping_wire.pattern(number, SIZE) for number in range(ROUNDS)]


def test_first_message_is_a_read_of_no_bytes():
    server = Server([REPLY])
    run_client(server)
    (request,) = server.requests
    assert (request.revision, request.enhanced, request.peer_to_peer) == (2, True, True)
    assert request.rtr & Rtr.READ and not request.markers
    assert server.endpoint is not None and server.endpoint.rtr_taken


def test_peer_with_crc_gets_crcs():
    server = Server([dataclasses.replace(REPLY, crc=True)])
    run_client(server)
    assert server.endpoint is not None and server.endpoint.crc


def test_peer_that_knows_only_revision_1_is_asked_again_in_its_way():
    server = Server([None, Startup(reply=True, revision=1, enhanced=False)])
    run_client(server)
    assert [request.revision for request in server.requests] == [2, 1]


def test_peer_that_answers_with_revision_1_is_understood():
    run_client(Server([Startup(reply=True, revision=1, enhanced=False)]))


def test_bytes_in_the_answer_to_a_read_of_none_are_dropped():
    run_client(Server([REPLY], StaleEndpoint))
