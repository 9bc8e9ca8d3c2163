"""Runs the tests. PARTS is the table of parts.

    .venv/bin/python rig/run_tests.py [PART...]

Without names, those that PARTS="unit rxe0" names run, or else the usual ones. Parts stand in three rows, which run side
by side, because programs under Wine and tests without a VM wait more than they compute. A row that has ended takes
parts of the others. What the first row prints is shown as it comes, and what the others print after that.

NDPY_STRESS=1                   full counts, which take about two hours; some parts then run all their modules, with the
usual counts ARGS                            more arguments for pytest SOFTROCE                        where the tests
on rxe0 and siw0 run; see the Makefile LIMIT                           seconds after which a command is ended that hangs
ADAPTER, CPUS, KERNEL_ROOT      of the part hosts; KERNELS: of the part kernels

The exit status is 1 if a part failed, and 130 if this was interrupted. Nothing that it started runs on then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from results import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".rig/results"
PYTHON, NDPY, WINE_PYTHON = ".venv/bin/python", ".venv/bin/ndpy", "rig/wine-python"

STRESS = bool(os.environ.get("NDPY_STRESS"))
ARGS = shlex.split(os.environ.get("ARGS", ""))
SOFTROCE = os.environ.get("SOFTROCE", "--vm")
ADAPTER = os.environ.get("ADAPTER") or "rxe"
OWN_KERNEL = ["--kernel-root", os.environ["KERNEL_ROOT"]] if os.environ.get("KERNEL_ROOT") else []
# For a VM or a program that hangs. A test that hangs has its own limit, and a busy machine may be slow.
LIMIT_S = int(os.environ.get("LIMIT") or (10800 if STRESS else 3600))
# rig/kernels.sh and rig/aarch64.sh end with this if Debian's packages cannot be fetched.
NOT_THERE = 3

# ---- what a part does ----


@dataclass(frozen=True)
class Step:
    """A command. If it is brief, only the end of its output is shown, or all of it if it fails. The exit status
    `allowed` counts as success, like 0."""

    command: Iterable[str | Path]
    variables: Mapping[str, str] = field(default_factory=dict)
    brief: bool = False
    allowed: int = 0
    folder: Path = ROOT


# The commands of a part, and texts to print. It is sent the exit status of each command.
Steps = Generator["Step | str", int, None]


def pytest(
    name: str, tests: str, adapter: str = "", python: Iterable[str] = (PYTHON,), folder: Path = ROOT, **variables: str
) -> Step:
    """pytest on some tests. `name` is that of the result file. `python` runs Python, wherever that is."""
    words = [*shlex.split(tests), *(["--adapter", adapter] if adapter else []), "-p", "no:cacheprovider"]
    words += ["--junitxml", str(RESULTS / f"{name}.xml"), *ARGS]
    return Step([*python, "-m", "pytest", *words], variables, folder=folder)


def machine(*options: str, where: str = SOFTROCE) -> list[str]:
    return [NDPY, "vm", "run", *where.split(), *options, "--limit", str(LIMIT_S), "--"]


# `vm run --adapter siw` boots the newest kernel that has siw. That need not be the newest kernel.
FIND_SIW = 'from ndpy.tools.machines import tools; tools.find_kernel(adapters=("siw",))'


def there_is(kind: str) -> bool:
    return kind != "siw" or not subprocess.run([PYTHON, "-c", FIND_SIW], stderr=subprocess.DEVNULL, cwd=ROOT).returncode


def here(name: str, tests: str) -> Steps:
    yield pytest(name, tests)


def on_soft(tests: str) -> Steps:
    yield Step([NDPY, "smoke", "soft0"], brief=True)
    yield pytest("soft0", tests, "soft0")


def on(kind: str, cpus: int, tests: str) -> Steps:
    """On a driver of the kernel."""
    if not there_is(kind):
        yield f"no tests on {kind}0: this machine has no module {kind}"
        return
    # The part wheels creates this environment unless ARGS deselects its tests.
    installed = ROOT / ".rig/wheels/linux/bin/ndpy"
    variables = {"NDPY_INSTALLED": str(installed)} if installed.exists() or not ARGS else {}
    python = [*machine("--adapter", kind, "--cpus", str(cpus)), PYTHON]
    yield pytest(f"{kind}0", tests, f"{kind}0", python, **variables)


ON_HOSTS = f"""
    if [ "$NDPY_HOST" = 2 ]; then exec {PYTHON} tests/kit/remote.py --listen "$NDPY_CONTROL_ADDRESS:7471"; fi
    exec "$@" --peer "$NDPY_PEER_CONTROL_ADDRESS:7471"
