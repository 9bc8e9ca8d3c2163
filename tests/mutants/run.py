"""The mutation run changes one small place of ndpy, runs the quick tests of that place, and checks whether one fails.

    run.py [--count N] [--seed N] [--files GLOB ...] [--places unit softnd softnd1 rxe] [--json FILE]

README.md in the same folder explains it.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from c_changes import c_changes, c_with_counters
from change import Change
from python_changes import python_changes

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".rig/mutants"
SCOPE = (
    "ndpy/*.py",
    "ndpy/vocabulary/*.py",
    "ndpy/objects/*.py",
    "ndpy/cache/*.py",
    "ndpy/platforms/*.py",
    "ndpy/platforms/verbs/*.py",
    "ndpy/platforms/networkdirect/**/*.py",
)
C_SCOPE = (
    "cdefs/data_path.h",
    "cdefs/rings.c",
    "cdefs/rings.h",
    "cdefs/verbs/data_path.c",
    "cdefs/networkdirect/common.c",
    "cdefs/networkdirect/data_path.c",
    "cdefs/networkdirect/version1/data_path.c",
)
PLACES = ["unit", "softnd", "softnd1", "rxe"]
# Some of these examine a machine, a wheel or a provider's file from outside. The others start many processes, and that
# takes minutes in the VM.
_ELSEWHERE = ("test_smoke.py", "test_process.py", "test_installed.py", "test_monitor.py", "test_peers.py")
WINDOWS_ONLY = ("ndpy/platforms/networkdirect/", "cdefs/networkdirect/")
LINUX_ONLY = ("ndpy/platforms/verbs/", "cdefs/verbs/")
# Modules for Windows that tests/unit tests on any system.
_TESTED_ANYWHERE = tuple(
    f"ndpy/platforms/networkdirect/{name}.py" for name in ("dll_header", "softnd_installation", "winsock_catalogue")
)


class Place:
    """A place where tests run.

    budget_s: for one change, how many seconds of tests run, by their times in the recording.
    slow: the factor for time limits.
    """

    name: str
    extension: str
    adapter: str | None = None
    budget_s: float
    slow: float = 1.0
    seconds: float = 3600.0
    _emitted = False

    def meets(self, file: str) -> bool:
        """Whether tests run code of this file here."""
        raise NotImplementedError

    def paths(self) -> list[str]:
        raise NotImplementedError

    def command(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def build(self, cdefs: Path, out: Path) -> str | None:
        """Compile the extension module from a copy of cdefs/. Returns the compiler's errors, or None on success."""
        raise NotImplementedError

    def _emit(self, script: str, cdefs: Path) -> Path:
        """Let cffi write its part of the module. It includes the sources of cdefs/, so one text serves all changes."""
        out = STATE / f"{self.name}.c"
        if not self._emitted:
            code = "import sys, runpy; runpy.run_path(sys.argv[1])['ffibuilder'].emit_c_code(sys.argv[2])"
            subprocess.run([sys.executable, "-c", code, str(cdefs / script), str(out)], check=True, capture_output=True)
            self._emitted = True
        return out


def _compile(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return None if done.returncode == 0 else done.stderr


def _includes(cdefs: Path) -> list[str]:
    return ["-DPy_LIMITED_API=0x030a0000", f"-I{sysconfig.get_path('include')}", f"-I{cdefs}"]


class Unit(Place):
    name = "unit"
    extension = "ndpy._verbs"
    budget_s = 10.0

    def meets(self, file: str) -> bool:
        return not file.startswith(WINDOWS_ONLY) or file in _TESTED_ANYWHERE

    def paths(self) -> list[str]:
        names = [path.name for path in _tests("tests/unit") if path.name != "test_vm.py"]
        # test_monitor.py needs no adapter.
        return [*(f"tests/unit/{name}" for name in names), "tests/verbs/test_monitor.py"]

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "tests/mutants/worker.py", str(folder)]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT / "tests/mutants/started")}

    def build(self, cdefs: Path, out: Path) -> str | None:
        source = self._emit("build_verbs.py", cdefs)
        flags = ["-shared", "-fPIC", "-O0", "-w", "-std=gnu11", *_includes(cdefs)]
        return _compile(["gcc", *flags, str(source), "-o", f"{out}.abi3.so"])


