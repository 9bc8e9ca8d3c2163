"""What JUnit result files say.

report() prints the time of each file, its slowest test modules, each failed test with what pytest says of it, and one
line for all. `python rig/results.py RESULTS PAGE` writes the table of tested kernels into a page. RESULTS/kernels
has a line "SUITE VERSION FOLDER" for each kernel, and RESULTS/VERSION-smoke.xml and RESULTS/VERSION-contract.xml have
its results. Rows of other suites stay as they are.
"""

from __future__ import annotations

import datetime
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

BEGIN = "<!-- make test-kernels writes this table -->"
HEAD = ["| Linux | of | smoke test | contract's tests | on |", "| --- | --- | --- | --- | --- |"]
NAMES = {"stable": "Debian stable", "testing": "Debian testing", "unstable": "Debian unstable"}
_SLOWEST = 3
# Of a failed test.
_LINES = 8


def counted(suites: Iterable[ET.Element]) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped."""
    total: Counter[str] = Counter()
    for suite in suites:
        total.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    failed = total["failures"] + total["errors"]
    return total["tests"] - failed - total["skipped"], failed, total["skipped"]


def report(paths: Iterable[Path]) -> None:
    every, failures = [], []
    for path in paths:
        suites = list(ET.parse(path).getroot().iter("testsuite"))
        every += suites
        modules: Counter[str] = Counter()
        for case in (case for suite in suites for case in suite.iter("testcase")):
            modules[case.get("classname", "").rpartition(".")[2]] += float(case.get("time", 0))
            for failure in (*case.iter("failure"), *case.iter("error")):
                lines = (failure.text or failure.get("message", "")).strip().splitlines()
                failures.append(f"{path.stem}: {case.get('classname')}::{case.get('name')} failed")
                told = [line for line in lines if line.startswith("E ")] or lines[-_LINES:]
                failures.extend(f"    {line[:200]}" for line in (*told[:_LINES], *lines[-1:]))
        slowest = ", ".join(f"{module} {taken:.0f} s" for module, taken in modules.most_common(_SLOWEST))
        print(f"{path.stem}: {sum(float(suite.get('time', 0)) for suite in suites):.0f} s ({slowest})")
    for line in failures:
        print(line)
    passed, failed, skipped = counted(every)
    print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")


def result(path: Path) -> str:
    """What a result file says, such as "92 passed, 4 skipped"."""
    if not path.exists():
        return "did not run"
    passed, failed, skipped = counted(ET.parse(path).getroot().iter("testsuite"))
    parts = [f"{passed} passed", f"**{failed} failed**" if failed else "", f"{skipped} skipped" if skipped else ""]
    return ", ".join(filter(None, parts))


def rows(folder: Path, day: datetime.date) -> dict[str, str]:
    """The row of each kernel, by its suite."""
    found = {}
    for line in (folder / "kernels").read_text().splitlines():
        suite, version, _ = line.split()
        smoke, contract = (result(folder / f"{version}-{part}.xml") for part in ("smoke", "contract"))
        found[suite] = f"| {version} | {NAMES.get(suite, suite)} | {smoke} | {contract} | {day.isoformat()} |"
    return found


def replace_table(text: str, new: dict[str, str]) -> str:
    """The page with new rows in place of those of the same suites, the newest suite last."""
    before, mark, after = text.partition(BEGIN + "\n")
    if not mark:
        raise SystemExit(f"the page has no line {BEGIN}")
    lines = after.splitlines(keepends=True)
    table = [line.rstrip("\n") for line in lines]
    end = next((place for place, line in enumerate(table) if not line.startswith("|")), len(table))
    names = {name: suite for suite, name in NAMES.items()}
    kept = {names.get(row.split("|")[2].strip(), ""): row for row in table[len(HEAD) : end]}
    kept.update(new)
    made = [*HEAD, *(kept[suite] for suite in NAMES if suite in kept)]
    return before + mark + "".join(f"{line}\n" for line in made) + "".join(lines[end:])


if __name__ == "__main__":
    results, page = Path(sys.argv[1]), Path(sys.argv[2])
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    page.write_text(replace_table(page.read_text(encoding="utf-8"), rows(results, today)), encoding="utf-8")
