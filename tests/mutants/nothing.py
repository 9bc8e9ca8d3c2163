"""Has each public method do nothing, and runs the tests that name it: those that still pass are told.

    nothing.py [METHOD ...] [--jobs N] [--list]

METHOD is CLASS.METHOD, such as Batch.clear. A test names a method if its name has the method's words and the test
itself, or a function of its file, calls that method of that class. For a method that no test names, one of those that
call it has to fail. nothing.txt has what passes for a reason. README.md in the same folder explains it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import functools
import inspect
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = Path(__file__).with_name("nothing.txt")
STATE = ROOT / ".rig/mutants"
# A test that waits for what never comes need not wait long.
_DEADLINE_S = 2.0
_LIMIT_S = 12
# So many tests that call a method are tried, if none names it.
_ROUNDS = 12
NO_TEST = "-"
_PASSED, _FAILED, _SKIPPED = 0, 1, 3
_PLACES = {"contract": ["tests/contract", "--adapter", "soft0"], "unit": ["tests/unit"]}
# These boot machines, build things, or start processes that know nothing of a change made here.
_SHARED = ("provider", "fake", "soft", "points")
_NOT_HERE = ("test_vm.py", "test_core_sanitized.py", "test_setup.py", "test_logic_faults.py")


# ---- methods ----


def classes() -> dict[str, type]:
    """The public classes by name."""
    import ndpy
    import ndpy.aio
    import ndpy.ndk

    found: dict[str, type] = {}
    for module in (ndpy, ndpy.aio, ndpy.ndk):
        for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]):
            value = getattr(module, name)
            if isinstance(value, type) and value.__module__.startswith("ndpy") and not issubclass(value, BaseException):
                found.setdefault(name if module is not ndpy.aio else f"aio.{name}", value)
    return found


def _is_method(owner: type, name: str) -> bool:
    static = inspect.getattr_static(owner, name, None)
    return callable(static) or isinstance(static, (staticmethod, classmethod))


def methods() -> dict[str, list[type]]:
    """The public methods by the class that is the first to show them, such as QueuePair.write, with all classes that
    do.
    """
    found: dict[str, list[type]] = {}
    seen: dict[int, list[type]] = {}
    for class_name, owner in classes().items():
        for name in dir(owner):
            if name.startswith("_") or not _is_method(owner, name):
                continue
            definer = next(kind for kind in owner.__mro__ if name in kind.__dict__)
            static = definer.__dict__[name]
            if not definer.__module__.startswith("ndpy"):
                continue
            if id(static) not in seen:
                found[f"{class_name}.{name}"] = seen[id(static)] = []
            seen[id(static)].append(owner)
    return found


def _subclasses(owner: type) -> Iterator[type]:
    for kind in owner.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _definers(owners: list[type], name: str) -> Iterator[type]:
    """The classes in which a method is to be replaced: these, and those below them that have one of their own."""
    for owner in owners:
        yield owner
        yield from (kind for kind in _subclasses(owner) if name in kind.__dict__ and kind not in owners)


def do_nothing(owners: list[type], name: str) -> None:
    """From now on the method returns at once, in these classes and in those that have one of their own."""
    static = inspect.getattr_static(owners[0], name)

    async def nothing_later(*_: Any, **__: Any) -> None:
        pass

    def nothing(*_: Any, **__: Any) -> None:
        pass

    function = nothing_later if inspect.iscoroutinefunction(getattr(owners[0], name)) else nothing
    replacement: Any = function
    if isinstance(static, (staticmethod, classmethod)) or "classmethod" in type(static).__name__:
        replacement = staticmethod(function)
    for kind in list(_definers(owners, name)):
        setattr(kind, name, replacement)


def record_calls(wanted: dict[str, list[type]], file: Path) -> tuple[set[str], set[str]]:
    """From now on, note which of these methods are called. Returns the sets to which they are added.

    The first one is for calls by code of the file, the other one for those by any code of the tests.
    """
    tests = str(ROOT / "tests")
    by_file: set[str] = set()
    by_tests: set[str] = set()

    def wrap(kind: type, full_name: str, static: Any) -> None:
        def recorder(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if caller == str(file):
                by_file.add(full_name)
            if caller.startswith(tests):
                by_tests.add(full_name)
            return plain(*arguments, **options)

        plain = static.__func__ if isinstance(static, (staticmethod, classmethod)) else static
        # What looks like a coroutine function to asyncio and to the tests is one still.
        with contextlib.suppress(AttributeError, TypeError):
            functools.update_wrapper(recorder, plain)
        if isinstance(static, classmethod):
            setattr(kind, full_name.rpartition(".")[2], classmethod(recorder))
        elif isinstance(static, staticmethod):
            setattr(kind, full_name.rpartition(".")[2], staticmethod(recorder))
        elif callable(static) and not isinstance(static, type):
            setattr(kind, full_name.rpartition(".")[2], recorder)

    for full_name, owners in wanted.items():
        name = full_name.rpartition(".")[2]
        for kind in list(_definers(owners, name)):
            wrap(kind, full_name, inspect.getattr_static(kind, name))
    return by_file, by_tests


# ---- which tests name a method ----


def _forms(word: str) -> set[str]:
    stem = word[:-1] if word.endswith("e") else word
    return {word, word + "s", stem + "ed", stem + "ing", stem + stem[-1] + "ed", stem + stem[-1] + "ing"}


def is_named(method: str, words: list[str]) -> bool:
    """Whether the words of a method follow each other there, the last of them in any form."""
    parts = method.split("_")
    for place in range(len(words) - len(parts) + 1):
        here = words[place : place + len(parts)]
        if here[:-1] == parts[:-1] and here[-1] in _forms(parts[-1]):
            return True
    return False


@functools.cache
def _attributes(path: Path) -> frozenset[str]:
    """All names behind a dot in a file, and its strings, which may be such names."""
    names = set()
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            names.add(part.value)
    return frozenset(names)


@functools.cache
def _calls(path: Path) -> dict[str, frozenset[str]]:
    """The names of the methods that each test function of a file calls or passes on."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: frozenset(part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute))
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }


def named_by(method: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that name a method, of each function the first case."""
    found: dict[str, pytest.Item] = {}
    for item in items:
        function = item.nodeid.split("[")[0]
        name = function.rpartition("::")[2]
        if (
            function not in found
            and method in _calls(item.path).get(name, ())
            and is_named(method, name.split("_")[1:])
        ):
            found[function] = item
    return list(found.values())


def calling(method: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that refer to a method, of each function the first case, first those that refer to little else.

    Then those whose file refers to it elsewhere.
    """
    found: dict[str, tuple[int, pytest.Item]] = {}
    for item in items:
        function = item.nodeid.split("[")[0]
        if function not in found and method in _attributes(item.path):
            attributes = _calls(item.path).get(function.rpartition("::")[2], frozenset())
            found[function] = len(attributes) + 1000 * (method not in attributes), item
    return [item for _, item in sorted(found.values(), key=lambda pair: pair[0])]


# ---- running ----


def _run_item(item: pytest.Item, following: pytest.Item) -> int:
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, nextitem=following, log=False)
    if any(report.failed for report in reports):
        return _FAILED
    return _SKIPPED if any(report.skipped for report in reports) else _PASSED


class Forker:
    """Collects the tests, and forks for each method and each test that names it."""

    def __init__(self, wanted: list[str], callers: bool, out: Path, jobs: int) -> None:
        self._wanted = wanted
        self._callers = callers
        self._out = out
        self._jobs = jobs
        self._running: dict[int, tuple[str, str, float]] = {}
        self.results: dict[tuple[str, str], int] = {}

    def pytest_configure(self) -> None:
        from kit import helpers

        helpers.DEADLINE_S = _DEADLINE_S

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if item.path.name not in _NOT_HERE]
        owners = {name: kinds for name, kinds in methods().items() if name in self._wanted}
        self._prepare(items)
        if self._callers:
            self._try_callers(items, owners)
        else:
            self._try_named(items, owners)
        return True

    def _try_named(self, items: list[pytest.Item], owners: dict[str, list[type]]) -> None:
        """Run all tests that name a method."""
        named: dict[str, tuple[pytest.Item, list[str]]] = {}
        for name in owners:
            for item in named_by(name.rpartition(".")[2], items):
                named.setdefault(item.nodeid, (item, []))[1].append(name)
        # Without a change first: what fails then says nothing, and which methods a test really calls is seen.
        for item, _ in named.values():
            self._start("", item, items, owners)
        self._finish()
        for item, names in named.values():
            for name in names:
                if name in self._called(item)[0]:
                    self._start(name, item, items, owners)
        self._finish()

    def _try_callers(self, items: list[pytest.Item], owners: dict[str, list[type]]) -> None:
        """Run tests that call a method until one fails."""
        waiting = {name: calling(name.rpartition(".")[2], items) for name in owners}
        for _ in range(_ROUNDS):
            chosen = {}
            for name, candidates in waiting.items():
                # Known from another method's turn, or not known yet.
                candidates[:] = [
                    item for item in candidates if not self._is_known(item) or name in self._called(item)[1]
                ]
                candidates.sort(key=lambda item: not self._is_known(item))
                if candidates:
                    chosen[name] = candidates[0]
            for item in {item.nodeid: item for item in chosen.values() if not self._is_known(item)}.values():
                self._start("", item, items, owners)
            self._finish()
            tried = {name: item for name, item in chosen.items() if name in self._called(item)[1]}
            for name, item in tried.items():
                waiting[name].remove(item)
                self._start(name, item, items, owners)
            self._finish()
            for name, item in tried.items():
                if self.results[name, item.nodeid] not in (_PASSED, _SKIPPED):
                    del waiting[name]

    def _is_known(self, item: pytest.Item) -> bool:
        return ("", item.nodeid) in self.results

    def _called(self, item: pytest.Item) -> list[list[str]]:
        """The methods that a test calls: from its file, and from anywhere in the tests. None if it fails without a
        change.
        """
        log = self._log("", item)
        if self.results.get(("", item.nodeid)) != _PASSED or not log.exists():
            return [[], []]
        return [line.split() for line in log.read_text().split("\n")]

    def _prepare(self, items: list[pytest.Item]) -> None:
        """Make what the tests of a session share, such as compiled stand-ins, once and not in each fork."""
        for fixture in _SHARED:
            item = next((item for item in items if fixture in item.fixturenames), None)
            if item is not None:
                _run_item(item, next(other for other in items if other.path != item.path))

    def _log(self, name: str, item: pytest.Item) -> Path:
        return self._out / f"{name or 'without'}-{item.name[:90]}".replace("/", "_")

    def _start(self, name: str, item: pytest.Item, items: list[pytest.Item], owners: dict[str, list[type]]) -> None:
        """Run a test in a fork: without a change if there is no name, and then the log gets the methods that it
        calls.
        """
        self._finish(self._jobs - 1)
        # One of another module, so that what the session shares is not taken down.
        following = next(other for other in items if other.path != item.path)
        log = self._log(name, item)
        pid = os.fork()
        if pid:
            self._running[pid] = name, item.nodeid, time.monotonic()
            return
        status = _FAILED
        try:
            os.setpgid(0, 0)
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
            called: tuple[set[str], ...] = ()
            if name:
                do_nothing(owners[name], name.rpartition(".")[2])
            else:
                called = record_calls(owners, item.path)
            status = _run_item(item, following)
            if not name:
                log.write_text("\n".join(" ".join(names) for names in called))
        finally:
            os._exit(status)

    def _finish(self, left: int = 0) -> None:
        while len(self._running) > left:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended:
                name, test, _ = self._running.pop(ended)
                self.results[name, test] = code = os.waitstatus_to_exitcode(status)
                if name:
                    with (self._out / "results.txt").open("a") as results:
                        results.write(f"{code}\t{name}\t{test}\n")
                with contextlib.suppress(OSError):
                    os.killpg(ended, 9)
                continue
            for pid, (_, _, began) in self._running.items():
                if time.monotonic() > began + 3 * _LIMIT_S:
                    with contextlib.suppress(OSError):
                        os.killpg(pid, 9)
            time.sleep(0.002)