"""


def hosts(kind: str, cpus: int, tests: str) -> Steps:
    """Two VMs with a network between them: pytest on the first, and on the second a server through which tests use ndpy
    there.
    """
    if not there_is(kind):
        yield f"no two hosts with {kind}: this machine has no module {kind}"
        return
    options = f"--hosts 2 --adapter {kind} --cpus {os.environ.get('CPUS') or cpus}"
    python = [*machine(*options.split(), *OWN_KERNEL, where=""), "sh", "-c", ON_HOSTS, "sh", PYTHON]
    yield pytest(f"hosts-{kind}", tests, f"{kind}0", python)


# One VM for both, because a boot takes 15 s in emulation.
SMOKE_AND_TESTS = f"""
    {PYTHON} -m ndpy smoke rxe0 --junit "$0-smoke.xml"
    status=$?
    "$@" || status=1
    exit $status
"""


def kernels(suites: str, tests: str, allowed: int = 0) -> Steps:
    """The smoke test and tests on rxe0, for the newest kernel of each of these suites of Debian."""
    folder = RESULTS / "kernels"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if (yield Step(["sh", "-c", f"rig/kernels.sh {suites} >{folder}/kernels"], allowed=allowed)):
        yield "no tests on the newest kernel: it could not be fetched"
        return
    for suite, kernel, root in map(str.split, (folder / "kernels").read_text().splitlines()):
        yield f"Linux {kernel} of Debian {suite}"
        options = ("--adapter", "rxe", "--kernel-root", root)
        python = [*machine(*options, where="--vm"), "sh", "-c", SMOKE_AND_TESTS, str(folder / kernel), PYTHON]
        yield pytest(f"kernels/{kernel}-contract", tests, "rxe0", python)


def table_of_kernels() -> Steps:
    yield from kernels(os.environ.get("KERNELS") or "stable testing unstable", "tests/contract")
    if list(RESULTS.glob("kernels/*.xml")):
        yield Step([PYTHON, "rig/results.py", RESULTS / "kernels", "docs/reference/supported.md"])


UNDER_WINE = {"NDPY_PROVIDER": r"softrdma\build\softnd.dll", "WINE_LIMIT": str(LIMIT_S)}


def softnd() -> Steps:
    yield Step(["make", "-s", "-C", "softrdma/fuzz", "test"])
    tests = "tests/softnd -c pyproject.toml --confcutdir=tests/softnd"
    yield pytest("softnd-windows", tests, python=[WINE_PYTHON], WINE_LIMIT=str(LIMIT_S))


def fuzz() -> Steps:
    yield Step(
        ["nice", "-n", "19", "make", "-s", "-C", "softrdma/fuzz", "fuzz", f"SECONDS={60 if STRESS else 20}"], brief=True
    )


def windows(version_1: str) -> Steps:
    tests = f"{without(PROTOCOL)} tests/examples tests/networkdirect"
    yield pytest("softnd0", tests, "softnd0", [WINE_PYTHON], **UNDER_WINE)
    yield "tests on softnd0 as version 1"
    yield pytest("softnd0-version-1", version_1, "softnd0", [WINE_PYTHON], **UNDER_WINE, NDPY_PROVIDER_VERSION="1")


def elsewhere(tests: str) -> str:
    """The same for a working folder that is not the checkout, so that Python finds no other package than the one
    there.
    """
    return f"-c {ROOT}/pyproject.toml {tests.replace('tests/', f'{ROOT}/tests/')}"


def sanitized(kind: str, left_out: str = "") -> Steps:
    python = ["rig/sanitized.sh", kind]
    tests = f"tests/contract {usual_or_full('', 'tests/examples')} --ignore {PLUGIN} {left_out}"
    yield pytest(f"softverbs-{kind}", elsewhere(tests), "soft0", python)
    yield Step([*python, "-m", "ndpy", "smoke", "soft0"], brief=True)


def on_aarch64() -> Steps:
    wheel = next(ROOT.glob(".rig/wheels/dist/ndpy-*-manylinux_*_aarch64.whl"), None)
    if wheel is None:
        yield "no tests on aarch64: no wheel was built for it"
    elif (yield Step(["rig/aarch64.sh", wheel], allowed=NOT_THERE)):
        yield "no tests on aarch64: what they need could not be fetched"
    else:
        python, folder = [str(ROOT / ".rig/aarch64/python")], ROOT / ".rig/aarch64/empty"
        yield Step([*python, "-m", "ndpy", "smoke", "soft0"], brief=True, folder=folder)
        # QEMU's emulation has no userfaultfd, without which memory cannot be monitored.
        tests = "tests/contract --ignore tests/contract/test_registration_cache_monitor.py -k 'not monitored'"
        yield pytest("aarch64", elsewhere(tests), "soft0", python, folder)


def freethreaded(kind: str) -> Steps:
    python = ".rig/freethreaded/venv/bin/python"
    if (yield Step(["rig/freethreaded.sh", *(["tsan"] if kind == "tsan" else [])])):
        return
    if kind == "own":
        # The tests of the commands that boot a VM say nothing about Python. Without the GIL it cannot use malloc(),
        # which AddressSanitizer needs to see the memory of objects.
        tests = f"tests/unit --ignore {VM} --ignore tests/unit/test_core_sanitized.py"
        yield pytest("freethreaded-unit", tests, python=[python])
        yield pytest("freethreaded-contract", "tests/contract tests/examples", "soft0", [python])
    elif kind == "rxe":
        yield Step([python, "-m", "compileall", "-q", "ndpy", "tests"])
        yield pytest("freethreaded-rxe", "tests/contract", "rxe0", [*machine("--adapter", "rxe"), python])
    else:
        yield pytest("freethreaded-tsan", elsewhere(THREADS), "soft0", ["rig/sanitized.sh", "freethreaded-tsan"])


def with_warnings() -> Steps:
    """Every warning is an error, for Python itself and for pytest, which has filters of its own."""
    error = ["-W", "error"]
    yield pytest("warnings-unit", f"tests/unit --ignore {VM} -W error", python=[PYTHON, *error])
    python = [*machine("--adapter", "rxe"), PYTHON, *error]
    yield pytest("warnings-rxe0", "tests/contract -W error", "rxe0", python)
    tests = "tests/contract tests/networkdirect -W error"
    yield pytest("warnings-softnd0", tests, "softnd0", [WINE_PYTHON, *error], **UNDER_WINE)


def ten_faults() -> Steps:
    yield Step([PYTHON, "tests/mutants/logic.py", "--count", "10", "--seed", "1", "--jobs", "1"])


# ---- which tests ----


def usual_or_full(usual: str, full: str) -> str:
    return full if STRESS else usual


def without(modules: str) -> str:
    """The contract without what the usual run leaves out on a driver, because it does not depend on it. soft0 has it
    all, and rxe0 most of it.
    """
    left_out = () if STRESS else modules.split()
    return " ".join(("tests/contract", *(f"--ignore tests/contract/test_{module}.py" for module in left_out)))


VM = "tests/unit/test_vm.py"
SIW_AND_SOFTND = "tests/softnd/test_siw.py"
CABLES = "tests/networks/test_on_cables.py"
FLEET = "tests/fleet/test_on_drivers.py"
PLUGIN = "tests/contract/test_pytest_plugin.py"
# The examples and the tests of the smoke test and of pytest's plugin start many processes, which is slow in the VM. On
# rxe the examples run between two hosts, and the smoke test on the newest kernel.
SOFT = "tests/contract tests/interop tests/examples tests/networks tests/verbs" + usual_or_full("/test_smoke.py", "")
FULL = f"tests/contract tests/interop tests/examples tests/verbs {CABLES}"
# Of ndpy.aio's protocol and of what it does with hostile peers.
PROTOCOL = "aio_crowd aio_dropped aio_hostile"
# What no driver changes, because it is of ndpy.aio's protocol, of the cache's bookkeeping, of buffers or of names. Nor
# does a driver take the memory that stands for a CUDA device's.
NO_DRIVERS = f"""
    {PROTOCOL}
    aio_closed_peers aio_ctrl_c aio_cuda aio_unequal_ends arrays copies_of_objects cuda_cache cuda_copied
    cuda_memory foreign_regions layouts_of_memory names ndk outstanding pending pytest_plugin
    registration_cache_exposures registration_cache_fuzz registration_cache_merging registration_cache_threads
    timeouts
