"""Sweeps the programs of two_ended.py, each with the faults at one end and at the other, and prints a table.

python swept_programs.py FOLDER [--runs N] [--executor engine|shim] [NAME...]     keeps the reports in FOLDER

The adapter is $NDPY_ADAPTER, or soft0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from two_ended import DEVICE, PROGRAMS

from ndpy.platforms.verbs import softverbs

HERE = Path(__file__).resolve().parent

OUTCOMES = ("succeeded", "failed", "leaked", "lost data", "hung", "crashed", "not reached")
# What rping, the pingpongs, fi_pingpong and the examples print when the data is wrong.
LOST_DATA = (
    "data mismatch|invalid data|came back damaged|Error at iteration|bytes differ|wrong data|is not what was sent"
)


def sweep(name: str, end: str, runs: int, executor: str, folder: Path) -> None:
    words = [sys.executable, "-m", "ndpy", "faults", "sweep", "--executor", executor, "--max-runs", str(runs)]
    options = ["--seed", "1", "--limit", "900", "--lost-data", LOST_DATA]
    report = folder / f"{name}.{end}.json"
    environment = dict(os.environ)
    if DEVICE == "soft0":
        environment = softverbs.environment(softverbs.folder(), environment)
    done = subprocess.run(
        [*words, *options, "--json", str(report), "--", sys.executable, str(HERE / "two_ended.py"), name, end],
        capture_output=True,
        text=True,
        env=environment,
    )
    (folder / f"{name}.{end}.txt").write_text(done.stdout + done.stderr)
    if done.returncode not in (0, 1):
        print(f"{name} {end}: status {done.returncode}\n{done.stderr}", file=sys.stderr)


def row(name: str, end: str, folder: Path) -> str:
    report = json.loads((folder / f"{name}.{end}.json").read_text())
    runs = report["runs"]
    counts = Counter(run["outcome"] for run in runs)
    bad: dict[str, list[str]] = {}
    for run in runs:
        if run["outcome"] in OUTCOMES[2:6]:
            fault = run["fault"]
            kind = f"`{fault['do']}`" + (f" of {fault['call']}" if "call" in fault else "")
            bad.setdefault(run["outcome"], []).append(kind)
    told = "; ".join(f"{outcome}: {', '.join(dict.fromkeys(kinds))}" for outcome, kinds in bad.items())
    faults = len(runs) + report["left_out"]
    cells = [
        name,
        end,
        len(report["places"]),
        faults,
        len(runs),
        *(counts[outcome] or "" for outcome in OUTCOMES),
        told,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--executor", default="engine")
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    args = parser.parse_intermixed_args()
    args.folder.mkdir(exist_ok=True)
    print("| program | faults at | places | single faults | runs |", " | ".join(OUTCOMES), "| which |")
    print("|", " | ".join(["---"] * (6 + len(OUTCOMES))), "|")
    for name in args.names:
        for end in ("client", "server"):
            sweep(name, end, args.runs, args.executor, args.folder)
            if (args.folder / f"{name}.{end}.json").exists():
                print(row(name, end, args.folder), flush=True)


if __name__ == "__main__":
    main()
