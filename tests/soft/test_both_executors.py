"""The engine and the shim make the same of a scenario: the same completions in the same order."""

from __future__ import annotations

import errno

import pytest
from c_programs import run
from kit.every_fault import limits
from kit.helpers import sample
from test_engine_faults import FLUSHED, OK, STATUSES, codes, play

from ndpy.faults import kinds
from ndpy.faults.injection import Injection
from ndpy.faults.scenario import Fault, Scenario

pytestmark = pytest.mark.timeout(120)


def seen(executor: str, faults: list[Fault], options: str) -> dict[str, list[str]]:
    """What completions.c prints of both ends, by its first words, without how often it was woken."""
    with Injection(Scenario(faults, seed=7), executor) as injection:
        text = run("completions", "soft0", 0, 6, *options.split(), **injection.environment({}))
        injection.report().check()
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name != "events":
            found.setdefault(name, []).append(rest)
    return found


ALIKE = [
    (Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR"), "list"),
    (Fault("hold", operation="send", nth=3), "events"),
    (Fault("hold", operation="send", nth=3, ms=50), "events"),
    (Fault("delay", at="request", operation="send", probability=0.4, ms=5), "events"),
    (Fault("silent", operation="send", nth=3), ""),
    (Fault("late_receive", operation="receive", nth=2, ms=50), ""),
    (Fault("errno", call="post_send", nth=4, errno="ENOMEM"), ""),
    (Fault("remove", nth=7), ""),
    (Fault("status", operation="write", nth=3, status="REM_ACCESS_ERR"), "write silent=3"),
    (Fault("status", operation="send", nth=2, status="LOC_PROT_ERR"), "events"),
    (Fault("status", operation="send", nth=3, status="RNR_RETRY_EXC_ERR"), "srq"),
    (Fault("hold", operation="receive", nth=3), ""),
    (Fault("delay", at="request", operation="receive", every=2, ms=20), "list"),
    (Fault("errno", call="post_send", nth=1, errno="EINVAL"), "list"),
    (Fault("queue_pair_fatal", nth=7), ""),
    (Fault("completion_queue_error", nth=7), "first=500"),
]


@pytest.mark.parametrize(("fault", "options"), sample(ALIKE, 9), ids=str)
def test_both_have_the_same_completions(fault, options):
    assert seen("shim", [fault], options) == seen("engine", [fault], options)


@pytest.mark.parametrize("executor", kinds.HERE)
def test_a_completion_queue_that_fails_gives_its_channel_no_event(executor):
    """rxe_cq_post() of Linux raises IBV_EVENT_CQ_ERR alone. The one event is of the other queue, which is flushed."""
    with Injection(Scenario([Fault("completion_queue_error", nth=7)]), executor) as injection:
        text = run("completions", "soft0", 0, 6, "events", "first=500", **injection.environment({}))
    assert "\nevents 1\n" in text


CALLS = [call for call in kinds.CALLS if call.executors]


@pytest.mark.parametrize("executor", kinds.HERE)
def test_every_call_can_fail_and_be_slow(executor):
    """each_call.c makes all of them. Those of librdmacm itself do not count."""
    for call in sample([call for call in CALLS if executor in call.executors], 12):
        number = getattr(errno, call.errnos[0])
        for fault, line in (
            (Fault("errno", call=call.name, nth=1, errno=call.errnos[0]), f"{call.name} 1 {number}"),
            (Fault("slow", call=call.name, nth=1, ms=200), f"slow {call.name} 1"),
        ):
            with Injection(Scenario([fault]), executor) as injection:
                text = run("each_call", "soft0", "127.0.0.1", **injection.environment({}))
                injection.report().check()
            assert line in text.splitlines(), fault


@pytest.mark.parametrize("executor", kinds.HERE)
def test_what_can_be_limited_is(executor):
    # soft0 has no address handles.
    for fault, line in limits(without=["create_ah"]):
        with Injection(Scenario([fault]), executor) as injection:
            text = run("each_call", "soft0", "127.0.0.1", **injection.environment({}))
            injection.report().check()
        assert line in text.splitlines(), fault


@pytest.mark.parametrize("executor", kinds.HERE)
def test_the_events_of_an_adapter(tmp_path, executor):
    """With the shim requests go on while a port is down."""
    fatal = "at=adapter do=queue_pair_fatal nth=9"
    wanted = {
        ("at=adapter do=port_down nth=3", "at=adapter do=port_up nth=11"): ["PORT_DOWN", "PORT_ACTIVE"],
        ("at=adapter do=gid_change nth=3",): ["GID_CHANGED"],
        (fatal,): ["QUEUE_PAIR_FATAL"],
        ("at=adapter do=completion_queue_error nth=9",): ["COMPLETION_QUEUE_ERROR"],
        ("at=adapter do=full_event_queue nth=8", fatal): [],
    }
    if executor == "shim":
        wanted["at=adapter do=path_migrated nth=9",] = ["PATH_MIGRATED"]
    with Injection(Scenario([]), executor) as injection:
        seen = play([("events", faults) for faults in wanted], tmp_path, injection.environment())
    assert {faults: each.get("events", each) for faults, each in zip(wanted, seen, strict=True)} == wanted


#: The names of engine_conversations.py.
CONVERSATIONS = {"send": "send", "write": "write", "read": "read", "bind_window": "bind", "invalidate": "invalidate"}
ALONE = ("bind_window", "invalidate")
NUMBERS = {**STATUSES, "BAD_RESP_ERR": 7, "LOC_ACCESS_ERR": 8}


@pytest.mark.parametrize("executor", kinds.HERE)
def test_every_status(tmp_path, executor):
    """Of soft0's operations. The requests before have succeeded, and those behind are flushed."""
    failures = [
        (operation, status.name)
        for status in kinds.STATUSES
        for operation in status.operations
        if executor in status.executors and operation in [*CONVERSATIONS, "receive"]
    ]
    cases = [
        (
            CONVERSATIONS.get(operation, operation),
            (f"at=request operation={operation} nth={1 if operation in ALONE else 2} do=status status={status}",),
        )
        for operation, status in failures
    ]
    with Injection(Scenario([]), executor) as injection:
        seen = play(cases, tmp_path, injection.environment())
    for (operation, status), each in zip(failures, seen, strict=True):
        found = codes(each["server" if operation == "receive" else "client"])
        expected = [OK, NUMBERS[status], *[FLUSHED] * (4 if operation == "receive" else 3)]
        assert found == (expected[1:2] if operation in ALONE else expected), (operation, status)
