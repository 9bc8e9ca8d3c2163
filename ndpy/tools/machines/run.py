"""Runs a command on this machine if it has an adapter or can create one, else in a VM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ndpy.tools.machines import SetupError, hosts, kernel_log, links, vm
from ndpy.tools.output import why_unwritten, write_report

EXIT_KERNEL = 123  # the command succeeded, but the kernel log shows a bug
EXIT_LIMIT = 124  # the command did not finish in time; timeout(1) has the same status
EXIT_SETUP = 125  # no adapter could be provided, or the VM broke

_TERM_LIMIT_S = 10.0


@dataclass(frozen=True)
class Request:
    """What to run, where, and for how long."""

    command: tuple[str, ...]
    limit_s: float = 1800.0
    force_vm: bool = False
    adapter: str | None = None
    machine: vm.Machine = field(default_factory=vm.Machine)
    keep_log: Path | None = None
    # 2: two VMs with a network between them.
    hosts: int = 1


def run(request: Request, say: Callable[[str], None]) -> int:
    """Run the command. Returns the exit status to pass on. `say` is called with messages for the user."""
    if request.hosts > 1:
        return _finish_hosts(hosts.run(request.command, request.machine, request.limit_s, say), request, say)
    if not request.force_vm:
        if links.adapters() and (request.adapter is None or links.adapters(request.adapter)):
            say(f"running here, on {', '.join(links.adapters(request.adapter))}")
            return _finish(_run_here(request), request, say)
        if request.adapter in (None, "rxe") and os.geteuid() == 0 and links.module_available():
            with _link(say):
                return _finish(_run_here(request), request, say)
    return _finish(vm.run(request.command, request.machine, request.limit_s, say), request, say)


@contextlib.contextmanager
def _link(say: Callable[[str], None]) -> Iterator[None]:
    name, made = links.up()
    say(f"running here, on {name}")
    try:
        yield
    finally:
        if made:
            try:
                links.down([name])
            except SetupError as error:
                say(str(error))


def _run_here(request: Request) -> vm.Outcome:
    log = kernel_log.RunningKernel()
    try:
        process = subprocess.Popen(request.command, stdin=subprocess.DEVNULL)
    except OSError as error:
        status = 127 if isinstance(error, FileNotFoundError) else 126
        return vm.Outcome(status, f"{request.command[0]}: {error.strerror}")
    reason, timed_out = "", False
    try:
        process.wait(request.limit_s)
    except subprocess.TimeoutExpired:
        reason, timed_out = f"the command did not finish within {request.limit_s:g} s and was ended", True
    finally:
        _end(process)
    status = process.returncode
    if status is not None and status < 0:
        status = 128 - status
    if not log.readable:
        reason = reason or "the kernel log was not searched for bugs, because only root can read it"
    records = log.read()
    log.close()
    return vm.Outcome(None if timed_out else status, reason, timed_out, log=records)


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_LIMIT_S)


def _finish_hosts(outcomes: Sequence[vm.Outcome], request: Request, say: Callable[[str], None]) -> int:
    """The status of the first host that did not succeed.
    A host whose power was cut counts only for its kernel's bugs.
    """
    statuses = []
    for i, outcome in enumerate(outcomes, 1):
        log = request.keep_log and request.keep_log.with_name(f"{request.keep_log.name}.{i}")
        status = _finish(outcome, replace(request, keep_log=log), say)
        statuses.append(status if not outcome.cut else EXIT_KERNEL if kernel_log.find_bugs(outcome.log) else 0)
    return next((status for status in statuses if status), 0)


def _finish(outcome: vm.Outcome, request: Request, say: Callable[[str], None]) -> int:
    if outcome.reason:
        say(outcome.reason)
    if outcome.broken:
        say("the end of its console:\n" + kernel_log.console_tail(outcome.console))
    status = outcome.status
    if status is not None and status > 128 and status - 128 in {number.value for number in signal.Signals}:
        say(f"the command ended with status {status}, which usually means {signal.Signals(status - 128).name}")
    if request.keep_log is not None:
        text = "".join(f"{record}\n" for record in outcome.log)
        try:
            write_report(request.keep_log, text.encode())
        except OSError as error:
            say(f"the kernel log is not kept: {why_unwritten(error)}")
    bugs = kernel_log.find_bugs(outcome.log)
    if bugs:
        say("the kernel log shows a bug since the command began:\n" + "\n".join(map(str, bugs)))
    if outcome.timed_out:
        return EXIT_LIMIT
    if status is None or (outcome.broken and status == 0):
        return EXIT_SETUP
    return status or (EXIT_KERNEL if bugs else 0)
