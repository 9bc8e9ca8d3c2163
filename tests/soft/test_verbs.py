"""What verbs programs find in soft0, which is not a matter of ndpy. Each test runs a C program of programs/."""

from __future__ import annotations

import pytest
from c_programs import run


def test_a_message_without_a_receive_waits_as_long_as_rnr_retry_says():
    run("patience")


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