class Rxe(Unit):
    """The VM. Others may wait to boot theirs, so a batch ends after some minutes, and the next one goes on."""

    name = "rxe"
    adapter = "rxe0"
    budget_s = 20.0
    slow = 4.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def meets(self, file: str) -> bool:
        return not file.startswith(WINDOWS_ONLY)

    def paths(self) -> list[str]:
        return [
            f"{path.parent.relative_to(ROOT)}/{path.name}"
            for path in [*_tests("tests/contract"), *_tests("tests/verbs"), *_tests("tests/interop")]
            if path.name not in _ELSEWHERE
        ]

    def command(self, folder: Path) -> list[str]:
        # VM_COMMAND may be a command that waits for its turn to boot a machine.
        before = shlex.split(os.environ.get("VM_COMMAND", ""))
        run = [".venv/bin/ndpy", "vm", "run", "--vm", "--cpus", "1", "--adapter", "rxe"]
        return [*before, *run, "--limit", str(int(self.seconds) + 120), "--", *super().command(folder)]


class Softnd(Place):
    name = "softnd"
    extension = "ndpy._networkdirect"
    adapter = "softnd0"
    slow = 2.0
    budget_s = 10.0
    _folders: tuple[str, ...] = ("contract", "networkdirect")

    def meets(self, file: str) -> bool:
        return not file.startswith(LINUX_ONLY)

    def paths(self) -> list[str]:
        return [
            f"{path.parent.relative_to(ROOT)}/{path.name}" for part in self._folders for path in _tests(f"tests/{part}")
        ]

    def command(self, folder: Path) -> list[str]:
        return ["rig/wine-python", "tests/mutants/worker.py", folder.relative_to(ROOT).as_posix()]

    def environment(self) -> dict[str, str]:
        return {"NDPY_PROVIDER": "softrdma\\build\\softnd.dll", "WINE_LIMIT": str(int(self.seconds) + 300)}

    def build(self, cdefs: Path, out: Path) -> str | None:
        source = self._emit("build_networkdirect.py", cdefs)
        flags = ["-shared", "-static-libgcc", "-O0", "-w", "-include", "rig/windows/pyconfig.h", *_includes(cdefs)]
        libraries = [".rig/wine/python/python3.dll", "-lws2_32"]
        return _compile(["x86_64-w64-mingw32-gcc", *flags, str(source), *libraries, "-o", f"{out}.pyd"])


class Softnd1(Softnd):
    """softnd as version 1 of NetworkDirect. tests/networkdirect chooses the version itself."""

    name = "softnd1"
    _folders = ("contract",)

    def meets(self, file: str) -> bool:
        return file.startswith(WINDOWS_ONLY)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "NDPY_PROVIDER_VERSION": "1"}


def _tests(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("test_*.py"))


# ---- changes ----


def sources() -> dict[str, str]:
    paths = [path for pattern in (*SCOPE, *C_SCOPE) for path in sorted(ROOT.glob(pattern))]
    # `python -m` runs __main__.py, and nothing imports it.
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if path.name != "__main__.py"}


def changes_of(file: str, source: str) -> list[Change]:
    return (python_changes if file.endswith(".py") else c_changes)(file, source)


def choose(by_file: dict[str, list[Change]], count: int, seed: int) -> list[Change]:
    """Choose a sample: three changes of each file if `count` allows, and others in proportion to the file's number."""
    rng = random.Random(seed)
    shuffled = {file: rng.sample(changes, len(changes)) for file, changes in by_file.items()}
    chosen = [change for changes in shuffled.values() for change in changes[:3]]
    rest = [change for changes in shuffled.values() for change in changes[3:]]
    rng.shuffle(chosen)
    rng.shuffle(rest)
    return sorted((chosen + rest)[:count] if count else chosen + rest, key=lambda change: (change.file, change.start))


