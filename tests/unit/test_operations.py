"""The table of operations: what Python knows of it besides, and the methods that are made of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from ndpy import Access, Flags, Operation, QueuePairType, _core
from ndpy.objects import operations
from ndpy.objects.operations import MARKER, TABLE, UNWRITABLE, words_of_flags

CDEFS = Path(__file__).resolve().parents[2] / "cdefs"
HEADER = (CDEFS / "operations.h").read_text()
CALLS = re.findall(r"^ {4}CALL\((\w+), (\w+), (\w+),\s*\\?\s*\"([^\"]*)\"", HEADER, re.MULTILINE)
# enum ndpy_operation: the numbers of those that only completions name, and of those that are only posted.
FIRST_ONLY_POSTED = 16


def constant(name: str) -> int:
    text = HEADER + (CDEFS / "ndpy_abi.h").read_text()
    found = re.search(rf"\b{name} = (0x[0-9A-Fa-f]+|\d+)", text)
    assert found, name
    return int(found[1], 0)


def test_the_numbers_that_python_has_are_those_of_c():
    for trait in ("FILLS_LOCAL", "NAMES_REMOTE", "IS_ALIGNED"):
        assert getattr(operations, trait) == constant(trait)
    bits = {type: constant(f"BY_{'XRC' if type is QueuePairType.XRC_SEND else type.name}") for type in operations._BITS}
    assert bits == operations._BITS
    assert (constant("NDPY_UNWRITABLE"), constant("NDPY_MARKER")) == (UNWRITABLE, MARKER)


def test_what_completes_is_an_operation_of_the_interface():
    assert {row.number: row.name for row in TABLE.values() if row.number < FIRST_ONLY_POSTED} == {
        operation.value: operation.name for operation in Operation
    }
    for row in TABLE.values():
        assert row.completes_as in list(Operation)
        assert all(right in Access.__members__ for right in row.rights.split(" or ") if right)


@pytest.mark.parametrize(("name", "arguments"), [(name, arguments) for name, _, _, arguments in CALLS])
@pytest.mark.parametrize("owner", [_core.WorkQueues, _core.Batch])
def test_a_method_has_the_arguments_of_its_line(owner, name, arguments):
    text = getattr(owner, name).__text_signature__
    assert text == f"($self, {arguments})"
    if "ndpy." not in text:
        assert list(inspect.signature(getattr(owner, name)).parameters)[1:] == re.findall(
            r"(\w+)(?:=\w+)?(?:,|$)", arguments
        )


def test_every_operation_that_is_posted_has_a_method():
    posted = {name for _, *pair, _ in CALLS for name in pair}
    others = {"BIND", "INVALIDATE", "RECEIVE_RDMA_WITH_IMMEDIATE"}
    assert posted | others == {row.name for row in TABLE.values()}


@pytest.mark.parametrize(
    ("operation", "type", "words"),
    [
        (Operation.SEND, QueuePairType.RC, "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE"),
        (Operation.READ, QueuePairType.RC, "SILENT_SUCCESS and READ_FENCE"),
        (operations.SEND_TO, QueuePairType.UD, "SILENT_SUCCESS, SOLICITED and INLINE"),
        (Operation.RECEIVE, QueuePairType.RC, "none"),
    ],
)
def test_an_error_names_the_flags_that_an_operation_takes(operation, type, words):
    assert words_of_flags(operation, type) == words


def test_every_public_flag_is_taken_by_something():
    taken = 0
    for row in TABLE.values():
        taken |= row.flags
    assert all(flag & taken for flag in Flags if flag)
