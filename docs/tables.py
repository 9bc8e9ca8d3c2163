"""Writes the parts of pages that tables in the code decide. tests/docs/test_tables.py says whether they are up to date.

    .venv/bin/python docs/tables.py           prints the pages that are not
    .venv/bin/python docs/tables.py --write   writes them

Such a part begins with the comment `made by docs/tables.py: NAME` and ends with `end of NAME`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ndpy import Capability, errors, problems
from ndpy.aio import life
from ndpy.fleet.report import document, openmetrics
from ndpy.objects import completion, connection_states
from ndpy.vocabulary.queue_pair_attributes import CHANGES, QueuePairAttributes
from ndpy.vocabulary.quirks import Quirk

DOCS = Path(__file__).resolve().parent
PART = re.compile(r"(<!-- made by docs/tables\.py: (\w+) -->\n).*?(\n<!-- end of \2 -->)", re.S)
#: What adapters were seen to have. `ndpy devices --json` tells it, and tests/contract/test_listed_capabilities.py
#: compares it with each adapter on which the tests run.
SEEN = DOCS / "reference/capabilities.json"

DRIVERS = {
    "rdma_rxe": ("rxe", "SoftRoCE, a driver of Linux."),
    "siw": ("siw", "Soft-iWARP, a driver of Linux. It also has what the next section says."),
    "iWARP": ("All iWARP adapters but soft0", "What the protocol, or the part of Linux that serves it, brings along."),
}


def quirks() -> str:
    lines: list[str] = []
    for key, (title, words) in DRIVERS.items():
        lines += [f"## {title}", "", words, "", "| what differs | kernels | what ndpy does |", "| --- | --- | --- |"]
        for quirk in Quirk:
            facts = quirk.value
            if key in (facts.driver, facts.transport):
                summary = _sentence(facts.summary)
                danger = " **Trying it crashes the machine.**" if facts.crashes_machine else ""
                done = _sentence(facts.workaround) if facts.workaround else ""
                lines.append(f"| {summary}{danger} | {_kernels(facts.first, facts.last)} | {done} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _sentence(text: str) -> str:
    keeps = re.match(r"(rxe|siw|ndpy|iWARP)\b", text)
    return re.sub(r"([|<>*])", r"\\\1", text if keeps else text[0].upper() + text[1:]) + "."


def _kernels(first: tuple[int, ...], last: tuple[int, ...]) -> str:
    numbers = [".".join(map(str, number)) for number in (first, last)]
    if first and last:
        return f"{numbers[0]} to {numbers[1]}"
    return f"from {numbers[0]}" if first else f"to {numbers[1]}" if last else "all"


def capabilities() -> str:
    seen = json.loads(SEEN.read_text("utf-8"))
    head = [each["adapter"] + ("" if each["system"] == "any" else f", {each['system']}") for each in seen]
    lines = [f"| capability | {' | '.join(head)} |", "| --- |" + " --- |" * len(seen)]
    for capability in sorted(filter(None, Capability), key=lambda each: str(each.name)):
        marks = ["yes" if capability.name in each["capabilities"] else "" for each in seen]
        link = f"[{capability.name}](#ndpy.Capability.{capability.name})"
        lines.append(f"| {link} | {' | '.join(marks)} |")
    return "\n".join(lines)


def graph(name: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """A block of Graphviz whose grey is readable on black and on white."""
    grey = 'color="#808080", fontcolor="#808080", fontname="sans-serif"'
    lines = [
        "```{graphviz}",
        f"digraph {name} {{",
        "    bgcolor=transparent;",
        f"    node [shape=box, style=rounded, fontsize=11, {grey}];",
        f"    edge [fontsize=9, {grey}];",
    ]
    edges: dict[tuple[str, str], list[str]] = {}
    for before, event, after in rows:
        edges.setdefault((before, after), []).append(event)
    for (before, after), events in edges.items():
        label = f' [label="{_labels(events)}"]' if any(events) else ""
        lines.append(f'    "{before}" -> "{after}"{label};')
    return "\n".join([*lines, "}", "```"])


def _labels(events: list[str]) -> str:
    return "\\n".join(events)


def connection_life() -> str:
    called = set(connection_states.CALLS)
    rows = [
        (before, f"{event.value}()" if event in called else event.name.lower(), after)
        for (before, event), after in connection_states.TRANSITIONS.items()
        if before != after
    ]
    words = [f"- *{event.name.lower()}*: {event.value}." for event in connection_states.Event if event not in called]
    return "\n".join([graph("connection", rows), "", *words])


def aio_life() -> str:
    rows = [
        (before, event.name.lower(), after) for (before, event), after in life.TRANSITIONS.items() if before != after
    ]
    words = [f"- *{event.name.lower()}*: {event.value}." for event in life.Event]
    return "\n".join([graph("aio", rows), "", *words])


def floors() -> str:
    """The imports of parts of ndpy, without those that a lower part makes anyway."""
    tree = ast.parse((DOCS.parent / "tests/unit/test_imports.py").read_text("utf-8"))
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    ]
    uses = {name: set(words.split()) for name, words in ast.literal_eval(value).items()}

    def below(name: str) -> set[str]:
        return uses[name].union(*map(below, uses[name]))

    rows = []
    for name, direct in uses.items():
        indirect = set().union(*map(below, direct)) if direct else set()
        rows += [(name, "", each) for each in sorted(direct - indirect)]
    return graph("floors", rows)


def changes() -> str:
    """The attributes of each change of state, for each type of queue pair."""
    fields = tuple(QueuePairAttributes.__dataclass_fields__)
    lines = []
    for kind, table in CHANGES.items():
        lines += [f"**{kind.name}**", "", "| from | to | needs | also takes |", "| --- | --- | --- | --- |"]
        for (before, after), given in table.items():
            needed, taken = (", ".join(f"`{name}`" for name in fields if name in names) for names in given)
            lines.append(f"| {before.name} | {after.name} | {needed} | {taken} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def index_of_problems() -> str:
    """The word, the sentence and the other names of each problem, as a table for each page."""
    folder = Path(problems.__file__).parent
    lines: list[str] = []
    for name in problems.FILES:
        title = re.search(r"^# (.+)$", (DOCS / f"problems/{name}.md").read_text("utf-8"), re.M)
        words = re.findall(r"^## (\S+)$", (folder / f"{name}.md").read_text("utf-8"), re.M)
        assert title
        lines += [f"**{title[1]}**", "", "| word | what it is | other names |", "| --- | --- | --- |"]
        for each in (each for each in problems.all_problems() if each.word in words):
            names = ", ".join(f"`{one}`" + (f" ({number})" if number is not None else "") for one, number in each.names)
            lines.append(f"| [{each.word}]({name}.md#{each.word}) | {each.summary} | {names} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def statuses() -> str:
    """What raise_for_status() raises for each status, and the problems that have it."""
    lines = ["| status | meaning | exception | problems |", "| --- | --- | --- | --- |"]
    for status, meaning in completion.MEANINGS.items():
        error = completion.EXCEPTIONS.get(status, errors.ProviderError)
        found = [each.word for each in problems.all_problems() if f"Status.{status.name}" in dict(each.names)]
        pages = ", ".join(f"[{word}](../problems/requests.md#{word})" for word in found)
        lines.append(f"| `{status.name}` | {meaning} | `{error.__name__}` | {pages} |")
    return "\n".join(lines)


def fleet_fields() -> str:
    """The fields of a fleet's report, from its schema. Lists of objects have a table of their own."""
    whole = document.schema()
    lines = [*_fields(whole["properties"])]
    for name, title in (("machines", "A machine"), ("ends", "An end"), ("suspects", "A suspect")):
        lines += ["", f"### {title}", "", *_fields(whole["properties"][name]["items"]["properties"])]
    properties = whole["properties"]
    names = [each["const"] for each in properties["measurement_fields"]["prefixItems"]]
    rows = properties["measurements"]["items"]["prefixItems"]
    lines += ["", "### A measurement", "", *_fields(dict(zip(names, rows, strict=True)))]
    return "\n".join(lines)


