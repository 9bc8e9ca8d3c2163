"""Adds up JUnit result files. Prints the time of each file, its slowest test modules, each failed test with what
pytest says of it, and one line for all the tests.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

SLOWEST = 3
LINES = 8

total = Counter()
failures = []
for path in map(Path, sys.argv[1:]):
    if not path.exists():
        continue
    seconds = 0.0
    modules: Counter[str] = Counter()
    for suite in ET.parse(path).getroot().iter("testsuite"):
        for name in ("tests", "failures", "errors", "skipped"):
            total[name] += int(suite.get(name, 0))
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            modules[case.get("classname", "").rpartition(".")[2]] += float(case.get("time", 0))
            for failure in (*case.iter("failure"), *case.iter("error")):
                lines = (failure.text or failure.get("message", "")).strip().splitlines()
                failures.append(f"{path.stem}: {case.get('classname')}::{case.get('name')} failed")
                told = [line for line in lines if line.startswith("E ")] or lines[-LINES:]
                failures.extend(f"    {line[:200]}" for line in (*told[:LINES], lines[-1]))
    slowest = ", ".join(f"{module} {taken:.0f} s" for module, taken in modules.most_common(SLOWEST))
    print(f"{path.stem}: {seconds:.0f} s ({slowest})")

failed = total["failures"] + total["errors"]
for line in failures:
    print(line)
print(f"tests: {total['tests'] - failed - total['skipped']} passed, {failed} failed, {total['skipped']} skipped")
