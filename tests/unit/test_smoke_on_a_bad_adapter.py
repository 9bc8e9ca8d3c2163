"""Each check of the smoke test fails on an adapter that misbehaves in its way, and says why.

The adapter is soft0, which behaves. smoke_lies.py has the ways in which what this end gets to see differs from that.
"""

from __future__ import annotations

import re
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("soft0 is for Linux", allow_module_level=True)

import smoke_lies as lies
from smoke_lies import Bed, judge

import ndpy
from ndpy.platforms.verbs import softverbs
from ndpy.tools.cli.smoke.catalog import Verdict, load

if not softverbs.is_there():
    pytest.skip("this installation has no softverbs", allow_module_level=True)

CHECKS = {check.full_name: check for check in load()}

NOT_REFUSED = r"was not refused; expected \w+"
DIFFER = r"\d of \d+ bytes differ, the first at offset \d+ \(0x.. instead of 0x..\)"
COMPLETED = r"completed SUCCESS, expected CANCELED"
VIOLATION = r"was not refused"

#: Checks that fail alike: how the adapter misbehaves, and what they say then.
ALIKE = {
    (lies.refuses_nothing, NOT_REFUSED): """
        enumerate/unknown-name register/read-only-buffer windows/fresh-token windows/busy-region windows/bad-bind
        connect/private-data-too-long connect/nobody-listens connect/rejected connect/connected-twice
        disconnect/never-connected refusals/not-connected refusals/full-queue refusals/outside-the-region
        refusals/foreign-region refusals/bad-buffers refusals/too-many-elements refusals/bad-flags refusals/after-close
        refusals/in-use
    """,
    (lies.says_success, VIOLATION): """
        register/no-remote-right register/deregistered windows/write-past-end windows/write-before-start
        windows/write-across-end windows/read-past-end windows/other-queue-pair windows/invalidated windows/stale-token
        read-write/write-to-readable read-write/read-of-writable read-write/past-the-region read-write/unknown-token
    """,
    (lies.flips_a_byte, DIFFER): """
        windows/write windows/read windows/overlapping windows/beyond-remote-length send-receive/from-peer
        send-receive/gather-scatter send-receive/inline send-receive/shared-receives read-write/read
        read-write/gathered-write ordering/read-fence ordering/last-byte-last
    """,
    (lies.says_success, COMPLETED): """
        disconnect/by-this-side disconnect/released-by-the-peer disconnect/flush-unconnected
    """,
}
#: For each check: how the adapter misbehaves, and what the check says then.
MISBEHAVIOURS = {
    **{check: misbehaviour for misbehaviour, checks in ALIKE.items() for check in checks.split()},
    "enumerate/port-active": (lies.describes_itself_wrongly, "the port is down"),
    "enumerate/gids": (lies.describes_itself_wrongly, "the table has the same GID twice"),
    "enumerate/limits": (lies.describes_itself_wrongly, "max_caller_data is 1, less than 16"),
    "register/tokens": (lies.gives_one_token_twice, "two live regions have the same local token"),
    "register/many-at-once": (lies.gives_one_token_twice, "two of them have the same token"),
    "windows/bind-then-send": (lies.flips_a_byte, "the peer received RemoteMemory"),
    "windows/read-only": (lies.says_success, "the write was not refused; the owner's memory: unchanged"),
    "windows/write-only": (lies.says_success, "the read was not refused; the reader's memory: unchanged"),
    "link/path-mtu": (lies.says_timeout, "nothing arrives"),
    "connect/ipv4": (lies.tells_another_peer, r"this side is \('192.0.2.99', 1\), the peer sees"),
    "connect/ipv6": (lies.tells_another_peer, r"this side is \('192.0.2.99', 1\), the peer sees"),
    "connect/private-data": (lies.tells_another_peer, "private data of accept"),
    "connect/read-limits": (lies.tells_another_peer, r"this side was told ReadLimits\(inbound=9"),
    "connect/refused-offer": (lies.refuses_as_something_else, r"accept\(\) at the peer failed with TimeoutError"),
    "connect/four-at-once": (lies.tells_another_peer, r"this side is \('192.0.2.99', 1\), the peer sees"),
    "send-receive/sizes": (lies.counts_wrong, "the peer's receive reports 1 bytes instead of 0"),
    "send-receive/one-mebibyte": (lies.has_another_context, r"receive \d+ was taken instead of 0"),
    "send-receive/in-order": (lies.reverses_completions, r"the sends completed in the order \[31, 30"),
    "send-receive/late-receive": (lies.says_timeout, "completed IO_TIMEOUT, expected SUCCESS"),
    "send-receive/too-long": (lies.says_success, "was not refused by a receive of 512"),
    "send-receive/dropped-references": (lies.is_another_operation, "completed a BIND instead of its receive"),
    "read-write/write": (lies.is_another_operation, "a write completed as BIND"),
    "read-write/zero-length": (lies.loses_completions, r"1 of 2 completions within"),
    "read-write/own-unknown-token": (lies.says_success, "completed SUCCESS, expected ACCESS_VIOLATION"),
    "ordering/mixed": (lies.reverses_completions, r"they completed in the order \[17, 16"),
    "ordering/write-then-send": (lies.says_timeout, "completed IO_TIMEOUT, expected SUCCESS"),
    "ordering/silent-success": (lies.repeats_completions, "after silent requests: an unexpected completion came"),
    "ordering/read-limit": (lies.reverses_completions, r"they completed in the order \[15, 14"),
    "notification/any": (lies.notifies_at_once, "the notification came before any completion"),
    "notification/not-lost": (lies.never_notifies, "not finished within"),
    "notification/solicited": (lies.notifies_at_once, "a plain message satisfied a notification for solicited ones"),
    "notification/failure-tells": (lies.never_notifies, "not finished within"),
    "notification/poller": (lies.names_another_queue, "the poller names the wrong queue"),
    "disconnect/by-the-peer": (lies.reverses_completions, r"this side's receives: in the order \[2, 1, 0\]"),
    "disconnect/delivered-first": (lies.says_success, r"the peer's receives completed \['SUCCESS', 'SUCCESS'"),
    "disconnect/flush": (lies.repeats_completions, "after a flush: an unexpected completion came"),
    "disconnect/again-and-again": (lies.counts_wrong, "reports 65 bytes instead of 64"),
}

