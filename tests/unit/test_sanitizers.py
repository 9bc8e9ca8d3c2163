"""What the sanitizers are told to overlook."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The comment before it names the file, if it is one of ndpy's own.
OVERLOOKED = re.compile(r"^# (?:(cdefs/\S+):.*\n)(?:#.*\n)*race_top:\^(\w+)\$$", re.MULTILINE)


def test_each_function_of_ndpy_that_thread_sanitizer_overlooks_is_where_the_list_says():
    found = OVERLOOKED.findall((ROOT / "rig/tsan.supp").read_text("utf-8"))
    assert found
    for file, function in found:
        assert re.search(rf"^[^\s#/].*\b{function}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), function
