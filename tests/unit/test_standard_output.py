"""Commands whose standard output is full, closed by its reader, or does not wait. Without an adapter but soft0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kit.deadlines import patient

NDPY = [sys.executable, "-m", "ndpy"]
FULL = (
    "ndpy: standard output cannot be written: No space left on device (errno 28, ENOSPC). "
    "Make room there, or send it to another place\n"
)
# The command `ndpy devices`, replaced by another function.
OTHER = """
import sys
import ndpy.tools.cli.devices
from ndpy.tools.cli import main

def other(**options):
    {body}

ndpy.tools.cli.devices.command.callback = other
main(["devices"])
"""


def other(body):
    return [sys.executable, "-c", OTHER.format(body=body)]


def run(words, out, err=subprocess.PIPE):
    return subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, timeout=patient(60))


@pytest.fixture(autouse=True)
def with_a_buffer(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture
def full():
    with open("/dev/full", "wb") as file:
        yield file


@pytest.mark.parametrize(
    "words", ["--version", "smoke --list", "doctor soft0 --json -", "perf --serve soft0 --listen 127.0.0.1:0"]
)
def test_a_full_standard_output_is_one_sentence_and_status_1(full, words):
    done = run([*NDPY, *words.split()], full)
    assert (done.stderr, done.returncode) == (FULL, 1)


def test_a_buffer_that_cannot_be_written_at_the_end_counts_too(full):
    # Less than a buffer, and nothing flushes it.
    done = run(other("print('text')"), full)
    assert (done.stderr, done.returncode) == (FULL, 1)


def test_when_standard_error_is_full_too_the_status_is_1(full):
    assert run(other("print('text')"), full, full).returncode == 1


def test_no_command_takes_it_for_a_failure_of_its_own(full):
    body = """
    try:
        print("text", flush=True)
    except OSError as error:
        sys.exit(f"my adapter fails: {error}")
    """
    done = run(other(body), full)
    assert (done.stderr, done.returncode) == (FULL, 1)


def test_what_a_command_in_a_vm_prints_counts_too(full):
    program = """
from ndpy.tools.cli import main
from ndpy.tools.machines import run
from ndpy.tools.machines.place import Place

run.run = lambda request, say: Place().out(b"text") or 0
main(["vm", "run", "true"])
"""
    done = run([sys.executable, "-c", program], full)
    assert (done.stderr, done.returncode) == (FULL, 1)


@pytest.mark.parametrize("body", ["print('text')", "print('text', flush=True)"])
def test_a_reader_who_has_closed_the_pipe_gets_no_sentence(body):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(other(body), writer)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 1)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_does_not_wait_gets_everything(monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen(other("print('text\\n' * 100_000)"), stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        with open(reader, "rb") as file:
            assert len(file.read()) == 500_001
        assert (process.stderr.read(), process.wait(patient(60))) == (b"", 0)


def test_a_closed_standard_output_is_no_failure():
    done = run(["/bin/sh", "-c", 'exec "$@" >&-', "sh", *NDPY, "--version"], None)
    assert (done.stderr, done.returncode) == ("", 0)
