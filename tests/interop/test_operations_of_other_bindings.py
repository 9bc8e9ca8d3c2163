"""Atomic operations, and numbers beside messages and writes, with programs on pyverbs and on PyPI's ibverbs (rdma4py)
at the other end. Both sides do each.
"""

from __future__ import annotations

import sys

import pytest
from kit.helpers import contents, create_end, memory, require, sample, succeed
from kit.processes import Process, foreign_environment
from test_other_bindings import PROGRAMS, PYTHON

import ndpy
from ndpy import Access, Capability, Endpoint, Operation

START = 0x8000000000000005
OPCODE_RECEIVE, OPCODE_RECEIVE_RDMA_WITH_IMM = 128, 129


class Theirs:
    """The program, connected to our queue pair. It may use `ours`, and `remote` is memory of its own."""

    def __init__(self, process: Process, queue_pair: ndpy.QueuePair, ours: ndpy.RemoteMemory) -> None:
        self._process = process
        self._answers = 0
        number, psn, address, rkey = map(int, process.wait_for(r"endpoint (\d+) (\d+) (\d+) (\d+)\n").groups())
        local = queue_pair.local_endpoint()
        self.remote = ndpy.RemoteMemory(address, 64, rkey)
        process.say(local.qp_number, local.psn, local.gid.hex(), ours.address, ours.token)
        queue_pair.connect_endpoint(Endpoint(local.lid, number, psn, local.gid))
        process.wait_for("connected\n")

    def __call__(self, *words: object) -> str:
        """Give a command. Returns the answer."""
        self._process.say(*words)
        self._answers += 1
        return str(self._process.wait_for(rf"connected\n(?:.*\n){{{self._answers - 1}}}(.*)\n")[1])


@pytest.fixture(params=sample(["pyverbs", "ibverbs"], 1))
def conversation(request, adapter, keep, pytestconfig):
    """Our end, our memory and theirs."""
    require(adapter, Capability.ATOMICS, Capability.IMMEDIATE_DATA)
    if not PYTHON.exists():
        if pytestconfig.getoption("--adapter"):
            pytest.fail(f"{PYTHON} is missing: make setup")
        pytest.skip("no environment with pyverbs and ibverbs: make setup")
    access = Access.REMOTE_ATOMIC | Access.REMOTE_WRITE
    ours = memory(keep, adapter, START.to_bytes(8, sys.byteorder) + bytes(56), access)
    end = create_end(keep, adapter)
    words = (f"--device={adapter.info.name}", f"--gid={end.queue_pair.local_endpoint().gid_index}")
    program = PROGRAMS / f"operations_{request.param}.py"
    with Process(PYTHON, program, *words, variables=foreign_environment()) as process:
        yield end, ours, Theirs(process, end.queue_pair, ours.remote())


def number(data: bytes) -> int:
    return int.from_bytes(data[:8], sys.byteorder)


def test_they_and_ndpy_do_the_same_to_each_other(conversation, keep, adapter):
    end, ours, theirs = conversation
    queue_pair = end.queue_pair

    # Theirs on our memory.
    assert theirs("fetch_and_add", 3) == f"ended 0 {START}"
    assert theirs("compare_and_swap", START + 3, 77) == f"ended 0 {START + 3}"
    assert theirs("compare_and_swap", 1, 2) == "ended 0 77"
    assert number(contents(ours)) == 77

    # Ours on theirs.
    result = memory(keep, adapter, 8)
    queue_pair.fetch_and_add(result, theirs.remote, START)
    queue_pair.compare_and_swap(result, theirs.remote, START, START + 1)
    succeed(end.cq, 2)
    assert number(contents(result)) == START
    assert number(bytes.fromhex(theirs("show").split()[1])) == START + 1

    # Numbers beside what they send.
    inbox = memory(keep, adapter, 64)
    for context in (1, 2):
        queue_pair.receive(inbox, context=context)
    assert theirs("send", 5, 0x81020304) == "ended 0"
    assert theirs("write", 26, 0xFFFFFFFF) == "ended 0"
    message, write = succeed(end.cq, 2)
    assert (message.operation, message.nbytes, message.immediate) == (Operation.RECEIVE, 5, 0x81020304)
    assert (write.operation, write.nbytes) == (Operation.RECEIVE_RDMA_WITH_IMMEDIATE, 26)
    assert write.immediate == 0xFFFFFFFF
    assert contents(ours)[:26] == b"abcdefghijklmnopqrstuvwxyz"
    assert contents(inbox)[:6] == b"abcde\0"

    # And beside what we send.
    for _ in range(2):
        assert theirs("receive") == "posted"
    source = memory(keep, adapter, b"ndpy writes this")
    queue_pair.send(source[:4], immediate=0x01020384)
    queue_pair.write(source, theirs.remote[16:], immediate=0)
    succeed(end.cq, 2)
    assert theirs("take") == f"{OPCODE_RECEIVE} 0 4 {0x01020384}"
    assert theirs("take") == f"{OPCODE_RECEIVE_RDMA_WITH_IMM} 0 16 0"
    assert bytes.fromhex(theirs("show").split()[1])[16:32] == b"ndpy writes this"