def run_place(place: str, wanted: list[str], callers: bool, jobs: int) -> dict[tuple[str, str], int]:
    out = STATE / "nothing"
    out.mkdir(parents=True, exist_ok=True)
    forker = Forker(wanted, callers, out, jobs)
    arguments = [*_PLACES[place], "-q", "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(arguments, plugins=[forker])
    return forker.results


def read_listed() -> dict[tuple[str, str], str]:
    """What passes for a reason, by method and test. The test is NO_TEST where none notices that the method does
    nothing.
    """
    lines = LISTED.read_text(encoding="utf-8").splitlines() if LISTED.exists() else []
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            method, test, why = line.split(None, 2)
            found[method, test] = why
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument("--place", choices=_PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--callers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="only show the methods")
    options = parser.parse_args()
    os.chdir(ROOT)
    known = methods()
    if unknown := set(options.methods) - known.keys():
        parser.error(f"there is no method {', '.join(sorted(unknown))}")
    wanted = options.methods or sorted(known)
    if options.list:
        print("\n".join(wanted))
        return 0
    if options.place:
        for (name, test), status in run_place(options.place, wanted, options.callers, options.jobs).items():
            print(f"{status}\t{name}\t{test}")
        return 0
    named: dict[tuple[str, str], int] = {}
    for place in _PLACES:
        named |= run_apart(place, options.methods, options.jobs)
    called: dict[tuple[str, str], int] = {}
    for place in ("unit", "contract"):
        # One of another place may have noticed it.
        left = sorted(set(wanted) - {name for name, _ in named} - noticed(called))
        if left:
            called |= run_apart(place, [*left, "--callers"], options.jobs)
    return report(wanted, named, called)


def run_apart(place: str, words: list[str], jobs: int) -> dict[tuple[str, str], int]:
    """The results of a place, in a process of its own, because some tests of one place change what the others
    expect.
    """
    command = [sys.executable, __file__, *words, "--jobs", str(jobs), "--place", place]
    out = STATE / "nothing"
    out.mkdir(parents=True, exist_ok=True)
    with (out / "errors.txt").open("a") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=True)
    results = {}
    for line in done.stdout.splitlines():
        status, name, test = line.split("\t")
        results[name, test] = int(status)
    return results


