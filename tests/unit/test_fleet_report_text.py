"""The forms of a fleet's report that are text: for a terminal, JUnit and OpenMetrics; and sets of nodes."""

from __future__ import annotations

import os
import random
import re
import stat
import sys
from dataclasses import replace
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from ndpy.fleet.report import junit, openmetrics
from ndpy.fleet.report.node_sets import fold
from ndpy.fleet.report.options import report_options, write_files
from ndpy.fleet.report.terminal import print_report
from ndpy.fleet.results import Kind, Report, Suspect
from ndpy.fleet.topology import node_set
from tests.kit.reports import HOSTILE, report

BAD = report(8, slow={"n3": 0.8}, dead=("n7",))
LEAF = Suspect(Kind.GROUP, "leaf l3", ("n1", "n2"), None, None, 0.999, 40, "slow", "look at the switch")
# As a hostile machine could name itself.
NASTY = '\x1b[2J"\\\n<&>\ud800'


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n7", "n1", "n2", "n3", "n3"], "n[1-3,7]"),
        (["login"], "login"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n1", "n01", "n001"], "n001,n01,n1"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n1-ib", "n2-ib"], "n[1-2]-ib"),
        (["n0", "n1"], "n[0-1]"),
        (["n1234567890123"], "n1234567890123"),
    ],
)
def test_names_fold_into_a_set(names, text):
    assert fold(names) == text


def test_a_folded_set_has_the_same_names():
    chance = random.Random(40)
    for _ in range(300):
        width = chance.choice([0, 0, 2, 3])

        def name(width=width):
            number = chance.randrange(chance.choice([12, 120]))
            return f"{chance.choice(['n', 'r1n', 'gpu-', ''])}{number:0{width}}{chance.choice(['', '-ib'])}"

        names = {name() for _ in range(chance.randrange(1, 40))} | set(
            chance.sample(["login", "head"], chance.randrange(3))
        )
        assert sorted(node_set(fold(names))) == sorted(names)


def printed(capsys: pytest.CaptureFixture[str], made: Report) -> list[str]:
    print_report(made)
    return capsys.readouterr().out.splitlines()


def test_the_terminal_has_a_line_for_each_suspect_and_the_nodes_to_drain(capsys):
    lines = printed(capsys, BAD)
    assert lines[0] == "8 ranks on 8 nodes, 4 rounds, 64 measurements in 41.2 s (mpi, ndpy 1.0)"
    found = [line.strip() for line in lines]
    assert "node n3  99.8 %   8  it sends 20 % less than the others, which have 97.5 Gb/s." in found
    assert "remedy: look at the machine's console, and start the rank again (ndpy explain RETRY_EXC_ERR)" in found
    assert lines[-2:] == ["drain: n[3,7]", "fleet: 2 suspects"]
    assert "counter: n6 mlx5_0 out_of_sequence +12" in lines
    assert "note: The budget of 10 minutes was enough." in lines


def test_failed_measurements_are_counted_apart(capsys):
    row = next(line for line in printed(capsys, BAD) if "bandwidth" in line)
    assert row.split()[:4] == ["pairs", "bandwidth", "32", "8"]


def test_a_good_run_says_so(capsys):
    lines = printed(capsys, report(4))
    assert lines[-1] == "fleet: no suspects"
    assert not any(line.startswith("drain") for line in lines)


def test_a_run_that_measured_nothing_is_printed(capsys):
    assert printed(capsys, report(0))[-1] == "fleet: no suspects"


def test_a_confidence_is_not_rounded_up_to_certainty(capsys):
    sure = replace(BAD.suspects[0], confidence=0.99999)
    assert any("99.9 %" in line for line in printed(capsys, replace(BAD, suspects=(sure,))))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_of_every_width_has_the_whole_text(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    print_report(BAD)
    words = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).split()
    for suspect in BAD.suspects:
        for word in f"{suspect.name} {suspect.reason} {suspect.remedy}".split():
            assert word in words


def test_names_of_machines_do_not_steer_the_terminal(capsys):
    text = "\n".join(printed(capsys, report(8, slow={NASTY: 0.5}, names={2: NASTY})))
    assert "\x1b" not in text
    assert "?[2J" in text


def cases(made: Report) -> dict[tuple[str, str], ElementTree.Element]:
    suite = ElementTree.fromstring(junit.to_text(made)).find("testsuite")
    assert suite is not None
    found = {(case.get("classname", ""), case.get("name", "")): case for case in suite.iter("testcase")}
    assert suite.get("tests") == str(len(found))
    assert suite.get("failures") == str(sum(case.find("failure") is not None for case in found.values()))
    return found


