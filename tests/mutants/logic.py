"""Builds ndpy with each fault of logic/, one at a time, and runs the tests that should notice it.

    logic.py [NAME ...] [--count N] [--seed N] [--jobs N] [--list]

The faults are made in a copy of the checkout, in .rig/mutants/tree-N, where C is compiled too. The tests are the
copy's, and run on soft0. README.md in the same folder explains it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from faults import AREAS, KINDS, ROOT, Fault, is_a_test, read_faults

STATE = ROOT / ".rig/mutants"
_TEST_LIMIT_S = 90
_FAULT_LIMIT_S = 400
_CONTROL_LIMIT_S = 1800
_C = ["gcc", "-shared", "-fPIC", "-O0", "-w", "-std=gnu11", "-fvisibility=hidden", "-DPy_LIMITED_API=0x030a0000"]
_EMIT = "import sys, runpy; runpy.run_path(sys.argv[1])['ffibuilder'].emit_c_code(sys.argv[2])"
# Files that git does not know, and that the copy needs.
_BUILT = ("ndpy/*.so", "ndpy/platforms/verbs/soft/*", "softrdma/build/**/*")


def built_from(file: str) -> set[str]:
    """What has to be compiled when this file has changed."""
    if file.startswith("softrdma/"):
        return {"softverbs"}
    if file.startswith("cdefs/core/"):
        return {"core"}
    return {"core", "verbs"} if file.startswith("cdefs/") else set()


def _build_core(tree: Path) -> list[list[str]]:
    sources = sorted(map(str, (tree / "cdefs/core").glob("*.c")))
    return [[*_C, *_includes(tree), *sources, "-o", "ndpy/_core.abi3.so"]]


def _build_verbs(tree: Path) -> list[list[str]]:
    emitted = ".rig-verbs.c"
    return [
        [sys.executable, "-c", _EMIT, "cdefs/build_verbs.py", emitted],
        [*_C, *_includes(tree), emitted, "-o", "ndpy/_verbs.abi3.so"],
    ]


def _build_softverbs(tree: Path) -> list[list[str]]:
    return [[sys.executable, "setup.py", "-q", "build_softverbs", "--inplace"]]


def _includes(tree: Path) -> list[str]:
    return [f"-I{sysconfig.get_path('include')}", f"-I{tree / 'cdefs'}"]


# Without optimization, which takes a fifth of the time.
_COMMANDS = {"core": _build_core, "verbs": _build_verbs, "softverbs": _build_softverbs}


class Tree:
    """A copy of the checkout, with at most one fault at a time."""

    def __init__(self, number: int) -> None:
        self.folder = STATE / f"tree-{number}"
        #: The file that has a fault now, and its text without one.
        self._changed: tuple[str, str] | None = None
        self._stale: set[str] = set()
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        files = {ROOT / name for name in names.stdout.splitlines()}
        files |= {path for pattern in _BUILT for path in ROOT.glob(pattern) if path.is_file()}
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in files:
            if file.is_file():
                copy = self.folder / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy, follow_symlinks=False)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")

    def make(self, fault: Fault | None) -> str:
        """Make the copy have this fault, or none. Returns what the compiler says if it fails."""
        if self._changed is not None:
            self._write(*self._changed)
            self._changed = None
        if fault is not None:
            mutated = fault.mutated(self.folder)
            self._changed = fault.file, (self.folder / fault.file).read_text(encoding="utf-8")
            self._write(fault.file, mutated)
        for part in sorted(self._stale):
            for command in _COMMANDS[part](self.folder):
                built = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
                if built.returncode:
                    return built.stdout + built.stderr
        self._stale.clear()
        return ""

    def _write(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text, encoding="utf-8")
        self._stale |= built_from(file)

    def run(self, tests: Iterable[str], log: Path, limit_s: float, *arguments: str) -> int:
        """Run tests. Returns pytest's exit status, or that of the signal that ended it."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("NDPY_STRESS", None)
        if "-x" in arguments:
            # What a fault holds up never comes.
            environment["NDPY_TEST_PATIENCE"] = "1"
        options = ["-q", "-p", "no:cacheprovider", "--timeout", str(_TEST_LIMIT_S), "--adapter", "soft0", *arguments]
        # For the other styles pytest parses sources, which fails at some depths of calls (SystemError of ast.parse()).
        options.append("--tb=native")
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL
            finally:
                # With the programs that the tests started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def examine(tree: Tree, fault: Fault) -> tuple[str, str]:
    """Returns "noticed", "survived" or "broken", and by which test or why."""
    said = tree.make(fault)
    if said:
        return "broken", f"it does not compile:\n{said}"
    log = STATE / "logs" / f"{fault.name}.log"
    status = tree.run(fault.tests, log, _FAULT_LIMIT_S, "-x")
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [line.partition(" ")[2] for line in lines]
    if status == 0:
        return "survived", f"{', '.join(fault.tests)}; see {log.relative_to(ROOT)}"
    if status == 1 and failed:
        return "noticed", failed[0]
    if status < 0 or status in (1, 128 + signal.SIGSEGV, 128 + signal.SIGABRT):
        return "noticed", f"its tests ended with status {status}"
    return "broken", f"pytest ended with status {status}; see {log.relative_to(ROOT)}"


