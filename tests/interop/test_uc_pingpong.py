"""The rc_pingpong example with queue pairs of the type UC, against ibverbs-utils' ibv_uc_pingpong, in both roles."""

from __future__ import annotations

import pytest
from helpers import require
from processes import free_port, start_example, start_program, wait_for_tcp_listener
from test_rc_pingpong import routable_gids

from ndpy import Capability
from ndpy.verbs import distribution

SIZE, COUNT = 10007, 50


@pytest.mark.parametrize("role", ["client", "server"])
def test_ibv_uc_pingpong(adapter, pytestconfig, role):
    require(adapter, Capability.UNRELIABLE_CONNECTIONS)
    common = ("-d", adapter.info.name, "-s", SIZE, "-n", COUNT)
    theirs = ("ibv_uc_pingpong", distribution.VERBS_PROGRAMS, *common, "-g", routable_gids(adapter)[0].index)
    ours = ("rc_pingpong", *common, "-t", "UC")
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
    assert f"{COUNT} iters of {SIZE} bytes verified" in result.out
