"""Which machines are unlike the majority, and which ends fail whoever their partner is. Needs no numpy."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from ndpy.fleet.results import End, Kind, Machine, Measurement, Suspect
from ndpy.tools.cli.channel import printable

#: A majority needs so many machines.
_LEAST = 3
_MOST_FINDINGS = 100


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
            for finding in end.get("findings") or ():
                if isinstance(finding, dict) and len(findings) < _MOST_FINDINGS:
                    plain = {name: printable(value) for name, value in finding.items() if isinstance(value, str)}
                    if plain not in findings:
                        findings.append(plain)
    return facts, tuple(findings)


def unlike(machines: Sequence[Machine]) -> list[Suspect]:
    """Machines of which a fact is not that of most others. Without a majority nobody is a suspect."""
    found = []
    for name in sorted({name for machine in machines for name in machine.facts}):
        having = [machine for machine in machines if name in machine.facts]
        (common, count), *_ = collections.Counter(machine.facts[name] for machine in having).most_common()
        if len(having) < _LEAST or 2 * count <= len(having):
            continue
        for machine in having:
            if machine.facts[name] != common:
                reason = f"{name} is {machine.facts[name]} on {machine.node}, and {common} on {count} of {len(having)} machines"
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


def failed(ends: Sequence[End], measurements: Iterable[Measurement], lost: set[int]) -> list[Suspect]:
    """Ends that fail with most partners, although these work with others. Ranks that are lost have their own line."""
    tried: dict[int, dict[int, Measurement | None]] = collections.defaultdict(dict)
    for each in measurements:
        for own, other in ((each.source, each.target), (each.target, each.source)):
            if ends[own].rank not in lost and ends[other].rank not in lost:
                tried[own][other] = each if each.value is None else tried[own].get(other)
    bad = {own: [each for each in partners.values() if each is not None] for own, partners in tried.items()}
    found = []
    while bad:
        worst = max(bad, key=lambda own: len(bad[own]))
        failures = bad.pop(worst)
        partners = len(tried[worst])
        if not failures or 2 * len(failures) <= partners:
            break
        end = ends[worst]
        place = f"{end.node}/{end.adapter} (rank {end.rank})"
        reason = f"{place} failed with {len(failures)} of {partners} partners; the first: {failures[0].error}"
        found.append(
            Suspect(
                Kind.ADAPTER,
                place,
                (end.node,),
                None,
                None,
                len(failures) / (partners + 1),
                len(failures),
                reason,
                "run `ndpy doctor` there, and `ndpy smoke` against a machine that works",
            )
        )
        # Its partners failed because of it.
        bad = {own: [each for each in others if worst not in (each.source, each.target)] for own, others in bad.items()}
    return found
