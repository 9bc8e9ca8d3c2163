"""Connections by number and GID, as programs make them that take their time between the steps."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from kit.helpers import DEADLINE_S, contents, create_end, memory, succeed

from ndpy import AddressVector, QueuePairState

# softrdma/verbs/pairing.c waits 20 ms for the PSN of the end that connects. Then it greets without it.
LATER_S = 0.1


def receive_from(one, other, gid):
    local, remote = one.queue_pair.local_endpoint(gid.index), other.queue_pair.local_endpoint(gid.index)
    one.queue_pair.modify(
        state=QueuePairState.RTR,
        path=AddressVector(gid=remote.gid, gid_index=gid.index, lid=0, port=1),
        path_mtu=1024,
        remote_number=remote.qp_number,
        receive_psn=remote.psn,
        inbound_read_limit=2,
        min_rnr_timer=12,
    )
    assert local.psn != remote.psn


def send(one):
    psn = one.queue_pair.local_endpoint().psn
    retries = {"ack_timeout": 14, "retry_count": 7, "rnr_retry_count": 7}
    one.queue_pair.modify(state=QueuePairState.RTS, send_psn=psn, outbound_read_limit=2, **retries)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("senders", ["both", "the one that connects", "the one that accepts", "both, the latter first"])
def test_ends_become_ready_to_send_late_or_never(keep, adapter, address, senders):
    """A program that only receives may stay in RTR. The other one's PSN is proof then."""
    gid = next((gid for gid in adapter.info.ports[0].gids if gid.address == address), None)
    if gid is None:
        pytest.skip(f"this machine has no {address}")
    made = sorted((create_end(keep, adapter), create_end(keep, adapter)), key=lambda end: end.queue_pair.number)
    connects, accepts = made
    for one, other in ((connects, accepts), (accepts, connects)):
        receive_from(one, other, gid)
    time.sleep(LATER_S)
    order = {
        "both": [connects, accepts],
        "the one that connects": [connects],
        "the one that accepts": [accepts],
        "both, the latter first": [accepts, connects],
    }[senders]
    for one in order:
        send(one)
        time.sleep(LATER_S)
    for one in order:
        other = accepts if one is connects else connects
        inbox = memory(keep, adapter, 16)
        other.queue_pair.receive(inbox)
        one.queue_pair.send(memory(keep, adapter, b"ready"))
        succeed(one.cq)
        succeed(other.cq)
        assert contents(inbox).startswith(b"ready")


LOOKING = """
import sys, time
from pathlib import Path
import ndpy
from ndpy import AddressVector, QueuePairState

def attempts():
    return sum("connector" in line and "released" in line for line in Path(sys.argv[1]).read_text().splitlines())

with ndpy.open_adapter("soft0") as adapter, adapter.create_completion_queue(4) as cq:
    with adapter.create_queue_pair(cq) as queue_pair:
        gid = next(gid for gid in adapter.info.ports[0].gids if gid.address == "127.0.0.1")
        queue_pair.modify(
            state=QueuePairState.RTR,
            path=AddressVector(gid=gid.value, gid_index=gid.index, lid=0, port=1),
            path_mtu=1024,
            remote_number=0xFFFF00,  # nobody; the end with the smaller number connects
            receive_psn=1,
            inbound_read_limit=2,
            min_rnr_timer=12,
        )
        deadline = time.monotonic() + float(sys.argv[2])
        while attempts() < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        queue_pair.modify(state=QueuePairState.ERROR)
        made = attempts()
        time.sleep(1)  # four times the longest pause
        print(made, attempts())
"""


def test_a_queue_pair_in_the_error_state_looks_for_its_peer_no_more(tmp_path):
    """An attempt that cannot begin makes a socket nevertheless, which the trace shows and nobody else sees."""
    trace = tmp_path / "trace"
    done = subprocess.run(
        [sys.executable, "-c", LOOKING, trace, str(DEADLINE_S)],
        env={**os.environ, "SOFTVERBS_TRACE": str(trace)},
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,
    )
    before, after = map(int, done.stdout.split())
    assert before >= 3, done
    assert after == before
