"""Faults of a scenario in softnd, as programs of NetworkDirect see them. The engine makes those that soft0 has too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kit.deadlines import patient
from kit.every_fault import every_fault
from kit.helpers import DEADLINE_S, connect_pair, memory, take
from own_softnd import SOFTND, opened

import ndpy
from ndpy.faults.scenario import Fault, Scenario, ScenarioError


def test_softnd_can_make_what_the_table_says(softnd):
    """A scenario that it cannot make is refused by Python, and by softnd for who writes it by hand."""
    wrong = []
    for fault in every_fault():
        reason = fault.why_not("softnd")
        try:
            softnd.open(str(fault)).close()
            could = True
        except ndpy.NdpyError:
            could = False
        if could == bool(reason):
            wrong.append(str(fault))
    assert not wrong
    with pytest.raises(ScenarioError, match="because NetworkDirect has no events of the adapter; engine or shim can"):
        Scenario([Fault("gid_change")]).check_for("softnd")


FULL = "ND_INSUFFICIENT_RESOURCES"


def full(call: str) -> list[str]:
    return [str(Fault("limit", call=call, limit=1)), str(Fault("errno", call=call, nth=2, errno="ENOMEM"))]


@pytest.mark.parametrize("way", [0, 1], ids=["limit", "errno"])
@pytest.mark.parametrize(
    ("call", "create"),
    [
        ("reg_mr", lambda adapter: adapter.register(bytearray(8))),
        ("alloc_mw", lambda adapter: adapter.create_memory_window()),
        ("create_cq", lambda adapter: adapter.create_completion_queue(4)),
        ("rdma_create_id", lambda adapter: adapter.create_connector()),
    ],
    ids=str,
)
def test_an_adapter_is_full(softnd, call, create, way):
    """Before, during and after: what is there goes on, and one that is closed makes room."""
    with opened(softnd, full(call)[way]) as (adapter, keep):
        first = keep(create(adapter))
        with pytest.raises(ndpy.NdpyError, match=FULL):
            create(adapter)
        first.close()
        keep(create(adapter))


def test_no_more_queue_pairs(softnd):
    with opened(softnd, full("create_qp")[0], full("create_srq")[0]) as (adapter, keep):
        cq = keep(adapter.create_completion_queue(4))
        keep(adapter.create_queue_pair(cq))
        with pytest.raises(ndpy.NdpyError, match=FULL):
            adapter.create_queue_pair(cq)
        keep(adapter.create_shared_receive_queue(4))
        with pytest.raises(ndpy.NdpyError, match=FULL):
            adapter.create_shared_receive_queue(4)


def test_a_queue_that_is_full(softnd):
    """As ENOMEM of ibv_post_send(3): the request is not posted, and later ones are."""
    refused = [str(Fault("errno", call=call, nth=1, errno="ENOMEM")) for call in ("post_send", "post_recv")]
    with opened(softnd, *refused) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        source, sink = memory(keep, adapter, b"hello", ndpy.Access.NONE), memory(keep, adapter, 5)
        for post in (lambda: pair.server.queue_pair.receive(sink), lambda: pair.client.queue_pair.send(source)):
            with pytest.raises(ndpy.NdpyError):
                post()
            post()
        assert take(pair.client.cq)[0].ok and take(pair.server.cq)[0].ok
        assert bytes(sink.buffer) == b"hello"


def test_a_queue_pair_that_fails_as_a_whole(softnd):
    """All that is outstanding is given back, and the peer sees an ordinary end."""
    with opened(softnd, str(Fault("queue_pair_fatal", nth=5))) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        region = memory(keep, adapter, 8)
        for context in range(4):
            pair.client.queue_pair.receive(region, context=context)
        pair.client.queue_pair.send(region, context=4)
        seen = take(pair.client.cq, 5)
        assert {completion.status for completion in seen} == {ndpy.Status.CANCELED}
        pair.server.connector.wait_disconnected(DEADLINE_S)


REGISTERS = """
import ndpy

with ndpy.open_adapter("softnd0") as adapter:
    for _ in range(4):
        try:
            adapter.register(bytearray(8)).close()
            print("registered")
        except ndpy.NdpyError as error:
            print(error)
"""


def run_with(folder, nth: int) -> subprocess.CompletedProcess[str]:
    """What `ndpy faults run` does with a program of which a registration fails."""
    scenario = folder / "scenario.toml"
    scenario.write_text(f'[[fault]]\ndo = "errno"\ncall = "reg_mr"\nerrno = "ENOMEM"\nnth = {nth}\n')
    faults_run = ("-m", "ndpy", "faults", "run", "-f", str(scenario), "--")
    command = [sys.executable, *faults_run, sys.executable, "-c", REGISTERS]
    environment = {**os.environ, "NDPY_PROVIDER": str(SOFTND)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(100))


def test_the_command_runs_a_program_with_a_scenario_and_says_what_fired(tmp_path):
    done = run_with(tmp_path, 2)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines), lines.count("registered")) == (0, 4, 3), done.stdout + done.stderr
    assert FULL in done.stdout
    assert "fired: errno at reg_mr" in done.stderr and "never fired" not in done.stderr


def test_the_command_fails_if_a_fault_never_fires(tmp_path):
    done = run_with(tmp_path, 1000)
    assert (done.returncode, done.stdout.split()) == (124, 4 * ["registered"]), done.stdout + done.stderr
    assert "never fired: do=errno at=call call=reg_mr" in done.stderr
