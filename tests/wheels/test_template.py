"""The project of examples/testing and its workflow, with the wheel in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from environments import PLACE, PROVIDED, ROOT, linux_environment, output_of, run, windows_environment
from kit.helpers import only_under_stress

if not PROVIDED:
    pytest.skip("needs what rig/setup.sh provides", allow_module_level=True)

# The files of a release may be built for the first test, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(420)

TEMPLATE = ROOT / "examples/testing"
WITH_PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-asyncio", "anyio")
# Stands for installing packages: they have to be here already.
SUDO = """#!/bin/sh
case "$*" in
*update) ;;
"apt-get install -y "*) shift 3; exec dpkg-query -W "$@" ;;
*) echo "sudo $*: not expected"; exit 1 ;;
esac
"""


def commands(job: str) -> list[str]:
    """The `run:` lines of a job of the workflow."""
    text = (TEMPLATE / ".github/workflows/tests.yml").read_text()
    (steps,) = re.findall(rf"^  {job}:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    return re.findall(r"^ +(?:- )?run: (.+)$", steps, re.MULTILINE)


def copy_of_template(folder: Path) -> Path:
    return shutil.copytree(
        TEMPLATE, folder, ignore=shutil.ignore_patterns("postcard", "*.egg-info", "__pycache__", ".pytest_cache")
    )


class Project:
    """A copy of the template, and what runs commands in it."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder = folder
        self._environment = environment

    def run(self, command: str, status: int = 0) -> str:
        """Run a command of the shell as the workflow does. Returns its output."""
        # The programs of virtme-ng are those of this Python.
        folders = [self.folder.parent, self._environment / "bin", os.environ["PATH"], Path(sys.executable).parent]
        # What has to be installed is there already, so pip needs no index. It must not make an environment for
        # building.
        pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = run("sh", "-e", "-c", command, cwd=self.folder, PATH=os.pathsep.join(map(str, folders)), **pip)
        output = done.stdout + done.stderr
        assert done.returncode == status, f"{command}: status {done.returncode}\n{output}"
        return output


@pytest.fixture(scope="session")
def project(release) -> Project:
    environment = linux_environment(PLACE / "testing", release.linux, "pip", "setuptools", "virtme-ng", *WITH_PYTEST)
    # A VM has a /tmp of its own.
    folder = PLACE / "project"
    folder.mkdir()
    sudo = folder / "sudo"
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    return Project(copy_of_template(folder / "postcard"), environment)


def test_every_command_of_the_workflow_works(project):
    *before, last = commands("soft")
    for command in before:
        project.run(command)
    assert last == "python -m pytest -n 2"
    output = project.run(last)
    assert "2 workers" in output
    assert re.search(r"\b7 passed, 1 skipped in", output), output
    assert "soft0 does not claim ATOMICS" in output


MISBEHAVING = """
import asyncio

import ndpy
import pytest
from ndpy import aio

kept = []

def wait(adapter, channel):
    channel.send("begun")
    channel.get()

def test_leaks(rdma_adapter):
    kept.append(rdma_adapter.create_completion_queue(4))  # here

@pytest.mark.timeout(2)
def test_hangs(rdma_pair):
    rdma_pair.client.queue.wait(60)

def test_kills_its_peer(rdma_peer):
    peer = rdma_peer(wait)
    assert peer.get() == "begun"
    peer.process.kill()

@pytest.mark.rdma(capabilities=ndpy.Capability.DEVICE_MEMORY)
def test_is_not_for_this_adapter():
    raise AssertionError

async def exchange(rdma_adapter, rdma_server):
    async def echo(connection):
        await connection.send(await connection.receive())

    async with rdma_server(echo) as server, aio.connect(server.address, adapter=rdma_adapter) as connection:
        await connection.send(b"hello")
        assert await connection.receive() == b"hello"

@pytest.mark.asyncio
async def test_of_pytest_asyncio(rdma_adapter, rdma_server):
    await exchange(rdma_adapter, rdma_server)

@pytest.mark.anyio
async def test_of_anyio(rdma_adapter, rdma_server):
    await exchange(rdma_adapter, rdma_server)

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""
#: What the report says of these tests, on each adapter.
REPORTED = [
    r"left open: <CompletionQueue.*, made at .*test_misbehaving\.py:\d+: kept\.append\(.*# here",
    r"wait\(\) in process \d+ has failed: the process has ended with status ",
    r"^SKIPPED .* does not claim DEVICE_MEMORY$",
]


#: Windows has no signal that interrupts a test, so pytest-timeout ends the worker there.
HANGS = [r"^FAILED .*::test_hangs - Failed: Timeout", "what was outstanding"]
HANGS_ON_WINDOWS = [r"^worker '\w+' crashed while running 'test_misbehaving\.py::test_hangs'"]


def assert_reported(output: str, hangs: list[str] = HANGS) -> None:
    for line in [*REPORTED, *hangs]:
        assert re.search(line, output, re.MULTILINE), f"{line}\nis not in\n{output}"
    assert re.search(r"\b1 failed, 4 passed, 1 skipped, 2 errors in", output), output


def test_each_test_that_misbehaves_is_reported_beside_other_plugins(project):
    (project.folder / "test_misbehaving.py").write_text(MISBEHAVING)
    assert_reported(project.run("python -m pytest -n 2 test_misbehaving.py", status=1))


@only_under_stress
def test_the_nightly_job_works(project):
    # Which packages have a kernel with RDMA depends on the distribution.
    *before, last = [command for command in commands("vm") if not command.startswith("sudo")]
    for command in before:
        project.run(command)
    output = project.run(last)
    # rxe has atomic operations, and faults by the shim.
    assert re.search(r"\b8 passed in", output), output
    (project.folder / "test_misbehaving.py").write_text(MISBEHAVING)
    assert_reported(project.run(f"{last} -n 2 test_misbehaving.py", status=1))


@only_under_stress
def test_the_tests_work_on_windows(release):
    python = windows_environment(PLACE / "windows-testing", release.windows, *WITH_PYTEST)
    folder = copy_of_template(PLACE / "windows-project")
    shutil.copy(folder / "postcard.py", python.parents[1] / "packages")
    command = (ROOT / "rig/wine-python", "--run", python, "-m", "pytest", "-n", "2")
    output = output_of(*command, cwd=folder)
    assert re.search(r"\b6 passed, 2 skipped in", output), output
    (folder / "test_misbehaving.py").write_text(MISBEHAVING)
    done = run(*command, "test_misbehaving.py", cwd=folder)
    assert_reported(done.stdout + done.stderr, HANGS_ON_WINDOWS)
