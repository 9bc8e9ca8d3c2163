"""Scenarios of faults: what they may say, their files, and the reports."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from ndpy import faults
from ndpy.faults import Fault, Fired, Report, Scenario, ScenarioError, kinds, scenario
from ndpy.faults.kinds import Data, Number

needs_toml = pytest.mark.skipif(
    not importlib.util.find_spec("tomllib" if sys.version_info >= (3, 11) else "tomli"), reason="no package for TOML"
)


def example(kind: kinds.Kind, **more: object) -> Fault:
    """A fault of a kind, with the least that it needs."""
    given: dict[str, object] = {"at": kind.at}
    for name in kind.values:
        value = kinds.value_named(name)
        given[name] = (
            value.maximum if isinstance(value, Number) else b"x" if isinstance(value, Data) else value.words[0]
        )
    if kind.do == "limit":
        given["call"] = "create_qp"
    if kind.do == "late_receive":
        given["operation"] = "receive"
    return Fault(kind.do, **(given | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: f"{kind.at}-{kind.do}")
def test_each_kind_has_its_values_its_rule_and_what_is_afterwards(kind):
    fault = example(kind)
    assert fault.kind is kind
    assert kind.meaning and kind.afterwards and kind.reference
    assert kind.at in kinds.PLACES and set(kind.executors) <= set(kinds.EXECUTORS)
    for name in kind.values:
        with pytest.raises(ScenarioError, match=f"needs {name}: "):
            example(kind, **{name: None})
    for value in kinds.VALUES:
        if value.name not in (*kind.values, *kind.optional):
            wrong = b"x" if isinstance(value, Data) else 1 if isinstance(value, Number) else value.words[0]
            with pytest.raises(ScenarioError, match=f"has no {value.name}"):
                example(kind, **{value.name: wrong})


@pytest.mark.parametrize(
    ("words", "wrong", "said"),
    [
        ({"do": "delay", "ms": 1}, "do", "at a request or a message"),
        ({"do": "staus"}, "do", "'staus' is not a kind of fault; the kinds are errno, slow"),
        ({"do": "status", "status": "RNR_RETRY_EXC_ERR", "operation": "read"}, "status", "read never ends with"),
        ({"do": "status", "status": "SUCCESS"}, "status", "it can be LOC_LEN_ERR"),
        ({"do": "errno", "errno": "EIO", "call": "ibv_reg_mr"}, "call", "no faults are known of a call 'ibv_reg_mr'"),
        ({"do": "errno", "errno": "EIO", "operation": "send"}, "operation", "no meaning where at is 'call'"),
        ({"do": "errno", "errno": "EIO", "call": "reg_mr", "queue_pair": 1}, "queue_pair", "reg_mr has no queue pair"),
        ({"do": "limit", "limit": 1, "call": "post_send"}, "call", "no limited number|whose number can be limited"),
        ({"do": "remove", "at": "call"}, "at", "it is for 'adapter'"),
        ({"do": "remove", "at": "Adapter"}, "at", "it can be call, request, message, connection or adapter"),
        ({"do": "silent", "nth": 0}, "nth", "a whole number from 1"),
        ({"do": "silent", "nth": True}, "nth", "a whole number from 1"),
        ({"do": "silent", "nth": 1, "every": 2}, "every", "nth and every exclude each other"),
        ({"do": "silent", "probability": 1.5}, "probability", "from 1e-12 to 1"),
        ({"do": "silent", "probability": float("nan")}, "probability", "from 1e-12 to 1"),
        ({"do": "silent", "after_ms": 5, "until_ms": 5}, "until_ms", "not before"),
        ({"do": "silent", "min_size": 5, "max_size": 4}, "max_size", "no size is from"),
        ({"do": "silent", "peer": "localhost"}, "peer", "not an IP address"),
        ({"do": "corrupt", "content": "ab"}, "content", "not bytes"),
        ({"do": "corrupt", "content": bytes(65)}, "content", "it can have 1 to 64"),
        ({"do": "lose", "bytes": -1}, "bytes", "a whole number from 0"),
        ({"do": 5}, "do", "not a text"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_word(words, wrong, said):
    with pytest.raises(ScenarioError, match=said) as caught:
        Fault(**words)
    assert caught.value.word == wrong
    assert isinstance(caught.value, ValueError)


def test_the_plain_form_has_a_line_for_each_fault(tmp_path):
    made = Scenario(
        [
            Fault("status", operation="send", queue_pair=2, nth=3, status="RETRY_EXC_ERR"),
            Fault("delay", at="message", probability=1e-6, content=b"\x01\xff", ms=5),
        ],
        seed=7,
    )
    text = made.plain("engine", tmp_path / "a report", tmp_path / "count")
    assert text.splitlines() == [
        "scenario 1",
        "seed 7",
        f"report {tmp_path}/a report",
        f"count {tmp_path}/count",
        "fault do=status at=request operation=send queue_pair=2 nth=3 status=RETRY_EXC_ERR",
        "fault do=delay at=message content=01ff probability=0.000001000000000 ms=5",
    ]


def test_an_executor_says_what_it_cannot_do():
    with pytest.raises(ScenarioError, match=r"fault 2: shim cannot .*driver.*; engine or softnd can: do=split"):
        Scenario([Fault("silent"), Fault("split")]).plain("shim")


@needs_toml
def test_a_file_has_the_words_of_the_objects(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('seed = 5\n[[fault]]\ndo = "reject"\nnth = 2\ndata = "6e6f"\n[[fault]]\ndo = "silent"\n')
    assert Scenario.load(path) == Scenario([Fault("reject", nth=2, data=b"no"), Fault("silent")], seed=5)


@needs_toml
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed = 1\nseed", r"no TOML: .*(line 2|end of document)"),
        ("seed = -1", "seed is -1"),
        ("sed = 1", "'sed' is unknown"),
        ('[fault]\ndo = "silent"', "with two brackets"),
        ('[[fault]]\ndo = "silent"\n\n[[fault]]\nnth = 1\n', "line 4: do is missing"),
        ('[[fault]]\ndo = "silent"\n\n[[fault]]\ndo = "silent"\n# once\nnth = 0\n', "line 7: nth is 0"),
        ('[[fault]]\ndo = "silent"\nevry = 1\n', "line 3: a fault has no 'evry'"),
        ('fault = [{do = "silent"}, {do = "silent", nth = 0}]', "fault 2: nth is 0"),
        ('[[fault]]\ndo = "reject"\ndata = "no"\n', "line 3: data is 'no'; it is written in hexadecimal"),
        ('[[fault]]\ndo = "reject"\ndata = 5\n', "line 3: data is 5; it is written in hexadecimal"),
    ],
    ids=str,
)
def test_an_error_names_the_file_and_the_line(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=rf"^{path}: .*{said}"):
        Scenario.load(path)


def test_without_a_reader_of_toml_it_says_what_to_install(monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(scenario.importlib, "import_module", absent)
    with pytest.raises(ScenarioError, match=r"pip install 'ndpy\[faults\]'"):
        Scenario.parse("seed = 1")


def test_a_report_names_what_fired_and_what_never_did(tmp_path):
    made = Scenario([Fault("silent", nth=9), Fault("errno", call="reg_mr", errno="ENOMEM")])
    path = tmp_path / "report"
    assert Report.read(made, path).never == made.faults
    line = {"fault": 1, "pid": 7, "at": "call", "place": "reg_mr", "queue_pair": 0, "count": 3, "does": "errno"}
    whole = json.dumps(line | {"time": 5, "caller": "a.out+0x12 (main)"})
    # The end of the process may cut off the last line.
    path.write_text(f"{whole}\n{whole[:20]}")
    report = Report.read(made, path)
    assert report.fired == (Fired(1, 7, "reg_mr", 0, 3, "errno", "a.out+0x12 (main)", 5),)
    assert report.never == made.faults[:1]
    assert str(report).splitlines() == [
        "fired: errno at reg_mr 3, called by a.out+0x12 (main) (process 7)",
        "never fired: do=silent at=request nth=9",
    ]
    with pytest.raises(faults.NeverFiredError, match="never fired: do=silent"):
        report.check()
    assert json.loads(json.dumps(report.as_values()))["never_fired"] == [0]


def test_two_faults_that_are_the_same_are_told_apart(tmp_path):
    made = Scenario([Fault("silent"), Fault("silent")])
    path = tmp_path / "report"
    path.write_text('{"fault":0,"pid":7,"place":"send","does":"silent"}\n')
    assert Report.read(made, path).as_values()["never_fired"] == [1]


def test_the_field_bytes_hides_no_type():
    assert Fault("lose", bytes=5).bytes == 5
    assert Fault("reject", data=b"x").data == b"x"
