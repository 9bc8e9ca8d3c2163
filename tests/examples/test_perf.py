"""`ndpy perf`, run as its user runs it: between two processes, over the adapter under test.

tests/unit/test_perf_runs.py has the claims about tests, deaths and interrupts between two threads.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from kit.documentation import DOCS
from kit.helpers import host_of, only_under_stress, require, sample
from kit.processes import Process, start_python

import ndpy
from ndpy.tools.cli.perf.plan import TESTS

pytestmark = pytest.mark.timeout(300)
COMMAND = Path(ndpy.__file__).with_name("__main__.py")
# Emulated machines are slow.
LIMIT_S = 120
QUICK = ["--iterations", 20, "--warm-up", 5]
# How many of a test's kinds the usual run takes, where some cost much: none in the VM, which takes ten seconds for
# each.
FEW = 1 if sys.platform == "win32" else 0
# The first ones cover most of the code.
ORDER = ["send_bw", "write_lat", "read_bw", "write_bw", "read_lat", "send_lat"]


@pytest.fixture
def name(adapter) -> str:
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return adapter.info.name


@pytest.fixture
def server(adapter, name):
    """A server on a port of its own. Its address is `address`."""
    host = host_of(adapter)
    with start_python(COMMAND, "perf", "--serve", "--listen", f"{host}:0", name) as process:
        process.address = f"{host}:{process.wait_for(r'perf: serving .*:([0-9]+)[.] Press', LIMIT_S)[1]}"
        yield process


def perf(*words) -> Process:
    return start_python(COMMAND, "perf", *words)


def assert_clean(result) -> None:
    warnings = [line for line in result.err.splitlines() if "perf: warning: " not in line]
    assert not warnings, result.err


def test_both_ends_have_the_source_that_was_named_and_no_other(adapter, name, tmp_path):
    last = [address for address in adapter.info.addresses if not address.startswith("fe80")][-1]
    with perf("send_lat", name, "--source", last, *QUICK, "--json", tmp_path / "out.json") as process:
        assert_clean(process.succeed(LIMIT_S))
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["addresses"] == report["peer"]["addresses"] == [last]


def test_without_a_host_the_server_listens_at_all_addresses(adapter, name):
    """As listen("") does: also at the last one of the other family than the first address has."""
    addresses = adapter.info.addresses
    with start_python(COMMAND, "perf", "--serve", "--listen", ":0", name) as server:
        told = server.wait_for(r"perf: serving .* at (.*)[.] Press", LIMIT_S)[1].split(", ")
        hosts = {text.rpartition(":")[0].strip("[]"): text for text in told}
        assert set(hosts) == set(addresses)
        others = [host for host in addresses if (":" in host) != (":" in addresses[0]) and "fe80" not in host]
        for host in others[-1:]:
            with perf("read_lat", name, *QUICK, "--peer", hosts[host]) as process:
                assert_clean(process.succeed(LIMIT_S))


def test_all_tests_are_tried_here():
    assert set(ORDER) == set(TESTS)


@pytest.mark.parametrize("test", sample(ORDER, 1 + FEW))
def test_it_measures_and_verifies(name, tmp_path, test):
    with perf(test, name, *QUICK, "--size", 1, "--size", "8K", "--json", tmp_path / "out.json") as process:
        result = process.succeed(LIMIT_S)
    assert_clean(result)
    assert re.search(
        rf"^perf: {test} on {name} \(\w+\), .*peer: process \d+ on this machine$", result.out, re.MULTILINE
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"]
    assert [row["bytes"] for row in report["results"]] == [1, 8192]
    for row in report["results"]:
        assert row["iterations"] >= 20
        if TESTS[test].is_latency:
            assert 0 < row["min_us"] <= row["p50_us"] <= row["max_us"] < 10e6
        else:
            assert row["gbps"] * 1e9 == pytest.approx(row["iterations"] * row["bytes"] * 8 / row["seconds"])


@only_under_stress
@pytest.mark.parametrize(
    "words",
    [
        ["send_bw", "--queue-pairs", 3, "--depth", 4, "--events"],
        ["write_bw", "--queue-pairs", 2, "--batch", 5, "--depth", 10],
        ["read_bw", "--duration", 1],
    ],
)
def test_both_directions_at_once(name, tmp_path, words):
    with perf(
        *words, name, *([] if "--duration" in words else QUICK), "--bidirectional", "--json", tmp_path / "out.json"
    ) as process:
        assert_clean(process.succeed(LIMIT_S))
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["iterations"] > 0
    assert row["peer_iterations"] > 0


@only_under_stress
def test_events_instead_of_polling(name):
    with perf("send_lat", name, *QUICK, "--events") as process:
        assert_clean(process.succeed(LIMIT_S))


def test_the_commands_of_the_page_work_and_the_server_serves_them_all(server, name, tmp_path):
    page = (DOCS / "howto/measure.md").read_text("utf-8")
    commands = re.findall(r"^machine-[ab]\$ ndpy perf (.*)", page, re.MULTILINE)
    assert commands[0] == "--serve --listen 192.0.2.2:7471"
    remote = [command for command in commands[1:] if "--peer" in command]
    # Without a limit on time, and smaller. In an emulated machine, matplotlib looks for fonts for a minute.
    changes = [
        ("mlx5_0", name),
        ("192.0.2.2:7471", server.address),
        ("--all", "--size 512"),
        (" --plot send_bw.png", ""),
    ]
    for command in sample(remote, 1):
        for old, new in changes:
            command = command.replace(old, new)
        command = re.sub(r"(--csv) (\S+)", rf"\1 {tmp_path.as_posix()}/\2", command)
        with perf(*shlex.split(command), *QUICK) as process:
            result = process.succeed(LIMIT_S)
        assert_clean(result)
        assert f"peer: {name} of " in result.out
        for file in re.findall(r"--csv (\S+)", command):
            assert Path(file).stat().st_size > 0
    server.interrupt()
    ended = server.succeed(LIMIT_S)
    assert ended.out.splitlines()[-1] == "perf: stopped"
    assert [line.split()[-1] for line in ended.out.splitlines() if "client" in line][1::2] == ["left"] * len(
        sample(remote, 1)
    )


@only_under_stress
def test_a_broken_limit_is_status_1(name):
    with perf("write_lat", name, *QUICK, "--max-us", "0.001") as process:
        result = process.finish(LIMIT_S)
    assert result.status == 1
    assert re.search(r"^perf: limit broken: 2 bytes: 50 % is [\d.]+ us, more than 0.001$", result.err, re.MULTILINE)


def wait_until_measuring(process: Process) -> None:
    process.wait_for("peer: ", LIMIT_S)
    # The connection is made after this line.
    time.sleep(3)


@pytest.mark.parametrize("test", sample(["write_lat", "send_bw", "read_bw"], FEW))
def test_a_server_that_is_killed_ends_the_client_with_a_reason(server, name, test):
    with perf(test, name, "--peer", server.address, "--duration", 600) as client:
        wait_until_measuring(client)
        server.popen.kill()
        result = client.finish(60)
    assert result.status == 1
    assert re.search(r"^perf: the peer at \S+ is gone: ", result.err, re.MULTILINE), result.err


@only_under_stress
@pytest.mark.parametrize("test", ["write_lat", "send_bw", "read_bw"])
def test_a_client_that_is_killed_leaves_the_server_to_the_next_one(server, name, test):
    with perf(test, name, "--peer", server.address, "--duration", 600) as client:
        wait_until_measuring(client)
        client.popen.kill()
    with perf(test, name, "--peer", server.address, *QUICK) as client:
        client.succeed(LIMIT_S)


@pytest.mark.parametrize("test", sample(["write_bw", "send_lat"], FEW))
def test_ctrl_c_prints_what_was_measured(name, test):
    with perf(test, name, "--duration", 600) as process:
        wait_until_measuring(process)
        process.interrupt()
        result = process.finish(60)
    assert result.status == 130
    assert re.search(r"^ *\d+ +\d+ +[\d.]+ ", result.out, re.MULTILINE), result.out
    assert result.err.splitlines()[-1] == "perf: interrupted"