#: What is not tried here, and why.
NOT_HERE = {
    "load/library": "fails with the library's own error",
    "load/open-twice": "fails with the library's own error",
    "load/peer": "fails with the peer's own error",
    "enumerate/listed": "soft0 is not listed",
    "enumerate/by-address": "soft0 is not found by address",
    "register/sizes": "fails with the library's own error",
    "register/on-demand": "soft0 has no paging on demand",
    "link/ends-agree": "tests/unit/test_two_ends.py",
    "link/each-other": "tests/unit/test_two_ends.py",
    "connect/timeout": "waits",
    "notification/wait": "waits",
    "read-write/large": "takes long; the same as read-write/write",
    "performance/register": "only measures",
    "performance/write-latency": "only measures",
    "performance/write-bandwidth": "only measures",
}


@pytest.fixture(scope="module")
def bed():
    with ndpy.open_adapter("soft0") as adapter:
        bed = Bed(adapter)
        yield bed
        bed.end()


@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_a_check_fails_on_an_adapter_that_misbehaves_in_its_way(bed, monkeypatch, name):
    misbehave, reason = MISBEHAVIOURS[name]
    misbehave(monkeypatch)
    result = judge(bed, CHECKS[name])
    assert result.verdict is Verdict.FAIL
    assert re.search(reason, result.reason), result.reason


def test_a_check_passes_after_all_that(bed):
    """The adapter behaves again, and so the checks have no reason to fail."""
    for name in ("windows/write-past-end", "send-receive/in-order", "refusals/bad-flags"):
        result = judge(bed, CHECKS[name])
        assert result.verdict is Verdict.PASS, result.reason


def test_every_check_is_tried_or_named():
    assert CHECKS.keys() == MISBEHAVIOURS.keys() | NOT_HERE.keys()
    assert not MISBEHAVIOURS.keys() & NOT_HERE.keys()


def test_a_single_wrong_byte_is_told_with_its_place():
    from ndpy.tools.cli.smoke.resources import difference

    expected = bytes(range(100))
    assert difference(expected, expected) == ""
    assert difference(expected[:-1], expected) == "99 bytes instead of 100"
    assert re.match(
        r"1 of 100 bytes differ, the first at offset 7 \(0xff",
        difference(expected[:7] + b"\xff" + expected[8:], expected),
    )


def test_a_second_check_gets_memory_of_its_own(bed):
    """What the first one has registered is closed when it ends."""
    bed.begin_check(5.0)
    first = bed.ping
    assert bed.end_check() == []
    bed.begin_check(5.0)
    second = bed.ping
    assert second is not first
    assert first.region.closed and not second.region.closed
    assert bed.end_check() == []
