"""What verbs programs find in soft0, which is not a matter of ndpy. Each test runs a C program of programs/."""

from __future__ import annotations

import pytest
from c_programs import number, run
from kit.deadlines import patient


def test_a_message_without_a_receive_waits_as_long_as_rnr_retry_says():
    run("patience")


@pytest.mark.parametrize("how", ["disconnects", "exits", "killed"])
@pytest.mark.parametrize("size", [64, 2**15, 2**16, 2**18], ids="{} bytes".format)
def test_the_end_of_a_peer_is_told_although_its_messages_find_no_receive(how, size):
    took_ms = number("told after", run("end_behind_messages", how, 16, size))
    assert took_ms < patient(5.0) * 1000


def test_requests_that_wait_for_others_need_no_look():
    run("gathered")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("windows", id="a window takes every right of a region"),
        pytest.param("depth", id="a completion queue has room for what libfabric asks for"),
        pytest.param("domains", id="receives of a shared queue are checked against its domain"),
        pytest.param("tails", id="structures of newer headers are zeroed to their end"),
        pytest.param("gids", id="a table of GIDs that does not fit is refused"),
        pytest.param("rights", id="peers may change only what its owner may change"),
        pytest.param("service", id="the type of service of an identifier is that of its TCP connection"),
        pytest.param("events", id="what an event is about stays until the event is acknowledged"),
        pytest.param("timeout", id="the ACK timeout of an identifier is told"),
    ],
)
def test_small_calls(part):
    run("small_calls", part)
