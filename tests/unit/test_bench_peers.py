"""`make bench-peers` and `make bench-scale` judge right, from given figures. The echo runs over each transport, and
each row of the growth with its smallest number."""

import subprocess
import sys
from pathlib import Path

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("the tests of a wheel have no benchmarks", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import peers  # noqa: E402
import scale  # noqa: E402

sys.path.remove(str(FOLDER))


def row(ours, theirs, **more):
    return peers.Row("a row", "us", {"ours": lambda: ours, "theirs": lambda: theirs}, {"theirs": 1.5}, **more)


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "missed"),
    [
        (15.0, 10.0, False, []),
        (16.0, 10.0, False, ["1.60 times theirs, and the bar is 1.5"]),
        (15.0, 10.0, True, []),
        (14.0, 10.0, True, ["1.40 times theirs, and the bar is 1.5"]),
    ],
)
def test_a_bar_is_a_part_of_the_other_programs_figure(ours, theirs, more, missed):
    assert row(ours, theirs, more=more).missed({"ours": ours, "theirs": theirs}) == missed


def test_a_limit_is_of_the_first_program_alone():
    assert row(4.0, 10.0, limit=3.5).missed({"ours": 4.0, "theirs": 10.0}) == ["4 us, and the bar is 3.5"]


@pytest.mark.parametrize(("ours", "status"), [(15.0, 0), (16.0, 1)])
def test_the_exit_status_says_whether_a_bar_was_missed(monkeypatch, capsys, tmp_path, ours, status):
    monkeypatch.setattr(peers, "ROWS", {"one": row(ours, 10.0)})
    monkeypatch.setattr(sys, "argv", ["peers.py", "--runs", "2", "--json", str(tmp_path / "peers.json")])
    assert peers.main() == status
    assert ("1 bars are missed" in capsys.readouterr().out) == bool(status)
    assert (tmp_path / "peers.json").read_text().count(str(ours)) == 3


def test_a_program_that_fails_is_shown(monkeypatch):
    with pytest.raises(RuntimeError, match="ended with 3:\nwhy"):
        peers.output([sys.executable, "-c", "print('why'); raise SystemExit(3)"])


@pytest.mark.skipif(sys.platform != "linux", reason="the echo is measured on soft0, which is of Linux")
@pytest.mark.parametrize("transport", ["ndpy", "streams", "uvloop"])
@pytest.mark.parametrize("how", [("64", "2"), ("1048576", "1", "--answer", "64")], ids=["64 B", "1 MiB"])
def test_the_echo_runs_over_each_transport(transport, how):
    command = [sys.executable, str(FOLDER / "echo_loops.py"), transport, "10", *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
    assert not done.stderr


# ---- growth ----


@pytest.mark.parametrize(("power", "factor"), [(0, 1.0), (1, 100.0), (0.5, 10.0)])
def test_the_exponent_is_the_slope_of_the_logarithms(power, factor):
    points = {number: 3 * number**power for number in (10, 100, 1000)}
    assert scale.exponent(points) == pytest.approx(power)
    assert scale.growth(points) == pytest.approx(factor)


def test_a_cost_that_falls_does_not_grow():
    assert scale.growth({10: 3.0, 100: 2.0, 1000: 2.2}) == pytest.approx(1.1)


@pytest.mark.skipif(sys.platform != "linux", reason="the growth is measured on soft0, which is of Linux")
def test_the_growth_runs_and_is_drawn(tmp_path):
    drawn = [tmp_path / "scale.png", tmp_path / "scale.svg"]
    words = ["--most", "10", "writes", "pollers", "server", *(word for file in drawn for word in ("--plot", str(file)))]
    command = [sys.executable, str(FOLDER / "scale.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(";")[0] for line in done.stdout.splitlines()] == [
        scale.ROWS[name].what.split(";")[0] for name in ("writes", "pollers", "server")
    ]
    assert all(file.stat().st_size > 1000 for file in drawn)