"""
RXE = usual_or_full(
    f"{without(NO_DRIVERS)} tests/interop tests/verbs {CABLES} {FLEET} --ignore tests/verbs/test_smoke.py",
    f"{FULL} {FLEET}",
)
# What a new kernel has changed before. The smoke test runs there too.
CHANGING = "completion_queue connector datagrams memory_region memory_window queue_pair queue_pair_endings"
NEWEST = usual_or_full(" ".join(f"tests/contract/test_{module}.py" for module in CHANGING.split()), "tests/contract")
# What is of ndpy.aio, of loops and of the interpreter: rxe0 shows that it works on a driver.
ABOVE_DRIVERS = """
    aio_cancelling aio_endings aio_servers ends_of_the_interpreter error_messages event_loop poller registration_cache
"""
# tests/verbs starts dozens of processes, which takes minutes in the VM.
USUAL_SIW = f"""
    {without(NO_DRIVERS + ABOVE_DRIVERS + "alloc")} tests/interop {CABLES}
    --deselect {CABLES}::test_a_listener_of_one_adapter_takes_peers_of_all_its_subnets
    --deselect {CABLES}::test_an_adapter_on_a_bond_uses_it
"""
SIW = usual_or_full(USUAL_SIW, f"{FULL} {FLEET}")
# The contract's connection tests take a minute there on rxe and three on siw. They run within one VM.
FULL_HOSTS = "tests/contract/test_connector.py tests/contract/test_listener.py tests/hosts"
RXE_HOSTS = usual_or_full("tests/hosts", FULL_HOSTS)
# The usual run has the modules in which version 1 differs most.
DIFFERENT = ("memory_window", "send_and_invalidate", "connector")
VERSION_1 = usual_or_full(" ".join(f"tests/contract/test_{module}.py" for module in DIFFERENT), "tests/contract")
# The runtime of ThreadSanitizer takes the pages that this test unmaps and wants back.
NOT_UNDER_TSAN = """
    --deselect tests/contract/test_registration_cache_monitor.py::test_k_1_8_monitored_memory_in_use_is_detached_and_deregistered_on_release
