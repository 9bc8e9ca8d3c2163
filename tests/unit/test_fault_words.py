"""The table of kinds and the C program that reads scenarios have the same words and bounds."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.compiling import compiled

from ndpy.faults import Fault, ScenarioError, kinds
from ndpy.faults.kinds import Data, Number, Word

FAULTS = Path(__file__).parents[2] / "softrdma/faults"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    path = compiled(tmp_path_factory.mktemp("faults") / "scenario.so", "-shared", "-fPIC", *FAULTS.glob("*.c"), "-ldl")
    loaded = ctypes.CDLL(str(path))
    loaded.scenario_parse.restype = loaded.scenario_free.argtypes = None
    loaded.scenario_parse.restype = ctypes.c_void_p
    loaded.scenario_free.argtypes = [ctypes.c_void_p]
    loaded.fault_kind_name.restype = loaded.fault_what_name.restype = loaded.fault_at_name.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def problem(library) -> Callable[[str], str]:
    """What C says of a fault's words, or ""."""

    def of(words: str) -> str:
        text = f"scenario 1\nseed 0\nfault {words}\n".encode()
        error = ctypes.create_string_buffer(512)
        made = library.scenario_parse(b"test", text, ctypes.c_size_t(len(text)), error, ctypes.c_size_t(512))
        if made:
            library.scenario_free(made)
            return ""
        return error.value.decode()

    return of


def python_says(**words: object) -> str:
    try:
        Fault(**words)  # type: ignore[arg-type]
    except ScenarioError as error:
        return str(error)
    return ""


def agree(problem: Callable[[str], str], **words: object) -> bool:
    """Whether both accept or refuse a fault. Returns whether they accept it."""
    plain = " ".join(
        f"{name}={value.hex() if isinstance(value, bytes) else value}"
        for name, value in words.items()
        if value is not None
    )
    python, c = python_says(**words), problem(plain)
    assert (python == "") == (c == ""), f"{plain}: Python says {python!r}, and C {c!r}"
    return not python


def names(look_up: Callable[[int], bytes], count: int) -> list[str]:
    return [look_up(number).decode() for number in range(count)]


def enumerators(name: str) -> int:
    """How many an enum of the header has."""
    body = (FAULTS / "scenario.h").read_text().split(f"enum {name} {{")[1].split("}")[0]
    return len([word for word in body.split(",") if word.strip() and "=" not in word]) - 1


def test_the_numbers_of_places_calls_operations_and_kinds_are_those_of_c(library):
    assert tuple(names(library.fault_at_name, enumerators("fault_at"))) == kinds.PLACES
    calls = [call.name for call in kinds.CALLS]
    assert names(lambda number: library.fault_what_name(0, number), enumerators("fault_call"))[1:] == calls
    operations = names(lambda number: library.fault_what_name(1, number), enumerators("fault_operation"))[1:]
    assert tuple(operations) == kinds.OPERATIONS
    found = names(library.fault_kind_name, enumerators("fault_kind"))
    assert found == list(dict.fromkeys(kind.do for kind in kinds.KINDS))


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: f"{kind.at}-{kind.do}")
def test_both_agree_on_the_places_and_values_of_a_kind(problem, kind):
    least: dict[str, object] = {"do": kind.do, "at": kind.at}
    if kind.do == "limit":
        least["call"] = "create_qp"
    if kind.do == "late_receive":
        least["operation"] = "receive"
    for name in kind.values:
        value = kinds.value_named(name)
        least[name] = value.words[0] if isinstance(value, Word) else 1 if isinstance(value, Number) else b"x"
    assert agree(problem, **least)
    for place in kinds.PLACES:
        agree(problem, **(least | {"at": place}))
    for word in ("call", "operation", *kind.values):
        agree(problem, **(least | {word: None}))
    for word, example in {
        "call": "reg_mr", "operation": "send", "queue_pair": 1, "peer": "::1", "min_size": 1, "max_size": 2,
        "content": b"x", "nth": 1, "every": 1, "after_ms": 1, "until_ms": 2, "times": 2, "errno": "EIO",
        "status": "LOC_QP_OP_ERR", "ms": 1, "limit": 1, "bytes": 1, "data": b"x",
    }.items():  # fmt: skip
        # C does not know which calls have a queue pair, and lets a limit hold at times.
        if kind.do != "limit" or word not in ("queue_pair", "nth", "every"):
            agree(problem, **(least | {word: example}))


def test_both_agree_which_operation_can_end_with_which_status(problem):
    for status in kinds.STATUSES:
        accepted = [
            operation
            for operation in kinds.OPERATIONS
            if agree(problem, do="status", at="request", operation=operation, status=status.name)
        ]
        assert tuple(accepted) == status.operations
    for other in ("SUCCESS", "WR_FLUSH_ERR", "LOC_RDD_VIOL_ERR", "GENERAL_ERR"):
        assert not agree(problem, do="status", at="request", status=other)


def test_both_agree_which_calls_make_what_is_limited(problem):
    accepted = [call.name for call in kinds.CALLS if agree(problem, do="limit", at="call", call=call.name, limit=1)]
    assert accepted == [call.name for call in kinds.CALLS if call.limited]


def test_both_know_the_same_error_numbers(problem):
    accepted = {name for name in errno.errorcode.values() if agree(problem, do="errno", at="call", errno=name)}
    # Linux has two names for this number.
    assert accepted | {"EOPNOTSUPP"} == set(kinds.ERRNOS)
    assert agree(problem, do="errno", at="call", errno="EOPNOTSUPP")
    assert {name for call in kinds.CALLS for name in call.errnos} <= set(kinds.ERRNOS)


BOUNDS = {
    "queue_pair": (1, 2**32 - 1), "min_size": (0, 2**32 - 1), "max_size": (0, 2**32 - 1), "nth": (1, kinds.MOST),
    "every": (1, kinds.MOST), "times": (1, kinds.MOST), "after_ms": (0, kinds.DAY_MS), "until_ms": (1, kinds.DAY_MS),
}  # fmt: skip


@pytest.mark.parametrize("word", BOUNDS)
def test_both_agree_on_the_bounds_of_numbers(problem, word):
    for bound, beyond in zip(BOUNDS[word], (-1, 1), strict=True):
        assert agree(problem, do="silent", at="request", **{word: bound})
        assert not agree(problem, do="silent", at="request", **{word: bound + beyond})


@pytest.mark.parametrize("value", kinds.VALUES, ids=lambda value: value.name)
def test_both_agree_on_the_bounds_of_values(problem, value):
    kind = next(kind for kind in kinds.KINDS if value.name in (*kind.values, *kind.optional))
    rest = {"do": kind.do, "at": kind.at, "call": "create_qp" if kind.at == "call" else None}
    if isinstance(value, Number):
        for bound, beyond in ((value.minimum, -1), (value.maximum, 1)):
            assert agree(problem, **rest, **{value.name: bound})
            assert not agree(problem, **rest, **{value.name: bound + beyond})
    elif isinstance(value, Data):
        assert agree(problem, **rest, **{value.name: bytes(value.maximum)})
        assert not agree(problem, **rest, **{value.name: bytes(value.maximum + 1)})


@pytest.mark.parametrize("probability", [0.5, 1, 1e-12, 1.5, -0.1])
def test_both_agree_on_probabilities(problem, probability):
    said = problem(str(Fault("silent", probability=probability))) if 0 < probability <= 1 else "refused"
    assert (said == "") == (python_says(do="silent", probability=probability) == "")
