"""iwarp.py against itself, and against the numbers of the RFCs."""

from __future__ import annotations

import dataclasses
import socket

import iwarp
import pytest
import rping_wire
from iwarp import Endpoint, Opcode, Rights, Rtr, Startup
from kit.threads import Elsewhere


def streams() -> tuple[Endpoint, Endpoint]:
    """The two ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        active = iwarp.connect(*listener.getsockname())
        accepted, _ = listener.accept()
    return active, Endpoint(accepted)


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (
            bytes.fromhex(
                "01c00000 00000000 00000000 00000000 14000000 00000400"
                "00000014 00000018 28000000 00000000 02000000 00000000"
            ),
            0xD9963A56,
        ),
    ],
)
def test_crc32c_has_the_values_of_rfc_3720_b_4(data, checksum):
    assert iwarp.crc32c(data) == checksum


def test_start_up_frame_has_the_layout_of_rfc_5044_and_6581():
    start = Startup(ird=1, ord=0x3FFF, peer_to_peer=True, rtr=Rtr.READ, crc=True, private_data=b"hello")
    data = b"MPA ID Req Frame" + bytes([0x50, 2, 0, 9, 0x80, 0x01, 0x7F, 0xFF]) + b"hello"
    assert start.encode() == data
    assert iwarp.decode_startup(data + b"more", reply=False) == (start, len(data))
    assert all(iwarp.decode_startup(data[:size], reply=False) is None for size in range(len(data)))


def test_segments_have_the_layout_of_rfc_5041_and_5040():
    write = iwarp.tagged(Opcode.WRITE, 0x01020304, 0x1122334455667788, b"abc")
    assert write == bytes.fromhex("c140 01020304 1122334455667788") + b"abc"
    send = iwarp.untagged(Opcode.SEND_SE_INVALIDATE, 0, 7, b"x", offset=9, invalidate=0xAABBCCDD, last=False)
    assert send == bytes.fromhex("0146 aabbccdd 00000000 00000007 00000009") + b"x"
    assert iwarp.fpdu(b"abc", crc=False) == b"\0\3abc\0\0\0" + bytes(4)
    assert iwarp.fpdu_size(3) == 12


@pytest.mark.parametrize("start", rping_wire.STARTS.values(), ids=rping_wire.STARTS.keys())
def test_both_ends_understand_each_other(start):
    active, passive = streams()

    def serve() -> list[bytes]:
        request = passive.await_start()
        passive.answer(dataclasses.replace(request.answered(), peer_to_peer=request.peer_to_peer, rtr=request.rtr))
        return list(rping_wire.server(passive))

    server = Elsewhere(serve).start()
    with active:
        reply = active.start(start)
        assert reply.enhanced == start.enhanced
        rping_wire.client(active, 3, 40000)
    assert server.result() == [rping_wire.pattern(number, 40000) for number in range(3)]
    assert passive.crc == start.crc
    assert passive.rtr_taken == bool(start.rtr)
    passive.close()


def test_invalidated_memory_is_refused_and_a_terminate_is_understood():
    active, passive = streams()
    with active, passive:
        active.local = passive.local = Startup()
        memory = bytearray(16)
        stag = passive.expose(memory, Rights.WRITE)
        active.write(stag, 3, b"abc")
        active.send(b"done", solicited=True, invalidate=stag)
        assert passive.receive() == iwarp.Message(b"done", True, stag)
        assert memory == bytes(3) + b"abc" + bytes(10)
        active.write(stag, 3, b"xyz")
        with pytest.raises(iwarp.ProtocolError, match="unknown stag"):
            passive.run_until(lambda: False)
        header = iwarp.tagged(Opcode.WRITE, stag, 3, b"")
        passive.terminate(1, 1, 0, header)
        with pytest.raises(iwarp.ClosedError):
            active.run_until(lambda: False)
        assert active.terminated == iwarp.Terminate(1, 1, 0, header, length=14)
