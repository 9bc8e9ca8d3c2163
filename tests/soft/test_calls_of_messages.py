"""How many system calls a message costs on soft0, and a connection. softrdma/verbs/README.md has the table.

The numbers are those of a program whose own thread does the work. On a busy machine the library's threads come first
now and then, which costs more: a mode is tried several times then.
"""

from __future__ import annotations

import os

import pytest
from c_programs import number, run

TRIES = 5


def counted(mode: str, call: str, least: float) -> str:
    """What the program counted, when its own thread made at least so many of these calls for a message."""
    for _ in range(TRIES):
        output = run("calls", mode)
        if number(call, output) >= least:
            return output
    pytest.skip(f"the machine is busy: {number(call, output)} calls of {call} in place of {least}")


def test_a_loop_of_the_program_learns_of_its_own_work_without_a_descriptor():
    output = counted("loop", "fcntl", 1.8)
    # Its second event is raised when it asks for the next one before it has polled.
    assert number("write", output) < 1.3
    assert number("preadv2", output) < 1.3
    # Nothing waits in the library, so signals stay as they are.
    assert number("rt_sigprocmask", output) < 0.2
    assert number("send", output) < 2.1
    assert number("recv", output) < 1.3


def test_a_program_that_sleeps_in_the_library_is_not_told_by_a_descriptor_either():
    output = counted("asleep", "ppoll", 0.6)
    assert number("write", output) < 1.5
    assert number("preadv2", output) < 1.5
    assert number("send", output) < 2.1
    assert number("recv", output) < 1.5


def test_a_program_that_looks_for_completions_uses_no_event():
    output = run("calls", "polled")
    for call in ("write", "preadv2", "rt_sigprocmask", "fcntl", "ppoll"):
        assert number(call, output) < 0.1
    assert number("send", output) < 2.1


def test_programs_that_look_for_completions_on_one_processor_switch_once_for_a_message():
    processor = min(os.sched_getaffinity(0))
    output = run("calls", "polled", under=("taskset", "-c", str(processor)))
    # The peer runs in between, and no thread of the library.
    assert number("switches", output) < 1.5
    assert number("futex", output) < 0.2
    assert number("recv", output) < 1.2


def test_a_stream_of_64_kib_writes_costs_one_send_each():
    output = run("calls", "stream")
    # In a buffer that is a little too small for two of them, the second one has to be moved.
    assert number("moved", output) < 16384
    assert number("send", output) < 1.1
    assert number("recv", output) < 1.1
    assert number("write", output) < 0.1


def test_a_connection_asks_the_system_nothing_that_the_library_knows():
    output = run("connection_calls")
    # The active end: what leads to the peer, that nothing is bound yet, and the port that it got. The passive end's
    # address is that of its listener.
    assert number("getsockname", output) <= 3
    assert number("getpeername", output) == 0
    assert number("ioctl", output) == 0
    # Of the active end, how it binds, TCP_NODELAY and SO_KEEPALIVE, which the passive one has from its listener. Of
    # both, how they end, at the beginning and before the FIN.
    assert number("setsockopt", output) <= 7
