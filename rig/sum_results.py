"""Adds up JUnit result files and prints one line for all of them."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
for path in sys.argv[1:]:
    if Path(path).exists():
        for suite in ET.parse(path).getroot().iter("testsuite"):
            for name in total:
                total[name] += int(suite.get(name, 0))

failed = total["failures"] + total["errors"]
print(f"tests: {total['tests'] - failed - total['skipped']} passed, {failed} failed, {total['skipped']} skipped")