def run_all(faults: list[Fault], jobs: int) -> dict[str, tuple[str, str]]:
    """Examine all faults, in so many copies at once."""
    # Those of C after the others, because each change of C is compiled twice.
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in sorted(faults, key=lambda fault: (bool(built_from(fault.file)), fault.file)):
        waiting.put(fault)
    outcome: dict[str, tuple[str, str]] = {}
    lock = threading.Lock()

    def work(tree: Tree) -> None:
        while True:
            try:
                fault = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            result = examine(tree, fault)
            with lock:
                outcome[fault.name] = result
                print(f"{result[0]:8} {fault.name} ({time.monotonic() - began:.0f} s): {result[1]}", flush=True)

    threads = [threading.Thread(target=work, args=(tree,)) for tree in trees(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def trees(count: int) -> list[Tree]:
    return [Tree(number) for number in range(count)]


def control(faults: list[Fault]) -> bool:
    """Run all the tests without a fault. Returns whether they pass."""
    tests = sorted({test for fault in faults for test in fault.tests})
    log = STATE / "logs/control.log"
    status = Tree(0).run(tests, log, _CONTROL_LIMIT_S)
    text = log.read_text(encoding="utf-8", errors="replace")
    print(f"without a fault: {text.splitlines()[-1] if text else status}", flush=True)
    if status:
        print(text)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--count", type=int, default=0, help="so many of them, chosen by the seed; 0 for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 2), help="how many copies work at once")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests without a fault before")
    parser.add_argument("--list", action="store_true", help="only show them")
    options = parser.parse_args()
    faults = read_faults()
    unknown = set(options.names) - {fault.name for fault in faults}
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not options.names or fault.name in options.names]
    if options.count:
        chosen = random.Random(options.seed).sample(chosen, min(options.count, len(chosen)))
    print(f"seed {options.seed}: {len(chosen)} of {len(faults)} faults of logic", flush=True)
    if options.list:
        for fault in chosen:
            print(f"{fault.name} ({KINDS[fault.kind]}; {fault.area}): {fault.what}")
        return 0
    problems = []
    for fault in chosen:
        try:
            fault.mutated()
        except ValueError as error:
            problems.append(str(error))
        problems += [f"{fault.name}: there is no test {test}" for test in fault.tests if not is_a_test(test)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    (STATE / "logs").mkdir(parents=True, exist_ok=True)
    # Held until this process ends.
    lock = (STATE / "logic.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another run uses the copies in .rig/mutants", file=sys.stderr)
        return 1
    if not options.no_control and not control(chosen):
        return 1
    outcome = run_all(chosen, options.jobs)
    for title, values in (("kind", KINDS), ("area", AREAS)):
        for value in values:
            of_it = Counter(outcome[fault.name][0] for fault in chosen if getattr(fault, title) == value)
            print(f"{value:12} {of_it['noticed']} of {sum(of_it.values())} noticed")
    missed = [name for name, (how, _) in outcome.items() if how != "noticed"]
    print(f"seed {options.seed}: {len(outcome) - len(missed)} of {len(outcome)} faults of logic noticed")
    for name in sorted(missed):
        print(f"not noticed: {name}: {outcome[name][1]}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
