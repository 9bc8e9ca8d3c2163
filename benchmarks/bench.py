"""Compares ndpy with C, pyverbs and PyPI's ibverbs: on rxe, in one VM whose clock counts instructions, and on softnd,
under Wine.

python benchmarks/bench.py [--part rxe|softnd|here] [FILE]
    (`make bench` runs it; FILE is bench.json by default, and gets all figures)

The exit status is 1 if ndpy misses a bar, and 2 if there are no figures.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from figures import BARS, LOOPS, PROGRAMS, STABLE, Figures
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
STATE = ROOT / ".rig" / "bench"
# With Debian's pyverbs, which only the system's Python can import.
PYTHON = STATE / "venv" / "bin" / "python"
LIMIT_S = 900
COMPILE = ("gcc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")
MACHINE = ("--vm", "--icount", "--adapter", "rxe", "--limit", str(LIMIT_S))
# Its paths are Windows paths.
ON_WINDOWS = (
    ROOT / "rig" / "wine-python",
    "benchmarks/networkdirect_calls.py",
    r"softrdma\build\networkdirect_calls.exe",
    r"softrdma\build\softnd.dll",
)
# On soft0, with memory whose bytes can be counted.
ON_THIS_MACHINE = ("env", "PYTHONMALLOC=malloc", sys.executable, HERE / "loops_here.py")
MISSED, NO_FIGURES = 1, 2


def build():
    """Compile the loops in C, and the Python that the VM would be slow to compile."""
    program = STATE / "loops"
    subprocess.run([*COMPILE, "-o", program, HERE / "loops.c", "-libverbs"], check=True)
    subprocess.run([PYTHON, "-m", "compileall", "-q", ROOT / "ndpy", HERE], check=True)
    shim = ROOT / "ndpy/platforms/verbs/soft/libndpyfaults.so"
    return [
        [program, "rxe0"],
        ["env", f"LD_PRELOAD={shim}", program, "rxe0"],
        *([PYTHON, HERE / f"loops_{who}.py", "rxe0"] for who in PROGRAMS if who not in ("C", "shim")),
        # `ndpy perf` needs packages that only this checkout's environment has.
        [sys.executable, HERE / "loops_perftest.py", "rxe0", sys.executable, "-m", "ndpy"],
    ]


def in_vm(commands):
    """The command that runs these in the VM, one after the other."""
    # rxe numbers its registrations, and finds one with a small number faster. Without this the first
    # program would be ahead of the others.
    steps = [
        f"{shlex.quote(str(STATE / 'loops'))} rxe0 register_4k >/dev/null",
        *(shlex.join(map(str, command)) for command in commands),
    ]
    script = " && ".join(steps)
    return [sys.executable, "-m", "ndpy", "vm", "run", *MACHINE, "--", "sh", "-c", script]


def take(figures, command):
    """Run a command, and take the figures that it prints, with progress on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WINE_LIMIT": str(LIMIT_S)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        for text in process.stdout:
            try:
                line = json.loads(text)
            except ValueError:
                print(text, end="", file=sys.stderr)
                continue
            if figures.add(line):
                print(f"bench: {line['who']:8}{LOOPS[line['loop']]:55}{line['us']:10.3f}", file=sys.stderr)
    if process.returncode:
        print(
            f"bench: the exit status of {shlex.join(map(str, command[:4]))} ... was {process.returncode}",
            file=sys.stderr,
        )
        sys.exit(NO_FIGURES)


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def versions():
    """What the figures depend on, apart from what the programs say of themselves."""
    packages = ("python3-pyverbs", "libibverbs1", "ibverbs-providers", "qemu-system-x86")
    return {
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "gcc": output_of("gcc", "-dumpfullversion"),
        "machine": platform.machine(),
        "arguments": list(MACHINE),
        **{package: output_of("dpkg-query", "-W", "-f", "${Version}", package) for package in packages},
    }


def as_json(figures, about):
    """All figures, ratios and verdicts."""
    loops = {}
    for loop, title in LOOPS.items():
        of_programs = figures.records.get(loop, {})
        loops[loop] = {
            "title": title,
            **{who: {**record, "ratio": figures.ratio(loop, who)} for who, record in of_programs.items()},
        }
    bars = [
        {"name": bar.name, "loop": bar.loop, "limit": bar.limit, "unit": bar.unit}
        | {"value": figures.value(bar), "met": figures.met(bar)}
        for bar in BARS
    ]
    return {"versions": about, "programs": figures.about, "loops": loops, "bars": bars}


def number(value):
    """Three digits at least, and never less than a nanosecond."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def table_of_loops(figures):
    table = Table(title="microseconds, and times C", box=None, pad_edge=False, header_style="bold")
    table.add_column("loop")
    for who in PROGRAMS:
        table.add_column(who, justify="right")
        if who != "C":
            table.add_column("/ C", justify="right", style="dim")
    for loop, title in LOOPS.items():
        cells = []
        for who in PROGRAMS:
            cells.append(number(figures.us(loop, who)))
            if who != "C":
                cells.append(number(figures.ratio(loop, who)))
        table.add_row(title, *cells)
    return table


def table_of_bars(figures, bars):
    table = Table(title="bars", box=None, pad_edge=False, header_style="bold")
    for column in ("bar", "limit", "figure", "unit", ""):
        table.add_column(column, justify="right" if column in ("limit", "figure") else "left")
    for bar in bars:
        verdict = "[green]met[/]" if figures.met(bar) else "[red]MISSED[/]"
        table.add_row(bar.name, number(bar.limit), number(figures.value(bar)), bar.unit, verdict)
    return table


def report(figures, bars=BARS):
    """Print the tables and what is doubtful. Returns the exit status."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file or a pipe has no width. Folded columns would break the program that reads it.
        console = Console(highlight=False, width=160)
    console.print(table_of_loops(figures))
    console.print()
    console.print(table_of_bars(figures, bars))
    for loop, who, spread in figures.unstable():
        console.print(f"not stable: {who}, {LOOPS[loop]}: samples differ by {spread:.1%}, more than {STABLE:.0%}")
    for loop, who, polls in figures.waiting():
        console.print(f"includes waiting: {who}, {LOOPS[loop]}: {polls:.2f} polls a completion")
    return 0 if all(figures.met(bar) for bar in bars) else MISSED


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("rxe", "softnd", "here"))
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "bench.json")
    arguments = parser.parse_args()
    target, figures = arguments.file, Figures([])
    try:
        about = versions()
        if arguments.part in (None, "rxe"):
            take(figures, in_vm(build()))
        if arguments.part in (None, "softnd"):
            take(figures, ON_WINDOWS)
        if arguments.part in (None, "here"):
            take(figures, ON_THIS_MACHINE)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(NO_FIGURES)
    target.write_text(json.dumps(as_json(figures, about), indent=2) + "\n", encoding="utf-8")
    status = report(figures, [bar for bar in BARS if arguments.part in (None, bar.part)])
    print(f"bench: all figures are in {target}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
