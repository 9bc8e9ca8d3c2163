"""`make bench` counts right: units, ratios, bars and the exit status, from given figures and with a clock of the test's
own.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("the tests of a wheel have no benchmarks", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import bench  # noqa: E402
import figures  # noqa: E402
import timing  # noqa: E402

sys.path.remove(str(FOLDER))


def line(who, loop, us, **more):
    return {"who": who, "loop": loop, "us": us, "spread": 0.001, "rounds": 1024, "samples": 9, **more}


def lines_at_the_bars():
    """Figures with which each bar is met, and would not be with a larger one."""
    lines = []
    for bar in figures.BARS:
        of_others = {"C": 2.0, "pyverbs": 4.0}
        known = {(each["who"], each["loop"]) for each in lines}
        lines += [line(who, bar.loop, us) for who, us in of_others.items() if (who, bar.loop) not in known]
        if bar.reference:
            # The reference is at its own bar.
            (reference,) = [other for other in lines if (other["who"], other["loop"]) == ("ndpy", bar.reference)]
            lines.append(line(bar.who, bar.loop, bar.limit * reference["us"]))
        else:
            lines.append(line(bar.who, bar.loop, bar.limit * of_others.get(bar.against, 1)))
    return lines


class Clock:
    """A clock that only the loops move."""

    def __init__(self):
        self.ns = 1000

    def __call__(self):
        return self.ns

    def take(self, ns):
        self.ns += ns


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "now", made)
    monkeypatch.setattr(timing, "SAMPLE_NS", 20_000)
    monkeypatch.setattr(timing, "EMPTY_TURN", {"empty_turn": "clock.take(10)"})
    return made


def test_a_figure_is_microseconds_an_operation(clock):
    run = timing.compiled("clock.take(64 * 25)", {"clock": clock})
    result = timing.measured(run, 64)
    assert result["us"] == pytest.approx(0.025)
    assert result["spread"] == 0
    assert result["samples"] == timing.SAMPLES
    assert 20_000 <= result["rounds"] * 64 * 25 < 40_000


def test_a_loop_as_a_module_is_measured_alike(clock):
    run = timing.as_module("clock.take(1000)\ntaken.append(turn)", {"clock": clock, "taken": (taken := [])})
    assert run(3) == 3000
    assert taken == [0, 1, 2]


def test_a_figure_is_the_median_and_the_spread_that_of_the_middle_half(clock):
    times = [10, 11, 12, 13, 14, 15, 16, 17, 1000]

    def run(rounds):
        if clock.ns < 2 * timing.SAMPLE_NS:
            clock.take(timing.SAMPLE_NS)
            return 1
        return times.pop(0) * 1000 * rounds

    result = timing.measured(run, 1)
    assert not times
    assert result["us"] == pytest.approx(14)
    assert result["spread"] == pytest.approx(4 / 14)


def test_untimed_steps_do_not_count(clock):
    left = []
    names = {
        "clock": clock,
        "post_receives": lambda: clock.take(3000),
        "deliver": lambda: clock.take(5000),
        "drain": lambda: len(left),
    }
    turns = timing.compiled("clock.take(6400)", {"clock": clock})
    run = timing.with_steps(turns, *timing.STEPS["poll_64"], names)
    assert timing.measured(run, timing.RECEIVES)["us"] == pytest.approx(0.1)
    left.append("a completion")
    with pytest.raises(RuntimeError, match="1 completions were left instead of 0"):
        run(1)


def test_polls_count_those_that_found_nothing(clock, capsys):
    names = {"clock": clock, "empty": [], "check": lambda: None}
    loops = {"write_kept": "clock.take(1000)\nempty.append(0)\nempty.append(0)", "poll_empty": "clock.take(50)"}
    timing.measure("ndpy", {"version": "0"}, loops, names)
    about, kept, empty, turn = map(json.loads, capsys.readouterr().out.splitlines())
    assert about == {"who": "ndpy", "version": "0"}
    assert (kept["loop"], kept["us"], kept["polls"]) == ("write_kept", pytest.approx(1), pytest.approx(3))
    assert (empty["loop"], empty["us"]) == ("poll_empty", pytest.approx(0.05))
    assert "polls" not in empty
    assert turn["loop"] == "empty_turn"


def test_a_ratio_is_a_figure_divided_by_that_of_the_same_loop():
    found = figures.Figures(
        [line("C", "write_kept", 20.0), line("ndpy", "write_kept", 75.0), line("pyverbs", "poll_empty", 3.0)]
    )
    assert found.ratio("write_kept", "ndpy") == 3.75
    assert found.ratio("write_kept", "C") == 1
    assert found.ratio("write_kept", "pyverbs") is None
    assert found.ratio("poll_empty", "pyverbs") is None


def test_a_bar_is_met_up_to_its_limit():
    found = figures.Figures(lines_at_the_bars())
    assert [bar.name for bar in figures.BARS if not found.met(bar)] == []
    assert bench.report(found) == 0


@pytest.mark.parametrize("bar", figures.BARS, ids=lambda bar: f"{bar.who}-{bar.loop}")
def test_one_missed_bar_is_an_exit_status_of_1(bar):
    lines = lines_at_the_bars()
    for each in lines:
        if (each["who"], each["loop"]) == (bar.who, bar.loop):
            each["us"] *= 1.001
    found = figures.Figures(lines)
    assert [other for other in figures.BARS if not found.met(other)] == [bar]
    assert bench.report(found) == 1


@pytest.mark.parametrize("who", ["ndpy", "C"])
def test_a_bar_without_its_figure_is_missed(who, capsys):
    lines = [each for each in lines_at_the_bars() if (each["who"], each["loop"]) != (who, "write_afresh")]
    assert bench.report(figures.Figures(lines)) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


def test_the_limits_are_ratios_and_microseconds():
    found = figures.Figures(
        [
            line("C", "write_afresh", 28.0),
            line("ndpy", "write_afresh", 32.2),
            line("pyverbs", "poll_empty", 2.0),
            line("C", "poll_empty", 0.1),
            line("ndpy", "poll_empty", 0.8),
            line("ndpy", "slice_region", 0.9),
        ]
    )
    values = {bar.loop: found.value(bar) for bar in figures.BARS if bar.who == "ndpy"}
    assert values["write_afresh"] == pytest.approx(1.15)
    assert values["poll_empty"] == pytest.approx(0.4)
    assert values["slice_region"] == 0.9
    assert values["cache_hit"] is None


def test_the_tables_show_absent_figures_as_absent(capsys):
    bench.report(figures.Figures([line("C", "write_64_list", 23.5), line("ibverbs", "write_64_list", 24.9)]))
    out = capsys.readouterr().out
    (row,) = [text for text in out.splitlines() if figures.LOOPS["write_64_list"] in text]
    assert row.removeprefix(figures.LOOPS["write_64_list"]).split() == ["23.5", *"----", "24.9", "1.06", "-", "-"]


def test_what_is_not_stable_or_includes_waiting_is_told(capsys):
    lines = [line("C", "write_kept", 28.0, polls=1.0), line("ndpy", "write_kept", 75.0, polls=1.5)]
    lines[0]["spread"] = 0.02
    bench.report(figures.Figures(lines))
    out = capsys.readouterr().out
    assert "not stable: C, the same, request kept: samples differ by 2.0%, more than 1%" in out
    assert "includes waiting: ndpy, the same, request kept: 1.50 polls a completion" in out


def test_the_file_has_figures_ratios_and_verdicts():
    found = figures.Figures([{"who": "ndpy", "version": "0.1.0", "python": "3.11.2"}, *lines_at_the_bars()])
    written = json.loads(json.dumps(bench.as_json(found, {"gcc": "12.2.0"})))
    assert written["versions"] == {"gcc": "12.2.0"}
    assert written["programs"]["ndpy"] == {"version": "0.1.0", "python": "3.11.2"}
    assert written["loops"]["write_kept"]["ndpy"]["ratio"] == pytest.approx(1.1)
    assert written["loops"]["write_kept"]["C"]["us"] == 2.0
    assert all(bar["met"] for bar in written["bars"])
    assert len(written["bars"]) == len(figures.BARS)


@pytest.mark.parametrize(
    "lines",
    [
        [line("C", "write_kept", 1.0), line("C", "write_kept", 1.0)],
        [line("C", "another", 1.0)],
        [line("another", "write_kept", 1.0)],
    ],
)
def test_a_figure_twice_or_of_something_unknown_is_refused(lines):
    with pytest.raises(ValueError):
        figures.Figures(lines)


def loops_of(who):
    """The names of a program's loops, from its source."""
    if who in ("C", "shim"):
        return re.findall(r'^    \{"(\w+)", \w+,', (FOLDER / "loops.c").read_text("utf-8"), re.MULTILINE)
    tree = ast.parse((FOLDER / f"loops_{who}.py").read_text("utf-8"))
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LOOPS"
    ]
    bodies = ast.literal_eval(value)
    for name, body in bodies.items():
        (timing.as_module if name in timing.AS_MODULES else timing.compiled)(body, {})
    return list(bodies)


