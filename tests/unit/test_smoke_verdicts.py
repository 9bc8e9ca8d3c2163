"""Verdicts and reports of the smoke test, without an adapter."""

import json
import threading
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from ndpy import Capability
from ndpy.tools.cli.peers import PeerLost
from ndpy.tools.cli.smoke import report, runner
from ndpy.tools.cli.smoke.catalog import GROUPS, Check, Failure, Result, Skip, Verdict, load
from ndpy.tools.output import write_json
from ndpy.vocabulary.quirks import Quirk

BOUNDS = "windows/write-past-end"


class FakeTestbed:
    """A testbed with only the parts that the runner needs."""

    def __init__(self):
        self.info = SimpleNamespace(driver="rdma_rxe", capabilities=Capability.NONE)
        self.figures = {}
        self.lost = []
        self.left = []
        self.killed = threading.Event()
        self.closed = False
        self.has_no_peer = False

    def begin_check(self, limit_s):
        self.figures = {}

    def need(self, *capabilities):
        if capabilities:
            raise Skip(f"does not claim {capabilities[0].name}")

    def end_check(self):
        return self.left

    def lose_peer(self, reason):
        self.lost.append(reason)

    def kill_peer(self):
        self.killed.set()

    def close(self):
        self.closed = True


def make_check(body, name="x", needs=()):
    return Check("windows", name, "what it claims", needs, body)


def run(*checks, testbed=None, limit_s=5.0):
    testbed = testbed or FakeTestbed()
    outcome = report.Run("rxe0", "verbs")
    reporter = report.Reporter(len(checks), terminal=False)
    worker = runner.Runner(testbed, outcome, reporter, limit_s=limit_s)
    worker.run(checks)
    return outcome, testbed, worker


def fails(text):
    def body(testbed):
        raise Failure(text)

    return body


def test_verdicts_and_the_summary_line(capsys):
    outcome, testbed, _ = run(
        make_check(lambda testbed: "fine"),
        make_check(fails("wrong")),
        make_check(lambda testbed: "", needs=(Capability.MEMORY_WINDOWS,)),
    )
    assert [result.verdict for result in outcome.results] == [Verdict.PASS, Verdict.FAIL, Verdict.SKIP]
    assert outcome.results[2].reason == "does not claim MEMORY_WINDOWS"
    assert outcome.summary() == "smoke: 1 passed, 1 failed, 0 known, 1 skipped on rxe0 (verbs)"
    assert testbed.closed
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["PASS", "FAIL", "wrong", "SKIP"]


def test_an_exception_is_a_failure_with_its_place():
    def body(testbed):
        raise KeyError("what")

    outcome, _, _ = run(make_check(body))
    assert outcome.results[0].verdict is Verdict.FAIL
    assert "KeyError: 'what'" in outcome.results[0].reason
    assert "test_smoke_verdicts.py" in outcome.results[0].reason


def test_a_lost_peer_costs_one_check():
    def body(testbed):
        raise PeerLost("the peer process 12 was killed by signal 9")

    outcome, testbed, _ = run(make_check(body), make_check(lambda testbed: "fine"))
    assert [result.verdict for result in outcome.results] == [Verdict.FAIL, Verdict.PASS]
    assert "killed by signal 9" in outcome.results[0].reason
    assert len(testbed.lost) == 1


def test_what_cannot_be_closed_fails_the_check():
    testbed = FakeTestbed()
    testbed.left = ["closing QueuePair: it hangs"]
    outcome, _, _ = run(make_check(lambda testbed: "fine"), testbed=testbed)
    assert outcome.results[0].verdict is Verdict.FAIL
    assert "it hangs" in outcome.results[0].reason


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_peer_whose_answer_makes_no_sense_costs_one_check():
    """Anybody may answer at --peer HOST. Here the answer to "reset" has no "failures"."""
    testbed = FakeTestbed()

    def end_check():
        testbed.end_check = list
        raise KeyError("failures")

    testbed.end_check = end_check
    outcome, _, worker = run(make_check(lambda testbed: "fine"), make_check(lambda testbed: "fine"), testbed=testbed)
    assert [result.verdict for result in outcome.results] == [Verdict.FAIL, Verdict.PASS]
    assert outcome.results[0].reason == "cleaning up: KeyError: 'failures'"
    assert testbed.lost == ["KeyError: 'failures'"]
    assert not worker.stuck


def test_a_check_that_never_returns_does_not_hold_up_the_run(monkeypatch):
    monkeypatch.setattr(runner, "_CLOSING_S", 0.1)
    monkeypatch.setattr(runner, "_STUCK_S", 0.1)
    release = threading.Event()

    def body(testbed):
        release.wait(30)
        return ""

    outcome, testbed, worker = run(make_check(body, "stuck"), make_check(lambda testbed: "fine", "next"), limit_s=0.2)
    release.set()
    assert worker.stuck and testbed.killed.is_set()
    assert [result.verdict for result in outcome.results] == [Verdict.FAIL, Verdict.FAIL]
    assert "it was at" in outcome.results[0].reason
    assert outcome.results[1].reason == "not run, because windows/stuck never returned"


