"""`ndpy fleet` between ranks of this machine: on soft0, by the rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading

import psutil
import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.processes import Process
from kit.ranks import Ranks

pytestmark = pytest.mark.timeout(patient(120))

STRESS = pytest.mark.skipif(not os.environ.get("NDPY_STRESS"), reason="it takes long: NDPY_STRESS")
OTHER_VERSION = (
    "import sys, ndpy; ndpy.__version__ = '0.0.9'; sys.argv[0] = 'ndpy'; from ndpy.tools.cli import main; main()"
)


@pytest.fixture
def ranks(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda size, **variables: Ranks(stack, tmp_path, size, **variables)


@pytest.mark.parametrize(("size", "words"), [(2, ["--full-mesh"]), (5, ["--full-mesh"]), (5, [])])
def test_all_ranks_meet_and_nobody_is_a_suspect(ranks, size, words):
    run = ranks(size)
    others = [run.start(rank) for rank in range(1, size)]
    run.first(*words).succeed(PROGRAM_DEADLINE_S)
    for other in others:
        assert other.succeed(PROGRAM_DEADLINE_S).err == ""
    report = run.report()
    assert (report["suspects"], report["ranks"]) == ([], size)
    met = {frozenset(row[3:5]) for row in report["measurements"]}
    assert len(met) == size * (size - 1) // 2
    assert all(row[5] > 0 for row in report["measurements"])
    # Of each pair a latency, and a bandwidth each way.
    times = 1 if words else 12 / 5
    assert len(report["measurements"]) == pytest.approx(3 * len(met) * times, abs=12)


@STRESS
def test_after_the_pairs_many_write_to_one_and_all_at_once(ranks):
    run = ranks(3)
    others = [run.start(rank) for rank in range(1, 3)]
    run.first("--full-mesh", "--patterns").succeed(PROGRAM_DEADLINE_S)
    for other in others:
        assert other.succeed(PROGRAM_DEADLINE_S).err == ""
    report = run.report()
    assert report["suspects"] == []
    flows = {name: [row for row in report["measurements"] if row[1] == name] for name in ("incast", "all")}
    # Each receives once from the two others. Then all send at once, each to one and then to the other.
    assert sorted(row[3:5] for row in flows["incast"]) == sorted(
        [one, to] for to in range(3) for one in range(3) if one != to
    )
    assert sorted(row[3:5] for row in flows["all"]) == sorted(row[3:5] for row in flows["incast"])
    assert all(row[5] > 0 for rows in flows.values() for row in rows)
    assert len({row[0] for row in report["measurements"]}) == report["rounds"] == 3 + 3 + 2


@STRESS
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_goes_during_the_patterns_is_named_and_the_others_go_on(ranks, how):
    run = ranks(6)
    others = [run.start(rank) for rank in range(1, 6)]
    first = run.first("--full-mesh", "--patterns")
    first.wait_for("incast", PROGRAM_DEADLINE_S, stream="err")
    others[1].popen.send_signal(how)
    try:
        assert first.finish(PROGRAM_DEADLINE_S).status == 1
    finally:
        others[1].popen.send_signal(signal.SIGCONT)
    assert [suspect["nodes"] for suspect in run.report()["suspects"]] == [["n2"]]
    assert sum(row[1] == "all" and row[5] is not None for row in run.report()["measurements"]) > 10


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_hangs_is_named_and_the_others_go_on(ranks, how):
    run = ranks(4)
    others = [run.start(rank) for rank in range(1, 4)]
    first = run.first("--rounds", 4)
    first.wait_for("round 1:", PROGRAM_DEADLINE_S, stream="err")
    others[1].popen.send_signal(how)
    try:
        result = first.finish(PROGRAM_DEADLINE_S)
    finally:
        others[1].popen.send_signal(signal.SIGCONT)
    assert result.status == 1
    (suspect,) = run.report()["suspects"]
    assert (suspect["kind"], suspect["nodes"]) == ("rank", ["n2"])
    assert ("said nothing" if how == signal.SIGSTOP else "ended during the run") in suspect["reason"]
    assert run.report()["drain"] == ["n2"]
    assert run.report()["rounds"] > 2


def test_an_adapter_whose_process_dies_is_named_once_and_left_out(ranks):
    run = ranks(4)
    others = [run.start(rank) for rank in range(1, 4)]
    first = run.first("--rounds", 6)
    first.wait_for("round 1:", PROGRAM_DEADLINE_S, stream="err")
    for worker in psutil.Process(others[1].popen.pid).children():
        worker.kill()
    assert first.finish(PROGRAM_DEADLINE_S).status == 1
    (suspect,) = run.report()["suspects"]
    assert (suspect["kind"], suspect["name"]) == ("adapter", "n2/soft0")
    assert "was killed by signal 9" in suspect["reason"]
    assert others[1].succeed(PROGRAM_DEADLINE_S).err == ""


def test_a_slow_rank_is_named(ranks, tmp_path):
    (tmp_path / "slow.toml").write_text('[[fault]]\ndo = "delay"\nat = "request"\nevery = 4\nms = 2\n')
    run = ranks(5)
    for rank in (1, 3, 4):
        run.start(rank)
    run.start(
        2, program=("-m", "ndpy", "faults", "run", "-f", tmp_path / "slow.toml", "--", sys.executable, "-m", "ndpy")
    )
    assert run.first().finish(PROGRAM_DEADLINE_S).status == 1
    suspects = run.report()["suspects"]
    assert {suspect["nodes"][0] for suspect in suspects} == {"n2"}
    assert {suspect["quantity"] for suspect in suspects} <= {"us", "Gb/s"}
    assert run.report()["drain"] == ["n2"]


@STRESS
def test_no_round_begins_after_the_budget(ranks):
    run = ranks(2)
    other = run.start(1)
    first = run.first("--rounds", 10_000, "--budget", "1s").succeed(PROGRAM_DEADLINE_S)
    assert other.succeed(PROGRAM_DEADLINE_S).err == ""
    report = run.report()
    assert f"note: the budget of 1 s ended the run after {report['rounds']} rounds" in first.out
    assert 0 < report["rounds"] < 100


def test_ctrl_c_writes_what_was_found_and_ends_all(ranks):
    run = ranks(3)
    others = [run.start(rank) for rank in range(1, 3)]
    first = run.first("--rounds", 10_000)
    first.wait_for("round 1:", PROGRAM_DEADLINE_S, stream="err")
    first.popen.send_signal(signal.SIGINT)
    assert first.finish(PROGRAM_DEADLINE_S).status == 130
    assert run.report()["measurements"]
    for other in others:
        assert other.succeed(PROGRAM_DEADLINE_S).err == ""


def test_a_rank_of_another_version_is_named(ranks):
    run = ranks(3)
    run.start(1)
    run.start(2, program=("-c", OTHER_VERSION))
    assert run.first("--full-mesh").finish(PROGRAM_DEADLINE_S).status == 1
    (suspect,) = run.report()["suspects"]
    assert suspect["nodes"] == ["n2"]
    assert "it has ndpy 0.0.9" in suspect["reason"]


def test_a_rank_that_does_not_come_is_named(ranks):
    run = ranks(3)
    run.start(1)
    assert run.first("--join", "5s", "--full-mesh").finish(PROGRAM_DEADLINE_S).status == 1
    (suspect,) = run.report()["suspects"]
    assert suspect["reason"] == "rank 2: it did not come within 5 s"


def test_what_got_worse_since_the_baseline_is_told(ranks, tmp_path):
    """A file that is not a report ends the run before it begins."""
    run = ranks(2)
    run.start(1)
    run.first("--full-mesh").succeed(PROGRAM_DEADLINE_S)
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(run.report()))
    again = ranks(2)
    again.start(1)
    assert "diff: 0 worse" in again.first("--full-mesh", "--baseline", baseline).succeed(PROGRAM_DEADLINE_S).out
    baseline.write_text("{}")
    result = ranks(2).first("--baseline", baseline).finish(PROGRAM_DEADLINE_S)
    assert (result.status, "baseline.json" in result.err) == (1, True)


def test_an_adapter_that_does_not_open_is_named(ranks):
    run = ranks(3)
    run.start(1)
    run.start(2, "mlx5_9")
    assert run.first("--full-mesh").finish(PROGRAM_DEADLINE_S).status == 1
    (suspect,) = run.report()["suspects"]
    assert (suspect["kind"], suspect["name"]) == ("adapter", "n2/mlx5_9")
    assert "AdapterNotFoundError" in suspect["reason"]


def test_strangers_at_the_port_are_refused_and_told_of(ranks):
    """Silence, garbage, a wrong token, another rank's number, and hundreds of connections."""
    run = ranks(3, NDPY_FLEET_TOKEN="a secret of this job")
    first = run.first("--full-mesh")
    silent = [connected(run.port) for _ in range(3)]
    garbage = connected(run.port)
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
    for _ in range(300):
        connected(run.port).close()
    stranger = run.start(2, NDPY_FLEET_TOKEN="another secret")
    assert "refuses rank 2: it does not know the token" in stranger.finish(PROGRAM_DEADLINE_S).err
    run.start(1)
    run.start(2)
    first.succeed(PROGRAM_DEADLINE_S)
    for each in (*silent, garbage):
        each.close()
    notes = "\n".join(run.report()["notes"])
    assert "127.0.0.1: it does not know the token" in notes
    assert run.report()["suspects"] == []


def connected(port: int) -> socket.socket:
    """A connection to the rendezvous, which comes as soon as rank 0 listens."""
    waiting = threading.Event()
    for _ in range(int(PROGRAM_DEADLINE_S * 10)):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 5)
        waiting.wait(0.1)
    pytest.fail(f"nobody listens at port {port}")


def test_without_a_launcher_it_says_how_to_start_it():
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    with Process(sys.executable, "-m", "ndpy", "fleet", variables=dict.fromkeys(names, "")) as process:
        result = process.finish(PROGRAM_DEADLINE_S)
    assert result.status == 2
    assert "mpirun -n 8" in result.err
    assert "RANK=0 WORLD_SIZE=8 MASTER_ADDR=n1 ndpy fleet" in result.err
