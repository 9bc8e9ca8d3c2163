"""What `ndpy doctor` finds: a verdict, a sentence and a remedy.

An examination that calls other people's libraries runs in a process of its own, where it can do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

_LIMIT_S = 60.0
_KILL_LIMIT_S = 5.0
# Libraries may print a lot. The first lines say what is wrong.
_MOST_LINES = 10
_REPORT = "Please report this; the other findings are not affected"
_INSTALL_AGAIN = (
    "a library or driver that is loaded there is broken; install it again, in a version that fits the others"
)


class Verdict(str, enum.Enum):
    """PASS: it is as it should be. WARN: it works, with a drawback or a doubt. FAIL: it does not work."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


_NAMED = re.compile(r"\(ndpy explain ([\w-]+)\)")
#: The words of `ndpy explain` for the checks whose findings have a page.
PAGES = {
    "libibverbs": "no-library",
    "librdmacm": "no-library",
    "symbols": "no-library",
    "drivers": "no-library",
    "device files": "no-adapter",
    "adapters": "no-adapter",
    "container": "not-permitted",
    "locked memory": "memlock",
    "open files": "open-files",
    "rdma control group": "resources",
    "memory control group": "resources",
    "active port": "port-down",
    "fork": "fork",
    "GPU driver": "device-memory",
    "GPU memory": "device-memory",
    "GPU files": "device-memory",
    "GPU IOMMU": "device-memory",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: the name of the check.
        verdict: PASS, WARN or FAIL.
        message: what was found.
        remedy: what to do. "" for a PASS only.
    """

    check: str
    verdict: Verdict
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.verdict is Verdict.PASS) is bool(self.remedy):
            raise ValueError(f"{self.check}: {self.verdict.value} with the remedy {self.remedy!r}")

    @property
    def problem(self) -> str:
        """The word of the page on it, for `ndpy explain`. "" for a PASS, and if no page is about it."""
        named = _NAMED.search(self.remedy)
        return named[1] if named else PAGES.get(self.check, "") if self.remedy else ""

    @property
    def page(self) -> str:
        """The command that explains it, in brackets. "" if it has no page, or the remedy names one already. For the
        implementation.
        """
        return f" (ndpy explain {self.problem})" if self.problem and not _NAMED.search(self.remedy) else ""

    def to_dict(self) -> dict[str, str]:
        """Return plain values, for JSON."""
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "message": self.message,
            "remedy": self.remedy,
            "problem": self.problem,
        }


def passed(check: str, message: str) -> Finding:
    return Finding(check, Verdict.PASS, message)


def warned(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, Verdict.WARN, message, remedy)


def failed(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAIL, message, remedy)


def split_remedy(text: str, otherwise: str) -> tuple[str, str]:
    """Split an error's text "MESSAGE; REMEDY". `otherwise` is the remedy if the text has none."""
    message, found, remedy = text.rpartition("; ")
    return (message, remedy) if found else (text, otherwise)


def examine(check: str, function: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """Return what an examination finds. If the examination itself breaks, that is the finding."""
    try:
        return list(function(*arguments))
    except Exception as error:
        return [warned(check, f"this could not be examined: {type(error).__name__}: {error}", _REPORT)]


def examine_apart(check: str, module: str, function: str, *arguments: str, limit_s: float = _LIMIT_S) -> list[Finding]:
    """Run module.function(*arguments) in a process of its own and return what it finds.

    A crash, a hang, and what the libraries print to standard error become findings too.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from ndpy.tools.doctor.findings import answer; answer({check!r}, {module!r}, {function!r}, {arguments!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except KeyboardInterrupt:
        process.kill()
        raise
    except subprocess.TimeoutExpired:
        process.kill()
        # It may wait in the kernel, where no signal reaches it. Then it is left to itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_LIMIT_S)
        return [
            failed(
                check,
                f"no answer within {limit_s:g} s: the driver or its library hangs",
                "look at the system's log (dmesg, Event Viewer); load the driver again, or restart the machine",
            )
        ]
    said = [line.strip() for line in err.splitlines() if line.strip()]
    try:
        found = [Finding(**{**values, "verdict": Verdict(values["verdict"])}) for values in json.loads(out)]
    except (ValueError, TypeError, KeyError):
        words = f"; its last words: {said[-1]}" if said else ""
        return [failed(check, f"the process that examined this {_ending(process.returncode)}{words}", _INSTALL_AGAIN)]
    if process.returncode:
        # The answer was whole. What the libraries do when a process ends came after it.
        message = (
            f"the process that examined this {_ending(process.returncode)} after its answer: programs that use the"
        )
        found.append(failed(check, f"{message} adapter will end so", _INSTALL_AGAIN))
    remedy = "this is what the libraries print themselves; see to it if adapters are missing or slow"
    return [*found, *(warned(check, line, remedy) for line in list(dict.fromkeys(said))[:_MOST_LINES])]


def answer(check: str, module: str, function: str, arguments: tuple[str, ...]) -> None:
    """Run in the other process of examine_apart(): examine, and print the findings as JSON."""
    import importlib

    found = examine(check, getattr(importlib.import_module(module), function), *arguments)
    print(json.dumps([dataclasses.asdict(finding) for finding in found]))


def _ending(status: int) -> str:
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    # A status this large is Windows' number of the exception that ended the process, such as 0xC0000005.
    return f"ended with status {status:#x}" if status > 255 else f"ended with status {status} and no answer"
