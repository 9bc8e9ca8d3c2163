"""Runs tests on changed sources in the place of the tests: on this system, in the VM, or on Windows Python under Wine.

    worker.py FOLDER     does what FOLDER/task.json says. run.py writes that file and reads FOLDER/results.jsonl

The sources stay as they are: a changed module is compiled in the process that tests it. A process that has collected
the tests forks for each change of a function's body. Any other change gets a process of its own, which imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve()
# The Python of rig/wine.sh does not search the program's folder for modules.
sys.path.insert(0, str(HERE.parent))
import hook  # noqa: E402
from c_changes import counter_name  # noqa: E402

ROOT = hook.ROOT

_NO_TEST = 70
_COLD = 77


# ---- changed functions ----


def functions_of_package() -> dict[str, list[types.FunctionType]]:
    """The functions of every imported module of the package, by file."""
    found: dict[str, list[types.FunctionType]] = {}
    package = str(ROOT / "ndpy") + os.sep
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename.startswith(package):
            found.setdefault(Path(function.__code__.co_filename).relative_to(ROOT).as_posix(), []).append(function)
    return found


def swap_functions(functions: list[types.FunctionType], file: str, text: str) -> bool:
    """Give functions the code of a changed text of their file. Returns False if that is not the whole change."""
    made: dict[tuple[str, int], list[types.CodeType]] = {}

    def collect(code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                made.setdefault((constant.co_name, constant.co_firstlineno), []).append(constant)
                collect(constant)

    collect(compile(text, str(ROOT / file), "exec", dont_inherit=True))
    done = False
    for function in functions:
        codes = made.get((function.__code__.co_name, function.__code__.co_firstlineno), [])
        if len(codes) != 1 or codes[0].co_freevars != function.__code__.co_freevars:
            return False
        if codes[0] != function.__code__:
            function.__code__ = codes[0]
            done = True
    return done


# ---- running tests ----


class Watch:
    """Records which test failed, and ends the process when a test takes too long."""

    def __init__(self, limits: dict[str, float], to_the_end: bool = False) -> None:
        self._limits = limits
        self._to_the_end = to_the_end
        self.failed: str | None = None
        self.passed = 0
        self.skipped = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid
            print(f"\n{report.longreprtext}", flush=True)
        if report.failed:
            print(f"\nfailed {report.nodeid}", flush=True)
        if report.when == "call" and report.passed:
            self.passed += 1
        self.skipped |= report.skipped

    def run(self, items: list[pytest.Item]) -> None:
        for place, item in enumerate(items):
            following = items[place + 1] if place + 1 < len(items) else None
            faulthandler.dump_traceback_later(self._limits[item.nodeid], exit=True)
            print(f"test {item.nodeid}", flush=True)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            faulthandler.cancel_dump_traceback_later()
            if self.failed and not self._to_the_end:
                return


def status_of(watch: Watch) -> int:
    if watch.failed:
        return 1
    return 0 if watch.passed else _NO_TEST


class OneJob:
    """Runs the tests of one job and nothing else."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._limits = job["limits"]
        self._to_the_end = job["id"].startswith("control")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_name = {item.nodeid: item for item in session.items}
        items = [by_name[name] for name in self._limits if name in by_name]
        watch = Watch(self._limits, self._to_the_end)
        session.config.pluginmanager.register(watch)
        watch.run(items)
        sys.stdout.flush()
        os._exit(status_of(watch))


def run_cold(task: dict[str, Any], job: dict[str, Any]) -> int:
    hook.activate(announce(job))
    files = list(dict.fromkeys(name.split("::")[0] for name in job["limits"]))
    return int(pytest.main([*files, *arguments(task)], [OneJob(job)]))


def announce(job: dict[str, Any]) -> str:
    """Write the file that tells programs of the tests which sources are changed. Returns its path."""
    path = Path(sys.argv[1]).resolve() / "logs" / f"{job['id']}.json"
    parts = {name: job[name] for name in ("sources", "counted", "counters", "extension") if job.get(name)}
    path.write_text(json.dumps(parts), encoding="utf-8")
    os.environ["MUTANT_OF_NDPY"] = str(path)
    return str(path)


class ManyJobs:
    """After the tests are collected, forks for each job."""

    def __init__(self, worker: Worker, jobs: list[dict[str, Any]]) -> None:
        self._worker = worker
        self._jobs = jobs

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_name = {item.nodeid: item for item in session.items}
        functions = functions_of_package()
        sys.stdout.flush()
        for job in self._jobs:
            if self._worker.is_over():
                break

            def run(job: dict[str, Any] = job) -> int:
                announce(job)
                for file, text in job["sources"].items():
                    if not swap_functions(functions.get(file, []), file, text):
                        return _COLD
                watch = Watch(job["limits"])
                session.config.pluginmanager.register(watch)
                watch.run([by_name[name] for name in job["limits"] if name in by_name])
                return status_of(watch)

            self._worker.forked(job, run)
        return True