# ---- which test runs what ----


class Recording:
    """Which tests of a place run which lines, and how long each test takes.

    If a file has changed since the recording, its unchanged lines are found again.
    """

    def __init__(self, place: Place) -> None:
        self.path = STATE / f"recorded-{place.name}.json"
        data = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.tests: dict[str, dict[str, Any]] = data.get("tests", {})
        #: For each recording, the lines of each file that ran when the tests were imported.
        self.imported: dict[str, dict[str, list[int]]] = data.get("imported", {})
        self.files: dict[str, dict[str, str]] = data.get("files", {})
        self.key: str = data.get("key", "")

    def save(self) -> None:
        data = {"tests": self.tests, "imported": self.imported, "files": self.files, "key": self.key}
        self.path.write_text(json.dumps(data))

    def index(self, now: dict[str, str]) -> None:
        """Build the reverse index: file -> line as it is numbered now -> tests."""
        self.by_line: dict[str, dict[int, list[str]]] = {}
        self.by_file: dict[str, list[str]] = {}
        carried: dict[tuple[str, str], dict[int, int]] = {}
        self.at_import: dict[str, set[int]] = {}
        for of, imported in self.imported.items():
            for file, lines in imported.items():
                if file in now:
                    carry = _carry(self.files[of][file], now[file])
                    self.at_import.setdefault(file, set()).update(carry[line] for line in lines if line in carry)
        for name, test in self.tests.items():
            if not test["good"]:
                continue
            for file, lines in test["ran"].items():
                if file not in now:
                    continue
                self.by_file.setdefault(file, []).append(name)
                key = (test["of"], file)
                if key not in carried:
                    carried[key] = _carry(self.files[test["of"]][file], now[file])
                by_line = self.by_line.setdefault(file, {})
                for line in lines:
                    if line in carried[key]:
                        by_line.setdefault(carried[key][line], []).append(name)

    def tests_of(self, change: Change) -> list[str]:
        by_line = self.by_line.get(change.file, {})
        found = by_line.get(change.statement)
        at_import = self.at_import.get(change.file, set())
        if change.statement in at_import:
            # Any test may depend on this line. Prefer the tests that run a function of the file. The line also runs in
            # programs that tests start, because they import the file.
            others = {name for line, names in by_line.items() if line not in at_import for name in names}
            found = sorted(others) or [name for name, test in self.tests.items() if test["good"]]
        if found is None and change.statement in self.new_lines(change.file):
            # The line is newer than the recording. Take the tests of the nearest line before it.
            known = [line for line in by_line if line < change.statement]
            found = by_line[max(known)] if known else []
        return found or []

    def new_lines(self, file: str) -> set[int]:
        return self._new.get(file, set())

    def note_new_lines(self, now: dict[str, str]) -> None:
        self._new: dict[str, set[int]] = {}
        recorded = list(self.files.values())
        for file, text in now.items():
            new = set(range(1, text.count("\n") + 2))
            for texts in recorded:
                if file in texts:
                    new -= set(_carry(texts[file], text).values())
            self._new[file] = new


def _carry(old: str, new: str) -> dict[int, int]:
    if old == new:
        return {line: line for line in range(1, old.count("\n") + 2)}
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return {
        block.a + step + 1: block.b + step + 1 for block in matcher.get_matching_blocks() for step in range(block.size)
    }


def in_order(names: Iterable[str], tests: dict[str, dict[str, Any]], budget_s: float) -> list[str]:
    """Order the tests, and keep as many as the budget allows.

    Quick tests that run few lines come first. A test that runs few lines is likely to be about them. After a second of
    one function, its other parameters come last.
    """
    spent: dict[str, float] = {}
    ranked = []
    lines = {name: sum(map(len, tests[name]["ran"].values())) for name in set(names)}
    for name in sorted(lines, key=lambda name: (lines[name] * tests[name]["seconds"], name)):
        function = name.split("[")[0]
        ranked.append((spent.get(function, 0.0) > 1, lines[name] * tests[name]["seconds"], name))
        spent[function] = spent.get(function, 0.0) + tests[name]["seconds"]
    chosen, total = [], 0.0
    for _, _, name in sorted(ranked):
        if total + tests[name]["seconds"] > budget_s and chosen:
            break
        total += tests[name]["seconds"]
        chosen.append(name)
    return chosen


