"""Runs checks one after the other and gives each a verdict.

Each check runs in its own thread. If a check never returns, because a call is stuck in the kernel for example, the
results of the other checks are not lost: the check fails with the place where it hangs, and the process exits without
waiting for its thread.
"""

from __future__ import annotations

import platform
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import ndpy
from ndpy.tools.cli.peers import PeerLost, PeerRefused
from ndpy.tools.cli.smoke.catalog import Check, Failure, Result, Skip, Verdict
from ndpy.tools.cli.smoke.report import Reporter, Run
from ndpy.tools.cli.smoke.testbed import Testbed
from ndpy.vocabulary import quirks

#: The time that a check has beyond its limit, to close what it created.
_CLOSING_S = 20.0
_STUCK_S = 5.0


class Runner:
    """One run of the checks on an open adapter."""

    def __init__(self, testbed: Testbed, run: Run, reporter: Reporter, *, limit_s: float) -> None:
        self._lab = testbed
        self._run = run
        self._reporter = reporter
        self._limit_s = limit_s
        #: Whether a thread is stuck, so that the process must exit without waiting for it.
        self.stuck = False

    def run(self, checks: Sequence[Check]) -> None:
        """Run all the checks. If KeyboardInterrupt is raised, the results so far stay in the Run."""
        started = time.monotonic()
        try:
            for index, check in enumerate(checks):
                self._reporter.starts(check)
                self._record(self.run_one(check))
                if self.stuck:
                    for rest in checks[index + 1 :]:
                        self._record(Result(rest, Verdict.FAIL, f"not run, because {check.full_name} never returned"))
                    return
                if self._lab.has_no_peer:
                    self._leave_out(checks[index + 1 :])
                    return
        except KeyboardInterrupt:
            self._run.interrupted = True
            raise
        finally:
            self._run.seconds = time.monotonic() - started
            self.end()

    def _record(self, result: Result) -> None:
        self._run.results.append(result)
        self._reporter.ended(result)

    def _leave_out(self, checks: Sequence[Check]) -> None:
        """Say that the rest is not run. The check that found no peer has failed for all of them."""
        self._run.not_run = [check.full_name for check in checks]
        if checks:
            self._reporter.say(f"smoke: {len(checks)} more checks are not run without a peer")

    def end(self) -> None:
        """Close the testbed, or kill the peer if a check may still use it."""
        if self.stuck:
            self._lab.kill_peer()
        elif self._run.interrupted:
            # The interrupted check may still use the testbed. Without a peer it ends soon, and then the process exits.
            self._lab.kill_peer()
            self.stuck = True
        else:
            self._lab.close()

    def run_one(self, check: Check) -> Result:
        """Run a check in a thread, for at most its limit and what closing takes."""
        done: list[Result] = []
        thread = threading.Thread(target=lambda: done.append(self._attempt(check)), name=check.full_name, daemon=True)
        started = time.monotonic()
        thread.start()
        thread.join(self._limit_s + _CLOSING_S)
        if not done:
            place = _where(sys._current_frames().get(thread.ident or 0))
            self._lab.kill_peer()
            thread.join(_STUCK_S)
            self.stuck = thread.is_alive()
            reason = f"did not end within {time.monotonic() - started:.0f} s; it was at {place}"
            return Result(check, Verdict.FAIL, reason, time.monotonic() - started)
        done[0].seconds = time.monotonic() - started
        return done[0]

    def _attempt(self, check: Check) -> Result:
        testbed = self._lab
        testbed.begin_check(self._limit_s)
        lost = False
        try:
            testbed.need(*check.needs)
            result = Result(check, Verdict.PASS, check.body(testbed))
        except Skip as skip:
            result = Result(check, Verdict.SKIP, str(skip))
        except PeerLost as error:
            lost = True
            result = Result(check, Verdict.FAIL, str(error))
            testbed.lose_peer(str(error))
        except (Failure, PeerRefused) as failure:
            result = Result(check, Verdict.FAIL, str(failure))
        except Exception as error:
            result = Result(check, Verdict.FAIL, f"{type(error).__name__}: {error}\nat {_place(error)}")
        result.figures = testbed.figures
        try:
            failures = testbed.end_check()
        except (PeerLost, PeerRefused) as error:
            testbed.lose_peer(str(error))
            failures = [] if lost else [str(error)]
        except Exception as error:
            # For example, the peer's answer is malformed.
            reason = f"{type(error).__name__}: {error}"
            testbed.lose_peer(reason)
            failures = [reason]
        if failures:
            reasons = [result.reason] if result.verdict is Verdict.FAIL else []
            result = Result(check, Verdict.FAIL, "\n".join([*reasons, "cleaning up: " + "; ".join(failures)]))
        return judge(result, testbed.info.driver, platform.release())


def judge(result: Result, driver: str, release: str) -> Result:
    """Adjust the result to the quirks that this driver and kernel are known to have."""
    for quirk in quirks.known(driver, release):
        if result.check.full_name not in quirk.checks:
            continue
        if result.verdict is Verdict.PASS and quirk.workaround:
            result.reason += f" ({quirk.summary}; {quirk.workaround})"
            result.reference = quirk.reference
        elif result.verdict is Verdict.PASS:
            result.reason += f" (known quirk of {driver} not seen: {quirk.summary})"
        elif result.verdict is Verdict.FAIL and not quirk.workaround and quirk.symptom in result.reason:
            result.verdict = Verdict.KNOWN
            result.reason = f"{quirk.summary}; here: {result.reason.partition(chr(10))[0]}"
            result.reference = quirk.reference
    return result


def _place(error: BaseException) -> str:
    """Where an exception was raised: the line in the check, and the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if "smoke" in frame.filename and "checks" in frame.filename]
    shown = dict.fromkeys(f"{_short(frame.filename)}:{frame.lineno}" for frame in [*mine[-1:], *frames[-1:]])
    return ", ".join(shown)


def _where(frame: FrameType | None) -> str:
    if frame is None:
        return "its end"
    stack = traceback.extract_stack(frame)[-4:]
    return " < ".join(f"{_short(entry.filename)}:{entry.lineno} {entry.name}" for entry in reversed(stack))


def _short(filename: str) -> str:
    return "/".join(filename.replace("\\", "/").split("/")[-2:])


def describe(info: ndpy.AdapterInfo) -> dict[str, Any]:
    """What a report says about the adapter and the machine."""
    return {
        "driver": info.driver,
        "transport": info.transport,
        "firmware": info.firmware,
        "port": info.port,
        "netdev": info.netdev,
        "state": info.state,
        "addresses": list(info.addresses),
        "mtu": info.mtu,
        "capabilities": info.capabilities.names(),
        "host": platform.node(),
        "kernel": platform.release(),
        "ndpy": ndpy.__version__,
        "python": platform.python_version(),
    }