class Recorder:
    """Runs tests with counters. Records which lines each test runs and how long it takes."""

    def __init__(self, worker: Worker, finder: hook.ModuleFinder) -> None:
        self._worker = worker
        self._finder = finder
        self._c_counters: list[tuple[str, Any]] | None = None

    def _counters(self) -> Iterator[tuple[str, Any]]:
        yield from self._finder.counters.items()
        if self._c_counters is None and (extension := self._worker.task["extension"]):
            module = sys.modules.get(extension[0])
            if module is not None:
                library = ctypes.CDLL(str(module.__file__))
                self._c_counters = [
                    (file, (ctypes.c_ubyte * length).in_dll(library, counter_name(file)))
                    for file, length in self._worker.task["c_files"].items()
                    if hasattr(library, counter_name(file))
                ]
        yield from self._c_counters or ()

    def take(self) -> dict[str, list[int]]:
        """The lines that ran since the last call."""
        ran = {}
        for file, counters in self._counters():
            lines = [line for line, count in enumerate(bytes(counters)) if count]
            if lines:
                ran[file] = lines
                counters[:] = bytes(len(counters))
        return ran

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        known = set(self._worker.task["known"])
        items = [item for item in session.items if item.nodeid not in known]
        self._worker.write({"imported": self.take()})
        for place, item in enumerate(items):
            over = self._worker.is_over()
            following = items[place + 1] if place + 1 < len(items) and not over else None
            watch = Watch({})
            session.config.pluginmanager.register(watch)
            began = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = round(time.monotonic() - began, 3)
            session.config.pluginmanager.unregister(watch)
            good = watch.passed and not watch.failed
            self._worker.write(
                {"test": item.nodeid, "seconds": seconds, "good": bool(good), "ran": self.take() if good else {}}
            )
            if not good:
                self.take()
            if over:
                return True
        self._worker.write({"complete": True})
        return True


class Worker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        self._results = (folder / "results.jsonl").open("a", encoding="utf-8")
        self._until = time.monotonic() + self.task["seconds"]

    def is_over(self) -> bool:
        return time.monotonic() > self._until

    def write(self, result: dict[str, Any]) -> None:
        self._results.write(json.dumps(result) + "\n")
        self._results.flush()

    def run(self) -> None:
        if "known" in self.task:
            # self.folder cannot hold the counters: in the VM, the checkout does not allow shared mappings.
            counters = tempfile.mkdtemp()
            parts = {"counted": self.task["counted"], "counters": counters}
            finder = hook.activate(announce({"id": "counted", "extension": self.task["extension"], **parts}))
            pytest.main([*self.task["paths"], *arguments(self.task)], [Recorder(self, finder)])
            shutil.rmtree(counters, ignore_errors=True)
            return
        jobs = [json.loads(line) for line in (self.folder / "jobs.jsonl").read_text(encoding="utf-8").splitlines()]
        cold = [job for job in jobs if job["cold"]]
        if hasattr(os, "fork"):
            warm = [job for job in jobs if not job["cold"]]
            if warm:
                files = sorted({name.split("::")[0] for job in warm for name in job["limits"]})
                process = os.fork()
                if not process:
                    pytest.main([*files, *arguments(self.task)], [ManyJobs(self, warm)])
                    sys.stdout.flush()
                    os._exit(0)
                os.waitpid(process, 0)
            for job in cold:
                if not self.is_over():
                    self.forked(job, lambda job=job: run_cold(self.task, job))
            return
        for job in jobs:
            if self.is_over():
                break
            began = time.monotonic()
            with self._log(job).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, str(HERE), str(self.folder), job["id"]], stdout=log, stderr=log
                )
                try:
                    status = process.wait(_limit(job))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    status = -9
            self._report_outcome(job, status, began)

    def _log(self, job: dict[str, Any]) -> Path:
        return self.folder / "logs" / f"{job['id']}.log"

    def forked(self, job: dict[str, Any], run: Any) -> None:
        began = time.monotonic()
        process = os.fork()
        if not process:
            status = 99
            try:
                os.setpgid(0, 0)
                log = os.open(self._log(job), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = run()
                sys.stdout.flush()
            finally:
                os._exit(status)
        deadline = began + _limit(job)
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                time.sleep(0.005)
        # End the programs that the process started, too.
        with contextlib.suppress(OSError):
            os.killpg(process, 9)
        if not ended:
            os.waitpid(process, 0)
            status = 9
        self._report_outcome(job, os.waitstatus_to_exitcode(status), began)

    def _report_outcome(self, job: dict[str, Any], status: int, began: float) -> None:
        text = self._log(job).read_bytes().decode("utf-8", "replace")
        test = ""
        for line in text.splitlines():
            if "test tests/" in line or "test tests\\" in line:
                test = line.split("test ", 1)[1]
        how = {0: "survived", _NO_TEST: "untested", _COLD: "cold"}.get(status, "noticed")
        why = "failed"
        if "Timeout (" in text or status == -9:
            why = "too long"
        elif status != 1:
            why = f"status {status}"
        failed = [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("failed tests/")]
        self.write(
            {
                "id": job["id"],
                "how": how,
                "why": why if how == "noticed" else "",
                "test": test,
                "failed": failed,
                "seconds": round(time.monotonic() - began, 2),
            }
        )


def _limit(job: dict[str, Any]) -> float:
    return 60 + float(sum(job["limits"].values()))


def arguments(task: dict[str, Any]) -> list[str]:
    # With -s, the output of a test goes to its log at once.
    return ["-q", "-s", "-p", "no:cacheprovider", *(["--adapter", task["adapter"]] if task["adapter"] else [])]


def main() -> None:
    os.chdir(ROOT)
    # Shells start background jobs with SIGINT ignored, and some tests send SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = Worker(Path(sys.argv[1]).resolve())
    if len(sys.argv) > 2:
        for line in (worker.folder / "jobs.jsonl").read_text(encoding="utf-8").splitlines():
            job = json.loads(line)
            if job["id"] == sys.argv[2]:
                sys.exit(run_cold(worker.task, job))
    worker.run()


if __name__ == "__main__":
    main()
