"""Programs that end while much is open. Peers may write to registered memory until the process has gone."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, STRESS, Keeper, create_end, has_kernel_driver, host_of, memory, require, wait_until
from kit.processes import Process, start_python

import ndpy

PROGRAM = Path(__file__).parents[1] / "kit/ending.py"
#: How a program ends, and its exit status.
ENDS = {"return": 0, "exit": 3, "exception": 1, "threads": 0, "asyncio": 0}


def is_emulated(adapter: ndpy.Adapter) -> bool:
    return has_kernel_driver(adapter) and sys.platform == "linux"


@pytest.fixture
def starts_quickly(adapter):
    """An emulated machine takes 20 s to start such a program. What these tests show is in no driver."""
    if is_emulated(adapter) and not STRESS:
        pytest.skip(f"on {adapter.info.name} with NDPY_STRESS=1")


def end(adapter: ndpy.Adapter, how: str):
    # What is open stays open on purpose, which a search for leaks cannot know.
    variables = {"ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0"}
    return start_python(PROGRAM, adapter.info.name, host_of(adapter), how, variables=variables)


@pytest.mark.usefixtures("starts_quickly")
def test_memory_that_is_registered_is_never_freed(adapter):
    results = {}
    # Several at once, but an emulated machine starts them one after the other.
    together = 1 if is_emulated(adapter) else len(ENDS)
    for first in range(0, len(ENDS), together):
        with contextlib.ExitStack() as stack:
            programs = {how: stack.enter_context(end(adapter, how)) for how in list(ENDS)[first : first + together]}
            results |= {how: program.finish() for how, program in programs.items()}
    assert {how: (result.status, result.out) for how, result in results.items()} == {
        how: (status, "open\n") for how, status in ENDS.items()
    }
    complaints = {how: result.err for how, result in results.items() if result.err and how != "exception"}
    assert complaints == {}
    assert results["exception"].err.endswith("NdpyError: nobody catches this\n")


@pytest.mark.usefixtures("starts_quickly")
def test_memory_that_the_caller_keeps_is_deregistered_first(adapter):
    with end(adapter, "caller") as program:
        result = program.finish()
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines() == ["open", "closed first", "closed first"]


def test_memory_that_a_daemon_thread_registers_during_the_end_is_kept_when_it_is_dropped(keep: Keeper, adapter, cache):
    region = memory(keep, adapter, 64)
    kept: list[object] = []
    with cache.local(bytearray(64)) as lease:
        region._on_dropped(lambda: True, kept.append)
        cache._on_lease_dropped(lease, lambda: True, kept.append)
        assert kept == [region._owner, lease._view]


def test_a_program_ends_cleanly_while_its_peer_writes(keep: Keeper, adapter):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    client = create_end(keep, adapter)
    with end(adapter, "written") as program:
        port, descriptor = program.wait_for(r"listening (\d+) (\w+)").groups()
        target = ndpy.RemoteMemory.from_bytes(bytes.fromhex(descriptor))
        source = memory(keep, adapter, b"\xff" * target.length)
        keep(adapter.connect(client.queue_pair, (host_of(adapter), int(port)), timeout_s=DEADLINE_S))
        write_until_it_fails(client.queue_pair, source, target, program)
        result = program.finish()
    assert (result.status, result.err) == (0, "")
    assert "freed" not in result.out


def write_until_it_fails(
    queue_pair: ndpy.QueuePair, source: ndpy.MemoryRegion, target: ndpy.RemoteMemory, program: Process
) -> None:
    """Under Wine, which may keep the socket of a process that ended in the middle of a receive, the program's end will
    do.
    """
    outstanding = failed = 0
    completions: list[ndpy.Completion] = []

    def is_over() -> bool:
        completions.extend(queue_pair.initiator_cq.poll(spin_s=0.02))
        return bool(completions) or (sys.platform == "win32" and program.popen.poll() is not None)

    while not failed or outstanding:
        while not failed and outstanding < 16:
            queue_pair.write(source[0 : target.length], target)
            outstanding += 1
        wait_until(is_over, "a write completes")
        if not completions:
            return
        outstanding -= len(completions)
        failed += sum(completion.status is not ndpy.Status.SUCCESS for completion in completions)
        completions.clear()
