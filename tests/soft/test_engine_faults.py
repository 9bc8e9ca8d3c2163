"""Faults of a scenario in soft0's engine: what both ends see, and that it is the same in each run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.deadlines import patient
from kit.helpers import rounds
from kit.scenarios import write_scenario

from ndpy.faults import kinds

PROGRAMS = Path(__file__).with_name("engine_conversations.py")
OK, FLUSHED = 0, 5
# enum ibv_wc_status
STATUSES = {
    "LOC_LEN_ERR": 1,
    "LOC_QP_OP_ERR": 2,
    "LOC_PROT_ERR": 4,
    "MW_BIND_ERR": 6,
    "REM_INV_REQ_ERR": 9,
    "REM_ACCESS_ERR": 10,
    "REM_OP_ERR": 11,
    "RETRY_EXC_ERR": 12,
    "RNR_RETRY_EXC_ERR": 13,
}

pytestmark = pytest.mark.timeout(300)


def play(
    cases: list[tuple[str, tuple[str, ...]]], folder: Path, environment: dict[str, str] | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """What each program saw with its faults."""
    asked = [
        {"program": program, "scenario": str(write_scenario(folder, *faults, **settings))} for program, faults in cases
    ]
    done = subprocess.run(
        [sys.executable, PROGRAMS],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        timeout=patient(200 + len(cases)),
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) == len(cases), done.stderr
    return seen


def codes(completions: list[list[int]]) -> list[int]:
    """Their statuses. The contexts say that they came in order."""
    assert [context for context, _ in completions] == list(range(len(completions)))
    return [status for _, status in completions]


FAILURES = [
    (operation, status)
    for operation, named in (("send", "send"), ("write", "write"), ("read", "read"))
    for status in kinds.statuses_of(named)
    if status in STATUSES
]


def test_a_failed_request_ends_the_queue_pair_and_the_rest_is_flushed(tmp_path):
    """IBTA 1.4, 10.3.1.5: those before it succeed, and the peer hears of the end."""
    cases = [
        (operation, (f"at=request operation={operation} nth=3 do=status status={status}",))
        for operation, status in FAILURES
    ]
    for (operation, status), seen in zip(FAILURES, play(cases, tmp_path), strict=True):
        assert codes(seen["client"]) == [OK, OK, STATUSES[status], FLUSHED, FLUSHED], (operation, status, seen)
        assert seen["ended"]
        if operation == "send":
            assert codes(seen["server"]) == [OK, OK, *[FLUSHED] * 4], (status, seen)


def test_a_failed_receive_tells_the_sender_what_it_would_be_told(tmp_path):
    told = {"LOC_LEN_ERR": "REM_INV_REQ_ERR", "LOC_PROT_ERR": "REM_OP_ERR", "LOC_QP_OP_ERR": "REM_OP_ERR"}
    cases = [("receive", (f"at=request operation=receive nth=2 do=status status={status}",)) for status in told]
    for (status, sender), seen in zip(told.items(), play(cases, tmp_path), strict=True):
        assert codes(seen["server"]) == [OK, STATUSES[status], *[FLUSHED] * 4], seen
        assert codes(seen["client"]) == [OK, STATUSES[sender], *[FLUSHED] * 3], seen


def test_requests_of_windows(tmp_path):
    cases = [
        (operation, (f"at=request operation={named} do=status status={status}",))
        for operation, named in (("bind", "bind_window"), ("invalidate", "invalidate"))
        for status in ("MW_BIND_ERR", "LOC_QP_OP_ERR")
    ]
    for (_, faults), seen in zip(cases, play(cases, tmp_path), strict=True):
        assert codes(seen["client"]) == [STATUSES[faults[0].rpartition("=")[2]]], (faults, seen)
        assert seen["ended"]


def test_late_and_missing_completions(tmp_path):
    late = [
        "at=request operation=send nth=3 do=delay ms=200",
        "at=request operation=receive nth=3 do=late_receive ms=200",
        "at=message operation=send nth=3 do=delay ms=200",
    ]
    sent, received, *others = play(
        [
            ("held", ("at=request operation=send nth=3 do=hold",)),
            ("held", ("at=request operation=receive nth=3 do=hold",)),
            *(("send", (fault,)) for fault in late),
            ("receive", ("at=request operation=receive nth=2 do=delay ms=100",)),
        ],
        tmp_path,
    )
    assert (codes(sent["client"]), codes(sent["server"])) == ([OK] * 2, [OK] * 5), "only its completion is missing"
    assert (codes(received["client"]), codes(received["server"])) == ([OK] * 5, [OK] * 2)
    for fault, seen in zip([*late, "a late receive"], others, strict=True):
        assert codes(seen["client"]) == codes(seen["server"]) == [OK] * 5, (fault, seen)
        assert seen["took"] >= 0.19 or fault not in late, fault
    assert not any(seen["ended"] for seen in (sent, received, *others))


def test_a_silent_completion_wakes_nobody(tmp_path):
    """The message is late, so that the program sleeps when its completion comes."""
    late = "at=message operation=send nth=5 do=delay ms=100"
    silent, usual = play([("held", (late, "at=request operation=send nth=5 do=silent")), ("held", (late,))], tmp_path)
    assert codes(silent["client"]) == [OK] * 4, "it is there, and the program sleeps on"
    assert codes(silent["server"]) == codes(usual["client"]) == [OK] * 5


def test_an_end_that_says_nothing_more(tmp_path):
    """The first messages are taken. Later ones never arrive.

    76 bytes make the connection, and a Send has 88. Until the peer's first receipt has come, a Read of 52 bytes follows
    each, so 3 or 4 of them fit. The last Send may arrive without its Read.
    """
    (seen,) = play([("held", ("at=connection do=mute bytes=500",))], tmp_path)
    client, server = codes(seen["client"]), codes(seen["server"])
    assert set(client + server) == {OK}
    assert 3 <= len(client) <= len(server) <= 4
    assert not seen["ended"]


def test_a_receive_that_is_too_late_is_a_receiver_that_is_not_ready(tmp_path):
    """soft0 waits three seconds for a receive."""
    (seen,) = play([("receive", ("at=request operation=receive nth=2 do=late_receive ms=60000",))], tmp_path)
    assert codes(seen["client"]) == [OK, STATUSES["RNR_RETRY_EXC_ERR"], *[FLUSHED] * 3]
    assert codes(seen["server"]) == [OK, *[FLUSHED] * 5]


def test_messages(tmp_path):
    split, written, read = play(
        [
            ("large write", ("at=message operation=write nth=5 do=split",)),
            ("large write", ("at=message operation=write nth=5 do=corrupt",)),
            ("read", ("at=message operation=read nth=5 do=corrupt",)),
        ],
        tmp_path,
    )
    assert split["data"] == "E" * 300_000
    # 300,000 bytes are 74 pieces, with a pause of a millisecond behind each but the last.
    assert split["took"] >= 0.073
    assert sum(byte != "E" for byte in written["data"]) == 1
    assert sum(byte != "R" for byte in read["data"]) == 1
    assert all(codes(seen["client"]) == [OK] * 5 for seen in (split, written, read))


def test_connections(tmp_path):
    refused, timed_out, rejected, early, halfway, lost, left = play(
        [
            *(
                ("connect", (f"at=connection nth=1 do={what}",))
                for what in ("refuse", "time_out", "reject data=0102ff", "lose", "lose bytes=10")
            ),
            ("large send", ("at=connection do=lose bytes=400000",)),
            ("large send", ("at=connection do=disconnect bytes=400000",)),
        ],
        tmp_path,
    )
    assert refused["outcomes"] == ["ConnectionRefusedError ", "arrived"]
    assert timed_out["outcomes"] == ["TimeoutError", "arrived"]
    assert rejected["outcomes"] == ["ConnectionRefusedError 0102ff", "arrived"]
    # RDMA_CM_EVENT_CONNECT_ERROR of rdma_get_cm_event(3): nobody has refused it.
    assert early["outcomes"] == halfway["outcomes"] == ["ConnectionAbortedError ", "arrived"]
    assert codes(lost["client"]) == [OK, STATUSES["RETRY_EXC_ERR"], *[FLUSHED] * 3]
    assert codes(lost["server"]) == [OK, *[FLUSHED] * 5]
    client, server = codes(left["client"]), codes(left["server"])
    done = client.count(OK)
    assert client == [OK] * done + [FLUSHED] * (5 - done), "no request is half done"
    assert 1 <= done < 5 and server == [OK] * done + [FLUSHED] * (6 - done)
    assert lost["ended"] and left["ended"]


def test_the_adapter(tmp_path):
    down, up, fatal, overrun, removed, unheard = play(
        [
            ("events", ("at=adapter do=port_down nth=3",)),
            ("events", ("at=adapter do=port_down nth=3", "at=adapter do=port_up nth=11")),
            ("events", ("at=adapter do=queue_pair_fatal nth=9",)),
            ("events", ("at=adapter do=completion_queue_error nth=9",)),
            ("events", ("at=adapter do=remove nth=9",)),
            ("events", ("at=adapter do=full_event_queue nth=8", "at=adapter do=queue_pair_fatal nth=9")),
        ],
        tmp_path,
    )
    assert down == {"client": [], "events": ["PORT_DOWN"]}, "nothing moves"
    assert up["events"] == ["PORT_DOWN", "PORT_ACTIVE"]
    assert codes(up["client"]) == [OK] * 5, "and then it goes on"
    assert fatal["events"] == ["QUEUE_PAIR_FATAL"]
    assert codes(fatal["client"])[2:] == [FLUSHED] * 3
    assert overrun == {"client": [[-1, "CompletionQueueOverrunError"]], "events": ["COMPLETION_QUEUE_ERROR"]}
    assert removed["client"] == [[-1, "DeviceRemovedError"]]
    assert unheard["events"] == [] and codes(unheard["client"])[2:] == [FLUSHED] * 3


def test_calls(tmp_path):
    refused, full, queue, domain, posted = play(
        [
            ("calls", ("at=call call=reg_mr do=errno errno=EPERM",)),
            ("calls", ("at=call call=reg_mr do=limit limit=1",)),
            ("calls", ("at=call call=create_cq do=errno errno=ENOSPC",)),
            ("calls", ("at=call call=alloc_pd do=limit limit=1",)),
            ("calls", ("at=call call=post_recv do=errno errno=ENOMEM",)),
        ],
        tmp_path,
    )
    names = {"reg_mr", "reg_mr again", "create_cq", "alloc_pd", "post_recv"}

    def failed(seen: dict[str, Any]) -> dict[str, str]:
        assert seen["ends"].keys() == names
        return {name: end for name, end in seen["ends"].items() if end != "OK"}

    assert failed(refused) == dict.fromkeys(("reg_mr", "reg_mr again", "post_recv"), "EPERM")
    assert failed(full) == dict.fromkeys(("reg_mr again", "post_recv"), "ENOMEM")
    assert failed(queue) == dict.fromkeys(("create_cq", "post_recv"), "ENOSPC")
    assert failed(domain) == {"alloc_pd": "ENOMEM"}
    assert failed(posted) == {"post_recv": "ENOMEM"}


def test_a_scenario_that_cannot_be_used_opens_no_adapter(tmp_path):
    wrong = {
        "at=request do=sleep": ":3: do=sleep",
        "at=message do=reorder": "softverbs cannot do=reorder",
        "at=request do=status status=BAD_RESP_ERR": "softverbs cannot do=status",
    }
    cases = [{"program": "calls", "scenario": str(write_scenario(tmp_path, fault))} for fault in wrong]
    done = subprocess.run(
        [sys.executable, PROGRAMS], input=json.dumps(cases), capture_output=True, text=True, timeout=patient(60)
    )
    assert all("soft0 cannot be opened" in json.loads(line)["failed"] for line in done.stdout.splitlines())
    assert len(done.stderr.splitlines()) == len(wrong), "a line for each"
    assert all(words in done.stderr for words in wrong.values()), done.stderr


@pytest.mark.timeout(3000)
def test_the_same_scenario_gives_the_same_completions(tmp_path):
    """One seed and two faults by chance: each queue pair has the same completions in each run."""
    faults = (
        "at=request operation=send probability=0.3 do=delay ms=1",
        "at=request operation=send probability=0.1 do=status status=REM_OP_ERR",
        "at=message operation=send probability=0.3 do=split",
    )
    count = rounds(1000, 6)
    for seed in (3, 7):
        report = tmp_path / f"report{seed}"
        seen = play([("large send", faults)] * count, tmp_path, seed=seed, report=report)
        lists = {json.dumps([each["client"], each["server"]]) for each in seen}
        assert len(lists) == 1, lists
        entries = [json.loads(line) for line in report.read_text().splitlines()]
        fired = Counter((entry["fault"], entry["queue_pair"], entry["count"]) for entry in entries)
        assert set(fired.values()) == {count}, "the same faults at the same places"
