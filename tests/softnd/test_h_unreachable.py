"""Connect to addresses where nobody can answer (H.4.2).

No packet leaves loopback: the kernel has no route there from 127.0.0.1 or ::1.
"""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from consumer import Side, accept, connect, get_address
from version2 import Status

PORT = 7174
START_UP_S = 1.0


def connects_to_a_listener(kit, side, node):
    """H.4.4: check that a failed attempt left connector and queue pair usable."""
    listener, passive = node.listener(), Side(node, 2)
    arrived = kit.issue(listener, "GetConnectionRequest", passive.connector)
    again = connect(kit, side.connector, side.qp, get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    accepting = accept(kit, passive.connector, passive.qp)
    assert again.result() == Status.SUCCESS
    assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
    assert accepting.result() == Status.SUCCESS


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ("127.0.0.1", "127.255.255.255"),
        ("127.0.0.1", "255.255.255.255"),
        ("127.0.0.1", "224.0.0.1"),
        ("127.0.0.1", "198.51.100.1"),  # RFC 5737: reserved for documentation
        ("::1", "ff02::1"),
    ],
    ids=["broadcast on loopback", "broadcast", "multicast", "beyond loopback", "IPv6 multicast"],
)
def test_h_4_2_no_route_is_network_unreachable_and_may_be_retried(kit, local, remote):
    node = kit.node(local)
    side = Side(node, 1)
    side.connector = node.bound_connector()
    side.receive(side.region.sge(0, 8), context=5)
    attempt = connect(kit, side.connector, side.qp, (remote, PORT))
    assert attempt.result() == Status.NETWORK_UNREACHABLE
    connects_to_a_listener(kit, side, node)


def test_h_4_2_nobody_answers_is_a_timeout_and_may_be_retried(kit, monkeypatch):
    monkeypatch.setenv("SOFTND_START_UP_MS", str(int(START_UP_S * 1000)))
    node = kit.node()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # A full backlog does not answer.
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filling.connect(listening.getsockname())
        side = Side(node, 1)
        began = time.monotonic()
        attempt = connect(kit, side.connector, side.qp, listening.getsockname()[:2])
        assert attempt.result() == Status.IO_TIMEOUT
        assert time.monotonic() - began >= START_UP_S - 0.1
    connects_to_a_listener(kit, side, node)
