"""Who alone counts losses is named, and nobody else is, whatever healthy adapters count."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from ndpy.fleet import losses
from ndpy.fleet.report import document, html, junit, openmetrics, terminal
from ndpy.fleet.results import End, Kind, Machine, Measurement, Pattern, Quantity, Report, Suspect, to_json
from ndpy.fleet.schedule import full_mesh

ROUNDS = 12
#: What the two sides of a lost packet count: the one that sends it again, and the one that misses it.
SENT_AGAIN, MISSED = "packet_seq_err", "out_of_sequence"


def fleet(nodes, *, cards=1, leaf=0):
    return [
        End(node * cards + card, f"n{node}", f"mlx5_{card}", (f"leaf l{node // leaf}",) if leaf else ())
        for node in range(nodes)
        for card in range(cards)
    ]


class Run:
    """A run of a fleet that is not there: who met in which round, and what each card counted."""

    def __init__(self, ends, *, seed=0, rounds=ROUNDS):
        self.ends, self.random = ends, random.Random(seed)
        self.measurements, self.met = [], []
        self.grown = {end.node: {} for end in ends}
        self.known = {end.node: {f"{end.adapter} {name}" for name in (SENT_AGAIN, MISSED)} for end in ends}
        for end in ends:
            self.known[end.node] |= {f"{end.adapter} {name}" for name in (SENT_AGAIN, MISSED)}
        meshes = list(full_mesh(ends))
        for turn in range(rounds):
            # A new order each time, as in a search.
            for one, other in self.random.choice(meshes) if len(meshes) > rounds else meshes[turn % len(meshes)]:
                self.met.append((turn, one, other))
                for source, target in ((one, other), (other, one)):
                    self.measurements.append(
                        Measurement(turn, Pattern.PAIRS, Quantity.BANDWIDTH, source, target, 100.0)
                    )

    def count(self, place, turn, name, by=1):
        end = self.ends[place]
        rounds = self.grown[end.node].setdefault(f"{end.adapter} {name}", {})
        rounds[str(turn)] = rounds.get(str(turn), 0) + by

    def lose(self, share, *, of=None, sends=True, both=True, turns=range(ROUNDS)):
        """In this share of the rounds of these ends, or of all, packets that they send (or receive) get lost."""
        for turn, *pair in self.met:
            for at, place in enumerate(pair):
                if turn in turns and (of is None or place in of) and self.random.random() < share:
                    source, target = (place, pair[1 - at]) if sends else (pair[1 - at], place)
                    self.count(target, turn, MISSED, self.random.randint(1, 9))
                    if both:
                        self.count(source, turn, SENT_AGAIN, self.random.randint(1, 9))

    def machines(self):
        return [
            Machine(node, (at,), {}, (), {name: sum(grown.values()) for name, grown in rounds.items()}, rounds)
            for at, (node, rounds) in enumerate(self.grown.items())
        ]

    def suspects(self):
        return losses.suspects(self.machines(), self.ends, self.measurements, self.known)

    def named(self):
        return {suspect.name for suspect in self.suspects()}


SIZES = (3, 4, 5, 8, 16, 33)


def missed(size, share, **way):
    """How often n1 is not named of 40 times, while all others lose packets in one of a hundred rounds.
    Nobody else may be.
    """
    found = []
    for seed in range(40):
        run = Run(fleet(size), seed=seed)
        run.lose(share, of={1}, **way)
        run.lose(0.005)
        found.append(run.named())
        assert found[-1] <= {"n1"}, seed
    return found.count(set())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sends", [True, False], ids=["sends", "receives"])
def test_the_one_that_loses_packets_is_named_alone(size, sends):
    """With three ends, in all of its rounds. With more, in nine of ten."""
    assert missed(size, 0.9 if size > 3 else 1.0, sends=sends) <= 2


@pytest.mark.parametrize("size", [8, 16, 33])
def test_it_is_named_if_only_its_partners_count(size):
    assert missed(size, 0.9, both=False) <= 2


def test_two_of_sixteen_are_named():
    for seed in range(40):
        run = Run(fleet(16), seed=seed)
        run.lose(0.9, of={1})
        run.lose(0.9, of={5}, sends=False)
        assert run.named() == {"n1", "n5"}, seed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_losses_by_chance_name_nobody(size, share):
    """All have the same chance, however large it is."""
    for seed in range(60):
        run = Run(fleet(size), seed=seed)
        run.lose(share / 2)
        assert run.named() == set(), seed


@pytest.mark.parametrize("size", SIZES)
def test_a_network_that_loses_packets_for_some_rounds_names_nobody(size):
    for seed in range(60):
        run = Run(fleet(size), seed=seed)
        first = run.random.randrange(ROUNDS)
        run.lose(0.7, turns=range(first, first + run.random.randrange(1, 8)))
        assert run.named() == set(), seed


@pytest.mark.parametrize("size", SIZES)
def test_good_ends_that_differ_name_nobody(size):
    for seed in range(60):
        run = Run(fleet(size), seed=seed)
        for place in range(size):
            run.lose(run.random.uniform(0, 0.15), of={place})
        assert run.named() == set(), seed


def test_one_that_may_lose_packets_is_doubtful_from_its_second_round_on():
    for rounds, doubtful in ((1, set()), (2, {1}), (5, {1})):
        run = Run(fleet(8), rounds=rounds)
        run.lose(1.0, of={1})
        assert losses.doubtful(run.grown, run.ends, run.measurements) == doubtful
    run.lose(1.0)
    assert losses.doubtful(run.grown, run.ends, run.measurements) == set()
    assert losses.doubtful({}, run.ends, run.measurements) == set()


def test_two_ends_have_only_each_other():
    run = Run(fleet(2))
    run.lose(1.0, of={1})
    assert run.suspects() == []


def test_one_pair_that_loses_packets_names_neither_end():
    run = Run(fleet(4))
    for turn, one, other in run.met:
        if {one, other} == {1, 2}:
            run.count(1, turn, SENT_AGAIN)
            run.count(2, turn, MISSED)
    assert run.suspects() == []


@pytest.mark.parametrize(
    "name", ["rnr_nak_retry_err", "out_of_buffer", "rx_prio3_pause", "np_cnp_sent", "req_cqe_error"]
)
def test_what_a_slow_receiver_or_a_busy_switch_causes_is_no_loss(name):
    run = Run(fleet(8))
    for turn, *pair in run.met:
        for place in {1} & set(pair):
            run.count(place, turn, name)
    run.known["n1"].add(f"mlx5_0 {name}")
    assert run.suspects() == []


def test_incast_does_not_count():
    run = Run(fleet(8))
    run.lose(1.0, of={1})
    run.measurements = [
        Measurement(each.round, Pattern.INCAST, each.quantity, each.source, each.target, each.value)
        for each in run.measurements
    ]
    assert run.suspects() == []


def test_rounds_that_failed_do_not_count():
    """A rank that died lets its partners send again in vain. The failure names it."""
    run = Run(fleet(8))
    run.lose(1.0, of={1})
    run.measurements = [
        Measurement(each.round, each.pattern, each.quantity, each.source, each.target, None, "it timed out")
        if 1 in (each.source, each.target)
        else each
        for each in run.measurements
    ]
    assert run.suspects() == []


def test_a_machine_without_the_counter_is_not_one_that_counted_nothing():
    run = Run(fleet(8))
    run.lose(1.0, of={1})
    assert run.named() == {"n1"}
    for node in list(run.known)[3:]:
        run.known[node] = set()
    run.known["n2"] = set()
    assert run.suspects() == []


def test_one_card_of_a_node_is_an_adapter_and_all_of_them_are_the_node():
    ends = fleet(8, cards=2)
    one, both = Run(ends), Run(ends)
    one.lose(1.0, of={3})
    both.lose(1.0, of={2, 3})
    ((first,), (second,)) = one.suspects(), both.suspects()
    assert (first.kind, first.name, first.nodes) == (Kind.ADAPTER, "n1/mlx5_1", ("n1",))
    assert (second.kind, second.name, second.nodes) == (Kind.NODE, "n1", ("n1",))


def test_a_leaf_that_loses_packets_is_named_and_its_nodes_are_not():
    for seed in range(20):
        run = Run(fleet(32, leaf=4), seed=seed)
        run.lose(0.9, of={4, 5, 6, 7})
        (suspect,) = run.suspects()
        assert (suspect.kind, suspect.name) == (Kind.GROUP, "leaf l1"), seed


def test_the_sentence_has_the_counter_the_rounds_and_what_to_do():
    run = Run(fleet(3))
    for turn, *pair in run.met:
        for place in {1} & set(pair):
            run.count(place, turn, "rcvd_seq_err", 5)
    for node in run.known:
        run.known[node].add("mlx5_0 rcvd_seq_err")
    (suspect,) = run.suspects()
    assert suspect.reason == (
        "Its counter rcvd_seq_err grew in 8 of 8 rounds, by 40 in all. That of the others grew in 0 of 16."
    )
    assert 0.99 < suspect.confidence < 1 and suspect.measurements == 8
    assert suspect.remedy.startswith("Look at the cable and the transceiver of n1")


def test_one_that_is_slow_too_is_one_suspect_with_both_sentences():
    run = Run(fleet(5))
    run.lose(1.0, of={1})
    (lost,) = losing = run.suspects()
    slow = Suspect(Kind.NODE, "n1", ("n1",), Quantity.BANDWIDTH, 0.5, 0.9, 9, "It is slow.", "look there")
    both = losses.together(slow, losing)
    assert both.reason == f"It is slow. {lost.reason}" and (both.remedy, both.confidence) == (
        lost.remedy,
        lost.confidence,
    )
    assert (both.quantity, both.factor, both.measurements) == (Quantity.BANDWIDTH, 0.5, 9)
    assert losses.together(replace(slow, nodes=("n2",)), losing) is None


def test_every_form_of_the_report_has_it(capsys):
    run = Run(fleet(5))
    run.lose(1.0, of={1})
    (suspect,) = run.suspects()
    report = Report(
        "2024-05-01T00:00:00+00:00", 1.0, "mpi", "0.1.0", 5, ROUNDS, tuple(run.machines()), tuple(run.ends),
        tuple(run.measurements), (suspect,),
    )  # fmt: skip
    assert document.from_json(json.loads(document.to_text(report))).suspects == (suspect,)
    assert to_json(report)["drain"] == ("n1",)
    assert 'ndpy_fleet_suspect_confidence_ratio{kind="node",name="n1"} 0.99' in openmetrics.to_text(report)
    (failure,) = ElementTree.fromstring(junit.to_text(report)).iter("failure")
    assert failure.get("message") == suspect.reason
    assert suspect.reason in html.to_text(report)
    terminal.print_report(report)
    assert "drain: n1" in capsys.readouterr().out


def test_ten_thousand_nodes_take_seconds():
    run = Run(fleet(2))
    ends = [End(at, f"n{at}", "mlx5_0") for at in range(10_000)]
    run.ends = ends
    run.grown, run.known = {end.node: {} for end in ends}, {end.node: {f"mlx5_0 {MISSED}"} for end in ends}
    run.met = [(turn, at, (at + 1 + turn) % 10_000) for turn in range(ROUNDS) for at in range(0, 10_000, 2)]
    run.measurements = [
        Measurement(turn, Pattern.PAIRS, Quantity.BANDWIDTH, one, other, 1.0) for turn, one, other in run.met
    ]
    run.lose(0.02, both=False)
    run.lose(1.0, of={17}, sends=False, both=False)
    assert run.named() == {"n17"}