def test_a_peer_that_cannot_be_had_fails_once(capsys, tmp_path):
    testbed = FakeTestbed()

    def body(testbed):
        testbed.has_no_peer = True
        raise PeerLost("no peer at 192.0.2.9")

    checks = [make_check(lambda testbed: "fine", "local"), *(make_check(body, f"remote-{n}") for n in range(80))]
    outcome, _, _ = run(*checks, testbed=testbed)
    assert [result.verdict for result in outcome.results] == [Verdict.PASS, Verdict.FAIL]
    assert capsys.readouterr().out.count("no peer at 192.0.2.9") == 1
    assert outcome.not_run == [check.full_name for check in checks[2:]]
    write_json(tmp_path / "out.json", outcome.to_dict())
    assert len(json.loads((tmp_path / "out.json").read_text())["not_run"]) == 79


def judged(verdict, reason, *, driver="rdma_rxe", release="6.1.0-50-amd64", name=BOUNDS):
    group, _, name = name.partition("/")
    return runner.judge(Result(Check(group, name, "claim", (), lambda testbed: ""), verdict, reason), driver, release)


def test_a_listed_quirk_is_known():
    result = judged(Verdict.FAIL, "the write was not refused")
    assert result.verdict is Verdict.KNOWN
    assert "rxe_resp.c" in result.reference
    assert "the write was not refused" in result.reason


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("the peer is gone", {}),
        ("was not refused", {"driver": "mlx5_core"}),
        ("was not refused", {"name": "windows/read-only"}),
        ("was not refused", {"release": "5.13.9"}),
    ],
)
def test_everything_else_is_a_failure(reason, changes):
    assert judged(Verdict.FAIL, reason, **changes).verdict is Verdict.FAIL


def test_a_listed_quirk_that_is_gone_is_reported():
    result = judged(Verdict.PASS, "refused")
    assert result.verdict is Verdict.PASS
    assert "not seen" in result.reason


def test_a_quirk_with_a_workaround_excuses_nothing_and_is_told():
    check = {"name": "notification/failure-tells", "release": "6.12.107+deb13-amd64"}
    assert judged(Verdict.FAIL, "arm: not finished within 3 s", **check).verdict is Verdict.FAIL
    passed = judged(Verdict.PASS, "told", **check)
    assert passed.verdict is Verdict.PASS
    assert "every 50 ms" in passed.reason and "flush_recv_wqe" in passed.reference
    assert judged(Verdict.PASS, "told", name=check["name"]).reason == "told", "Linux 6.1 does not have it"


def test_the_table_names_checks_that_exist_and_how_they_fail():
    names = {check.full_name for check in load()}
    for quirk in Quirk:
        assert names.issuperset(quirk.value.checks)
        assert bool(quirk.value.checks) is bool(quirk.value.symptom)


def test_every_group_has_checks_with_a_claim_and_a_name_of_its_own():
    checks = load()
    assert {check.group for check in checks} == set(GROUPS)
    assert len({check.full_name for check in checks}) == len(checks)
    assert all(check.claim for check in checks)
    assert {check.group for check in load(["connect"])} == {"connect"}


def connections_from_one_port(peer_ports):
    """A testbed whose connections all have the same local address."""
    near, waiting = ("192.0.2.1", 49152), list(peer_ports)

    def connect():
        return SimpleNamespace(
            connector=SimpleNamespace(local_address=near, peer_address=("192.0.2.2", waiting.pop())),
            far=SimpleNamespace(peer_address=near, slot=lambda offset, length: bytes(length)),
            queue_pair=SimpleNamespace(send=lambda region: None),
            take=lambda count, what: None,
            take_at_peer=lambda count, what: None,
        )

    memory = SimpleNamespace(region=None, contents=lambda: bytes(512))
    return SimpleNamespace(connect=connect, memory=lambda length: memory)


def test_connections_to_different_ports_may_come_from_one_port():
    (check,) = (check for check in load(["connect"]) if check.name == "four-at-once")
    assert check.body(connections_from_one_port([7471, 7472, 7473, 7474])) == "4 connections, 4 messages"
    with pytest.raises(Failure, match="4 connections have 3 pairs of addresses"):
        check.body(connections_from_one_port([7471, 7472, 7473, 7471]))


def test_json_and_junit_say_the_same(tmp_path):
    outcome, _, _ = run(
        make_check(lambda testbed: "fine", "good"), make_check(fails("wrong <&>\x01"), "bad"),
        make_check(fails("was not refused"), "write-past-end")
    )  # fmt: skip
    write_json(tmp_path / "out.json", outcome.to_dict())
    report.write_junit(tmp_path / "out.xml", outcome)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["summary"] == {"pass": 1, "fail": 1, "known": 1, "skip": 0}
    assert [check["verdict"] for check in found["checks"]][:2] == ["PASS", "FAIL"]
    suite = ElementTree.parse(tmp_path / "out.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("3", str(found["summary"]["fail"]))
    assert suite.findall("testcase")[1].find("failure").get("message") == "wrong <&>?"
