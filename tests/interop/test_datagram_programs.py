"""udaddy and mckey of rdmacm-utils: datagrams and multicast groups that the connection manager finds, in both roles."""

from __future__ import annotations

import pytest
from kit.helpers import DEADLINE_S, contents, host_of, memory, require, succeed, wait_until
from kit.processes import start_program

import ndpy
from ndpy import Capability
from ndpy.platforms.verbs import distribution

PROGRAMS = distribution.CONNECTION_PROGRAMS
COUNT = 10
SIZE = 100
# udaddy's server listens nowhere else.
PORT = 7174
GROUP = "239.7.8.10"


@pytest.fixture
def end(adapter, keep):
    """A queue pair for datagrams with COUNT receives: (queue pair, completion queue, memory)."""
    require(adapter, Capability.DATAGRAMS)
    cq = keep(adapter.create_completion_queue(4 * COUNT))
    queue_pair = keep(adapter.create_datagram_queue_pair(cq))
    region = memory(keep, adapter, SIZE)
    for context in range(COUNT):
        queue_pair.receive(region, context=context)
    return queue_pair, cq, region


def receives(cq):
    """COUNT datagrams that have come."""
    found = []
    while len(found) < COUNT:
        found += [one for one in succeed(cq) if one.operation is ndpy.Operation.RECEIVE]
    return found


def test_udaddy_finds_our_queue_pair(adapter, keep, pytestconfig, end):
    queue_pair, cq, region = end
    with keep(adapter.listen_for_datagrams(queue_pair, (host_of(adapter), PORT))) as listener:
        with start_program(pytestconfig, "udaddy", PROGRAMS, "-s", host_of(adapter), "-C", COUNT, "-S", SIZE) as client:
            found = receives(cq)
            assert [one.nbytes for one in found] == [SIZE] * COUNT
            # Each datagram carries the number of its queue pair.
            assert {one.immediate for one in found} == {found[0].source.qp_number}
            there = keep(queue_pair.destination(found[0].source))
            for _ in range(COUNT):
                queue_pair.send(region, there)
            result = client.succeed()
        assert "data transfers complete" in result.out
        assert "return status 0" in result.out
        assert listener.answered >= 1


def test_we_find_the_queue_pair_of_udaddy(adapter, keep, pytestconfig, end):
    queue_pair, cq, region = end
    with start_program(pytestconfig, "udaddy", PROGRAMS, "-b", host_of(adapter), "-C", COUNT, "-S", SIZE) as server:

        def resolve():
            try:
                return queue_pair.resolve((host_of(adapter), PORT), timeout_s=DEADLINE_S)
            except ndpy.ConnectionRefusedError:
                # It does not listen yet.
                return None

        there = keep(wait_until(resolve, "udaddy"))
        for _ in range(COUNT):
            # It answers to the number in the datagram.
            queue_pair.send(region, there, immediate=queue_pair.number)
        assert {one.source.qp_number for one in receives(cq)} == {there.qp_number}
        assert "data transfers complete" in server.succeed().out


def test_mckey_receives_what_we_send(adapter, keep, pytestconfig, end):
    queue_pair, cq, region = end
    group = keep(queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S))
    arguments = ("-m", GROUP, "-b", host_of(adapter), "-C", COUNT, "-S", SIZE)
    with start_program(pytestconfig, "mckey", PROGRAMS, *arguments) as receiver:

        def send_until_it_ends():
            queue_pair.send(region, group.destination)
            cq.poll()
            return receiver.popen.poll() is not None

        # It does not say when it has joined.
        wait_until(send_until_it_ends, "mckey")
        assert "data transfers complete" in receiver.succeed().out


def test_we_receive_what_mckey_sends(adapter, keep, pytestconfig, end):
    queue_pair, cq, region = end
    keep(queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S))
    # It destroys its queue pair as soon as it has posted. On Linux 7.2 rxe has not sent the last ones by then.
    arguments = ("-m", GROUP, "-b", host_of(adapter), "-C", 100 * COUNT, "-S", SIZE, "-s")
    with start_program(pytestconfig, "mckey", PROGRAMS, *arguments) as sender:
        found = receives(cq)
        assert [one.nbytes for one in found] == [SIZE] * COUNT
        assert {one.immediate for one in found} == {found[0].source.qp_number}
        assert {len(contents(region))} == {SIZE}
        sender.succeed()
