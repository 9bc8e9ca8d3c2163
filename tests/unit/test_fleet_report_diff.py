"""What got worse and better between two reports of a fleet."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ndpy.fleet.report import document
from ndpy.fleet.report.diff import compare
from ndpy.fleet.results import Measurement, Pattern, Quantity, Report
from ndpy.tools.cli import main
from tests.kit.reports import report

GOOD = report(16, rounds=6)


def without_suspects(run: Report) -> Report:
    """So that only the measurements can tell."""
    return replace(run, suspects=())


def heavy_tails(seed: int, nodes: int) -> Report:
    """A standard deviation of 5 %, and one value of 20 that is up to a third lower."""
    chance = random.Random(seed)
    run = without_suspects(report(nodes, rounds=8, seed=seed))

    def noisy(each: Measurement) -> Measurement:
        assert each.value is not None
        share = 1 + chance.gauss(0, 0.05) - (chance.random() < 0.05) * chance.uniform(0, 0.33)
        return replace(each, value=each.value * share)

    return replace(run, measurements=tuple(noisy(each) for each in run.measurements))


def cards(sentences: tuple[str, ...]) -> set[str]:
    """The cards that sentences about measurements name."""
    return {found[1] for each in sentences if (found := re.match(r"(\S+)/\S+ (sends|receives): its ", each))}


def test_a_report_compared_with_itself_has_nothing():
    assert compare(GOOD, GOOD).lines() == ["diff: 0 worse, 0 better, 0 changed"]


@pytest.mark.parametrize("nodes", [2, 4, 5, 6, 7, 8, 16, 256])
def test_noise_alone_is_no_change(nodes):
    """In as many rounds as a full mesh has: three with four nodes, and seven with eight."""
    for seed in range(100 if nodes < 16 else 20 if nodes < 256 else 4):
        comparison = compare(heavy_tails(2 * seed, nodes), heavy_tails(2 * seed + 1, nodes))
        assert (comparison.worse, comparison.better) == ((), ()), seed


def test_a_node_that_became_slow_is_named_alone_and_is_better_the_other_way_round():
    slow = without_suspects(report(16, rounds=6, slow={"n5": 0.7}, seed=3))
    assert cards(compare(GOOD, slow).worse) == {"n5"}
    assert compare(GOOD, slow).better == ()
    assert cards(compare(slow, GOOD).better) == {"n5"}
    assert compare(slow, GOOD).worse == ()


def test_in_a_small_mesh_a_slow_node_is_named_or_it_is_said_that_nothing_tells():
    """A node with five partners has five results of each quantity, and one with three has three."""
    slow = without_suspects(report(6, rounds=5, slow={"n5": 0.7}, seed=3))
    assert cards(compare(report(6, rounds=5), slow).worse) == {"n5"}
    slow = without_suspects(report(4, rounds=3, slow={"n2": 0.7}, seed=3))
    comparison = compare(report(4, rounds=3), slow)
    assert cards(comparison.worse) == set()
    assert [each for each in comparison.changed if "of a card" in each] == [
        f"pairs: 3 measurements of the {name} of a card are too few to tell a change of one card from noise; measure "
        "more rounds"
        for name in ("latency", "bandwidth")
    ]


def test_what_all_share_is_one_sentence():
    (sentence,) = compare(GOOD, report(16, rounds=6, scale=0.8, seed=1)).worse
    assert re.fullmatch(r"pairs: the bandwidth of all is 7\d\.\d Gb/s, before 9\d\.\d Gb/s \(-20 %\)", sentence)


def test_a_node_that_alone_kept_its_bandwidth_is_not_better():
    slower = without_suspects(report(16, rounds=6, scale=0.7, slow={"n5": 1 / 0.7}, seed=1))
    better = [each for each in compare(GOOD, slower).better if "bandwidth" in each]
    assert better == []


def test_too_few_measurements_are_said_and_not_judged():
    few, half = report(2, rounds=1), report(2, rounds=1, scale=0.5)
    comparison = compare(few, half)
    assert comparison.worse == ()
    assert any("2 measurements of bandwidth are too few" in each for each in comparison.changed)


def test_more_latency_is_worse():
    run = replace(
        GOOD,
        measurements=tuple(
            replace(each, value=(each.value or 0) * 1.5) if each.quantity is Quantity.LATENCY else each
            for each in GOOD.measurements
        ),
    )
    assert [each.split(" is ")[0] for each in compare(GOOD, run).worse] == ["pairs: the latency of all"]
    assert [each.split(" is ")[0] for each in compare(run, GOOD).better] == ["pairs: the latency of all"]


def test_suspects_come_and_go():
    bad = report(16, rounds=6, dead=("n7",))
    assert "rank n7 is a suspect: it has not answered since round 0." in compare(GOOD, bad).worse
    assert any(each.startswith("rank n7 is no longer a suspect") for each in compare(bad, GOOD).better)
    # The suspect took no part, so nobody knows whether it is well.
    rest = replace(report(6, rounds=4, names={}), machines=GOOD.machines[:6], ends=GOOD.ends[:6])
    assert not any("no longer" in each for each in compare(bad, rest).better)
    assert "n[7-16] took no part" in compare(bad, rest).changed


def test_the_first_failure_counts_and_chance_does_not():
    def failing(count: int) -> Report:
        rows = list(GOOD.measurements)
        chosen = [place for place, each in enumerate(rows) if each.quantity is Quantity.BANDWIDTH][:count]
        for place in chosen:
            rows[place] = replace(rows[place], value=None, error="lost")
        return replace(GOOD, measurements=tuple(rows))

    assert compare(GOOD, failing(1)).worse == ("pairs: 1 of 96 measurements of bandwidth failed, before 0 of 96",)
    assert compare(failing(1), GOOD).better == ("pairs: 0 of 96 measurements of bandwidth failed, before 1 of 96",)
    assert compare(failing(3), failing(5)).worse == ()
    assert compare(failing(3), failing(60)).worse[0].startswith("pairs: 60 of 96")


def test_facts_and_counters_that_changed_are_neither_and_have_the_nodes_as_a_set():
    machines = tuple(
        (
            replace(
                each,
                facts={**each.facts, "mlx5_0 MTU": "1024"},
                counters={**each.counters, "mlx5_0 rx_discards_phy": 4},
            )
            if each.node in {"n1", "n2", "n3", "n9"}
            else each
        )
        for each in GOOD.machines
    )
    comparison = compare(GOOD, replace(GOOD, machines=machines))
    assert (comparison.worse, comparison.better) == ((), ())
    assert comparison.changed == (
        "n[1-3,9]: mlx5_0 MTU is 1024, before 4096",
        "n[1-3,9]: the counter mlx5_0 rx_discards_phy grew, and did not before",
    )


def test_patterns_of_another_number_of_ranks_are_not_compared():
    rows = tuple(replace(each, pattern=Pattern.INCAST) for each in GOOD.measurements)
    incast = replace(GOOD, measurements=rows)
    half = replace(incast, measurements=tuple(replace(each, value=(each.value or 0) / 2) for each in rows))
    assert compare(incast, half).worse
    assert compare(incast, replace(half, ranks=32)).worse == ()


@pytest.mark.parametrize("value", [0.0, None])
def test_runs_in_which_nothing_was_measured_compare(value):
    none = replace(GOOD, measurements=tuple(replace(each, value=value) for each in GOOD.measurements))
    assert compare(GOOD, none).worse
    assert compare(replace(GOOD, measurements=()), none).lines()
    assert compare(none, none).worse == ()


def test_the_command_prints_it_and_its_status_says_whether_something_got_worse(tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(document.to_text(GOOD))
    after.write_text(document.to_text(report(16, rounds=6, slow={"n\x1b[2J5": 0.5}, names={4: "n\x1b[2J5"})))
    done = CliRunner().invoke(main, ["report", "diff", str(before), str(after)])
    assert done.exit_code == 1
    assert "worse: node n" in done.output
    assert "\x1b" not in done.output
    assert done.output.splitlines()[-1].startswith("diff: ")
    assert CliRunner().invoke(main, ["report", "diff", str(before), str(before)]).exit_code == 0


def test_the_command_says_which_file_is_no_report_and_why(tmp_path):
    good, bad = tmp_path / "a.json", tmp_path / "b.json"
    good.write_text(document.to_text(GOOD))
    bad.write_text('{"schema": 9}')
    done = CliRunner().invoke(main, ["report", "diff", str(good), str(bad)])
    assert done.exit_code == 2
    assert "b.json: the report has version 9, and this ndpy reads version 1" in " ".join(done.output.split())
