"""Which machines say of themselves what most others do not."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ndpy.fleet.results import Kind, Machine, Suspect
from ndpy.tools.cli.channel import printable

#: A majority needs so many machines.
_LEAST = 3
_MOST_FINDINGS = 100
#: So many counters are named with a suspect.
_MOST_COUNTERS = 4


def of_machine(answers: Iterable[dict[str, Any]]) -> tuple[dict[str, str], tuple[dict[str, str], ...]]:
    """The facts and findings of a machine, from what its ranks answered to `examine`."""
    facts: dict[str, str] = {}
    findings: list[dict[str, str]] = []
    for answer in answers:
        for end in answer["ends"]:
            if not isinstance(end, dict):
                continue
            adapter = printable(end.get("adapter", "?"), 64)
            told = end.get("facts")
            for name, value in told.items() if isinstance(told, dict) else ():
                facts[f"{adapter} {printable(name, 64)}"] = printable(value, 200)
            findings_told = end.get("findings")
            for finding in findings_told if isinstance(findings_told, list) else ():
                if isinstance(finding, dict) and len(findings) < _MOST_FINDINGS:
                    plain = {name: printable(value) for name, value in finding.items() if isinstance(value, str)}
                    if plain not in findings:
                        findings.append(plain)
    return facts, tuple(findings)


def unlike(machines: Sequence[Machine]) -> list[Suspect]:
    """Machines of which a fact is not that of most others. Without a majority nobody is a suspect.

    Adapters of the same name are compared. If no machine has more than one, their names do not count: systems name an
    adapter by its slot too.
    """
    having_one = all(len({name.partition(" ")[0] for name in machine.facts}) <= 1 for machine in machines)
    facts: dict[str, list[tuple[Machine, str, str]]] = {}
    for machine in machines:
        for name, value in machine.facts.items():
            facts.setdefault(name.partition(" ")[2] if having_one else name, []).append((machine, name, value))
    found = []
    for _, having in sorted(facts.items()):
        (common, count), *_ = collections.Counter(value for _, _, value in having).most_common()
        if len(having) < _LEAST or 2 * count <= len(having):
            continue
        for machine, name, value in having:
            if value != common:
                reason = f"{name} is {value} on {machine.node}, and {common} on {count} of {len(having)} machines"
                found.append(
                    Suspect(
                        Kind.NODE,
                        machine.node,
                        (machine.node,),
                        None,
                        None,
                        count / len(having),
                        len(having),
                        reason,
                        "make it like the others, or take the machine out",
                    )
                )
    return found


def with_counters(suspect: Suspect, machines: Sequence[Machine]) -> Suspect:
    """The suspect, and what its machine counted more often than every other one: lost packets show so, and a slow host
    does not."""
    if len(suspect.nodes) != 1:
        return suspect
    counted: dict[str, collections.Counter[str]] = {machine.node: collections.Counter() for machine in machines}
    for machine in machines:
        for name, by in machine.counters.items():
            counted[machine.node][name.partition(" ")[2]] += by
    (node,) = suspect.nodes
    own = counted.pop(node, collections.Counter())
    most = [
        (name, by) for name, by in own.most_common() if by > max((other[name] for other in counted.values()), default=0)
    ]
    if not most:
        return suspect
    shown = ", ".join(f"{name} +{by}" for name, by in most[:_MOST_COUNTERS])
    return dataclasses.replace(
        suspect, reason=f"{suspect.reason} Meanwhile {node} counted more than any other machine: {shown}."
    )
