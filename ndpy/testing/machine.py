"""`--rdma vm`: the whole session runs in a VM with an adapter of the kernel, as if it ran here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ndpy.testing.leaks import IN_VM

_OPTIONS = ("--rdma", "--rdma-driver", "--rdma-kernel")
#: The VM ends by then.
_LIMIT_S = 4 * 3600


def run(config: pytest.Config) -> int:
    """Run pytest with the same arguments in a VM. Returns its exit status."""
    driver = config.getoption("--rdma-driver") or "rxe"
    kernel = config.getoption("--rdma-kernel")
    command = [sys.executable, "-m", "ndpy", "vm", "run", "--vm", "--adapter", driver, "--limit", str(_LIMIT_S)]
    command += ["--kernel", kernel] if kernel else []
    command += [
        "--",
        "env",
        f"{IN_VM}=1",
        sys.executable,
        "-m",
        "pytest",
        "--rdma",
        "here",
        "--rdma-adapter",
        f"{driver}0",
    ]
    command += _others(config.invocation_params.args)
    if sys.stdout.isatty():
        command.append("--color=yes")
    interrupted = False
    with subprocess.Popen(command) as process:
        while True:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                # The VM has heard of it too, and ends.
                interrupted = True
            else:
                return pytest.ExitCode.INTERRUPTED if interrupted else status


def _others(arguments: tuple[str | object, ...]) -> list[str]:
    """The arguments, except those that named the VM."""
    others: list[str] = []
    words = iter(map(str, arguments))
    for word in words:
        if word in _OPTIONS:
            next(words, None)
        elif word.partition("=")[0] not in _OPTIONS:
            others.append(word)
    return others
