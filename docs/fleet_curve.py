"""Writes the curve of docs/explained/fleet_model.md: how many slow nodes are named, by slowness, noise and rounds.

.venv/bin/python docs/fleet_curve.py [RUNS]   a minute; 3 runs are the page's
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ndpy.fleet.search import Search  # noqa: E402
from tests.kit.fleets import Count, Fleet, fleet, searched  # noqa: E402

PAGE = ROOT / "docs/explained/fleet_model.md"
NODES, BAD = 1024, 4
SLOWER, NOISE, ROUNDS = (3, 5, 10, 20), (2, 5, 10), (6, 12, 24)


def cell(slower: int, noise: int, rounds: int, runs: int) -> Count:
    ends, count = fleet(NODES, leaf=32), Count()
    for seed in range(runs):
        bad = {f"n{(seed * 37 + number * 251) % NODES}" for number in range(BAD)}
        search = Search(ends, rounds=rounds, least=slower / 100, seed=seed)
        measured = Fleet(ends, dict.fromkeys(bad, 1 / (1 - slower / 100)), noise=noise / 100, seed=seed)
        named, used = searched(search, measured)
        count.add(named, bad, used)
    return count


def table(runs: int) -> str:
    head = [f"{noise} %, {rounds} rounds" for noise in NOISE for rounds in ROUNDS]
    lines = [f"| slower by | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    wrong = 0
    for slower in SLOWER:
        cells = []
        for noise in NOISE:
            for rounds in ROUNDS:
                count = cell(slower, noise, rounds, runs)
                wrong += count.wrong
                cells.append(f"{count.recall:.2f}")
        lines.append(f"| {slower} % | {' | '.join(cells)} |")
    named = len(SLOWER) * len(head) * runs
    return "\n".join([*lines, "", f"In these {named} runs, {wrong} good nodes were named."])


def main() -> None:
    made = table(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    part = re.compile(r"(<!-- made by docs/fleet_curve\.py -->\n).*?(\n<!-- end of curve -->)", re.S)
    PAGE.write_text(part.sub(lambda found: found[1] + made + found[2], PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
