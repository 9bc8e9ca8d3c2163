"""The rc_pingpong example with unreliable queue pairs, against ibv_uc_pingpong and ibv_ud_pingpong, in both roles."""

from __future__ import annotations

import pytest
from kit.helpers import require, sample
from kit.processes import free_port, start_example, start_program, wait_for_tcp_listener
from test_rc_pingpong import routable_gids

from ndpy import Capability
from ndpy.platforms.verbs import distribution

COUNT = 50
# The capability that it needs, and the size of a message. A datagram is at most as long as the MTU.
TYPES = {"UC": (Capability.UNRELIABLE_CONNECTIONS, 10007), "UD": (Capability.DATAGRAMS, 999)}
CASES = sample([("UC", "client"), ("UD", "server"), ("UC", "server"), ("UD", "client")], 2)


@pytest.mark.parametrize(("kind", "role"), CASES)
def test_messages_of_unreliable_queue_pairs(adapter, pytestconfig, kind, role):
    capability, size = TYPES[kind]
    require(adapter, capability)
    common = ("-d", adapter.info.name, "-s", size, "-n", COUNT)
    program = f"ibv_{kind.lower()}_pingpong"
    theirs = (program, distribution.VERBS_PROGRAMS, *common, "-g", routable_gids(adapter)[0].index)
    ours = ("rc_pingpong", *common, "-t", kind)
    if role == "client":
        with start_example(*ours, "-p", 0) as server:
            port = server.wait_for(r"listening on TCP port (\d+)")[1]
            with start_program(pytestconfig, *theirs, "-p", port, "127.0.0.1") as client:
                client.succeed()
            result = server.succeed()
    else:
        number = free_port()
        with start_program(pytestconfig, *theirs, "-p", number) as server:
            wait_for_tcp_listener(server, number)
            with start_example(*ours, "-p", number, "127.0.0.1") as client:
                result = client.succeed()
            server.succeed()
    assert f"{COUNT} iters of {size} bytes verified" in result.out
