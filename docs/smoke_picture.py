"""Writes docs/_static/smoke.svg, the picture of the smoke test in the README: what `ndpy smoke soft0` prints here.

.venv/bin/python docs/smoke_picture.py
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "_static/smoke.svg"
# So many checks of each group, and so many characters of a line, are enough for a picture.
OF_A_GROUP, WIDTH = 2, 100
STYLES = {"PASS": "bold green", "SKIP": "yellow", "KNOWN": "yellow", "FAIL": "bold red", "smoke:": "bold"}


def picture(lines: list[str]) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        line = line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
        word = line.split(" ")[0]
        text = Text(line)
        text.stylize(STYLES.get(word, ""), 0, len(word))
        console.print(text)
    svg = console.export_svg(title="$ ndpy smoke soft0", unique_id="smoke")
    # Its letters would come from another host. The reader's own will do.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.S)


def main() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ndpy", "smoke", "soft0"], stdout=subprocess.PIPE, text=True, check=True
    )
    first, *checks, last = done.stdout.splitlines()
    groups: dict[str, list[str]] = {}
    for line in checks:
        groups.setdefault(line.split()[1].split("/")[0], []).append(line)
    shown = [line for lines in groups.values() for line in [*lines[:OF_A_GROUP], "..."][: len(lines)]]
    # The addresses of this machine say nothing to a reader.
    first = re.sub(r"\(.*\)", "(iWARP, softverbs, port active)", first)
    shown = [re.sub(r", kernel \S+|; kernel \S+", "", line) for line in shown]
    PICTURE.write_text(picture([first, *shown, last]), "utf-8")


if __name__ == "__main__":
    main()
