"""The engine and the shim make the same of a scenario: the same completions in the same order."""

from __future__ import annotations

import pytest
from c_programs import run
from kit.helpers import sample

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
