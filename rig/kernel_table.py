"""Writes the table of tested kernels into the README.

python kernel_table.py RESULTS README: RESULTS/kernels has a line "SUITE VERSION FOLDER" for each kernel, and RESULTS/VERSION-smoke.xml and
RESULTS/VERSION-contract.xml have its results. Rows of other suites stay as they are.
"""

from __future__ import annotations

import datetime
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

BEGIN = "<!-- make test-kernels writes this table -->"
HEAD = ["| Linux | of | smoke test | contract's tests | on |", "| --- | --- | --- | --- | --- |"]
NAMES = {"stable": "Debian stable", "testing": "Debian testing", "unstable": "Debian unstable"}


def result(path: Path) -> str:
    """What a JUnit file says, such as "92 passed, 4 skipped"."""
    if not path.exists():
        return "did not run"
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ET.parse(path).getroot().iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    parts = [f"{passed} passed"]
    if failed:
        parts.append(f"**{failed} failed**")
    if counts["skipped"]:
        parts.append(f"{counts['skipped']} skipped")
    return ", ".join(parts)


def rows(folder: Path, day: datetime.date) -> dict[str, str]:
    """The row of each kernel, by its suite."""
    found = {}
    for line in (folder / "kernels").read_text().splitlines():
        suite, version, _ = line.split()
        smoke, contract = (result(folder / f"{version}-{part}.xml") for part in ("smoke", "contract"))
        found[suite] = f"| {version} | {NAMES.get(suite, suite)} | {smoke} | {contract} | {day.isoformat()} |"
    return found


def replace_table(text: str, new: dict[str, str]) -> str:
    """The README with new rows in place of those of the same suites, the newest suite last."""
    before, mark, after = text.partition(BEGIN + "\n")
    if not mark:
        raise SystemExit(f"the README has no line {BEGIN}")
    lines = after.splitlines(keepends=True)
    table = [line.rstrip("\n") for line in lines]
    end = next((place for place, line in enumerate(table) if not line.startswith("|")), len(table))
    names = {name: suite for suite, name in NAMES.items()}
    kept = {names.get(row.split("|")[2].strip(), ""): row for row in table[len(HEAD) : end]}
    kept.update(new)
    made = [*HEAD, *(kept[suite] for suite in NAMES if suite in kept)]
    return before + mark + "".join(f"{line}\n" for line in made) + "".join(lines[end:])


if __name__ == "__main__":
    results, readme = Path(sys.argv[1]), Path(sys.argv[2])
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    readme.write_text(replace_table(readme.read_text(encoding="utf-8"), rows(results, today)), encoding="utf-8")
