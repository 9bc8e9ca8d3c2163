"""The perftest_peer example against perftest's programs, in both roles. perftest's own table says what it measured."""

from __future__ import annotations

import re

import pytest
from defects import skip_where
from helpers import has_kernel_driver, require, sample
from processes import free_port, start_example, start_program, wait_for_tcp_listener
from test_rc_pingpong import routable_gids

from ndpy import Capability
from ndpy.quirks import Quirk
from ndpy.verbs import distribution

COUNT = 300
TESTS = {
    "RC": ("send_lat", "write_bw", "read_bw", "write_lat", "read_lat", "send_bw", "atomic_bw", "atomic_lat"),
    "UC": ("send_lat", "send_bw", "write_bw", "write_lat"),
    "UD": ("send_lat", "send_bw"),
}
CASES = [(kind, test, role) for kind, tests in TESTS.items() for test in tests for role in ("client", "server")]
# On one emulated machine each of them takes ten seconds.
QUICK = [
    ("RC", "send_bw", "server"),
    ("RC", "write_bw", "client"),
    ("UD", "send_lat", "client"),
    ("RC", "atomic_bw", "server"),
]
CAPABILITIES = {"UC": Capability.UNRELIABLE_CONNECTIONS, "UD": Capability.DATAGRAMS}


def row_of(text: str) -> list[str]:
    """The figures of perftest's table: bytes, number, and what it measured."""
    (row,) = re.findall(r"^ *(\d+ +\d+ +\d+\.\d.*)$", text, re.MULTILINE)
    return str(row).split()


@pytest.mark.parametrize(("kind", "test", "role"), CASES)
def test_perftest_and_ours_measure_each_other(adapter, pytestconfig, kind, test, role):
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
    if test == "send_bw":
        # On iWARP perftest's receiver writes credits to its sender.
        skip_where(adapter, Quirk.IWARP_NO_IMMEDIATE_DATA)
    if kind in CAPABILITIES:
        require(adapter, CAPABILITIES[kind])
    is_atomic = test.startswith("atomic")
    if is_atomic:
        require(adapter, Capability.ATOMICS)
    if has_kernel_driver(adapter) and (kind, test, role) not in sample(CASES, 0) + QUICK:
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine is slow at it")
    name, index = adapter.info.name, routable_gids(adapter)[0].index
    size = 8 if is_atomic else 16 if test.endswith("_lat") else 1024 if kind == "UD" else 4096
    both = ("-d", name, "-x", index, "-n", COUNT, *(() if is_atomic else ("-s", size)))
    if kind != "RC":
        both += ("-c", kind)
    theirs = (f"ib_{test}", distribution.PERFTEST, *both, "-F")
    ours = (test, *both)
    if role == "client":
        with start_example("perftest_peer", *ours, "-p", 0) as server:
            port = server.wait_for(r"listening on TCP port (\d+)")[1]
            with start_program(pytestconfig, *theirs, "-p", port, "127.0.0.1") as client:
                foreign = client.succeed()
            own = server.succeed()
    else:
        number = free_port()
        with start_program(pytestconfig, *theirs, "-p", number) as server:
            wait_for_tcp_listener(server, number)
            with start_example("perftest_peer", *ours, "-p", number, "127.0.0.1") as client:
                own = client.succeed()
            foreign = server.succeed()
    assert "connected to perftest " in own.out
    is_one_sided_latency = test in ("read_lat", "atomic_lat")
    if not is_one_sided_latency or role == "server":
        assert f"{test}: {COUNT} times {size} bytes: " in own.out
    if not is_one_sided_latency or role == "client":
        row = row_of(foreign.out)
        assert row[:2] == [str(size), str(COUNT)]
        assert float(row[3]) > 0
    if test in ("write_bw", "read_bw", "atomic_bw"):
        # The server prints what the client told it.
        average = re.search(r"bytes: (\S+) MiB/s", own.out)[1]
        assert float(average) == pytest.approx(float(row_of(foreign.out)[3]), rel=0.01, abs=0.02)
