"""Section I: version 1 of the interface, with softnd on both sides, and beside version 2."""

from __future__ import annotations

from consumer1 import make_pair, result_of
from nd2 import Status


def test_i_1_two_programs_of_version_1_send_and_receive(kit):
    active, passive = make_pair(kit)
    active.region.put(0, b"hello, version 1")
    received = passive.receive(passive.region.sge(100, 64))
    sent = active.send(active.region.sge(0, 16))
    assert passive.expect(received).bytes == 16
    assert active.expect(sent).bytes == 16
    assert passive.region.get(100, 16) == b"hello, version 1"
    assert result_of(received) == Status.SUCCESS
    assert active.disconnect() == Status.SUCCESS
    assert passive.disconnect() == Status.SUCCESS
