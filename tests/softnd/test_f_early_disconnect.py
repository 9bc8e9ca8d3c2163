"""F.5.4, many times: a Send that was taken succeeds, whichever end disconnects first and however soon.

Here chance orders the events. test_f_receipts.py forces the order.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from conftest import share
from consumer import still_open
from early_disconnect import BURST, CONVERSATIONS, END_TOGETHER, Participant, run_conversation, run_role
from kit.starting import create_process
from peer import Peer
from version2 import Status

pytestmark = pytest.mark.timeout(900)

every_conversation = pytest.mark.parametrize("name", CONVERSATIONS)
both_roles = pytest.mark.parametrize("active", [0, 1], ids=["first role connects", "second role connects"])


@both_roles
@every_conversation
@pytest.mark.parametrize("version", [2, 1])
def test_f_5_4_who_takes_a_message_and_leaves_loses_none(name, version, active):
    failures = run_conversation(name, active, (version, version), share(1000, 10))
    assert not failures, (len(failures), failures[:5])


@every_conversation
@pytest.mark.parametrize("versions", [(2, 1), (1, 2)], ids=["2 and 1", "1 and 2"])
def test_f_5_4_between_versions(name, versions):
    failures = run_conversation(name, versions[1] % 2, versions, share(250, 5))
    assert not failures, (len(failures), failures[:5])


@pytest.mark.parametrize("threads", [2, 4])
def test_f_5_4_both_leave_at_once_in_several_threads(threads):
    failures = run_conversation(END_TOGETHER, 0, (2, 2), share(1000, 20) // threads, threads)
    assert not failures, (len(failures), failures[:5])


@contextlib.contextmanager
def busy_machine():
    """Keep every processor busy with something else."""
    burners: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(4):
            burners.append(create_process(lambda: subprocess.Popen([sys.executable, "-c", "while True: pass"])))
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait(30)


@every_conversation
def test_f_5_4_on_a_busy_machine(name):
    with busy_machine():
        failures = run_conversation(name, 0, (2, 2), share(100, 2), 2)
    assert not failures, (len(failures), failures[:5])


@both_roles
def test_f_5_4_between_processes(active):
    count = share(250, 3)
    participant = Participant(2)
    try:
        to = None if active == 0 else participant.listen()
        with Peer("early_disconnect", "run_all", 1, to, count) as peer:
            to = tuple(peer.receive()) if active == 0 else None
            failures = [fault for name in CONVERSATIONS for fault in run_role(participant, name, 0, to, count)]
            failures += peer.receive(300)
            assert not failures, (len(failures), failures[:5])
            assert peer.finish() == 0
    finally:
        participant.kit.close()


@pytest.mark.parametrize("taken", [1, BURST])
def test_f_5_4_the_receivers_process_ends_at_once(taken):
    rounds, kept = share(20, 1), 0
    for _ in range(rounds):
        participant = Participant(2)
        with Peer("early_disconnect", "exit_after", taken) as peer:
            to = tuple(peer.receive())
            with participant.connected(to, b"", (0, 0), lambda end: None) as end:
                sent = [end.send(64) for _ in range(BURST)]
                if not all(end.ends(number, 3) for number in sent):
                    assert still_open(end.connector), "the peer's socket is closed, and requests have no outcome"
                    kept += 1
                    end.disconnect()
                outcomes = [end.outcome(number) for number in sent]
                assert outcomes[:taken] == [Status.SUCCESS] * taken, outcomes
            assert peer.finish() == 0
        participant.kit.close()
    assert kept <= 1 + rounds // 4, "too many for sockets that Wine keeps"
