"""The program of docs/howto/logging.md prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/logging.md"


def test_the_program_of_the_page_prints_the_lines_that_follow_it():
    text = PAGE.read_text(encoding="utf-8")
    program, *_ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    expected, *_ = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()[-len(expected.splitlines()) :]
    assert re.sub(r"port \d+", "port N", "\n".join(lines)) == re.sub(r"port \d+", "port N", expected.strip())