def _fields(properties: dict[str, dict[str, object]]) -> list[str]:
    lines = ["| field | type | what it is |", "| --- | --- | --- |"]
    for name, field in properties.items():
        lines.append(f"| `{name}` | {_type(field)} | {field['description']} |")
    return lines


def _type(field: dict[str, object]) -> str:
    values = field.get("enum") or ([field["const"]] if "const" in field else [])
    if values:
        return ", ".join(f"`{json.dumps(each)}`" for each in values)  # type: ignore[union-attr]
    types = field["type"] if isinstance(field["type"], list) else [field["type"]]
    return " or ".join(map(str, types))


def fleet_metrics() -> str:
    lines = ["| metric | labels | what it is |", "| --- | --- | --- |"]
    for name, text in openmetrics.METRICS.items():
        labels = ", ".join(f"`{label}`" for label in openmetrics.LABELS.get(name, ()))
        lines.append(f"| `{name}` | {labels} | {text} |")
    return "\n".join(lines)


MAKERS: dict[str, Callable[[], str]] = {
    "floors": floors,
    "quirks": quirks,
    "capabilities": capabilities,
    "connection_life": connection_life,
    "aio_life": aio_life,
    "changes": changes,
    "problems": index_of_problems,
    "statuses": statuses,
    "fleet_fields": fleet_fields,
    "fleet_metrics": fleet_metrics,
}


def pages() -> dict[Path, tuple[str, str]]:
    """The text that each page with such a part has, and the text that it should have."""
    found = {}
    for page in DOCS.rglob("*.md"):
        if "_build" in page.parts:
            continue
        text = page.read_text("utf-8")
        made = PART.sub(lambda part: part[1] + "\n" + MAKERS[part[2]]() + "\n" + part[3], text)
        if "<!-- made by docs/tables.py:" in text:
            found[page] = (text, made)
    return found


if __name__ == "__main__":
    for page, (text, made) in pages().items():
        if text != made:
            print(page)
            if "--write" in sys.argv:
                page.write_text(made, "utf-8")
