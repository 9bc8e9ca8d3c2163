"""The reference has each public name once."""

from __future__ import annotations

import builtins
import collections.abc
import concurrent.futures
import re
import typing
from collections import Counter

import public
from pages import ROOT

from ndpy.tools.cli import _SUBCOMMANDS

REFERENCE = ROOT / "docs/reference"


def test_each_public_name_is_on_one_page_of_the_reference() -> None:
    blocks = [
        block
        for page in REFERENCE.glob("*.md")
        for block in re.findall(r"\.\. public::\n(.*?)```", page.read_text("utf-8"), re.S)
    ]
    shown = Counter(name for block in blocks for name in block.split())
    assert shown == Counter(list(public.names()))


def test_what_is_for_the_implementation_is_public_and_not_in_the_reference() -> None:
    shown = {f"{name}.{member}" for name, own in public.names().items() for member in own} | set(public.names())
    kept = {f"{name}.{member}" for name, own in public.all_names().items() for member in own} | set(public.all_names())
    hidden = kept - shown
    assert {
        "ndpy.Pending.succeed",
        "ndpy.aio.Connection.hurry",
        "ndpy.aio.Connection.on_dropped",
        "ndpy.errors.from_errno",
        "ndpy.faults.Scenario.plain",
    } <= hidden
    for name in hidden:
        owner, _, member = name.rpartition(".")
        assert owner not in public.names() or f"{owner}.{member}(" not in "\n".join(public.of(owner))


def test_each_type_that_a_signature_names_is_in_the_reference() -> None:
    (types,) = re.findall(r"\.\. types::\n(.*?)```", (REFERENCE / "objects.md").read_text("utf-8"), re.S)
    known = {name.rpartition(".")[2] for name in [*public.names(), *types.split()]}
    known |= {name for module in (builtins, collections.abc, concurrent.futures, typing) for name in dir(module)}
    known |= {"Path", "PathLike"}
    lines = [
        line for name in public.names() for line in public.of(name) if line.lstrip().startswith((".. py:", ":type:"))
    ]
    named = {
        word
        for line in lines
        for word in re.findall(r"(?<![.'\w])[A-Z]\w+", line.partition("(")[2] or line.partition(":type:")[2])
        if not word.isupper() and not word.startswith("_")
    }
    assert named <= known, named - known
    assert {each.rpartition(".")[2] for each in types.split()} <= named


def test_each_command_is_on_the_page_of_the_command_line() -> None:
    page = (REFERENCE / "command_line.md").read_text("utf-8")
    shown = dict(re.findall(r"\.\. click:: (\S+):command\n   :prog: ndpy (\S+)", page))
    assert shown == {module: name for name, module in _SUBCOMMANDS.items()}
