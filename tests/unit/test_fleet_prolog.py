"""What `ndpy fleet --prolog` says of a machine that is unlike those of a report."""

from __future__ import annotations

import dataclasses

from ndpy.fleet.prolog import against
from ndpy.fleet.results import Machine
from tests.kit.reports import report

FACTS = {"mlx5_0 MTU": "4096", "mlx5_0 firmware": "22.38"}
GONE = {"check": "MTU", "verdict": "FAIL", "message": "it is 1500", "remedy": "set it", "problem": "mtu"}
REFERENCE = dataclasses.replace(
    report(4), machines=tuple(Machine(f"n{at}", (at,), {**FACTS, "mlx5_1 MTU": "4096"}) for at in range(4))
)


def reasons(machine, reference=REFERENCE, **words):
    return [each.reason for each in against(machine, reference, {"mlx5_0"}, **{"others_too": False, **words})]


def test_a_machine_like_the_others_has_no_faults():
    assert reasons(Machine("n9", (0,), FACTS)) == []


def test_a_fact_that_is_unlike_the_majoritys_is_a_fault():
    machine = Machine("n9", (0,), {**FACTS, "mlx5_0 MTU": "1024"})
    assert reasons(machine) == ["mlx5_0 MTU is 1024 on n9, and 4096 on 4 of 4 machines"]
    (suspect,) = against(machine, REFERENCE, {"mlx5_0"}, others_too=False)
    assert (suspect.nodes, suspect.remedy) == (("n9",), "make it like the others, or take the machine out")


def test_an_adapter_that_is_not_there_is_a_fault_unless_others_were_asked_for():
    assert reasons(Machine("n9", (0,), FACTS), others_too=True) == ["n9 has no mlx5_1, and 4 of 4 machines have it"]
    assert len(reasons(Machine("n9", (0,)), others_too=True)) == 1


def test_a_finding_that_most_machines_have_too_is_no_fault():
    machine = Machine("n9", (0,), FACTS, (GONE, {"check": "MTU", "verdict": "PASS", "message": ""}))
    assert reasons(machine) == ["MTU: it is 1500"]
    all_have = dataclasses.replace(
        REFERENCE, machines=tuple(dataclasses.replace(each, findings=(GONE,)) for each in REFERENCE.machines)
    )
    assert reasons(machine, all_have) == []


def test_suspects_of_the_reference_do_not_count():
    """Three of four machines have another MTU, and are suspects."""
    wrong = [dataclasses.replace(each, facts={"mlx5_0 MTU": "1024"}) for each in REFERENCE.machines[1:]]
    suspects = report(4, slow={"n1": 0.5, "n2": 0.5, "n3": 0.5}).suspects
    reference = dataclasses.replace(REFERENCE, machines=(REFERENCE.machines[0], *wrong), suspects=suspects)
    assert reasons(Machine("n9", (0,), FACTS), reference) == []