def _run(place: Place, folder: Path, task: dict[str, Any]) -> None:
    (folder / "task.json").write_text(json.dumps(task))
    environment = {**os.environ, **place.environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            ["nice", "-n", "19", *place.command(folder)], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            process.wait()
        finally:
            # The process ends the programs that it started. After Ctrl-C it has already received that signal.
            process.terminate()
            process.wait()


def _fresh(name: str) -> Path:
    folder = STATE / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    return folder


def _results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key_of_tests(place: Place) -> str:
    files = [
        path for folder in {path.rsplit("/", 1)[0] for path in place.paths()} for path in (ROOT / folder).glob("*.*")
    ]
    texts = [path.name.encode() + path.read_bytes() for path in sorted([*files, *(ROOT / "tests").glob("*.py")])]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def record(place: Place, now: dict[str, str], mode: str) -> Recording:
    """Record tests. Mode "new" records those that are not recorded yet, "all" records all, and "none" records none."""
    recording = Recording(place)
    key = _key_of_tests(place)
    if mode == "all":
        recording.tests = {}
    if mode == "none" or (recording.key == key and recording.tests):
        return recording
    folder = _fresh(f"record-{place.name}")
    cdefs = folder / "cdefs"
    shutil.copytree(ROOT / "cdefs", cdefs)
    files = [file for file in now if place.meets(file)]
    c_files = {file: now[file].count("\n") + 2 for file in files if file.endswith((".c", ".h"))}
    for file in c_files:
        (folder / file).write_text(c_with_counters(file, now[file]))
    out = folder / place.extension.rsplit(".", 1)[1]
    trouble = place.build(cdefs, out)
    if trouble:
        sys.exit(f"the extension module with counters does not build:\n{trouble}")
    built = next(folder.glob(f"{out.name}.*")).relative_to(ROOT).as_posix()
    of = f"{time.time():.0f}"
    while True:
        say(f"{place.name}: recording which test runs which line ({len(recording.tests)} recorded)")
        task = {
            "adapter": place.adapter,
            "paths": place.paths(),
            "known": sorted(recording.tests),
            "counted": [file for file in files if file.endswith(".py")],
            "c_files": c_files,
            "extension": [place.extension, built],
            "seconds": place.seconds,
        }
        before = len(_results(folder))
        _run(place, folder, task)
        results = _results(folder)[before:]
        for result in results:
            if "test" in result:
                recording.tests[result["test"]] = {**result, "of": of}
            elif "imported" in result:
                recording.imported.setdefault(of, result["imported"])
        recording.files[of] = now
        done = any("complete" in result for result in results)
        if done:
            recording.key = key
        recording.save()
        if done:
            return recording
        if not any("test" in result for result in results):
            sys.exit(f"{place.name}: no test could be recorded; see {folder / 'worker.log'}")


# ---- the run ----


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Fate:
    """The results of one change, by place."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.places: dict[str, dict[str, Any]] = {}

    @property
    def how(self) -> str:
        found = {result["how"] for result in self.places.values()}
        for how in ("noticed", "not a program", "not run"):
            if how in found:
                return how
        return "survived" if "survived" in found else "no test"


def run_place(
    place: Place, fates: list[Fate], recording: Recording, now: dict[str, str], controls: int, until: float
) -> list[str]:
    """Run the changes that no place has noticed yet. Returns a line for each test that failed without a change."""
    seconds = {name: test["seconds"] for name, test in recording.tests.items()}
    lock = (STATE / f"{place.name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"another mutation run uses {STATE} for {place.name}")
    folder = _fresh(f"run-{place.name}")
    jobs: list[dict[str, Any]] = []
    by_id: dict[str, Fate] = {}

    def limits(names: list[str]) -> dict[str, float]:
        return {name: round(10 * place.slow + 15 * seconds[name], 1) for name in names}

    for number, fate in enumerate(fates):
        change = fate.change
        if fate.how == "noticed" or place.name in fate.places or not place.meets(change.file):
            continue
        names = in_order(recording.tests_of(change), recording.tests, place.budget_s)
        if not names:
            continue
        job: dict[str, Any] = {"id": f"{number:05}", "limits": limits(names), "sources": {}}
        # Code that runs at import has run before the process forks. A change of it needs a process of its own.
        job["cold"] = not change.in_function or change.statement in recording.at_import.get(change.file, ())
        text = change.apply(now[change.file])
        if change.file.endswith(".py"):
            job["sources"][change.file] = text
        else:
            cdefs = folder / "cdefs"
            shutil.rmtree(cdefs, ignore_errors=True)
            shutil.copytree(ROOT / "cdefs", cdefs)
            (folder / change.file).write_text(text)
            out = folder / job["id"] / place.extension.rsplit(".", 1)[1]
            out.parent.mkdir()
            if place.build(cdefs, out):
                fate.places[place.name] = {"how": "not a program"}
                continue
            built = next(out.parent.iterdir()).relative_to(ROOT).as_posix()
            job.update(cold=True, extension=[place.extension, built])
        jobs.append(job)
        by_id[job["id"]] = fate
    # If time runs out, the changes that are left should not all come from the end of the alphabet.
    random.Random(len(jobs)).shuffle(jobs)
    false_alarms: dict[str, str] = {}

    def control(name: str, names: Iterable[str]) -> dict[str, Any]:
        return {"id": f"control-{name}", "limits": limits(list(names)), "cold": True, "sources": {}}

    def run(jobs: list[dict[str, Any]]) -> None:
        left = {job["id"]: job for job in jobs}
        while left and (seconds_left := until - time.monotonic()) > 0:
            say(f"{place.name}: {len(left)} to run")
            (folder / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in left.values()))
            before = len(_results(folder))
            _run(place, folder, {"adapter": place.adapter, "seconds": min(place.seconds, seconds_left)})
            results = _results(folder)[before:]
            for result in results:
                if result["how"] == "cold":
                    left[result["id"]]["cold"] = True
                    continue
                job = left.pop(result["id"])
                result["tests"] = len(job["limits"])
                if result["id"] in by_id:
                    by_id[result["id"]].places[place.name] = result
                elif result["how"] != "survived":
                    for test in result["failed"] or [result["test"]]:
                        false_alarms[test] = result["why"]
            if not results:
                say(f"{place.name}: nothing ran; see {folder / 'worker.log'}")
                break

    # Controls run without a change: first some of the same tests, and at the end each test that noticed a change. If a
    # test fails in a control, it is not believed.
    rng = random.Random(len(jobs))
    some = rng.sample(jobs, min(controls, len(jobs)))
    run([*(control(f"{number}", list(job["limits"])[:30]) for number, job in enumerate(some)), *jobs])
    for job in jobs:
        by_id[job["id"]].places.setdefault(place.name, {"how": "not run"})
    noticed = {job["id"]: by_id[job["id"]].places.get(place.name, {}) for job in jobs}
    tests = sorted({result["test"] for result in noticed.values() if result.get("how") == "noticed"} & seconds.keys())
    if controls and tests:
        run([control("noticed", tests)])
    again = [job for job in jobs if noticed[job["id"]].get("test") in false_alarms]
    for job in again:
        job["limits"] = {name: limit for name, limit in job["limits"].items() if name not in false_alarms}
    run(again)
    return [f"{place.name}: {test} {why} without a change, and was not believed" for test, why in false_alarms.items()]


def table(fates: list[Fate]) -> str:
    rows: dict[str, dict[str, int]] = {}
    for fate in fates:
        row = rows.setdefault(fate.change.file, {})
        row[fate.how] = row.get(fate.how, 0) + 1
    columns = ("noticed", "survived", "no test")
    lines = [f"{'':44}{'noticed':>9}{'survived':>9}{'no test':>9}"]
    for file, row in sorted(rows.items()):
        lines.append(f"{file:44}" + "".join(f"{row.get(column, 0) or '':>9}" for column in columns))
    totals = [sum(row.get(column, 0) for row in rows.values()) for column in columns]
    lines.append(f"{'all':44}" + "".join(f"{total:>9}" for total in totals))
    others = sum(map(sum, (row.values() for row in rows.values()))) - sum(totals)
    lines.append(f"{others} not counted: they do not compile, or a place did not get to them")
    lines.append(f"{100 * totals[0] / max(sum(totals), 1):.1f} % of {sum(totals)} noticed")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="changes in the sample; 0 for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="*", default=[], metavar="GLOB", help="changes of these files only")
    parser.add_argument("--lines", metavar="REGEX", help="changes whose FILE:LINE:COLUMN KIND: OLD -> NEW matches")
    parser.add_argument("--places", nargs="*", default=PLACES, choices=PLACES)
    parser.add_argument("--record", choices=["new", "all", "none"], default="new", help="which tests to record before")
    parser.add_argument("--controls", type=int, default=10, help="runs without a change, for each place")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="for each place; what it does not get to is not counted"
    )
    parser.add_argument("--vm-minutes", type=float, default=10.0, help="of one boot of the VM")
    parser.add_argument("--list", action="store_true", help="only show the changes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of tests for one change, by the recording")
    parser.add_argument("--again", action="store_true", help="repeat what survived in the known results")
    parser.add_argument(
        "--known", type=Path, nargs="*", default=[], metavar="FILE", help="results that need no repeating"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    STATE.mkdir(parents=True, exist_ok=True)
    now = sources()
    by_file = {}
    for file, source in now.items():
        if not options.files or any(Path(file).match(pattern) for pattern in options.files):
            found = changes_of(file, source)
            if options.lines:
                found = [change for change in found if re.search(options.lines, change.name)]
            if found:
                by_file[file] = found
    chosen = choose(by_file, options.count, options.seed)
    total = sum(map(len, by_file.values()))
    say(f"seed {options.seed}: {len(chosen)} of {total} changes in {len(by_file)} files")
    if options.list:
        print("\n".join(change.name for change in chosen))
        return
    fates = [Fate(change) for change in chosen]
    for path in options.known:
        known = {result["change"]: result["places"] for result in json.loads(path.read_text())}
        for fate in fates:
            for name, result in known.get(fate.change.name, {}).items():
                if result["how"] != "not run" and not (options.again and result["how"] == "survived"):
                    fate.places[name] = result
    false_alarms = []
    places: list[Place] = [Unit(), Softnd(), Softnd1(), Rxe(60 * options.vm_minutes)]
    for place in places:
        if place.name not in options.places:
            continue
        place.budget_s = options.budget or place.budget_s
        recording = record(place, now, options.record)
        recording.index(now)
        recording.note_new_lines(now)
        until = time.monotonic() + 60 * options.minutes
        false_alarms += run_place(place, fates, recording, now, options.controls, until)
        if options.json:
            options.json.write_text(json.dumps([_as_json(fate) for fate in fates], indent=1))
    print(table(fates))
    for fate in fates:
        if fate.how in ("survived", "no test"):
            tests = ", ".join(f"{result.get('tests', 0)} on {place}" for place, result in fate.places.items())
            print(f"{fate.how}: {fate.change.name} (in {fate.change.function or 'the module'}; {tests or 'no tests'})")
    print(f"seed {options.seed}: {len(chosen)} of {total} changes; without a change {len(false_alarms)} runs failed")
    print("\n".join(false_alarms))


def _as_json(fate: Fate) -> dict[str, Any]:
    change = fate.change
    return {"change": change.name, "function": change.function, "how": fate.how, "places": fate.places}


if __name__ == "__main__":
    main()