@pytest.mark.parametrize("who", figures.PROGRAMS)
def test_the_programs_have_loops_that_the_table_knows(who):
    names = loops_of(who)
    assert "write_kept" in names
    assert set(names) <= set(figures.LOOPS)


def test_every_bar_has_a_loop():
    on_rxe = [bar for bar in figures.BARS if bar.part == "rxe" and bar.loop not in figures.OF_TWO_PROCESSES]
    for bar in on_rxe:
        assert bar.loop in loops_of(bar.who)
        assert not bar.against or bar.loop in loops_of(bar.against)
    assert {bar.loop for bar in figures.BARS if bar.part == "softnd"} <= set(figures.ON_SOFTND)


def test_a_part_has_its_own_verdict(capsys):
    on_softnd = [bar for bar in figures.BARS if bar.part == "softnd"]
    lines = [each for each in lines_at_the_bars() if each["loop"] in figures.ON_SOFTND]
    assert bench.report(figures.Figures(lines), on_softnd) == 0
    assert bench.report(figures.Figures(lines)) == 1
    assert bench.report(figures.Figures(lines[:-1]), on_softnd) == 1
    assert capsys.readouterr().out.count("MISSED") == len(figures.BARS) - len(on_softnd) + 1


def test_the_program_for_softnd_measures_its_loops():
    source = ast.parse((FOLDER / "networkdirect_calls.py").read_text("utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LOOPS"
    ]
    assert list(names) == figures.ON_SOFTND
