"""Every problem has a section with all its parts, and its scenario makes the error that ends with its word."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import walking
from click.testing import CliRunner
from kit.deadlines import DEADLINE_S, patient, wait_until

import ndpy
import ndpy.aio
import ndpy.errors
import ndpy.faults
import ndpy.tools.machines
from ndpy import problems
from ndpy.faults import kinds
from ndpy.faults.injection import VARIABLE, Injection
from ndpy.testing import own_address
from ndpy.tools.cli import main
from ndpy.tools.doctor import findings

PROBLEMS = problems.all_problems()
ROOT = Path(__file__).resolve().parents[2]
WORDS = Path(__file__).with_name("words.txt")
#: Nothing comes, so waiting shows nothing more.
WAITS = ("no-completion",)
#: Nothing can be closed while the fault is there, so this takes a process of its own.
CLOSES_NOTHING = ("busy",)
SHORT_S = 0.2


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


# Commands have errors of their own, which their users do not see as such.
ERRORS = [
    each for each in subclasses(ndpy.NdpyError) if not each.__module__.startswith(("ndpy.tools.cli", "kit", "test"))
]


# ---- the sections ----


def test_words_are_unique_and_stable() -> None:
    """Programs and people keep them: add a new word to the list, and never take one away."""
    assert sorted(each.word for each in PROBLEMS) == WORDS.read_text("utf-8").split()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: each.word)
def test_a_section_has_all_its_parts(problem: problems.Problem) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", problem.word)
    assert re.fullmatch(r"[^.]+\.", problem.summary)
    assert tuple(problem.parts) == problems.PARTS
    assert all(problem.parts.values())
    assert "1. " in problem.parts["Causes"]
    assert "`" in problem.parts["Tell them apart"]
    assert problem.scenario or len(problem.parts["Reproduce"]) > 20


def spans(problem: problems.Problem) -> list[str]:
    return re.findall(r"`(ndpy [^`]+)`", problem.text)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: each.word)
def test_the_commands_of_a_section_exist(problem: problems.Problem) -> None:
    for span in spans(problem):
        _, *words = shlex.split(span.partition(" -- ")[0])
        command: click.Command = main
        context = click.Context(main)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words.pop(0))
            assert found, span
            command = found
        known = {"--help"} | {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("-")} <= known, span
        if command.name == "explain":
            assert problems.named(" ".join(words)), span


# ---- completeness ----


def numbers() -> dict[str, int | None]:
    return {name: number for each in PROBLEMS for name, number in each.names}


def enumerators(name: str, header: str) -> list[str]:
    """The names of an enum of a header of libibverbs or librdmacm, in the order of their numbers."""
    found = re.search(rf"enum {name} {{(.*?)}}", (ROOT / "cdefs/verbs" / header).read_text("utf-8"), re.S)
    assert found
    return re.findall(r"\b[A-Z]\w+", found[1])


def test_every_completion_status_of_verbs_has_a_section_with_its_number() -> None:
    names = enumerators("ibv_wc_status", "ibverbs.h")
    assert len(names) == 22
    wanted = {name: number for number, name in enumerate(names) if number}
    assert wanted == {name: numbers().get(name) for name in wanted}


def test_every_completion_status_of_ndpy_has_a_section() -> None:
    assert {f"Status.{each.name}" for each in ndpy.Status if each} <= set(numbers())


def test_every_event_of_the_connection_manager_has_a_section() -> None:
    names = enumerators("rdma_cm_event_type", "rdmacm.h")
    assert len(names) == 16
    assert set(names) <= set(numbers())


def test_every_status_of_networkdirect_has_a_section_with_its_number() -> None:
    table = (ROOT / "docs/contract/b-constants.md").read_text("utf-8").partition("## B.2")[0]
    statuses = re.findall(r"^\| `?((?:ND|STATUS)_\w+)`? \|.*?`(0x\w{8})`", table, re.M)
    # A success, a call that goes on, and another name of ND_CONNECTION_REFUSED.
    wanted = {name: int(number, 16) for name, number in statuses}
    for name in ("ND_SUCCESS", "ND_PENDING", "STATUS_CONNECTION_REFUSED"):
        del wanted[name]
    assert len(wanted) == 46
    assert wanted == {name: numbers().get(name) for name in wanted}


@pytest.mark.skipif(sys.platform != "linux", reason="the numbers are those of Linux")
def test_every_errno_of_a_call_has_a_section_with_its_number() -> None:
    named = {errno.errorcode[number] for number in ndpy.errors._BY_ERRNO}
    wanted = {name: getattr(errno, name) for name in {*named, *kinds.ERRNOS}}
    assert wanted == {name: numbers().get(name) for name in wanted}


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: each.__name__)
def test_every_error_ends_with_the_word_of_a_section_that_names_it(error: type[ndpy.NdpyError]) -> None:
    assert error.problem in {each.word for each in PROBLEMS}
    (section,) = [each for each in PROBLEMS if each.word == error.problem]
    assert error.__name__ in {name.rpartition(".")[2] for name, _ in section.names}
    assert str(error("a reason")).endswith(f"(ndpy explain {error.problem})")


def test_the_word_of_every_errno_has_a_section() -> None:
    for number in range(1, 134):
        error = ndpy.errors.from_errno("call", number)
        assert problems.named(error.problem)[0].word == error.problem


def test_a_finding_of_the_doctor_ends_with_the_word_of_a_section() -> None:
    assert set(findings.PAGES.values()) <= {each.word for each in PROBLEMS}
    assert findings.failed("open files", "few are left", "raise the limit").page == " (ndpy explain open-files)"
    assert findings.failed("open files", "few are left", "raise it (ndpy explain x)").page == ""
    assert findings.passed("open files", "many are left").page == ""


def test_a_finding_names_its_problem_for_programs() -> None:
    assert findings.failed("open files", "few are left", "raise the limit").to_dict()["problem"] == "open-files"
    assert findings.failed("open files", "few are left", "raise it (ndpy explain memlock)").problem == "memlock"
    assert findings.warned("something", "it is so", "change it").problem == ""
    assert findings.passed("open files", "many are left").problem == ""


# ---- what is explained ----


@pytest.mark.parametrize("name", ["rnr-retry", "RNR_RETRY", "13", "IBV_WC_RNR_RETRY_EXC_ERR", "rnr_retry_exc_err"])
def test_a_problem_is_found_by_its_word_its_names_and_its_number(name: str) -> None:
    assert problems.named(name)[0].word == "rnr-retry"


def test_an_errno_is_found_by_its_name_and_its_negative_number() -> None:
    assert problems.named("ENOMEM")[0].word == problems.named("-12")[-1].word == "memlock"


def explain(*words: str) -> str:
    result = CliRunner().invoke(main, ["explain", *words])
    assert not result.exit_code, result.output
    return result.output


def test_a_section_is_printed_as_markdown_when_piped() -> None:
    problem = problems.named("rnr-retry")[0]
    assert explain("rnr-retry") == f"# rnr-retry\n\n{problem.text}\n"


def test_json_has_all_that_a_word_can_mean() -> None:
    (found,) = json.loads(explain("--json", "rnr-retry"))
    assert found["word"] == "rnr-retry"
    assert {"name": "IBV_WC_RNR_RETRY_EXC_ERR", "number": 13} in found["names"]
    assert all(found[part] for part in ("summary", "meaning", "causes", "tell_them_apart", "remedy", "scenario"))


def test_a_scenario_can_be_had_alone() -> None:
    assert explain("rnr-retry", "--scenario") == problems.named("rnr-retry")[0].scenario


def test_all_words_are_listed() -> None:
    assert [line.split()[0] for line in explain().splitlines()[1:]] == [each.word for each in PROBLEMS]


def test_an_unknown_word_ends_with_2_and_shows_near_ones() -> None:
    result = CliRunner().invoke(main, ["explain", "rnr-retyr"])
    assert result.exit_code == 2
    assert "similar are rnr-retry" in result.output


# ---- the scenarios ----


def executor_of(scenario: ndpy.faults.Scenario) -> str:
    """The engine of soft0, unless only the shim can make one of the faults."""
    try:
        scenario.check_for("engine")
    except ndpy.faults.ScenarioError:
        return "shim"
    return "engine"


def first(texts: Iterator[str], ending: str) -> list[str]:
    """The texts up to one that ends so. The rest of the walk is not made."""
    told = []
    for text in texts:
        told.append(text)
        if text.endswith(ending):
            break
    return told


# An adapter that refuses to close is dropped.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("problem", [each for each in PROBLEMS if each.scenario], ids=lambda each: each.word)
def test_a_scenario_makes_the_error_that_names_its_problem(
    problem: problems.Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(problem.scenario or "", "utf-8")
    scenario = ndpy.faults.Scenario.load(path)
    executor = executor_of(scenario)
    limit_s = SHORT_S if problem.word in WAITS else patient(20)
    with Injection(scenario, executor) as injection:
        if executor == "engine" and problem.word not in CLOSES_NOTHING:
            monkeypatch.setenv(VARIABLE, str(injection.path))
            told = first(walking.walk(limit_s), f"(ndpy explain {problem.word})")
        else:
            # The shim, too, has to be there before the libraries are loaded.
            command = [sys.executable, walking.__file__, str(limit_s)]
            output = subprocess.run(command, env=injection.environment(), capture_output=True, text=True, check=True)
            told = output.stdout.splitlines()
        injection.report().check()
    assert any(each.endswith(f"(ndpy explain {problem.word})") for each in told), told


@pytest.mark.parametrize("what", ["closed", "full"])
def test_a_listener_that_takes_no_request_rejects_as_its_section_says(what: str) -> None:
    with contextlib.ExitStack() as stack:
        adapter = stack.enter_context(ndpy.open_adapter("soft0"))
        queue = stack.enter_context(adapter.create_completion_queue(8))
        listener = stack.enter_context(adapter.listen((own_address(adapter), 0), backlog=1))
        asking = []
        for _ in range(2):
            queue_pair = stack.enter_context(adapter.create_queue_pair(queue))
            connector = stack.enter_context(adapter.create_connector())
            asking.append(connector.begin_connect(queue_pair, listener.address))
        wait_until(lambda: any(each.done() for each in asking), "one of two requests is refused")
        if what == "closed":
            listener.close()
            refused = asking
        else:
            refused = [each for each in asking if each.done()]
            assert listener.refused == len(refused) == 1
        for each in refused:
            with pytest.raises(ndpy.ConnectionRefusedError, match=r"consumer reject") as caught:
                each.result(DEADLINE_S)
            assert caught.value.native == 28
            assert caught.value.problem == "rejected"