def test_in_junit_the_nodes_of_suspects_fail():
    found = cases(BAD)
    assert len(found) == 8
    failed = {name: case.find("failure") for (_, name), case in found.items()}
    assert [name for name, failure in failed.items() if failure is not None] == ["n3", "n7"]
    assert "99.8 % sure from 8 measurements" in failed["n3"].text


def test_in_junit_a_leaf_fails_and_not_its_nodes():
    found = cases(replace(report(8), suspects=(LEAF,)))
    assert [each for each, case in found.items() if case.find("failure") is not None] == [("fleet.group", "leaf l3")]


def test_junit_holds_every_name():
    found = cases(report(8, slow={NASTY: 0.5, HOSTILE: 0.5}, names={2: NASTY, 3: HOSTILE}))
    assert ("fleet.node", HOSTILE) in found


LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and labels. The text is checked by the rules of OpenMetrics for gauges."""
    found: dict[tuple[str, str], float] = {}
    described: list[str] = []
    lines = text.split("\n")
    assert lines[-2:] == ["# EOF", ""]
    for line in lines[:-2]:
        if line.startswith("# TYPE "):
            assert line.endswith(" gauge")
            described.append(line.split()[2])
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            key = (match[1], match[2] or "")
            assert match[1] == described[-1]
            assert key not in found
            found[key] = float(match[3])
    assert len(described) == len(set(described))
    return found


def test_openmetrics_has_the_verdict_and_base_units():
    found = samples(openmetrics.to_text(BAD))
    assert found["ndpy_fleet_suspects", ""] == 2
    assert found["ndpy_fleet_began_timestamp_seconds", ""] == 1772352000
    assert found["ndpy_fleet_suspect_confidence_ratio", 'kind="node",name="n3"'] == 0.9987
    assert found["ndpy_fleet_suspect_factor_ratio", 'kind="node",name="n3",quantity="bandwidth"'] == 0.8
    assert found["ndpy_fleet_drain", 'node="n7"'] == 1
    assert found["ndpy_fleet_measurements", 'pattern="pairs",quantity="latency",result="failed"'] == 8
    labels = 'node="n1",adapter="mlx5_0",rank="0",direction="sends"'
    assert 90e9 < found["ndpy_fleet_bandwidth_bits_per_second", labels] < 105e9
    assert 1.9e-6 < found["ndpy_fleet_latency_seconds", labels] < 2.8e-6
    assert found["ndpy_fleet_counter_growth", 'node="n6",counter="mlx5_0 out_of_sequence"'] == 12


def test_openmetrics_holds_every_name_and_each_sample_once():
    made = report(8, slow={NASTY: 0.5}, names={2: NASTY})
    assert samples(openmetrics.to_text(replace(made, suspects=made.suspects * 2)))
    assert samples(openmetrics.to_text(report(0)))


def test_metrics_have_the_labels_that_the_reference_names():
    whole = report(4, slow={"n1": 0.8})
    machines = (replace(whole.machines[0], counters={"mlx5_0 discards": 3}), *whole.machines[1:])
    text = openmetrics.to_text(replace(whole, machines=machines))
    found = {
        name: tuple(re.findall(r'(\w+)="', labels)) for name, labels in re.findall(r"^(ndpy_\w+)({.*})?", text, re.M)
    }
    assert found == {name: openmetrics.LABELS.get(name, ()) for name in openmetrics.METRICS}


def test_the_names_of_metrics_are_legal_for_gauges():
    """Those endings belong to other types."""
    for name in openmetrics.METRICS:
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created", "_gcount", "_gsum"))


def test_a_file_of_metrics_is_replaced_at_once(tmp_path):
    path = tmp_path / "ndpy.prom"
    path.write_text("before")
    before = path.stat().st_ino
    openmetrics.replace(path, "after\n")
    assert path.read_text() == "after\n"
    assert path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_metrics_that_cannot_be_written_leave_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ndpy.prom"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        openmetrics.replace(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@click.command()
@report_options
def command(**files):
    raise SystemExit(write_files("fleet", BAD, files))


def test_a_command_writes_the_forms_that_it_was_asked_for(tmp_path):
    done = CliRunner().invoke(command, ["--openmetrics", str(tmp_path / "n.prom"), "--junit", str(tmp_path / "n.xml")])
    assert (done.exit_code, done.output) == (0, "")
    assert (tmp_path / "n.prom").read_text() == openmetrics.to_text(BAD)
    assert (tmp_path / "n.xml").read_text() == junit.to_text(BAD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n.prom", "n.xml"]


def test_metrics_go_to_standard_output_too():
    done = CliRunner().invoke(command, ["--openmetrics", "-"])
    assert (done.exit_code, done.output) == (0, openmetrics.to_text(BAD))
