"""The perftest_peer example against perftest's programs, in both roles. perftest's own table says what it measured."""

from __future__ import annotations

import re

import pytest
from kit.helpers import has_kernel_driver, host_of, only_under_stress, require, sample
from kit.processes import Result, free_port, start_example, start_program, wait_for_rdma_listener, wait_for_tcp_listener
from kit.quirks import skip_where
from test_rc_pingpong import routable_gids

from ndpy import Capability
from ndpy.platforms.verbs import distribution
from ndpy.vocabulary.quirks import Quirk

COUNT = 300
TESTS = {
    "RC": ("send_lat", "write_bw", "read_bw", "write_lat", "read_lat", "send_bw", "atomic_bw", "atomic_lat"),
    "UC": ("send_lat", "send_bw", "write_bw", "write_lat"),
    "UD": ("send_lat", "send_bw"),
}
# How the two are connected. The connection manager connects no queue pairs of type UC.
WAYS = {"by number": ("RC", "UC", "UD"), "-R": ("RC", "UD")}
CASES = [
    (way, kind, test, role)
    for way, kinds in WAYS.items()
    for kind in kinds
    for test in TESTS[kind]
    for role in ("client", "server")
]
# On one emulated machine each of them takes ten seconds.
QUICK = [
    ("by number", "RC", "send_bw", "server"),
    ("by number", "RC", "write_bw", "client"),
    ("by number", "UD", "send_lat", "client"),
    ("by number", "RC", "atomic_bw", "server"),
    ("-R", "RC", "read_bw", "client"),
    ("-R", "UD", "send_lat", "server"),
]
CAPABILITIES = {"UC": Capability.UNRELIABLE_CONNECTIONS, "UD": Capability.DATAGRAMS}


def has_figures(result: Result) -> bool:
    """Whether perftest could measure the clock of the processor. On a busy machine it may fail, and then it has no
    figures.
    """
    return "Correlation coefficient" not in result.err


def row_of(text: str) -> list[str]:
    """The figures of perftest's table: bytes, number, and what it measured."""
    rows = re.findall(r"^ *(\d+ +\d+ +\d+\.\d.*)$", text, re.MULTILINE)
    assert len(rows) == 1, text
    return str(rows[0]).split()


def measure(adapter, config, way, test, role, *options):
    """Let the two measure each other. role: perftest's. Returns what ours and theirs wrote."""
    name, host = adapter.info.name, host_of(adapter)
    both = ("-d", name, "-n", COUNT, *options)
    both += ("-R",) if way == "-R" else ("-x", routable_gids(adapter)[0].index)
    theirs = (f"ib_{test}", distribution.PERFTEST, *both, "-F")
    ours = ("perftest_peer", test, *both)
    if role == "client":
        with start_example(*ours, "-p", 0) as server:
            port = server.wait_for(r"listening on .*port (\d+)")[1]
            with start_program(config, *theirs, "-p", port, host) as client:
                foreign = client.succeed()
            own = server.succeed()
    else:
        number = free_port()
        with start_program(config, *theirs, "-p", number) as server:
            (wait_for_rdma_listener if way == "-R" else wait_for_tcp_listener)(server, number)
            with start_example(*ours, "-p", number, host) as client:
                own = client.succeed()
            foreign = server.succeed()
    assert "connected to perftest " in own.out
    return own, foreign


@pytest.mark.parametrize(("way", "kind", "test", "role"), CASES)
def test_perftest_and_ours_measure_each_other(adapter, pytestconfig, way, kind, test, role):
    if way == "-R":
        # The client begins, and no more comes until the server has answered.
        skip_where(adapter, Quirk.SIW_LEAVES_FIRST_MESSAGE)
    else:
        skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
        if test == "send_bw" and adapter.info.transport == "iWARP":
            pytest.skip("on iWARP ib_send_bw without -R does not deregister its credits, and so fails at its end")
    if kind in CAPABILITIES:
        require(adapter, CAPABILITIES[kind])
    is_atomic = test.startswith("atomic")
    if is_atomic:
        require(adapter, Capability.ATOMICS)
    if has_kernel_driver(adapter) and (way, kind, test, role) not in sample(CASES, 0) + QUICK:
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine is slow at it")
    size = 8 if is_atomic else 16 if test.endswith("_lat") else 1024 if kind == "UD" else 4096
    options = () if is_atomic else ("-s", size)
    if kind != "RC":
        options += ("-c", kind)
    own, foreign = measure(adapter, pytestconfig, way, test, role, *options)
    is_one_sided_latency = test in ("read_lat", "atomic_lat")
    if not is_one_sided_latency or role == "server":
        assert f"{test}: {COUNT} times {size} bytes: " in own.out
    if not has_figures(foreign):
        return
    if not is_one_sided_latency or role == "client":
        row = row_of(foreign.out)
        assert row[:2] == [str(size), str(COUNT)]
        assert float(row[3]) > 0
    if test in ("write_bw", "read_bw", "atomic_bw"):
        # The server prints what the client told it.
        average = re.search(r"bytes: (\S+) MiB/s", own.out)[1]
        assert float(average) == pytest.approx(float(row_of(foreign.out)[3]), rel=0.01, abs=0.02)


@only_under_stress
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("test", ["write_bw", "write_lat"])
@pytest.mark.parametrize("role", ["client", "server"])
def test_their_writes_and_ours_carry_immediate_data(adapter, pytestconfig, way, test, role):
    require(adapter, Capability.IMMEDIATE_DATA)
    with start_program(pytestconfig, f"ib_{test}", distribution.PERFTEST, "--help") as asked:
        if "--write_with_imm" not in asked.finish().out:
            pytest.skip("this perftest has no --write_with_imm")
    own, foreign = measure(adapter, pytestconfig, way, test, role, "-s", 64, "--write_with_imm")
    assert f"{test}: {COUNT} times 64 bytes: " in own.out
    if has_figures(foreign):
        assert row_of(foreign.out)[:2] == ["64", str(COUNT)]