def noticed(results: dict[tuple[str, str], int]) -> set[str]:
    return {name for (name, _), status in results.items() if name and status not in (_PASSED, _SKIPPED)}


def report(wanted: list[str], named: dict[tuple[str, str], int], called: dict[tuple[str, str], int]) -> int:
    listed = read_listed()
    by_name = {name for name, _ in named if name}
    unnoticed = set(wanted) - by_name - noticed(called)
    passing = {(name, test.split("[")[0]) for (name, test), status in named.items() if name and status == _PASSED}
    passing |= {(name, NO_TEST) for name in unnoticed}
    runs = sum(bool(name) for name, _ in (*named, *called))
    print(
        f"{len(by_name)} of {len(wanted)} methods are named by tests, {len(noticed(called))} noticed by others; {runs} "
        f"runs"
    )
    for name, test in sorted(passing):
        how = "no test notices" if test == NO_TEST else "still passes"
        print(f"{how}: {name} {test}{' (listed)' if (name, test) in listed else ''}")
        if test == NO_TEST:
            for tried in sorted(test for other, test in called if other == name):
                print(f"    passes: {tried}")
    stale = [pair for pair in listed if pair not in passing and pair[0] in wanted]
    for name, test in stale:
        print(f"nothing.txt lists what is noticed: {name} {test}")
    missing = passing - listed.keys()
    print(f"{len(passing)} still pass, {len(passing) - len(missing)} of them listed")
    return bool(missing or stale)


if __name__ == "__main__":
    sys.exit(main())
