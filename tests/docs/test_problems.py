"""Every problem has a section with all its parts, and its scenario makes the error that ends with its word."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from kit.deadlines import patient

import ndpy
import ndpy.aio
import ndpy.faults
from ndpy import problems
from ndpy.faults.injection import VARIABLE, Injection
from ndpy.testing import connected_pair
from ndpy.tools.cli import main

PROBLEMS = problems.all_problems()
WORDS = Path(__file__).with_name("words.txt")


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


ERRORS = [ndpy.NdpyError, *subclasses(ndpy.NdpyError)]


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
        while isinstance(command, click.Group) and words:
            found = command.get_command(context, words.pop(0))
            assert found, span
            command = found
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known, span
        if command.name == "explain":
            assert problems.named(" ".join(words)), span


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


def walk(seen: Callable[[ndpy.NdpyError], None], limit_s: float) -> None:
    """Do a bit of everything on soft0 until it fails, and tell of the errors."""
    with contextlib.ExitStack() as stack:

        def completions(end: ndpy.testing.End, count: int) -> None:
            for completion in end.take(count, limit_s):
                try:
                    completion.raise_for_status()
                except ndpy.NdpyError as error:
                    seen(error)

        try:
            adapter = stack.enter_context(ndpy.open_adapter("soft0"))
            pair = stack.enter_context(connected_pair(adapter))
            client, server = pair
            for _ in range(2):
                server.queue_pair.receive(server.memory[:64])
            for _ in range(2):
                client.queue_pair.send(client.memory[:8])
            completions(client, 2)
            completions(server, 2)
            client.queue_pair.write(client.memory[:8], server.memory.remote())
            completions(client, 1)
            client.queue_pair.read(client.memory[:8], server.memory.remote())
            completions(client, 1)
            with adapter.create_memory_window() as window:
                client.queue_pair.bind(window, client.memory[:64], ndpy.Access.REMOTE_READ)
                completions(client, 1)
        except ndpy.NdpyError as error:
            seen(error)


@pytest.mark.parametrize("problem", [each for each in PROBLEMS if each.scenario], ids=lambda each: each.word)
def test_a_scenario_makes_the_error_that_names_its_problem(
    problem: problems.Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(problem.scenario or "", "utf-8")
    errors: list[ndpy.NdpyError] = []
    with Injection(ndpy.faults.Scenario.load(path)) as injection:
        monkeypatch.setenv(VARIABLE, str(injection.path))
        waits = "hold" in (problem.scenario or "") or "mute" in (problem.scenario or "")
        walk(errors.append, 0.2 if waits else patient(20))
        injection.report().check()
    assert problem.word in [each.problem for each in errors], [str(each) for each in errors]
    assert any(str(each).endswith(f"(ndpy explain {problem.word})") for each in errors)
