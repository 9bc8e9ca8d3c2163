"""The reference has each public name once."""

from __future__ import annotations

import re
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


def test_each_command_is_on_the_page_of_the_command_line() -> None:
    page = (REFERENCE / "command_line.md").read_text("utf-8")
    shown = dict(re.findall(r"\.\. click:: (\S+):command\n   :prog: ndpy (\S+)", page))
    assert shown == {module: name for name, module in _SUBCOMMANDS.items()}