"""  # noqa: E501
THREADS = """
    tests/unit/test_core.py tests/unit/test_core_locks.py tests/unit/test_core_regions.py tests/unit/test_lease.py
    tests/contract/test_several_threads.py tests/contract/test_registration_cache_threads.py
"""

# ---- the table ----

# When a part runs.
USUAL, IN_STRESS, ASKED_FOR = range(3)
# Whose counts stay the usual ones with NDPY_STRESS=1: all but random requests beside a model, and those too.
ALL_BUT_REQUESTS, ALL = {"NDPY_STRESS": "", "NDPY_TEST_REQUESTS": "100000"}, {"NDPY_STRESS": ""}

# What several parts need is built first, so that no two of them build it.
NEEDS = {
    "programs": [PYTHON, "tests/kit/programs.py"],
    "modules": ["rig/windows/extension.sh"],
    "softnd": ["make", "-s", "-C", "softrdma", "build/softnd.dll"],
    "providers": ["make", "-s", "-C", "tests/networkdirect/providers"],
}


@dataclass(frozen=True)
class Part:
    """A part of the run. `seconds` is its time on a quiet machine, with two thirds of a processor."""

    name: str
    takes_s: int
    steps: Steps
    needs: str = ""
    after: str = ""
    usual: Mapping[str, str] = field(default_factory=dict)
    runs: int = USUAL


ROWS = {
    # Without a VM, then in one those that need an adapter. soft0 comes first, because it finds most mistakes in a
    # minute. A second processor costs half as much time again, when it is emulated. siw has two, because with one it
    # sometimes hangs.
    "first": [
        Part("soft0", 230, on_soft(SOFT), "programs"),
        Part("wheels", 165, here("wheels", "tests/wheels"), "modules softnd"),
        Part("rxe0", 950, on("rxe", 1, RXE), "programs", after="wheels"),
        Part("unit", 350, here("unit", f"tests/unit tests/machines --ignore {VM}"), "modules softnd"),
        Part("docs", 40, here("docs", "tests/docs")),
        # For other targets of the Makefile than test and stress.
        Part("hosts", 400, hosts(ADAPTER, 1, "" if ARGS else FULL_HOSTS), runs=ASKED_FOR),
        Part("kernels", 1500, table_of_kernels(), runs=ASKED_FOR),
        Part("warnings", 2000, with_warnings(), "modules softnd providers", runs=ASKED_FOR),
        Part("freethreaded-own", 600, freethreaded("own"), runs=ASKED_FOR),
        Part("freethreaded-rxe", 900, freethreaded("rxe"), runs=ASKED_FOR),
        Part("freethreaded-tsan", 600, freethreaded("tsan"), runs=ASKED_FOR),
    ],
    # Under Wine, then on siw.
    "wine": [
        Part("softnd", 235, softnd(), "softnd"),
        Part("windows", 785, windows(VERSION_1), "modules softnd providers"),
        Part("peers", 45, here("softnd", f"tests/softnd --ignore {SIW_AND_SOFTND}"), "softnd"),
        Part("siw0", 415, on("siw", 2, SIW), "programs", "wheels", ALL_BUT_REQUESTS),
        Part("hosts-siw", 150, hosts("siw", 2, FULL_HOSTS), usual=ALL_BUT_REQUESTS, runs=IN_STRESS),
        Part("aarch64", 600, on_aarch64(), after="wheels", usual=ALL_BUT_REQUESTS, runs=IN_STRESS),
    ],
    "machines": [
        Part("newest-kernel", 420, kernels("unstable", NEWEST, NOT_THERE), usual=ALL_BUT_REQUESTS),
        Part("vm", 66, here("vm", VM)),
        Part("softnd-siw", 200, here("softnd-siw", SIW_AND_SOFTND), "softnd"),
        Part("hosts-rxe", 360, hosts("rxe", 1, RXE_HOSTS)),
        Part("fuzz", 50, fuzz()),
        Part("asan", 200, sanitized("asan"), usual=ALL),
        Part("tsan", 600, sanitized("tsan", NOT_UNDER_TSAN), usual=ALL, runs=IN_STRESS),
        Part("softverbs", 270, here("softverbs", "tests/soft tests/fleet")),
        Part("faults", 300, ten_faults(), usual=ALL_BUT_REQUESTS, runs=IN_STRESS),
    ],
}
PARTS = {part.name: part for row in ROWS.values() for part in row}

# ---- running them ----

MARK = "NDPY_TEST_RUN"
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Of a brief command that has succeeded.
BRIEF_LINES = 6


class Ended(BaseException):
    """Somebody wants this run to end."""


class Run:
    def __init__(self, names: Iterable[str]) -> None:
        self._waiting = list(names)
        self._running: list[str] = []
        # Each row begins with a part of its own.
        self._initial: dict[str, str] = {}
        for row, parts in ROWS.items():
            own = [part.name for part in parts if part.name in self._waiting and part.after not in names]
            if own:
                self._initial[row] = own[0]
                self._begin(own[0])
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._over = False
        # Every program that this run starts has the mark in its environment, wherever it goes: machines and peers leave
        # the process group.
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        #: The logs of each row. First comes one that has something to show.
        self.logs: dict[str, list[Path]] = {row: [] for row in sorted(ROWS, key=lambda row: row not in self._initial)}
        self.failed: list[str] = []
        self.took: dict[str, float] = {}

    def begins(self, text: str) -> str:
        return f"== {text} (after {(time.monotonic() - self._began) / 60:.0f} min)\n"

    def _begin(self, name: str) -> str:
        self._waiting.remove(name)
        self._running.append(name)
        return name

    def _next(self, row: str) -> str | None:
        """The next part of a row, or else the longest that waits in another one."""
        with self._changed:
            if row in self._initial:
                return self._initial.pop(row)
            while self._waiting and not self._over:
                unfinished = self._waiting + self._running
                ready = [name for name in self._waiting if PARTS[name].after not in unfinished]
                if ready:
                    own = [name for name in ready if PARTS[name] in ROWS[row]]
                    return self._begin(own[0] if own else max(ready, key=lambda name: PARTS[name].takes_s))
                self._changed.wait()
            return None

    def row(self, row: str) -> None:
        """Run parts until there are no more."""
        while name := self._next(row):
            began = time.monotonic()
            path = RESULTS / f"part-{name}.log"
            with path.open("w", buffering=1) as log:
                self.logs[row].append(path)
                log.write(self.begins(name))
                try:
                    good = self._run(PARTS[name], log)
                except Exception:
                    good = False
                    traceback.print_exc(file=log)
            self.took[name] = time.monotonic() - began
            with self._changed:
                self.failed += [] if good else [name]
                self._running.remove(name)
                self._changed.notify_all()

    def _run(self, part: Part, log: TextIO) -> bool:
        good, status = True, None
        with contextlib.suppress(StopIteration):
            while True:
                step = part.steps.send(status)  # type: ignore[arg-type]
                if isinstance(step, str):
                    log.write(f"== {step}\n")
                    status = None
                    continue
                status = self.call(step, log, part.usual if STRESS else {})
                good = good and status in (0, step.allowed)
        return good

    def call(self, step: Step, log: TextIO, counts: Mapping[str, str]) -> int:
        """The exit status of a command, whose output goes to the log."""
        if step.brief:
            whole = Path(f"{log.name}.brief")
            with whole.open("w") as file:
                status = self.call(dataclasses.replace(step, brief=False), file, counts)
            log.writelines(whole.read_text(errors="replace").splitlines(keepends=True)[0 if status else -BRIEF_LINES :])
            return status
        words = [str(word) for word in step.command]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        with self._changed:
            if self._over:
                sys.exit()
            environment = {**os.environ, **counts, **step.variables, MARK: self._mark}
            process = subprocess.Popen(words, env=environment, cwd=step.folder, **options)
        try:
            # VMs and Wine have the limit too, and say more when it has passed.
            return process.wait(LIMIT_S + 60)
        except subprocess.TimeoutExpired:
            log.write(f"== {shlex.join(words)} is ended after {LIMIT_S + 60} s\n")
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def end_all(self) -> None:
        """End everything that this run has started. It has most of a second to end what it started itself."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        mark = f"{MARK}={self._mark}".encode()
        for number in [signal.SIGTERM] * 4 + [signal.SIGKILL] * 6:
            marked = [path for path in Path("/proc").glob("[0-9]*/environ") if mark in environment_of(path)]
            for path in marked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(path.parent.name), number)
            if not marked:
                break
            time.sleep(0.2)

    def prepare(self, collect: bool) -> bool:
        """What several parts need. A test module that cannot be imported shows at once."""
        needs = {need for name in (*self._waiting, *self._running) for need in PARTS[name].needs.split()}
        # Compiled here, because the VM is slow at it.
        commands = [[PYTHON, "-m", "compileall", "-q", "ndpy", "tests", "examples"]]
        commands += [command for need, command in NEEDS.items() if need in needs]
        commands += [[PYTHON, "-m", "pytest", "tests", "--collect-only", "-q"]] if collect else []
        for command in commands:
            with (RESULTS / "prepared.log").open("w+") as log:
                if self.call(Step(command), log, {}):
                    log.seek(0)
                    print(log.read())
                    return False
        return True


