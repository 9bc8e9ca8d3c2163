"""Connections of ndpy.aio between two hosts whose network loses frames. tests/soak/busy_connections.py accounts for every byte."""

from __future__ import annotations

import pytest
from helpers import SEED, only_under_stress
from hosts.soaking import Process

PORT = 7475
# Both processes import Python and end their connections in an emulated machine.
_SLACK_S = 330.0


@only_under_stress
@pytest.mark.timeout(1800)
def test_every_byte_of_connections_that_come_and_go_is_accounted_for(
    adapter_name, peer_host, network, nothing_leaks, peer_address
):
    """Ten minutes. The server is on the other host. Clients here are killed."""
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    seconds = 600
    with network.disturbed("loss", "1%"):
        server = peer_host.call("hosts.soaking:Process", seconds, adapter_name, "--serve", f"{peer_address}:{PORT}")
        clients = Process(seconds, adapter_name, "--peer", f"{peer_address}:{PORT}")
        status, output = clients.end(seconds + _SLACK_S)
        print(output)
        there, served = server.end(100.0 if status == 0 else 1.0)
        print(served)
    assert status == 0, output
    assert there == 0, served
    assert "every byte was accounted for" in served
