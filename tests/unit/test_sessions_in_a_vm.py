"""`pytest --rdma vm`: which command runs in the VM, and how Ctrl-C ends it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ndpy.testing import machine


class Program:
    """Stands for subprocess.Popen. Ctrl-C may come while it runs."""

    commands: list[list[str]]
    interruptions = 0

    def __init__(self, command):
        self.commands.append(command)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self):
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt
        return 3


@pytest.fixture
def run(monkeypatch):
    """run(*arguments, **options) returns the status, and the words before and after the `--` of the command."""
    monkeypatch.setattr(Program, "commands", [], raising=False)
    monkeypatch.setattr(machine.subprocess, "Popen", Program)

    def start(*arguments, **options):
        config = SimpleNamespace(
            getoption=lambda name: options.get(name.removeprefix("--rdma-")),
            invocation_params=SimpleNamespace(args=arguments),
        )
        status = machine.run(config)
        (command,) = Program.commands
        place = command.index("--")
        return status, command[:place], command[place + 1 :]

    return start


def test_the_session_has_the_same_arguments_and_its_status_comes_back(run):
    status, outside, inside = run("--rdma", "vm", "-x", "--rdma-driver=siw", "-k", "vm or rdma", "tests", driver="siw")
    assert status == 3
    assert outside[:7] == [sys.executable, "-m", "ndpy", "vm", "run", "--vm", "--adapter"]
    assert outside[7] == "siw" and "--kernel" not in outside
    assert inside[inside.index("--rdma") :] == [
        *("--rdma", "here", "--rdma-adapter", "siw0", "-x", "-k", "vm or rdma", "tests")
    ]


def test_the_kernel_is_that_of_the_option(run):
    _, outside, inside = run("--rdma=vm", "--rdma-kernel", "6.1.0", "--lf", kernel="6.1.0")
    assert outside[outside.index("--kernel") + 1] == "6.1.0"
    assert outside[7] == "rxe"
    assert inside[-1] == "--lf"
    assert "6.1.0" not in inside


def test_ctrl_c_waits_for_the_end_and_is_an_interrupted_session(run, monkeypatch):
    monkeypatch.setattr(Program, "interruptions", 2)
    status, _, _ = run("--rdma", "vm")
    assert status == pytest.ExitCode.INTERRUPTED
