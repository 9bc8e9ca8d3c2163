"""Programs of rdma-core, perftest and qperf on soft0: both ends of each are the foreign program."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from helpers import only_under_stress
from processes import Process, Result, free_port, wait_for_tcp_listener

from ndpy.cli import soft
from ndpy.verbs import softverbs

BY_NUMBER = ("-d", "soft0", "-x", "0")
BY_MANAGER = ("-R",)
TOOLS = [f"ib_{operation}_{what}" for operation in ("send", "write", "read") for what in ("bw", "lat")]
# On iWARP ib_send_bw keeps a region for its credits. Without -R it never deregisters that, and so fails at its end.
BY_NUMBER_TOOLS = [tool for tool in TOOLS if tool != "ib_send_bw"]

pytestmark = pytest.mark.timeout(120)


def start(program: str, *arguments: object) -> Process:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: make setup")
    return Process(path, *map(str, arguments), variables=soft.environment(softverbs.folder(), os.environ))


def run_both(program: str, server_options: tuple[object, ...], *client_options: object) -> tuple[Result, Result]:
    """Run a server and a client, which find each other by TCP port. Returns how both ended."""
    port = free_port()
    with start(program, *server_options, "-p", port) as server:
        wait_for_tcp_listener(server, port)
        with start(program, *client_options, "-p", port, "127.0.0.1") as client:
            ended = client.succeed()
        return server.succeed(), ended


def perftest(tool: str, *options: object) -> None:
    _, client = run_both(tool, ("-F", *options), "-F", *options)
    # The table's last lines: bytes, iterations, and figures above 0.
    rows = [line.split() for line in client.out.splitlines() if re.match(r"\s*\d+\s+\d+\s+\d+\.\d", line)]
    assert rows, client.out
    assert all(float(row[3]) > 0 for row in rows), client.out


@pytest.mark.parametrize("tool", BY_NUMBER_TOOLS)
def test_perftest_connects_by_number(tool):
    perftest(tool, *BY_NUMBER, "-n", 200)


@pytest.mark.parametrize("tool", TOOLS)
def test_perftest_connects_by_the_connection_manager(tool):
    perftest(tool, *BY_MANAGER, "-n", 200)


@pytest.mark.parametrize("tool", ["ib_send_lat", "ib_send_bw", "ib_read_bw"])
def test_perftest_waits_for_events(tool):
    perftest(tool, *BY_MANAGER, "-e", "-n", 200)


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool.endswith("_bw")])
def test_perftest_goes_both_ways_on_three_queue_pairs(tool):
    perftest(tool, *BY_MANAGER, "-b", "-q", 3, "-n", 200)


@pytest.mark.parametrize("options", [("-l", 8), ("-I", 64, "-s", 32)], ids=str)
def test_perftest_posts_lists_and_inline_requests(options):
    perftest("ib_write_bw", *BY_NUMBER, *options, "-n", 208)


def test_perftest_receives_from_a_shared_queue():
    perftest("ib_send_lat", *BY_NUMBER, "--use-srq", "-n", 200)


@only_under_stress
@pytest.mark.parametrize("tool", BY_NUMBER_TOOLS)
def test_perftest_sweeps_all_sizes(tool):
    perftest(tool, *BY_NUMBER, "-a", "-n", 20)


def test_ibv_srq_pingpong_verifies_what_comes_back():
    options = ("-d", "soft0", "-g", 0, "-q", 4, "-n", 500, "-c")
    server, client = run_both("ibv_srq_pingpong", options, *options)
    for ended in (server, client):
        assert "500 iters" in ended.out
        assert "invalid data" not in ended.out


# soft0 has no immediate data, which qperf's other writes need.
@pytest.mark.parametrize(
    "test", ["rc_bw", "rc_lat", "rc_bi_bw", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_poll_lat"]
)
def test_qperf(test):
    port = free_port()
    with start("qperf", "-lp", port) as server:
        wait_for_tcp_listener(server, port)
        with start("qperf", "-lp", port, "-t", 1, "-cm", 1, "127.0.0.1", test) as client:
            ended = client.succeed()
        with start("qperf", "-lp", port, "127.0.0.1", "quit") as client:
            client.succeed()
        server.succeed()
    figure = re.search(r"(bw|latency)\s+=\s+([\d.]+)", ended.out)
    assert figure and float(figure[2]) > 0, ended.out
