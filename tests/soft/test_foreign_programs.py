"""Programs of rdma-core, perftest and qperf on soft0: both ends of each are the foreign program."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from kit.deadlines import patient
from kit.helpers import only_under_stress
from kit.processes import Process, Result, free_port, wait_for_tcp_listener

from ndpy.platforms.verbs import softverbs

BY_NUMBER = ("-d", "soft0", "-x", "0")
BY_MANAGER = ("-R",)
TOOLS = [f"ib_{operation}_{what}" for operation in ("send", "write", "read") for what in ("bw", "lat")]
# On iWARP ib_send_bw keeps a region for its credits. Without -R it never deregisters that, and so fails at its end.
BY_NUMBER_TOOLS = [tool for tool in TOOLS if tool != "ib_send_bw"]
# It counts these credits wrongly if it waits for events, or has several queue pairs: it posts all messages but one,
# silently, and then waits for a completion that cannot come.
ONE_SIDED_TOOLS = [tool for tool in TOOLS if not tool.startswith("ib_send")]

pytestmark = pytest.mark.timeout(120)


def start(program: str, *arguments: object) -> Process:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: make setup")
    return Process(path, *map(str, arguments), variables=softverbs.environment(softverbs.folder(), os.environ))


def run_both(program: str, server_options: tuple[object, ...], *client_options: object) -> tuple[Result, Result]:
    """Run a server and a client, which find each other by TCP port. Returns how both ended."""
    port = free_port()
    with start(program, *server_options, "-p", port) as server:
        wait_for_tcp_listener(server, port)
        with start(program, *client_options, "-p", port, "127.0.0.1") as client:
            ended = client.succeed()
        return server.succeed(), ended


def figures(text: str) -> list[list[str]]:
    """The lines of perftest's table: bytes, iterations, and figures."""
    return [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\d+\.\d", line)]


def check_figures(text: str, count: int) -> None:
    rows = figures(text)
    assert rows, text
    # perftest sweeps powers of two.
    assert [int(row[0]) for row in rows[1:]] == [2 * int(row[0]) for row in rows[:-1]], text
    assert {row[1] for row in rows} == {str(count)}, text
    # Of two bytes on a busy machine, the MB/s are 0.00, and the message rate has six places.
    assert all(any(float(figure) > 0 for figure in row[3:]) for row in rows), text


def perftest(tool: str, *options: object, count: int = 200, queue_pairs: int = 1) -> None:
    _, client = run_both(tool, ("-F", "-n", count, *options), "-F", "-n", count, *options)
    # The table has the iterations of all queue pairs together.
    check_figures(client.out, count * queue_pairs)


@pytest.mark.parametrize("tool", BY_NUMBER_TOOLS)
def test_perftest_connects_by_number(tool):
    perftest(tool, *BY_NUMBER)


@pytest.mark.parametrize("tool", TOOLS)
def test_perftest_connects_by_the_connection_manager(tool):
    perftest(tool, *BY_MANAGER)


@pytest.mark.parametrize(
    ("tool", "way"),
    [
        ("ib_send_lat", BY_MANAGER),
        ("ib_read_bw", BY_MANAGER),
        ("ib_send_lat", BY_NUMBER),
        ("ib_read_lat", BY_NUMBER),
    ],
    ids=str,
)
def test_perftest_waits_for_events(tool, way):
    perftest(tool, *way, "-e")


@pytest.mark.parametrize("tool", [tool for tool in ONE_SIDED_TOOLS if tool.endswith("_bw")])
def test_perftest_goes_both_ways_on_three_queue_pairs(tool):
    perftest(tool, *BY_MANAGER, "-b", "-q", 3, queue_pairs=3)


def test_perftest_goes_both_ways():
    perftest("ib_write_bw", *BY_NUMBER, "-b")
    perftest("ib_send_bw", *BY_MANAGER, "-b")


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("ib_write_bw", (*BY_NUMBER, "-l", 8)),
        ("ib_write_bw", (*BY_NUMBER, "-I", 64, "-s", 32)),
        ("ib_read_bw", (*BY_NUMBER, "-l", 4)),
        ("ib_send_bw", (*BY_MANAGER, "-l", 8, "-b")),
    ],
    ids=str,
)
def test_perftest_posts_lists_and_inline_requests(tool, options):
    perftest(tool, *options, count=208)


def test_perftest_receives_from_a_shared_queue():
    perftest("ib_send_lat", *BY_NUMBER, "--use-srq")


@only_under_stress
@pytest.mark.parametrize("tool", BY_NUMBER_TOOLS)
def test_perftest_sweeps_all_sizes(tool):
    perftest(tool, *BY_NUMBER, "-a", count=20)


def test_ibv_srq_pingpong_verifies_what_comes_back():
    options = ("-d", "soft0", "-g", 0, "-q", 4, "-n", 500, "-c")
    server, client = run_both("ibv_srq_pingpong", options, *options)
    for ended in (server, client):
        assert "500 iters" in ended.out
        assert "invalid data" not in ended.out


def run_qperf(*tests: str) -> list[Result]:
    """Run a server and one client after another, then end the server."""
    port = free_port()
    # qperf itself gives its other end five seconds.
    patience = ("-to", round(patient(20)))
    ended = []
    with start("qperf", "-lp", port) as server:
        wait_for_tcp_listener(server, port)
        for test in tests:
            with start("qperf", "-lp", port, *patience, "-t", 1, "-cm", 1, "-vvs", "127.0.0.1", test) as client:
                ended.append(client.finish())
        with start("qperf", "-lp", port, *patience, "127.0.0.1", "quit") as client:
            client.succeed()
        server.succeed()
    return ended


@pytest.mark.parametrize(
    "test", ["rc_bw", "rc_lat", "rc_bi_bw", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_poll_lat"]
)
def test_qperf(test):
    (ended,) = run_qperf(test)
    assert ended.status == 0, ended
    found = dict(re.findall(r"^ +(\w+) += +([\d.,]+)", ended.out, re.MULTILINE))
    counted = {name: float(figure.replace(",", "")) for name, figure in found.items()}
    assert counted.get("bw", 0) > 0 or counted.get("latency", 0) > 0, ended.out
    # With -vvs it also counts what each end sent and received.
    assert any(name.endswith("send_msgs") and count > 0 for name, count in counted.items()), ended.out


def test_qperf_is_told_what_soft0_lacks_and_its_server_goes_on():
    """soft0 has no immediate data and no atomics. qperf's verify tests (ver_rc) are of atomics."""
    lacking = {
        "rc_rdma_write_lat": "failed to post rdma write with immediate",
        "rc_rdma_write_bw": "failed to post rdma write with immediate",
        "ver_rc_compare_swap": "failed to post compare and swap",
        "ver_rc_fetch_add": "failed to post fetch and add",
    }
    *refused, last = run_qperf(*lacking, "rc_lat")
    for ended, complaint in zip(refused, lacking.values(), strict=True):
        assert ended.status == 1, ended
        assert complaint in ended.out + ended.err
    assert last.status == 0, last