def environment_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


def show(logs: list[Path], thread: threading.Thread) -> None:
    """Print the logs of a row as they come, until it has ended."""
    files: list[TextIO] = []
    over = False
    while not over:
        over = not thread.is_alive()
        files += [path.open(errors="replace") for path in logs[len(files) :]]
        for file in files:
            print(file.read(), end="", flush=True)
        thread.join(0.1)


def main(names: list[str]) -> int:
    wanted = names or os.environ.get("PARTS", "").split()
    for name in wanted:
        if name not in PARTS:
            print(f"PARTS: there is no part {name}; there are: {' '.join(PARTS)}", file=sys.stderr)
            return 2
    wanted = [part.name for part in PARTS.values() if (part.name in wanted if wanted else part.runs <= STRESS)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in (*RESULTS.glob("*.xml"), *RESULTS.glob("part-*")):
        path.unlink()
    if "wheels" in wanted:
        shutil.rmtree(ROOT / ".rig/wheels", ignore_errors=True)
    # Three rows share the processors, and an emulated machine does not see how busy this one is. See
    # tests/kit/deadlines.py.
    os.environ.setdefault("NDPY_TEST_PATIENCE", "3")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def end(*_: object) -> None:
        for number in ENDED_BY:
            signal.signal(number, signal.SIG_IGN)
        raise Ended

    for number in ENDED_BY:
        signal.signal(number, end)
    run = Run(wanted)
    try:
        if not run.prepare(collect=not names):
            return 1
        threads = [threading.Thread(target=run.row, args=[row], daemon=True) for row in run.logs]
        for thread in threads:
            thread.start()
        for thread, logs in zip(threads, run.logs.values(), strict=True):
            show(logs, thread)
            if thread is threads[0]:
                print(run.begins("the other rows"), end="", flush=True)
                for other in threads:
                    other.join()
    except Ended:
        run.end_all()
        return 130
    report([*sorted(RESULTS.glob("*.xml")), *sorted(RESULTS.glob("kernels/*.xml"))])
    print("parts:", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.took.items()))
    for name in run.failed:
        lines = (RESULTS / f"part-{name}.log").read_text(errors="replace").splitlines(keepends=True)
        print(f"== the end of the output of {name}\n{''.join(lines[-10:])}", end="")
    print(run.begins("end"), end="")
    if run.failed:
        print(f"failed: {' '.join(run.failed)}")
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
