"""The report as JUnit XML. Each node is a test, which fails if it is a suspect.
Suspects that nodes share are tests too.
"""

from __future__ import annotations

from xml.etree import ElementTree

from ndpy.fleet.report.statistics import nodes, percent, title
from ndpy.fleet.results import Kind, Report, Suspect
from ndpy.tools.cli.channel import printable

_LONGEST = 2000
# What several nodes share. None of them fails by it.
_SHARED = {Kind.GROUP, Kind.PATH}


def to_text(report: Report) -> str:
    """The XML, as a file in UTF-8 has it."""
    shared = [suspect for suspect in report.suspects if suspect.kind in _SHARED or not suspect.nodes]
    of_nodes: dict[str, list[Suspect]] = {node: [] for node in nodes(report)}
    for suspect in report.suspects:
        for node in suspect.nodes if suspect not in shared else ():
            of_nodes.setdefault(node, []).append(suspect)
    suite = ElementTree.Element(
        "testsuite",
        name="ndpy fleet",
        tests=str(len(of_nodes) + len(shared)),
        failures=str(len(shared) + sum(bool(suspects) for suspects in of_nodes.values())),
        errors="0",
        skipped="0",
        timestamp=_text(report.began),
        time=f"{report.took_s:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("engine", "version", "ranks", "rounds"):
        ElementTree.SubElement(properties, "property", name=name, value=_text(str(getattr(report, name))))
    for node, suspects in of_nodes.items():
        _add(suite, "fleet.node", node, suspects)
    for suspect in shared:
        _add(suite, f"fleet.{suspect.kind.value}", suspect.name, [suspect])
    if report.notes:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(_text(note) for note in report.notes)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(suite: ElementTree.Element, group: str, name: str, suspects: list[Suspect]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=group, name=_text(name), time="0")
    if suspects:
        failure = ElementTree.SubElement(case, "failure", message=_text(suspects[0].reason))
        failure.text = "\n".join(_text(_sentence(suspect)) for suspect in suspects)


def _sentence(suspect: Suspect) -> str:
    return (
        f"{title(suspect)}, {percent(suspect.confidence)} sure from {suspect.measurements} measurements: "
        f"{suspect.reason} Remedy: {suspect.remedy}"
    )


def _text(text: str) -> str:
    """XML cannot contain control characters."""
    return printable(text, _LONGEST)
