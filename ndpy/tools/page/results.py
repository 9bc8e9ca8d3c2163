"""The results of `ndpy doctor`, `ndpy smoke` and `ndpy perf` as a page, from what their JSON has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ndpy.tools.page import Markup, element, page, table

_WIDTH, _HEIGHT = 480, 150
Document = Mapping[str, Any]


def doctor(findings: Sequence[Mapping[str, str]]) -> str:
    """findings: as Finding.to_dict() makes them."""
    counts = {name: sum(each["verdict"] == name for each in findings) for name in ("PASS", "WARN", "FAIL")}
    rows = [
        (
            *(each["verdict"], each["check"], each["message"]),
            each["remedy"] + (f" (ndpy explain {each['problem']})" if each["problem"] else ""),
        )
        for each in findings
    ]
    return page(
        "ndpy doctor",
        ("", [_verdict(", ".join(f"{count} {name}" for name, count in counts.items()), not counts["FAIL"])]),
        ("Findings", [table(("verdict", "check", "what was found", "what to do"), rows, "findings")]),
    )


def smoke(run: Document) -> str:
    """run: as the Run of a smoke test makes it."""
    counts = ", ".join(f"{count} {name}" for name, count in run["summary"].items())
    checks = [
        (
            *(each["verdict"], f"{each['group']}/{each['name']}", each["seconds"], each["claim"]),
            each["reason"] + (f" (see {each['reference']})" if each["reference"] else ""),
        )
        for each in run["checks"]
    ]
    counters = [(port, name, by) for port, counted in (run["counters"] or {}).items() for name, by in counted.items()]
    not_run = [element("p", f"not run: {', '.join(run['not_run'])}")] if run["not_run"] else []
    ended = " before it was interrupted" if run["interrupted"] else ""
    good = not run["summary"]["fail"] and not run["interrupted"]
    return page(
        f"ndpy smoke: {run['adapter']}",
        ("", [_verdict(f"{counts} in {run['seconds']:.1f} s{ended}", good), *not_run]),
        ("Checks", [table(("verdict", "check", "seconds", "claim", "reason"), checks, "checks")]),
        ("Counters", [table(("port", "counter", "grew by"), counters, "counters")] if counters else []),
        ("Details", [_details(run, {"summary", "checks", "counters", "not_run", "interrupted", "seconds"})]),
    )


def perf(run: Document) -> str:
    """run: as the Run of a measurement makes it."""
    results = run["results"]
    names = [name for name in dict.fromkeys(name for each in results for name in each) if name != "histogram"]
    rows = [["-" if each.get(name) is None else each[name] for name in names] for each in results]
    said = [*run["broken_limits"], *filter(None, [run["error"]]), *(["interrupted"] if run["interrupted"] else [])]
    plots = [
        _histogram(f"{each['bytes']} bytes, {each['iterations']} iterations", each["histogram"])
        for each in results
        if each.get("histogram")
    ]
    return page(
        f"ndpy perf {run['test']}: {run['adapter']}",
        ("", [_verdict("; ".join(map(str, said)) or "measured", run["passed"])]),
        ("Results", [table(names, rows, "results")] if rows else []),
        ("Distribution", [element("div", *plots, class_="plots")] if plots else []),
        ("Details", [_details(run, {"results", "broken_limits", "error", "interrupted", "passed"})]),
    )


def _verdict(text: str, good: bool) -> Markup:
    return element("p", text, class_="good" if good else "bad")


def _details(values: Document, without: set[str]) -> Markup:
    rows = [(name, _plain(value)) for name, value in values.items() if name not in without]
    return table(("name", "value"), rows, "details")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def _histogram(about: str, buckets: Sequence[Mapping[str, float]]) -> Markup:
    """Bars of equal width: each bucket is longer than the one before it by the same factor."""
    most, width = max(each["count"] for each in buckets), _WIDTH / len(buckets)
    bars = []
    for place, each in enumerate(buckets):
        height = max((_HEIGHT - 10) * each["count"] / most, 1) if each["count"] else 0
        box = {"x": f"{place * width:.1f}", "y": f"{_HEIGHT - height:.1f}"}
        bars.append(element("rect", class_="bar", width=f"{max(width - 1, 1):.1f}", height=f"{height:.1f}", **box))
    ends = (
        element("text", f"{buckets[0]['from_us']:.2f} us", x=2, y=_HEIGHT + 16),
        element("text", f"{buckets[-1]['to_us']:.2f} us", x=_WIDTH - 2, y=_HEIGHT + 16, text_anchor="end"),
    )
    frame = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT + 22}", "width": _WIDTH, "height": _HEIGHT + 22}
    drawn = element("svg", *bars, *ends, role="img", aria_label=about, **frame)
    return element("figure", drawn, element("figcaption", about))
